"""Reads the logs of training runs: what plotter.py draws, diagnoses and reports.

A run has train_log.jsonl or eval_log.jsonl or both. Where they exist, args.json has its settings,
and rollouts/ and eval/ hold its completions. In a row of the evaluation log, KEY_low and KEY_high
are the 95% interval of KEY.
"""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from config import ExpertIterationConfig, GRPOConfig, SFTConfig, may_change, read_args
from logs import jsonl

# These keys of the logs count progress, or are settings, and are therefore not metrics.
NO_METRICS = {
    "step",
    "total_tokens",
    "tokens",
    "examples",
    "elapsed",
    "epoch",
    "ei_step",
    "n",
    "micro_batch_tokens",
    "max_concurrent_sequences",
}
# Of the settings that a resumed run may change, these have an effect: on how long it is, and on
# where its curves have points.
LENGTHS = {"num_train_iters", "n_ei_steps"}
POINTS = {"eval_iterations", "eval_updates", "eval_ei_steps", "max_kl"}
# Flags of earlier versions.
FORMER = {"show_tokens", "log_entropy", "judge_timeout", "judge_max_retries"}
MAY_CHANGE = may_change(GRPOConfig) | may_change(SFTConfig) | may_change(ExpertIterationConfig)
# Settings without an effect on what is learnt: where a run is, how fast it goes, what it keeps.
NO_EFFECT = (MAY_CHANGE | FORMER) - LENGTHS - POINTS
# Runs that differ in nothing but these are repeats of each other. The number of parameters follows
# from the model.
MAY_DIFFER = NO_EFFECT | POINTS | {"seed", "parameters"}


@dataclass(frozen=True)
class RunLog:
    """The logs of one training run."""

    name: str  # its path, without the folder that holds all loaded runs
    path: Path
    args: dict  # its settings and "parameters", the number of parameters, as far as they are known
    rows: dict[str, list[dict]]  # "train" and "eval": the rows of these logs

    @property
    def description(self) -> str:
        """The model, the data set and the number of parameters, as far as args.json has them."""
        facts = [os.path.basename(str(self.args.get("model_name") or ""))]
        facts.append(str(self.args.get("dataset_name") or ""))
        if has_number(self.args, "parameters"):
            facts.append(f"{self.args['parameters'] / 1e6:,.3g}M parameters")
        return ", ".join(fact for fact in facts if fact)

    @property
    def unit_of_step(self) -> str:
        """What `step` counts: main.py counts iterations, and the scripts of SFT count updates."""
        is_fine_tuning = not self.args.keys().isdisjoint({"train_file", "n_ei_steps"})
        has_examples = any("examples" in row for row in self.rows["train"])
        return "update" if is_fine_tuning or has_examples else "iteration"


# ---- loading


def read_log(path, key="step"):
    """Return the rows of a log, which all need `key`. Prints a note if the last line is torn.

    Raises:
        ValueError: another line is damaged or lacks the key.
    """
    return jsonl.read(path, (key,), on_torn_line=lambda message: print(f"note: {message}"))


def load_runs(log_dirs):
    """Load the logs of several directories. Prints a note for each directory that holds no run.

    Raises:
        ValueError: a directory does not exist, is named twice or has logs that are damaged or have
            no row yet, or none of them holds a run.
    """
    paths = [Path(os.path.abspath(log_dir)) for log_dir in log_dirs]
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"{path}: there is no such directory; name the directory of a run")
        if paths.count(path) > 1:
            raise ValueError(f"{path}: given twice")
    common_folder = os.path.commonpath([path.parent for path in paths])
    runs = []
    for path in paths:
        if (path / "train_log.jsonl").exists() or (path / "eval_log.jsonl").exists():
            runs.append(load_run(path, os.path.relpath(path, common_folder)))
            if not any(runs[-1].rows.values()):
                raise ValueError(f"{path}: no complete line in its logs yet")
        elif path == paths[-1] and not runs:  # None of the directories holds a run.
            raise ValueError(f"{path}: no train_log.jsonl and no eval_log.jsonl in it")
        else:
            print(f"note: {path}: holds no run, left out")
    return runs


def load_run(path, name):
    """Load the logs of one run.

    Raises:
        ValueError: its logs are damaged.
    """
    rows = {}
    for log in ("train", "eval"):
        log_path = path / f"{log}_log.jsonl"
        rows[log] = read_log(log_path) if log_path.exists() else []
    return RunLog(name, path, read_args(path / "args.json"), rows)


def transcripts(run, folder):
    """Return {step: path} of the transcripts in a run's rollouts/ or eval/.

    Evaluations have the order of the log. An evaluation without a row in the log is left out,
    because its transcript is still being written.
    """
    paths = {}
    for path in run.path.glob(f"{folder}/step_*.jsonl"):
        step = path.stem.removeprefix("step_")
        if step.isdecimal():
            paths[int(step)] = path
    if folder == "rollouts":
        return paths
    rows = rows_with_number(run.rows["eval"], "step")
    return {row["step"]: paths[row["step"]] for row in rows if row["step"] in paths}


def first_answers(path):
    """Return {question: row} of a transcript of an evaluation, its last question first.

    Questions are the same if both id and gold answer are. If a question was sampled several times,
    its first sample counts.
    """
    # Reversed, so that the first sample of a question overwrites the later ones.
    rows = reversed(read_log(path, "id"))
    return {(str(row["id"]), str(row.get("gold"))): row for row in rows}


# ---- numbers in rows


def to_float(value):
    """Return a float, which is NaN if the value is not a finite number."""
    # The comparison is false for NaN, for infinity and for integers too large for a float.
    is_finite = isinstance(value, int | float) and abs(value) < 1e300
    return float(value) if is_finite else math.nan


def has_number(row, key):
    return math.isfinite(to_float(row.get(key)))


def rows_with_number(rows, key):
    return [row for row in rows if has_number(row, key)]


def column(rows, key):
    """Return the values of a key as an array, NaN where a row has no number."""
    return np.array([to_float(row.get(key)) for row in rows])


# ---- settings


def value_of_flag(run, flag):
    """Return the value of a flag in a run's args.json: a number, or a text ("default" if unset).

    Raises:
        ValueError: args.json lacks the flag.
    """
    if flag not in run.args:
        raise ValueError(f"{run.path}: no --{flag} in its args.json")
    value = run.args[flag]
    if value is None:
        return "default"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else str(value)


def differing_flags(runs, flags):
    """Return the flags, other than these, in which runs differ that are not repeats.

    A path does not tell the number of a seed, since seeds are repeats: start_seed0 is start_seed1.
    """
    other_flags = set().union(*(run.args for run in runs)) - MAY_DIFFER - set(flags)
    differing = []
    for flag in sorted(other_flags):
        values = {re.sub(r"seed\d+", "seed", str(run.args.get(flag))) for run in runs}
        if len(values) > 1:
            differing.append(flag)
    return differing
