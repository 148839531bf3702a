"""What a candidate gets: a copy without the loss, SFT and judges, and with the five tasks.

It is a list of files. What follows a marked line, to the end of the file or of the class, is left
out, and so is the body of main.compute_loss.
"""

import argparse
import ast
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = """
    LICENSE Makefile requirements.txt pyproject.toml .gitignore .ci/requirements.lock
    main.py evaluator.py rl_datasets.py llms.py utils.py plotter.py config.py
    grpo/checkpoints.py grpo/decoding.py grpo/distributed.py grpo/generation.py grpo/jsonl.py
    grpo/metrics.py grpo/report.html grpo/report.py grpo/rollout.py grpo/run.py grpo/sampler.py
    grpo/timer.py grpo/weights.py
    data/arithmetic/train.parquet data/arithmetic/validation.parquet data/arithmetic/test.parquet
    tiny/1m/chat_template.jinja tiny/1m/config.json tiny/1m/generation_config.json
    tiny/1m/model.safetensors tiny/1m/tokenizer.json tiny/1m/tokenizer_config.json
    tests/test_by_hand.py
""".split()
# What follows, to the end of the file or of the class, is not in the copy.
MARK = "# --- Not in the copy for a candidate "
WITH_MARK = "Makefile pyproject.toml .gitignore evaluator.py rl_datasets.py config.py".split()

COMPUTE_LOSS = '''\
    """The loss of a batch, yours to write: task 1 of README.md says what it must be.

    You need the first seven arguments and `config`. The others are for speed and other flags.

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
    assert old_logps is None, "several updates for each batch need the ratio to old_logps"
    raise NotImplementedError("compute_loss is yours to write: see task 1 of README.md")
'''
# losses.py of the copy: what the rest of main.py asks for.
LOSSES = '''\
"""What main.py asks for beside compute_loss, which is the only loss of this copy."""

from pathlib import Path

# Groups whose rewards are all equal have no gradient by this loss, if there is no KL term.
ZERO_WITHOUT_ADVANTAGE = ("grpo_clip",)


def try_loss(config) -> None:
    """Raises ValueError while compute_loss is not written yet."""
    if "compute_loss is yours to write" in (Path(__file__).parent / "main.py").read_text("utf-8"):
        raise ValueError("compute_loss in main.py is yours to write first: see task 1 of README.md")
'''


def make_interview(folder: Path) -> None:
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in WITH_MARK:
        text = (ROOT / name).read_text("utf-8")
        (folder / name).write_text(without_marked(name, text), "utf-8")
    main_py = (ROOT / "main.py").read_text("utf-8")
    (folder / "main.py").write_text(blank(main_py), "utf-8")
    (folder / "losses.py").write_text(LOSSES, "utf-8")
    shutil.copy(ROOT / "experiments/interview.md", folder / "README.md")
    print(f"Give {folder} to a candidate: its README.md has the five tasks.")


def without_marked(name: str, text: str) -> str:
    """A file's text without the rest of each block that has the marked line."""
    # From the mark on, every line that is indented as it is, or further, or blank.
    rest_of_block = rf"^( *){MARK}.*\n(?:\1.*\n|\n)*"
    kept, num_marks = re.subn(rest_of_block, "\n\n", text, flags=re.MULTILINE)
    if num_marks == 0:
        raise ValueError(f"{name} has no line that begins with {MARK!r}")
    return kept.rstrip() + "\n"


def blank(source: str) -> str:
    """main.py's source, in which only the body of compute_loss is replaced."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    (function,) = (function for function in functions if function.name == "compute_loss")
    lines = source.splitlines(keepends=True)
    lines_before = lines[: function.body[0].lineno - 1]
    lines_after = lines[function.body[-1].end_lineno :]
    return "".join([*lines_before, COMPUTE_LOSS, *lines_after])


def main():
    parser = argparse.ArgumentParser(description="A copy for a candidate, without the loss.")
    parser.add_argument("--output_dir", type=Path, default=Path("output/interview"))
    folder = parser.parse_args().output_dir
    try:
        if folder.exists():
            raise ValueError(f"{folder} exists, perhaps with a solution in it")
        make_interview(folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
