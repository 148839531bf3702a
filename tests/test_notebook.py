"""tiny/tiny_grpo.ipynb: stored with its outputs, short, true to them, and it runs."""

import json
import re

import pytest
from conftest import ROOT

PATH = ROOT / "tiny" / "tiny_grpo.ipynb"
NOTEBOOK = json.loads(PATH.read_text("utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def text_of(cell):
    """What a cell shows as text: printed lines, and the text of displayed values."""
    outputs = cell.get("outputs", [])
    shown = [
        output.get("text") or output.get("data", {}).get("text/plain", []) for output in outputs
    ]
    return "".join("".join(lines) for lines in shown)


def test_it_begins_with_a_quarto_header():
    first = NOTEBOOK["cells"][0]
    lines = "".join(first["source"]).split("\n")
    assert first["cell_type"] == "raw" and lines[0] == lines[-1] == "---"
    assert any(line.startswith("title:") for line in lines) and "jupyter: python3" in lines


def test_as_markdown_it_stays_under_40_000_characters():
    """What nbconvert writes: every source, fenced where it is code, and every text output, indented by four."""
    fences = sum(len("```python\n\n```\n\n") for _ in CODE)
    sources = sum(len("".join(cell["source"])) + 2 for cell in NOTEBOOK["cells"])
    outputs = sum(len(text_of(cell)) + 4 * text_of(cell).count("\n") + 8 for cell in CODE)
    assert 15_000 < sources + outputs + fences < 40_000


def test_it_is_stored_with_the_outputs_of_one_clean_run():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1)), (
        "top to bottom, once"
    )
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert all(cell["outputs"] for cell in CODE[1:]), "the first one only sets paths"
    assert {output["output_type"] for output in outputs} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    assert not [output for output in outputs if output.get("name") == "stderr"], (
        "warnings and progress bars"
    )
    everything = "".join(text_of(cell) for cell in CODE)
    assert "\r" not in everything and "\x1b" not in everything
    assert not re.search(r"/(home|root|tmp|work|usr|opt|Users|mnt)/|site-packages", everything), (
        "paths of a machine"
    )


def test_every_measured_number_in_its_text_is_in_its_outputs():
    """The analysis is written by hand: after a new run it must be read again where its numbers have changed."""
    everything = "".join(text_of(cell) for cell in CODE)
    start = next(
        i for i, cell in enumerate(NOTEBOOK["cells"]) if "".join(cell["source"]).startswith("## 8.")
    )
    prose = [cell for cell in NOTEBOOK["cells"][start:] if cell["cell_type"] == "markdown"]
    numbers = [n for cell in prose for n in re.findall(r"\d+\.\d+%?|\d+%", "".join(cell["source"]))]
    assert len(numbers) > 10
    stale = set(numbers) - set(re.findall(r"\d+(?:\.\d+)?%?", everything))
    assert not stale, stale


@pytest.mark.slow
def test_it_runs_top_to_bottom_and_training_helps():
    """All of it, but for shorter runs of the control and of the sweep over group sizes, to save three minutes."""
    nbclient = pytest.importorskip("nbclient", reason="pip install -r requirements-dev.txt")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(PATH, as_version=4)
    for long, short in (
        ("steps=60, reward_function", "steps=5, reward_function"),
        ("steps=12,", "steps=4,"),
    ):
        (cell,) = (
            cell for cell in notebook.cells if cell.cell_type == "code" and long in cell.source
        )
        cell.source = cell.source.replace(long, short)
    checks = """
assert trained["strict"] > baseline["strict"] + 0.1 and trained["reward"] > baseline["reward"] + 1
assert len(log) == 60 and log.isfinite().all() and len(sweep) == 8
"""
    notebook.cells.append(nbformat.v4.new_code_cell(checks))
    # The folder is where Jupyter would start it; the time limit is per cell. A cell that fails raises.
    resources = {"metadata": {"path": str(PATH.parent)}}
    nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources=resources
    ).execute()
