"""Copies of the repository in which the loss is left to you.

make exercise     all of it, but for the body of main.compute_loss; experiments/exercise.md
make interview    what a candidate gets: no loss, no SFT, no judge; experiments/interview.md
"""

import argparse
import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXERCISE_BODY = '''\
    """The loss of GRPO, yours to write: experiments/exercise.md says what it must do."""
    raise NotImplementedError("compute_loss is yours to write: see experiments/exercise.md")
'''
INTERVIEW_BODY = '''\
    """The loss of a batch, yours to write: task 1 of README.md says what it must do.

    Args:
        model, base_model: the policy that is trained, and the frozen reference.
        prompt_completion_ids, attention_mask: (B, T), prompts padded on the left.
        completion_ids, completion_mask: (B, C), the last C columns; 1 through the token that ends a
            completion.
        advantages: (B,).
        old_logps, ref_logps: (B, C), if a rollout batch gets several updates; else None.
        config, group_size, sampled_logps: you need none of them for the task.

    Returns:
        (loss, metrics): a scalar with gradient, the mean over this batch, and a dict of floats.
    """
    raise NotImplementedError("compute_loss is yours to write: see task 1 in README.md")
'''

# What a candidate gets; the sheet becomes the copy's README.md.
INTERVIEW_FILES = (
    "main.py config.py evaluator.py rl_datasets.py llms.py utils.py plotter.py grpo/*.py Makefile"
    " pyproject.toml requirements.txt .ci/requirements.lock .gitignore LICENSE data/arithmetic/*"
    " tiny/1m/* tests/test_loss_by_hand.py"
).split()
# Left out of these: statements by name, imports by module, and entries of dictionaries by key.
INTERVIEW_LEFT_OUT = {
    "main.py": "losses",
    "config.py": "FineTuningConfig SFTConfig ExpertIterationConfig GoldConfig judge_model"
    " judge_base_url loss_type cliprange cliprange_high length_normalization importance_cap",
    "evaluator.py": "CreativeWritingEvaluator why_no_story creative",
    "rl_datasets.py": "STORY_PROMPT story story_example creative",
}
# Texts of these that need what is left out, and what takes their place.
INTERVIEW_TEXTS = {
    "main.py": {
        " losses.py has each paper's loss.": "",
        ", and\n     --importance_cap corrects for it": "",
        "        # For no_baseline the reward takes the place of the advantage.\n": "",
        '        multipliers = rewards if config.loss_type == "no_baseline" else advantages\n': "",
        "for completion, multiplier in zip(completions, multipliers.": (
            "for completion, advantage in zip(completions, advantages."
        ),
        "completion.advantage = multiplier": "completion.advantage = advantage",
        """        if config.length_normalization == "token_mean":
            share = batch_tokens / num_tokens
""": "",
        " and config.loss_type in ZERO_WITHOUT_ADVANTAGE": "",
        "    find_loss(config.loss_type)  # a wrong name raises before the model is loaded\n": "",
    },
    "config.py": {
        '    "judge (of the data set creative)",\n': "",
        '        "creative: opening lines of stories, which a judge rewards\\n"\n': "",
        '        "creative: stories, by a judge\\n"\n': "",
        ", question_only or story": " or question_only",
        " (docs/gpus.md)": "",
        '0 leaves out.", zero=True': '0 leaves out.", zero=True, title="loss"',
        ' and self.loss_type != "no_baseline"': "",
        "; use --loss_type no_baseline": "",
    },
    "evaluator.py": {f"# --- Stories {86 * '-'}\n\n\n": ""},
    "Makefile": {' -m "not slow"': ""},
}


