"""What the tests of plots and reports share: rows of logs, runs on disk, the plotter's command."""

import shlex

import plotter
from grpo import jsonl


def eval_row(step, strict=0.3, flexible=0.4, n=500):
    """Return a row of the evaluation log, whose intervals are 4 points wide on either side."""
    row = {"step": step, "n": n, "total_tokens": 5000 * step, "elapsed": 2.0 * step}
    for key, share in (("accuracy", strict), ("accuracy_flexible", flexible)):
        row |= {key: share, f"{key}_low": share - 0.04, f"{key}_high": share + 0.04}
    return row


def write_run(path, train=None, evaluations=None, parameters=1_051_776, **flags):
    """Write the logs and the args.json of a run, and return its path."""
    path.mkdir(parents=True)
    for name, rows in (("train_log", train), ("eval_log", evaluations)):
        if rows is not None:
            jsonl.write(path / f"{name}.jsonl", rows)
    flags = {"model_name": "tiny/1m", "dataset_name": "arithmetic"} | flags
    jsonl.write_json(path / "args.json", {"args": flags, "parameters": parameters})
    return path


def write_answers(run, step, strict, flexible=None, gold=str):
    """Write eval/step_*.jsonl with a question for each verdict in `strict`.

    gold: a function from the number of a question to its gold answer.
    """
    rows = []
    for i, (correct_strict, correct_flexible) in enumerate(
        zip(strict, flexible or strict, strict=True)
    ):
        row = {"id": f"q{i}", "gold": gold(i)}
        row |= {"correct_strict": correct_strict, "correct_flexible": correct_flexible}
        rows.append(row)
    jsonl.write(run / f"eval/step_{step:06d}.jsonl", rows)


def plot(*paths, flags=""):
    """Run the plotter on these directories and return its exit code."""
    return plotter.main(["--log_dir", *map(str, paths), *shlex.split(flags)])
