"""The house as README draws it: imports that run one way, flags that do something."""

import argparse
import ast
import re
import subprocess

from conftest import ROOT

import flags

SOURCES = [
    name
    for name in subprocess.run(
        ["git", "ls-files", "*.py"], capture_output=True, text=True, cwd=ROOT
    ).stdout.split()
    if not name.startswith("tests/")
]
# From the top down: a room imports only from rooms on lines below its own. A folder is one room.
FLOORS = """
    experiments benchmarks tiny
    sft.py generate_gold.py selfcheck.py
    main.py
    training
    flags.py
    evaluator.py rl_datasets.py
    judges data
    sampling llms.py
    utils.py
    grading distributed.py plotter.py
    logs
"""


def modules_of(name):
    """Every module that a file imports, in functions and under `__main__` too."""
    for node in ast.walk(ast.parse((ROOT / name).read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]


def rooms_of(name):
    """{room: the rooms that it imports} as one file tells it; its own left out."""
    files = {
        source.removesuffix(".py").removesuffix("/__init__").replace("/", "."): source
        for source in SOURCES
    }
    return {room(files[module]) for module in modules_of(name) if module in files} - {room(name)}


def room(name):
    return name.partition("/")[0]


def test_imports_run_one_way():
    """Whole files are read: an import inside a function or under `__main__` once hid a circle of three."""
    floors = {
        place: i for i, line in enumerate(FLOORS.strip().splitlines()) for place in line.split()
    }
    assert {room(name) for name in SOURCES} <= floors.keys(), "a room that FLOORS does not know"
    wrong = [
        f"{name} -> {below}"
        for name in SOURCES
        for below in rooms_of(name)
        if floors[below] <= floors[room(name)]
    ]
    assert not wrong


def test_a_folder_has_no_circle_inside():
    inside = {}
    for name in SOURCES:
        module = name.removesuffix(".py").replace("/", ".")
        own = {
            m for m in modules_of(name) if m != module and room(m.replace(".", "/")) == room(name)
        }
        inside[module] = {m for m in own if m.replace(".", "/") + ".py" in SOURCES}
    while free := [module for module, needs in inside.items() if not needs & inside.keys()]:
        inside = {module: needs for module, needs in inside.items() if module not in free}
    assert not inside, f"a circle among {sorted(inside)}"


def test_what_plots_needs_no_torch():
    for name in SOURCES:
        if room(name) in ("logs", "plotter.py"):
            assert not {"torch", "transformers"} & {
                module.partition(".")[0] for module in modules_of(name)
            }, name


def test_every_flag_is_read_somewhere():
    """A flag that nothing reads misleads whoever sets it."""
    trees = [ast.parse((ROOT / name).read_text("utf-8")) for name in SOURCES]
    attributes = [
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    ]
    read = {
        node.attr for node in attributes if getattr(node.value, "id", None) in ("args", "flags")
    }
    parsed = vars(flags.parse_args([])).keys()
    assert (
        len(parsed) > 45
        and parsed - read - {"judge_concurrency", "judge_timeout", "judge_max_retries"} == set()
    )
    shared = argparse.ArgumentParser()
    groups = flags.add_model_and_data, flags.add_sampling, flags.add_optimisation, flags.add_runtime
    for add in groups:
        add(shared)
    assert vars(shared.parse_args([])).keys() <= parsed, (
        "what scripts share means the same in main.py"
    )


def test_nothing_is_unpickled_evaluated_or_run_from_a_model_repository():
    for name in SOURCES:
        text = (ROOT / name).read_text("utf-8")
        assert "trust_remote_code" not in text and "pickle" not in set(modules_of(name)), name
        assert not re.search(r"(?<![\w.])eval\(", text), name
        for call in re.findall(r"torch\.load\([^)]*\)", text):
            assert "weights_only=True" in call, name
