"""README and docs/: what they link to exists, and what they tell a reader to type works."""

import re
import shlex

import pytest
from conftest import ROOT, run_script

from config import GRPOConfig, parse
from rl_datasets import DATASETS

README = (ROOT / "README.md").read_text("utf-8")
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in local_links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(target), link


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
            name = parse(GRPOConfig, command).dataset_name
            assert name in DATASETS or ":" in name, (page.name, command)
    assert num_commands > 5


def test_the_demo_of_the_makefile_has_flags_that_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    flags = re.search(r"main\.py (--.*?) \$\(DEMO_FLAGS\)", makefile)[1].split()
    assert parse(GRPOConfig, flags).num_train_iters == 100  # as README says of its output


@pytest.mark.slow
def test_the_examples_of_a_reward_a_data_set_and_a_loss_train(tmp_path):
    """With README's command, which has all three, and the log has what they add."""
    for code in python_blocks(README):
        (name,) = re.findall(r"# (my_\w+\.py)$", code, re.MULTILINE)
        (tmp_path / name).write_text(code)
    commands = main_commands(ROOT / "README.md")
    (command,) = [command for command in commands if "my_data.py:sums" in command]
    small = f"--model_name {ROOT}/tiny/0.3m --num_train_iters 2 --rollout_batch_size 16"
    run = run_script("main.py", *command, *small.split(), "--output_dir", "run", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    log = (tmp_path / "run" / "train_log.jsonl").read_text()
    assert log.count('"rewards/short"') == log.count('"clip_fraction"') == 2
