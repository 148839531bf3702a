"""What the tests of plots, reports and rules share: rows of logs, runs on disk."""

from grpo import jsonl


def train_rows(n, **metrics):
    """n rows of a training log, with these values or functions of the step."""
    rows = []
    for step in range(1, n + 1):
        values = {key: f(step) if callable(f) else f for key, f in metrics.items()}
        rows.append({"step": step, "total_tokens": 5000 * step, "elapsed": 2.0 * step} | values)
    return rows


def eval_row(step, strict=0.3, flexible=0.4):
    """A row of the evaluation log, whose intervals are 4 points wide on either side."""
    row = {"step": step, "n": 500, "total_tokens": 5000 * step}
    for key, share in (("accuracy", strict), ("accuracy_flexible", flexible)):
        row |= {key: share, f"{key}_low": share - 0.04, f"{key}_high": share + 0.04}
    return row


def write_run(path, train=(), evaluations=(), **flags):
    """Write the logs and the args.json of a run, and return its path."""
    jsonl.write(path / "train_log.jsonl", train)
    jsonl.write(path / "eval_log.jsonl", evaluations)
    flags = {"model_name": "tiny/1m", "dataset_name": "arithmetic"} | flags
    jsonl.write_json(path / "args.json", {"args": flags, "parameters": 1_051_776})
    return path


def write_answers(run, step, verdicts, gold=str):
    """Write eval/step_*.jsonl with a question for each verdict, None for a story without one.

    gold: a function from the number of a question to its gold answer.
    """
    rows = []
    for i, verdict in enumerate(verdicts):
        row = {"id": f"q{i}", "prompt": f"Think.\n<user>\nHow many are {i}?\n<end>\nGo:\n"}
        row |= {"completion": f"At step {step} it is {i}.", "gold": gold(i), "reward": 1.0}
        row |= {"length": 4, "finished": True}
        rows.append(row if verdict is None else row | {"correct_strict": verdict})
    jsonl.write(run / f"eval/step_{step:06d}.jsonl", rows)
