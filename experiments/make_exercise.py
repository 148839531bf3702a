"""Write a copy of the repository in which the body of main.compute_loss is left to you; the loss tests judge it.

make exercise         # writes output/exercise; edit compute_loss in its main.py
make test-exercise    # red before, green when it is right
"""

import argparse
import ast
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TASK = '''\
    """Write this function: the loss of GRPO (arXiv:2402.03300), from one batch of sampled completions.

    B sequences, P prompt tokens, C completion tokens, T = P + C. You are given:
        model: the policy, to be trained; base_model: the frozen reference, None when beta is 0.
        prompt_completion_ids, attention_mask: (B, T), prompts left-padded, completions in the last C columns.
        completion_ids, completion_mask: (B, C); the mask is 1 on the tokens that count, the closing token included.
        advantages: (B,), one per sequence; raw rewards for "no_baseline".

    The loss, with the defaults:
        1. The log-probs of the completion tokens, (B, C): `utils.get_per_token_logps`, for the policy with gradient,
           for the reference under torch.inference_mode(). Hand on `group_size` and `temperature`.
        2. The ratio of each token: exp(policy log-prob - old log-prob). Without `old_per_token_logps` the old policy is
           the present one: the policy's log-probs, detached, so the ratio is 1 and only its gradient matters.
        3. The policy term: the smaller of ratio x advantage and clipped ratio x advantage, the ratio clipped to
           [1 - cliprange, 1 + cliprange] (0.2; `cliprange_high`, where given, replaces the upper one). This is
           `loss_type` "grpo_clip"; `compute_policy_gradient_loss` below, which is not blanked, knows the others too.
        4. The KL to the reference, per token, as k3: exp(d) - d - 1, d = reference log-prob - policy log-prob.
        5. Per token: -(policy term - beta x KL), beta 0.04. Mean over each sequence's own completion tokens, then mean
           over the sequences.

    Return (loss, metrics): a scalar with gradient, and a dict of floats with at least "kl", reduced as the loss is and
    absent when beta is 0, and "response_length", the mean number of completion tokens. The bare call needs no more.

    What the tests ask beyond it:
        - More metrics: "entropy" (`return_entropy=True`), "ratio_mean" and the share of each mask of the policy term
          ("clip_fraction", ...), as means over all completion tokens; "ratio_min" and "ratio_max" over the same.
        - A row whose mask is all 0 adds the value 0, even where its numbers overflow, and stays in the denominator. A
          row with advantage NaN (its reward is missing) adds nothing and leaves the denominator.
        - `num_sequences` and `num_tokens`, where given, are the denominators of a whole update of which this batch is a
          part; the loss and the metrics of its parts add up to those of the whole.
        - `length_normalization` and `normalization_constant` (None: C) choose another mean: `utils.aggregate_tokens`.
        - `ref_per_token_logps`, where given, are used instead of running the reference.
        - `sampled_per_token_logps`, where given: metric "sampling_logp_gap", the mean absolute difference of the old
          log-probs and these; with `importance_cap` each token's policy term is also multiplied by
          exp(old log-prob - sampled log-prob), at most the cap.
    """
    raise NotImplementedError("compute_loss is yours to write: its docstring is the task")
'''


def blank(source):
    """main.py's source with the body of compute_loss, and nothing else, replaced by the task."""
    functions = [node for node in ast.parse(source).body if getattr(node, "name", None) == "compute_loss"]
    assert len(functions) == 1, f"main.py defines compute_loss {len(functions)} times"
    first, last = functions[0].body[0], functions[0].body[-1]
    lines = source.splitlines(keepends=True)
    return "".join([*lines[: first.lineno - 1], TASK, *lines[last.end_lineno :]])


def write_exercise(folder):
    """Copy every tracked file to a new folder, with compute_loss blanked. ValueError where that is not possible."""
    if folder.exists():
        raise ValueError(f"{folder} already exists, perhaps with your solution in it; move or remove it first")
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT)
    if listed.returncode:
        raise ValueError(f"git cannot list the tracked files of {ROOT}: the exercise is made in a clone")
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    main = folder / "main.py"
    main.write_text(blank(main.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a copy of the repository with compute_loss left to you.")
    parser.add_argument("--output_dir", type=Path, default=Path("output/exercise"), help="a folder that is not there")
    folder = parser.parse_args().output_dir
    try:
        write_exercise(folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"write compute_loss in {folder}/main.py; its docstring is the task, and the loss tests are the judge:")
    print(f"    cd {folder} && {sys.executable} -m pytest -q tests/test_loss.py")
