"""README and docs/: what they link to exists, what they tell a reader to type or to write works."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import flags

README = (ROOT / "README.md").read_text("utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "analysis.md", *ROOT.glob("*/*.md")]
PAGES += ROOT.glob("experiments/*/*.md")


def prose(page):
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page):
    """What the pages tell to run with main.py: lists of flags; without those that leave some out by "..." or a $."""
    text = page.read_text("utf-8").replace("\\\n", " ")
    for line in re.findall(r"^ {4}(?:python|torchrun .*?) ?main\.py (.*)$", text, re.MULTILINE):
        if not re.search(r"\.\.\.|\$", line):
            yield shlex.split(line, comments=True)


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_readmes_accuracies_are_those_of_the_study():
    """experiments/table.py check says that the study's page is right."""
    study = (ROOT / "experiments" / "dynamics" / "README.md").read_text("utf-8")
    results = README[README.index("## Results") : README.index("`tiny/1m`, 16 prompts")]
    numbers = re.findall(r"\d+\.\d+", results)
    assert len(numbers) > 20 and not {*numbers} - {*re.findall(r"\d+\.\d+", study)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = prose(page)
    links = [
        *re.findall(r"\]\(([^)\s]+)\)", text),
        *re.findall(r"^\[\w+\]: (\S+)$", text, re.MULTILINE),
    ]
    for link in (link for link in links if not link.startswith("http")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_tree_is_there():
    tree = README[README.index("## The tree") : README.index("## Add an")]
    names = re.findall(r"^ {4}(\w+(?:\.py|/))", tree, re.MULTILINE)
    assert len(names) > 15
    for name in names:
        assert (ROOT / name).exists(), name


def test_commands_have_flags_that_exist():
    found = [(page.name, given) for page in PAGES for given in commands(page)]
    assert len(found) > 10
    for name, given in found:
        if "--resume" not in given:  # reads the flags of a run
            args = flags.parse_args(given)
            flags.check_numbers(args)
            assert args.dataset_name in flags.DATASETS, (name, given)


def test_the_demo_is_the_same_in_the_makefile_the_page_and_the_study():
    """Its flags stand in three places, and its numbers are those of the study."""
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    script = (ROOT / "experiments" / "study.sh").read_text("utf-8").replace("\\\n", " ")
    study = dict(re.findall(r'^(DEMO|MODEL)="(.*)"$', script, re.MULTILINE))
    given = [
        re.search(r"main\.py (.*?) \$\(DEMO_FLAGS\)", makefile)[1],
        shlex.join(next(commands(ROOT / "docs" / "try.md"))),
        study["DEMO"].replace("$MODEL", study["MODEL"]),
    ]
    demos = [
        vars(flags.parse_args(text.split())) | {"output_dir": None, "device": None}
        for text in given
    ]
    assert demos[0] == demos[1] == demos[2] and demos[0]["num_train_iters"] == 100


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """A copy of the repository into which README's three examples are written."""
    folder = tmp_path_factory.mktemp("docs") / "copy"
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in names:
        if name.endswith((".py", ".toml", ".jsonl")) or name.startswith("tiny/0.1m"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    evaluator, data, loss = blocks(README)
    registrations = re.findall(r"`((?:EVALUATORS|DATASETS)\[.+?\] = \w+)`", README)
    for name, code, line in zip(
        ("evaluator.py", "rl_datasets.py"), (evaluator, data), registrations, strict=True
    ):
        with open(folder / name, "a") as file:
            file.write(f"\n\n{code}\n\n{line}\n")
    for name, before, new in (
        ("main.py", '    raise ValueError(f"unknown loss_type', loss),
        ("flags.py", '"cispo")', '"cispo", "soft")'),
    ):
        text = (folder / name).read_text()
        assert text.count(before) == 1
        (folder / name).write_text(text.replace(before, new + before if name == "main.py" else new))
    return folder


def test_the_examples_pass_the_lint(edited):
    names = ["evaluator.py", "rl_datasets.py", "main.py", "flags.py"]
    for command in (["check"], ["format", "--check", "--diff"]):
        ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        run = subprocess.run(
            [ruff, *command, "--no-cache", *names], cwd=edited, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
def test_the_examples_train(edited):
    """All three at once, and the log has what they add."""
    given = "--model_name tiny/0.1m --dataset_name sums --evaluator short --loss_type soft --num_train_iters 2"
    given += " --rollout_batch_size 16 --max_completion_length 8 --output_dir output/run --learning_rate 1e-4"
    run = subprocess.run(
        [sys.executable, "main.py", *given.split()], cwd=edited, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    log = (edited / "output" / "run" / "train_log.jsonl").read_text()
    assert log.count('"rewards/short"') == log.count('"clip_fraction"') == 2


@pytest.mark.slow
def test_the_snippet_that_compares_two_models_runs(tmp_path):
    (code,) = blocks((ROOT / "docs" / "try.md").read_text("utf-8"))
    names = re.search(r"in (\(.+?\)):", code)[1]
    (tmp_path / "snippet.py").write_text(code.replace(names, '("tiny/0.1m", "tiny/0.3m")'))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "snippet.py")]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("===") == 2 and run.stdout.count("\n---\n") == 10


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1], ids=["defaults", "less memory"])
def test_the_memory_tables_are_what_the_script_prints(which):
    """They once stayed as they were when the computation changed."""
    if "GRPO_LITE_DATA" not in os.environ:
        pytest.skip("GRPO_LITE_DATA is not set: no configs of Qwen2")
    page = (ROOT / "docs" / "gpus.md").read_text("utf-8")
    table = re.findall(r"^\| Qwen2.*(?:\n\|.*)*", page, re.MULTILINE)[which]
    configs = Path(os.environ["GRPO_LITE_DATA"]) / "models" / "qwen2" / "configs"
    less = shlex.split(re.search(r"Then with `(.+?)`", page)[1]) if which else []
    models = [str(configs / f"Qwen2-{size}-Instruct") for size in ("0.5B", "1.5B", "7B")]
    command = [sys.executable, "benchmarks/memory_table.py", *models, *less]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert table in run.stdout.replace("-Instruct", "")
