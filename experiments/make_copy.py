"""What a candidate gets: a copy without the loss, SFT and judges; experiments/interview.md."""

import argparse
import ast
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INTERVIEW_BODY = '''\
    """The loss of a batch, yours to write: task 1 of README.md says what it must be.

    The first seven arguments are enough. The others have what flags and speed need.

    Args:
        model, base_model: the policy that is trained, and the frozen reference (None if beta is 0).
        prompt_completion_ids, attention_mask: (B, T), prompts padded on the left.
        completion_ids, completion_mask: (B, C), the last C columns; the mask is 1 through the token
            that ends the completion.
        advantages: (B,).
        config: `beta` is the weight of the KL; `temperature` is for get_per_token_logps.
        group_size: so many consecutive rows share a prompt; get_per_token_logps then runs it once.
        old_logps, ref_logps: (B, C), where a rollout batch gets several updates, under the policy
            before the first of them and under the reference; otherwise None.
        sampled_logps: (B, C) as the sampler gave them.

    Returns:
        (loss, metrics): the mean over this batch, a scalar with gradient, and a dict of floats.
    """
    raise NotImplementedError("compute_loss is yours to write: see task 1 of README.md")
'''

# --- What a candidate gets ------------------------------------------------------------------------

FILES = """
    LICENSE Makefile requirements.txt pyproject.toml .gitignore .ci/requirements.lock
    main.py evaluator.py rl_datasets.py llms.py utils.py plotter.py config.py
    grpo/*.py grpo/report.html data/arithmetic/* tiny/1m/* tests/test_by_hand.py
""".split()
# A statement, or an element of a dict or tuple, that names one of these is left out.
LEFT_OUT = {
    *"losses find_loss ZERO_WITHOUT_ADVANTAGE loss_type length_normalization".split(),
    *"cliprange cliprange_high importance_cap".split(),
    *"SFTConfig ExpertIterationConfig FineTuningConfig GoldConfig n_ei_steps ei_step".split(),
    *"CreativeWritingEvaluator why_no_story share_of_distinct rewards/distinct_2".split(),
    *"creative story story_example STORY_PROMPT becomes_alike judge_model judge_base_url".split(),
    "judge (of the data set creative)",
}
# Texts that tell of it: a pattern, and what takes its place.
TEXTS = {
    r" losses\.py has each paper's loss\.": "",
    r", and\s+--importance_cap corrects for it| or `--importance_cap 2`": "",
    r'\n +"creative: .*"': "",
    ", question_only or story": " or question_only",
    ", `creative` and those": " and those",
    "; use --loss_type no_baseline": "",
    r" and \w+\.loss_type [^:\n]*": "",
    r"(SFT|ExpertIteration)Config, | \| may_change\((SFT|ExpertIteration)Config\)": "",
    r"@experiments/recipes/\w+\.args": "@FILE",
    r": ten rules, which docs/tuning\.md prints as a table": "",
    r" docs/tuning\.md (explains|describes) .*?\.": "",
    r"in docs/tuning\.md": "of grpo/diagnose.py",
    r" \((docs/gpus|README)\.md\)| \(sft\.py\)| that tiny/make_word_problems\.py has generated": "",
    r"in tests/test_math_evaluator\.py": "that were tried",
    # In the Makefile, pyproject.toml and .gitignore:
    r"\n# --- For this repository alone(.|\n)*": "",
    r"\n# make (interview|lock) .*|\n\t.*ruff.*|\nmarkers = .*": "",
    "lint, run the fast tests; make test-slow: the others": "run the tests",
    r"\n.*(hypothesis|nbclient|ipykernel|ipynb|conftest|cs336|make_tiny_models).*": "",
}


def without_left_out(source: str) -> str:
    """A module's source without the code that names something in LEFT_OUT, as an AST has it."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        parts = parts_of(node)
        for i, part in enumerate(parts):
            if any(must_go(child) for child in part):
                # With the comments and empty lines before it.
                start = parts[i - 1][-1].end_lineno if i > 0 else part[0].lineno - 1
                end = part[-1].end_lineno
                lines[start:end] = [""] * (end - start)
    return "".join(lines)


def must_go(node: ast.AST) -> bool:
    """Whether a node must go as a whole: it names something, or none of its parts can stay."""
    if any(name in LEFT_OUT for _, name in ast.iter_fields(node) if isinstance(name, str)):
        return True
    parts = parts_of(node)
    children_in_parts = list(itertools.chain(*parts))
    for child in ast.iter_child_nodes(node):
        if child not in children_in_parts and must_go(child):
            return True
    return len(parts) > 0 and all(any(map(must_go, part)) for part in parts)


def parts_of(node: ast.AST) -> list[tuple[ast.AST, ...]]:
    """The parts of a node that have lines of their own, each as its first and last child."""
    if isinstance(node, ast.Dict):
        return [(key or value, value) for key, value in zip(node.keys, node.values, strict=True)]
    is_block = isinstance(node, ast.Module | ast.stmt)
    children = getattr(node, "body", []) if is_block else getattr(node, "elts", [])
    return [(child,) for child in children]


def make_interview(folder: Path) -> None:
    paths = [path for pattern in FILES for path in ROOT.glob(pattern) if path.name != "judges.py"]
    copy([path.relative_to(ROOT) for path in paths], folder)
    main_path = folder / "main.py"
    main_path.write_text(blank(main_path.read_text("utf-8"), INTERVIEW_BODY), "utf-8")
    unused = set(TEXTS)
    for path in [*folder.glob("*"), *folder.glob("grpo/*")]:
        if path.is_file():
            text = path.read_text("utf-8")
            for pattern, replacement in TEXTS.items():
                text, count = re.subn(pattern, replacement, text)
                if count > 0:
                    unused.discard(pattern)
            if path.suffix == ".py":
                text = without_left_out(text)
            path.write_text(text, "utf-8")
    assert not unused, f"nothing has the text {unused}"
    ruff = [sys.executable, "-m", "ruff", "--quiet"]
    unused_imports = ["--select", "F401", "--exclude", "main.py"]  # the loss needs main.py's
    subprocess.run([*ruff, "check", "--fix", *unused_imports, folder], check=True)
    subprocess.run([*ruff, "format", folder], check=True)
    shutil.rmtree(folder / ".ruff_cache", ignore_errors=True)
    shutil.copy(ROOT / "experiments/interview.md", folder / "README.md")
    print(f"Give {folder} to a candidate: its README.md has the five tasks.")


def blank(source: str, body: str) -> str:
    """main.py's source, in which only the body of compute_loss is replaced."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    (function,) = (function for function in functions if function.name == "compute_loss")
    lines = source.splitlines(keepends=True)
    lines_before = lines[: function.body[0].lineno - 1]
    lines_after = lines[function.body[-1].end_lineno :]
    return "".join([*lines_before, body, *lines_after])


def copy(names: list[str | Path], folder: Path) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def main():
    parser = argparse.ArgumentParser(description="A copy for a candidate, without the loss.")
    parser.add_argument("--output_dir", type=Path, default=Path("output/interview"))
    folder = parser.parse_args().output_dir
    if folder.exists():
        print(f"error: {folder} exists, perhaps with a solution in it", file=sys.stderr)
        sys.exit(2)
    make_interview(folder)


if __name__ == "__main__":
    main()
