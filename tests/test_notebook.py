"""tiny/tiny_grpo.ipynb: stored with its outputs, short, true to them, and it runs."""

import ast
import json
import os
import re
import sys
import warnings
from types import SimpleNamespace

import nbclient
import nbformat
import pytest
import torch
from conftest import ROOT, assert_same_gradient, gradients, logps_of, loss_of

import main
import utils

PATH = ROOT / "tiny" / "tiny_grpo.ipynb"
NOTEBOOK = json.loads(PATH.read_text("utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def source_of(cell):
    return "".join(cell["source"])


def text_of(cell):
    """What a cell shows as text: printed lines, and the text of displayed values."""
    shown_lines = []
    for output in cell.get("outputs", []):
        shown_lines += output.get("text") or output.get("data", {}).get("text/plain", [])
    return "".join(shown_lines)


@pytest.fixture(scope="module")
def update():
    """The functions and constants of the cell with the update, by name."""
    (cell,) = [cell for cell in CODE if "def grpo_step" in source_of(cell)]
    tree = ast.parse(source_of(cell))
    definitions = []
    for node in tree.body:
        is_constant = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        if is_constant or isinstance(node, ast.FunctionDef):
            definitions.append(node)
    tree.body = definitions
    names = {"torch": torch, "utils": utils}
    exec(compile(tree, PATH.name, "exec"), names)
    return names


def test_its_loss_and_gradient_are_those_of_main(update, model, base_model, batch):
    """The notebook writes GRPO out again, and two copies drift apart."""
    advantages = batch["advantages"]
    logps = logps_of(model, batch)
    noise = 0.4 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(5))
    for old_logps in (None, logps + noise):  # the second one takes every branch of the clip
        tensors = SimpleNamespace(**batch)
        loss, kl = update["compute_loss"](model, base_model, tensors, advantages, old_logps)
        expected, metrics = loss_of(model, base_model, batch, old_logps=old_logps)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert kl == pytest.approx(metrics["kl"], rel=1e-5) and kl > 0.01
        assert_same_gradient(gradients(model, loss), gradients(model, expected))
    assert metrics["clip_fraction_low"] > 0 and metrics["clip_fraction_high"] > 0


def test_its_advantages_are_those_of_main(update):
    # The second group is flat. Its mean is rounded, so only a test for it makes its advantages 0.
    rewards = torch.tensor([0.0, 4.0, 0.375, 2.0, 0.1, 0.7] + 6 * [0.9])
    assert rewards[6:].mean() != rewards[6]
    expected = main.compute_group_normalized_rewards(rewards, group_size=6)
    actual = update["compute_advantages"](rewards, group_size=6)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    assert actual[:6].abs().min() > 0 and not actual[6:].any()


def test_it_is_what_its_assignment_asks_for():
    """A Quarto header, the plan, few cells, and under 40,000 characters as Markdown.

    nbconvert writes every source, fenced if it is code, and every output, indented by four.
    """
    header, introduction, *_ = NOTEBOOK["cells"]
    lines = source_of(header).split("\n")
    assert lines[0] == lines[-1] == "---" and "jupyter: python3" in lines
    for heading in ("**Model.**", "**Task.**", "**Reward.**", "**Hypothesis, before the run.**"):
        assert heading in source_of(introduction)
    # It asks for nine cells. Explanations and the sweep take three more.
    assert len(NOTEBOOK["cells"]) <= 12
    num_characters = sum(len(source_of(cell)) + 2 for cell in NOTEBOOK["cells"])
    for cell in CODE:
        text = text_of(cell)
        num_characters += len("```python\n\n```\n\n") + len(text) + 4 * text.count("\n") + 8
    assert 15_000 < num_characters < 40_000


def test_it_is_stored_with_the_outputs_of_one_clean_run():
    execution_counts = [cell["execution_count"] for cell in CODE]
    assert execution_counts == list(range(1, len(CODE) + 1)), "top to bottom, once"
    for cell in CODE:
        assert cell["outputs"]
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr", "warnings and progress bars"
    all_text = "".join(text_of(cell) for cell in CODE)
    assert not re.search(
        r"/(home|root|tmp|work|usr|opt|Users|mnt)/|site-packages|\r|\x1b", all_text
    )


def test_every_measured_number_in_its_text_is_in_its_outputs():
    """The analysis is written by hand: after a new run its numbers must be read again."""
    all_text = "".join(text_of(cell) for cell in CODE)
    prose = "\n".join(source_of(cell) for cell in NOTEBOOK["cells"] if cell not in CODE)
    _, analysis = prose.split("## Analysis")
    numbers_in_analysis = set(re.findall(r"\d+\.\d+%?|\d+%", analysis))
    assert len(numbers_in_analysis) > 10
    assert numbers_in_analysis <= set(re.findall(r"\d+(?:\.\d+)?%?", all_text))


def test_opened_in_its_folder_it_goes_up_to_the_modules(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(PATH.parent)
    with warnings.catch_warnings():  # the first cell silences some for good
        for _ in range(2):  # a cell can be run again by hand
            exec(source_of(CODE[0]), {})
            assert os.getcwd() == sys.path[0] == str(ROOT)


@pytest.mark.slow
def test_it_runs_top_to_bottom_and_training_helps():
    """Training and evaluations are shortened, to save minutes."""
    notebook = nbformat.read(PATH, as_version=4)
    for code, quicker_code in (
        ("eval_size=500", "eval_size=100"),
        ("num_updates=60, print_every", "num_updates=15, print_every"),
        ("num_updates=60, reward_function", "num_updates=3, reward_function"),
        ("num_updates=12,", "num_updates=3,"),
        ("sizes = (2, 4, 8, 16)", "sizes = (2, 16)"),
        ("eval_loader.examples[:200]", "eval_loader.examples[:20]"),
    ):
        (cell,) = [cell for cell in notebook.cells if code in cell.source]
        cell.source = cell.source.replace(code, quicker_code)
    checks = """
assert trained["strict"] > baseline["strict"] + 0.1
assert trained["reward"] > baseline["reward"] + 1
assert "gradient norm" in log
for values in log.values():
    assert len(values) == 15 and torch.tensor(values).isfinite().all()
assert len(jumps) == 4 and torch.tensor(list(jumps.values())).isfinite().all()
"""
    notebook.cells.append(nbformat.v4.new_code_cell(checks))
    resources = {"metadata": {"path": str(PATH.parent)}}  # where Jupyter would start it
    client = nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources=resources
    )
    client.execute()  # raises if a cell fails
