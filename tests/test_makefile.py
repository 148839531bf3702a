"""`make demo` installs by uv or pip, and keeps demos that are not finished where they are."""

import os
import shutil
import subprocess

import pytest
from conftest import ROOT

# Every program of these tests prints its arguments.
PROGRAM = """#!/bin/sh
echo $(basename $0) $*
"""
UV = """#!/bin/sh
case "$1" in
venv) mkdir -p .venv/bin; cp python .venv/bin/python;;
*) echo uv $*; exit $UV_STATUS;;
esac
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """make(target, **environment): the result of a target where nothing is installed."""
    for name in ("Makefile", "requirements.txt", "pyproject.toml", ".ci/requirements.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in (("python", PROGRAM), ("uv", UV)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def run(target, **environment):
        environment = dict(os.environ, **environment)
        return subprocess.run(
            ["make", "--silent", target], capture_output=True, text=True, env=environment
        )

    return run


def test_what_is_installed(make):
    result = make(".venv/installed-dev", UV_STATUS="0")
    assert result.returncode == 0, result.stderr
    assert (
        result.stdout.split()
        == (
            "uv pip install --torch-backend=auto --python .venv/bin/python -c .ci/requirements.lock"
            " -r requirements.txt --group dev"
        ).split()
    )


def test_an_index_that_cannot_be_reached_is_said_in_a_line(make):
    result = make(".venv/installed", UV_STATUS="1")
    assert result.returncode != 0
    assert "error: the packages could not be installed" in result.stderr


def test_only_a_finished_demo_is_moved(make, tmp_path):
    """One that had been plotted while it ran was moved from under it."""
    demo = tmp_path / "output" / "demo"
    demo.mkdir(parents=True)
    (demo / "args.json").write_text("{}")
    (demo / "training_plots.pdf").write_text("")
    lines = make("demo", UV_STATUS="0").stdout.splitlines()
    assert any("main.py" in line and line.endswith("--resume") for line in lines)
    assert (demo / "args.json").exists()
    (demo / "args.json").write_text("of the first")

    (tmp_path / "python").write_text(f"{PROGRAM}mkdir -p output/demo")
    shutil.copy(tmp_path / "python", tmp_path / ".venv" / "bin")
    lines = make("demo", UV_STATUS="0").stdout.splitlines()
    assert lines[0].startswith("the last demo is now in output/demo-")
    assert not any(line.endswith("--resume") for line in lines)
    (moved,) = (tmp_path / "output").glob("demo-*")
    assert (moved / "args.json").read_text() == "of the first"
