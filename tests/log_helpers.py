"""What the tests of plots and reports share: rows of logs, runs on disk."""

from grpo import jsonl


def eval_row(step, strict=0.3, flexible=0.4, n=500):
    """A row of the evaluation log, whose intervals are 4 points wide on either side."""
    row = {"step": step, "n": n, "total_tokens": 5000 * step, "elapsed": 2.0 * step}
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
    """Write eval/step_*.jsonl with a question for each verdict, None for an unknown one.

    gold: a function from the number of a question to its gold answer.
    """
    rows = []
    for i, verdict in enumerate(verdicts):
        row = {"id": f"q{i}", "prompt": f"Think.\n<user>\nHow many are {i}?\n<end>\nGo:\n"}
        row |= {"completion": f"At step {step} it is {i}.", "gold": gold(i)}
        rows.append(row | {"correct_strict": verdict, "length": 4, "finished": True, "reward": 1.0})
    jsonl.write(run / f"eval/step_{step:06d}.jsonl", rows)
