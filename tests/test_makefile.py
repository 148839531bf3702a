"""`make demo` installs by what works, and keeps demos that are not finished where they are."""

import os
import shutil
import subprocess

import pytest
from conftest import ROOT

# Every program of these tests prints its arguments. The first uv cannot reach PyTorch's own index.
PROGRAM = """#!/bin/sh
echo $(basename $0) $*
"""
UV = """#!/bin/sh
case "$*" in
venv*) mkdir -p .venv/bin; cp python .venv/bin/python;;
*--torch-backend*) exit 2;;
*) echo uv $*; exit $UV_STATUS;;
esac
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """make(target, **environment): the lines of a target's output where nothing is installed."""
    for name in ("Makefile", "requirements.txt", "requirements-dev.txt", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    for name, text in (("python", PROGRAM), ("uv", UV)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def run(target, **environment):
        run = subprocess.run(
            ["make", "--silent", target],
            capture_output=True,
            text=True,
            env=dict(os.environ, **environment),
        )
        assert run.returncode == 0, run.stderr
        return run.stdout.splitlines()

    return run


@pytest.mark.parametrize("uv_status", ["0", "1"])
def test_what_cannot_be_installed_in_one_way_is_installed_in_another(uv_status, make):
    """Where PyTorch's own index could not be reached, it ended in an error of DNS."""
    install = "install -r requirements.txt -c requirements.lock"
    expected = [
        "uv has failed; trying without --torch-backend=auto",
        f"uv pip {install.replace('install', 'install --python .venv/bin/python')}",
    ]
    if uv_status == "1":
        expected += ["uv has failed; trying pip", "python -m ensurepip", f"python -m pip {install}"]
    assert make(".venv/installed", UV_STATUS=uv_status) == expected


def test_only_a_finished_demo_is_moved(make, tmp_path):
    """One that had been plotted while it ran was moved from under it."""
    demo = tmp_path / "output" / "demo"
    demo.mkdir(parents=True)
    (demo / "args.json").write_text("{}")
    (demo / "training_plots.pdf").write_text("")
    lines = make("demo", UV_STATUS="0")
    assert any("main.py" in line and line.endswith("--resume") for line in lines)
    assert (demo / "args.json").exists()
    (demo / "args.json").write_text("of the first")

    (tmp_path / "python").write_text(f"{PROGRAM}mkdir -p output/demo")
    shutil.copy(tmp_path / "python", tmp_path / ".venv" / "bin")
    lines = make("demo", UV_STATUS="0")
    assert lines[0].startswith("the last demo is now in output/demo-")
    assert not any(line.endswith("--resume") for line in lines)
    (moved,) = (tmp_path / "output").glob("demo-*")
    assert (moved / "args.json").read_text() == "of the first"