def blank(source: str, body: str) -> str:
    """main.py's source, in which only the body of compute_loss is replaced."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    (function,) = (function for function in functions if function.name == "compute_loss")
    lines = source.splitlines(keepends=True)
    lines_before = lines[: function.body[0].lineno - 1]
    lines_after = lines[function.body[-1].end_lineno :]
    return "".join([*lines_before, body, *lines_after])


def names_of(node: ast.AST) -> list[tuple[str | None, ast.AST, ast.AST]]:
    """What without() can leave out of a node: (its name, where it begins, where it ends)."""
    if isinstance(node, ast.Dict):
        keys = [getattr(key, "value", None) for key in node.keys]
        return list(zip(keys, node.keys, node.values, strict=True))
    if not isinstance(node, ast.Module | ast.ClassDef):
        return []
    parts = []
    for child in node.body:
        targets = getattr(child, "targets", [getattr(child, "target", child)])
        name = getattr(child, "module", getattr(targets[0], "id", getattr(child, "name", None)))
        parts.append((name, child, child))
    return parts


def without(source: str, names: str) -> str:
    """A module's source without the parts of these names and the comments above them."""
    lines = source.splitlines(keepends=True)
    found = set()
    for node in ast.walk(ast.parse(source)):
        for name, first, last in names_of(node):
            if name in names.split():
                found.add(name)
                decorators = getattr(first, "decorator_list", [])
                start = min(node.lineno for node in [first, *decorators]) - 1
                while lines[start - 1].lstrip().startswith("# "):
                    start -= 1
                lines[start : last.end_lineno] = [""] * (last.end_lineno - start)
    assert found == set(names.split()), f"there is no {set(names.split()) - found}"
    return "".join(lines)


def make_exercise(folder: Path) -> None:
    git = ["git", "ls-files"]
    tracked = subprocess.run(git, capture_output=True, text=True, cwd=ROOT, check=True)
    copy(tracked.stdout.splitlines(), folder)
    edit(folder / "main.py", lambda source: blank(source, EXERCISE_BODY))
    print(f"Write compute_loss in {folder}/main.py, as {folder}/experiments/exercise.md asks.")
    print(f"These tests judge it: make test-exercise EXERCISE={folder}")


def make_interview(folder: Path) -> None:
    paths = [path for pattern in INTERVIEW_FILES for path in ROOT.glob(pattern)]
    names = [str(path.relative_to(ROOT)) for path in paths if path.name != "judges.py"]
    copy(names, folder)
    edit(folder / "main.py", lambda source: blank(source, INTERVIEW_BODY))
    for name, left_out in INTERVIEW_LEFT_OUT.items():
        edit(folder / name, lambda source, left_out=left_out: without(source, left_out))
    for name, texts in INTERVIEW_TEXTS.items():
        for old, new in texts.items():
            assert (folder / name).read_text("utf-8").count(old) == 1, f"{name}: {old}"
            edit(folder / name, lambda source, old=old, new=new: source.replace(old, new))
    edit(folder / "Makefile", without_other_targets)
    shutil.copy(ROOT / "experiments/interview.md", folder / "README.md")
    print(f"Give {folder} to a candidate: its README.md has the five tasks.")


def without_other_targets(makefile: str) -> str:
    lines = makefile.splitlines(keepends=True)
    others = re.compile("exercise|interview|slow|ruff", re.IGNORECASE)
    return "".join(line for line in lines if not others.search(line))


def copy(names: list[str], folder: Path) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text("utf-8")), "utf-8")


def main():
    parser = argparse.ArgumentParser(description="Leave compute_loss to you, in a copy.")
    makers = {"exercise": make_exercise, "interview": make_interview}
    parser.add_argument("copy", choices=makers)
    parser.add_argument(
        "--output_dir", type=Path, help="(default: output/exercise or .../interview)"
    )
    args = parser.parse_args()
    folder = args.output_dir or Path("output") / args.copy
    if folder.exists():
        print(f"error: {folder} exists, perhaps with your solution in it", file=sys.stderr)
        sys.exit(2)
    makers[args.copy](folder)


if __name__ == "__main__":
    main()
