"""README and docs/: what they link to exists, and what they tell a reader to type works."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

from config import GRPOConfig, parse
from rl_datasets import DATASETS

README = (ROOT / "README.md").read_text("utf-8")
CONTRIBUTING = (ROOT / "docs" / "CONTRIBUTING.md").read_text("utf-8")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]


def text_without_code(page):
    text = page.read_text("utf-8")
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors_of(page):
    """The anchors of a page's headings, as GitHub makes them."""
    anchors = set()
    for heading in re.findall(r"^#+ (.+)$", text_without_code(page), re.MULTILINE):
        letters = re.sub(r"[^\w\- ]", "", heading.lower())
        anchors.add(letters.replace(" ", "-"))
    return anchors


def local_links(page):
    """What a page links to, in the line or by a reference, outside the web."""
    text = text_without_code(page)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    links += re.findall(r"^\[\w+\]: (\S+)$", text, re.MULTILINE)
    return [link for link in links if not link.startswith("http")]


def main_commands(page):
    """The flags of each complete command with main.py on a page; "..." or $ stand for more."""
    text = page.read_text("utf-8").replace("\\\n", " ")
    lines = re.findall(r"^ {4}(?:python|torchrun .*?) ?main\.py (.*)$", text, re.MULTILINE)
    complete_lines = [line for line in lines if "..." not in line and "$" not in line]
    return [shlex.split(line, comments=True) for line in complete_lines]


def python_blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run_in(folder, *command, **options):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, **options)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_reference_of_a_link_has_a_line_of_its_own(page):
    """Wrapped like prose, all of a page's sources were text and no links."""
    text = text_without_code(page)
    references = set(re.findall(r"\]\[(\w+)\]", text))
    assert references <= set(re.findall(r"^\[(\w+)\]: \S+$", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in local_links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(target), link


def test_readme_links_each_page_of_docs():
    links = local_links(ROOT / "README.md")
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {link.partition("#")[0] for link in links}


def test_the_tree_is_there():
    tree = README[README.index("## The tree") : README.index("## Is it for you?")]
    names = re.findall(r"^ {4}(\w+(?:\.py|/))", tree, re.MULTILINE)
    assert len(names) > 15
    for name in names:
        assert (ROOT / name).exists(), name


def test_commands_have_flags_that_exist():
    num_commands = 0
    for page in PAGES:
        for command in main_commands(page):
            num_commands += 1
            if "--resume" in command:  # the flags of a run would be read, which is not there
                continue
            args = parse(GRPOConfig, command)
            assert args.dataset_name in DATASETS, (page.name, command)
    assert num_commands > 5


def requirements_in(name):
    """The lines of a requirements file that name packages."""
    lines = (ROOT / name).read_text("utf-8").splitlines()
    texts = [line.partition("#")[0].strip() for line in lines]
    return [Requirement(text) for text in texts if text and not text.startswith("-r")]


def test_the_lock_has_versions_in_range_of_every_requirement():
    """A package that the lock lacks would be installed in any version."""
    locked_versions = {}
    for requirement in requirements_in(".ci/requirements.lock"):
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        # Systems or Pythons may have versions of their own.
        locked_versions.setdefault(requirement.name, []).append(pin.version)
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
    requirements = requirements_in("requirements.txt") + [Requirement(r) for r in groups["dev"]]
    assert len(requirements) > 10
    for requirement in requirements:
        assert requirement.name in locked_versions
        for version in locked_versions[requirement.name]:
            assert requirement.specifier.contains(version), requirement


def test_the_lock_suits_every_build_of_torch():
    """A pin of a CUDA package excludes builds for another CUDA, and "+cpu" all but one."""
    for requirement in requirements_in(".ci/requirements.lock"):
        assert not requirement.name.startswith(("cuda", "nvidia", "triton"))
        assert "+" not in str(requirement.specifier)


def test_the_files_of_tests_that_a_change_needs_exist():
    names = re.findall(r"test_\w+\.py", CONTRIBUTING)
    assert len(names) > 20
    for name in names:
        assert (ROOT / "tests" / name).exists(), name


def test_the_demo_is_the_same_in_the_makefile_and_in_readme():
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    makefile = makefile.replace("$(DEMO)", "output/demo")
    in_makefile = re.search(r"main\.py (.*?) \$\(DEMO_FLAGS\)", makefile)[1].split()
    on_page = next(
        command for command in main_commands(ROOT / "README.md") if "output/demo" in command
    )

    settings = parse(GRPOConfig, in_makefile)
    assert settings == parse(GRPOConfig, on_page)
    assert settings.num_train_iters == 100


@pytest.fixture(scope="module")
def edited_copy(tmp_path_factory):
    """A copy of the repository into which the examples of a reward, a loss and a data set go."""
    folder = tmp_path_factory.mktemp("docs") / "copy"
    names = run_in(ROOT, "git", "ls-files", check=True).stdout.split()
    for name in names:
        if name.endswith((".py", ".toml", ".jsonl")) or name.startswith("tiny/0.3m"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)

    reward, loss = python_blocks(README)
    (loader,) = python_blocks(CONTRIBUTING)
    (folder / "my_rewards.py").write_text(reward)
    (folder / "my_losses.py").write_text(loss)
    (folder / "my_data.py").write_text(loader)
    return folder


def test_the_examples_pass_the_lint(edited_copy):
    names = ["my_rewards.py", "my_data.py", "my_losses.py"]
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for command in (["check"], ["format", "--check", "--diff"]):
        run = run_in(edited_copy, ruff, *command, "--no-cache", *names)
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
def test_the_examples_train(edited_copy):
    """All three at once, and the log has what they add."""
    command = (
        "main.py --model_name tiny/0.3m --dataset_name my_data.py:sums"
        " --evaluator my_rewards.py:short --loss_type my_losses.py:soft"
        " --num_train_iters 2 --rollout_batch_size 16 --max_completion_length 8"
        " --learning_rate 1e-4 --output_dir output/run"
    )
    run = run_in(edited_copy, sys.executable, *command.split())
    assert run.returncode == 0, run.stderr
    log = (edited_copy / "output" / "run" / "train_log.jsonl").read_text()
    assert log.count('"rewards/short"') == log.count('"clip_fraction"') == 2
