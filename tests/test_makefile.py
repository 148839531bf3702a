"""`make demo` installs by uv or pip, says that an index fails, and resumes what was begun."""

import shutil
import subprocess

import pytest
from conftest import ROOT

# Every program of these tests prints its name and arguments.
PROGRAM = """#!/bin/sh
echo $(basename $0) $*
"""
MAKES_VENV = """#!/bin/sh
case "$*" in
venv*|"-m venv"*) mkdir -p .venv/bin; cp program .venv/bin/python;;
*) echo $(basename $0) $*; exit $STATUS;;
esac
"""


@pytest.fixture
def make(tmp_path):
    """make(target, installer, status): the result where nothing is installed but uv or pip."""
    for name in ("Makefile", "requirements.txt", "pyproject.toml", ".ci/requirements.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name in ("sh", "make", "echo", "basename", "mkdir", "cp", "touch"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))

    def run(target, installer="uv", status=0):
        for path, text in (("program", PROGRAM), (f"bin/{installer}", MAKES_VENV)):
            (tmp_path / path).write_text(text)
            (tmp_path / path).chmod(0o755)
        environment = {"PATH": f"{tmp_path}/bin", "STATUS": str(status)}
        command = ["make", "--silent", target]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    return run


REQUIREMENTS = "-r requirements.txt --group dev -c .ci/requirements.lock"


def test_uv_or_else_pip_installs(make):
    uv, training, plots = make("demo").stdout.splitlines()
    command = f"uv pip install --torch-backend=auto --python .venv/bin/python {REQUIREMENTS}"
    assert uv == command
    assert training.startswith("python main.py ") and not training.endswith("--resume")
    assert plots == "python plotter.py --log_dir output/demo"


def test_pip_installs_where_there_is_no_uv(make):
    result = make(".venv/installed", installer="python3")
    assert result.stdout.splitlines() == [
        "python -m pip install --quiet --upgrade pip>=25.1",
        f"python -m pip install {REQUIREMENTS}",
    ]


def test_an_index_that_cannot_be_reached_is_said_in_a_line(make, tmp_path):
    result = make("demo", status=1)
    assert result.returncode != 0
    assert "error: the packages could not be installed" in result.stderr
    assert "main.py" not in result.stdout and not (tmp_path / ".venv/installed").exists()


def test_a_demo_that_was_begun_is_resumed(make, tmp_path):
    (tmp_path / "output" / "demo").mkdir(parents=True)
    (tmp_path / "output" / "demo" / "args.json").write_text("{}")
    _, training, _ = make("demo").stdout.splitlines()
    assert training.endswith("--resume")
