"""The architecture: imports make no circle, and flags do something."""

import ast
import re
import subprocess
import sys
from dataclasses import fields

import pytest
from conftest import ROOT
from expert_iteration import ExpertIterationConfig

from config import GRPOConfig
from generate_gold import GoldConfig
from sft import SFTConfig


def list_sources():
    """The Python files of the project, without its tests."""
    command = ["git", "ls-files", "*.py"]
    files = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.split()
    return [file for file in files if not file.startswith("tests/")]


def parse(source):
    return ast.parse((ROOT / source).read_text("utf-8"))


def module_of(source):
    return source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


SOURCES = list_sources()
SOURCE_OF_MODULE = {module_of(source): source for source in SOURCES}


def imported_modules(source):
    """Every module that a file imports, in functions and under `__main__` too."""
    modules = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
            # `from grpo import metrics` imports a module, `from grpo.metrics import mean` does not.
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return modules


def imported_sources(source):
    """The files of the project that a file imports."""
    modules = imported_modules(source) & SOURCE_OF_MODULE.keys()
    return {SOURCE_OF_MODULE[module] for module in modules}


def test_imports_make_no_circle():
    """Files that import no other are taken away until none is left.

    Whole files are read: an import inside a function or under `__main__` once hid a circle.
    """
    remaining = {source: imported_sources(source) - {source} for source in SOURCES}
    while True:
        free = {source for source, targets in remaining.items() if not targets & remaining.keys()}
        if not free:
            break
        remaining = {source: remaining[source] for source in remaining.keys() - free}
    assert not remaining, f"a circle among {sorted(remaining)}"


def test_the_plotter_imports_no_torch_and_what_training_shares_with_it_no_matplotlib():
    code = "import sys, grpo.metrics, grpo.jsonl, grpo.diagnose; print(*sys.modules)"
    code += "; import plotter; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    of_training, of_plotter = [set(line.split()) for line in process.stdout.splitlines()]
    assert "grpo.diagnose" in of_training
    assert not of_training & {"torch", "matplotlib"}
    assert not of_plotter & {"torch", "transformers", "main", "grpo.distributed"}


def test_help_is_answered_before_torch_is_imported():
    code = """
import runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        assert "torch" not in sys.modules, script
"""
    scripts = "main.py sft.py generate_gold.py experiments/expert_iteration.py".split()
    run = subprocess.run([sys.executable, "-c", code, *scripts], cwd=ROOT, capture_output=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(b"usage:") == 4


@pytest.mark.parametrize("config_type", [GRPOConfig, SFTConfig, ExpertIterationConfig, GoldConfig])
def test_every_flag_is_read_somewhere(config_type):
    """A flag that nothing reads misleads whoever sets it."""
    names_read = set()
    for source in SOURCES:
        for node in ast.walk(parse(source)):
            # `config.beta` and `self.config.beta`
            if isinstance(node, ast.Attribute) and "config" in (
                getattr(node.value, "id", None),
                getattr(node.value, "attr", None),
            ):
                names_read.add(node.attr)
    # These are read in config.py, where the settings are `self`, `given` or a dict.
    names_read |= {"epochs", "resume"}
    names = {setting.name for setting in fields(config_type)}
    assert len(names) > 10
    assert not names - names_read


def test_nothing_is_unpickled_evaluated_or_run_from_a_model_repository():
    for source in SOURCES:
        text = (ROOT / source).read_text("utf-8")
        assert "trust_remote_code" not in text, source
        assert "pickle" not in imported_modules(source), source
        assert not re.search(r"(?<![\w.])eval\(", text), source
        for call in re.findall(r"torch\.load\([^)]*\)", text):
            assert "weights_only=True" in call, source
