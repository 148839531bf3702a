"""Reads the logs of training runs, and makes the comparisons and tables that plotter.py prints.

A run has train_log.jsonl or eval_log.jsonl or both. Where they exist, args.json gives titles and
flags, and eval/step_*.jsonl gives paired comparisons. In a row of the evaluation log, KEY_low and
KEY_high are the 95 % interval of KEY.
"""

import json
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from logs import jsonl, markdown
from logs.statistics import mcnemar

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
ACCURACIES = {"strict": "accuracy", "flexible": "accuracy_flexible"}  # {kind: key in the logs}
# Stories have no correct answer. If all runs wrote stories, these words replace the usual ones. The
# floor is a set of rules: a text that breaks one is below the floor, and the judge does not see it.
STORY_WORDS = {
    "strict": "above the floor and scored",
    "flexible": "above the floor",
    "Accuracy": "Stories scored",
    "Evaluation accuracy": "Stories",
    "correct": "scored",
    "incorrect": "not scored",
    "Response length correct": "Response length, scored",
    "Response length incorrect": "Response length, not scored",
}
# Runs that differ only in these flags are repeats, of which --by draws the mean. seed, arm, name
# and output_dir differ between repeats of a run. "parameters" follows from the model. The others
# have no effect on what is learnt by a given step.
MAY_DIFFER = {
    "seed",
    "arm",
    "name",
    "output_dir",
    "resume",
    "device",
    "parameters",
    "keep_checkpoints",
    "eval_iterations",
    "eval_updates",
    "eval_ei_steps",
    "save_iterations",
    "save_updates",
    "report_to",
    "show_tokens",
    "log_entropy",
    "max_kl",
    "gradient_checkpointing",
    "micro_batch_tokens",
    "max_concurrent_sequences",
    "judge_base_url",
    "judge_concurrency",
    "judge_timeout",
    "judge_max_retries",
    "max_judge_failures",
    "min_judge_spread",
}
MAX_SPLIT_FLAGS = 4  # With more, the label of a line would be longer than anyone reads.


@dataclass(frozen=True)
class DisplayName:
    """How figures name and colour the runs of one training method."""

    text: str
    color: str  # "#RRGGBB"


@dataclass(frozen=True)
class RunLog:
    """The logs of one training run, and how plots and tables name and colour it."""

    name: str  # its path, without the folder that all loaded runs lie in
    path: Path
    args: dict  # flags, "parameters", "arm" (see load_run) and "name" (see name_runs), if known
    description: str  # model, data set and number of parameters, as far as args.json has them
    rows: dict[str, list[dict]]  # "train" and "eval": the rows of these logs
    group: tuple  # runs with equal groups share a colour: the name, or the values of the --by flags
    label: str  # the group in words, for legends and tables
    color_index: int  # the position of the group among all groups of the study
    display_name: DisplayName | None = None  # of the run, by --names
    color: str | None = None  # of the group, if it has a display name


# ---- loading


def read_log(path, key="step"):
    """Return the rows of a log, which all need `key`. Prints a note if the last line is torn.

    Raises:
        ValueError: another line is damaged or lacks the key.
    """
    return jsonl.read(path, (key,), on_torn_line=lambda message: print(f"note: {message}"))


def read_args(path):
    """Return the flags of an args.json and the number of parameters; {} if there is no such file.

    Raises:
        ValueError: the file is not what a run writes.
    """
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_bytes())
        return record["args"] | {"parameters": record.get("parameters")}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: not the args.json of a run ({error!r})") from None


def load_runs(log_dirs):
    """Load the logs of several directories. Prints a note for each directory that holds no run.

    Raises:
        ValueError: a directory does not exist, is named twice or has damaged logs, or none of
            them holds a run.
    """
    paths = [Path(os.path.abspath(log_dir)) for log_dir in log_dirs]
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"{path}: no such directory")
        if paths.count(path) > 1:
            raise ValueError(f"{path}: given twice")
    common_folder = os.path.commonpath([path.parent for path in paths])
    runs = []
    for path in paths:
        if (path / "train_log.jsonl").exists() or (path / "eval_log.jsonl").exists():
            runs.append(load_run(path, os.path.relpath(path, common_folder), len(runs)))
        elif path == paths[-1] and not runs:  # None of the directories holds a run.
            raise ValueError(f"{path}: no train_log.jsonl and no eval_log.jsonl in it")
        else:
            print(f"note: {path}: holds no run, left out")
    return runs


def load_run(path, name, color_index):
    """Load the logs of one run, as a group of its own.

    Its "arm" is the name of its directory without the learning rate and the seed.

    Raises:
        ValueError: its logs are damaged or have no row yet.
    """
    rows = {}
    for log in ("train", "eval"):
        log_path = path / f"{log}_log.jsonl"
        rows[log] = read_log(log_path) if log_path.exists() else []
    if not rows["train"] and not rows["eval"]:
        raise ValueError(f"{path}: no complete line in its logs yet")
    args = read_args(path / "args.json")
    args["arm"] = re.sub(r"(_rate[^_]+)?_seed\d+$", "", path.name)
    return RunLog(
        name=name,
        path=path,
        args=args,
        description=describe(args),
        rows=rows,
        group=(name,),
        label=name,
        color_index=color_index,
    )


def describe(args):
    """Return in words the model, the data set and the number of parameters, where args has them."""
    facts = [os.path.basename(str(args.get("model_name") or "")), args.get("dataset_name")]
    if has_number(args, "parameters"):
        facts.append(f"{parameters_in_words(args['parameters'])} parameters")
    return ", ".join(str(fact) for fact in facts if fact)


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


# ---- groups of runs and their labels


def flags_of_groups(runs, flags, joined=False):
    """Return the flags of --by and, after them, those that split the groups further.

    These are the flags in which runs with equal values differ. The mean of runs that differ in such
    a flag would be a run that nobody made. So the flag takes part in the grouping, and in the
    labels of the groups.

    joined: whether a line joins the groups. Then a flag also splits them if it differs between runs
        with different values: such a line would lead from one kind of run to another.

    Raises:
        ValueError: the args.json of a run lacks one of the flags, or too many others differ.
    """
    for run in runs:
        for flag in flags:
            if flag not in run.args:
                raise ValueError(f"{run.path}: no --{flag} in its args.json")
    args_of_group = {}  # {values of the flags: the args of the runs with these values}
    for run in runs:
        args_of_group.setdefault(values_of(run.args, flags), []).append(run.args)
    split_flags = set()
    for group_args in args_of_group.values():
        split_flags |= differing_flags(group_args, flags)
    if joined:
        # Models of different sizes have different names.
        named_by_size = {"model_name"} if "parameters" in flags else set()
        split_flags |= differing_flags([run.args for run in runs], flags) - named_by_size
    if len(split_flags) > MAX_SPLIT_FLAGS:
        raise ValueError(too_many_split_flags(flags, sorted(split_flags), joined))
    return [*flags, *sorted(split_flags)]


def differing_flags(all_args, flags):
    """Return the flags, other than these, in which runs differ that are not repeats."""
    other_flags = set().union(*all_args) - MAY_DIFFER - set(flags)
    return {flag for flag in other_flags if len({value_of(args, flag) for args in all_args}) > 1}


def too_many_split_flags(flags, split_flags, joined):
    """Return the message of the error for groups that too many further flags would split."""
    difference = f"differ in {len(split_flags)} other flags ({', '.join(split_flags)})"
    if flags == ["name"]:
        return f"--names: runs of one name {difference}; leave runs out, or give them other names"
    runs = "the runs" if joined else "runs with equal values"
    return (
        f"--by {' '.join(flags)}: {runs} {difference}; leave runs out, or add a flag that tells"
        " them apart, such as arm"
    )


def group_by(runs, flags):
    """Group the runs by the values of flags, and return them in the order of these values.

    The colour of a group is chosen among all runs that lie in the same folders, so that a group
    keeps its colour whichever runs are drawn.
    """
    runs = [replace(run, group=values_of(run.args, flags)) for run in runs]
    study_groups = groups_of_study(runs, flags)
    labelled_runs = []
    for run in runs:
        label = group_label(run.group, flags, study_groups)
        color_index = study_groups.index(run.group)
        labelled_runs.append(replace(run, label=label, color_index=color_index, color=None))
    return sorted(labelled_runs, key=lambda run: run.color_index)


def groups_of(runs):
    """Return {group: its runs}, in order of appearance."""
    groups = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    return groups


def groups_of_study(runs, flags):
    """Return the groups of all runs in the folders of these runs, sorted, numbers before words."""
    groups = {run.group for run in runs}
    for folder in {run.path.parent for run in runs}:
        for path in folder.glob("*/args.json"):
            try:
                args = read_args(path)
            except (ValueError, OSError):
                continue  # It does not belong to a run.
            if args.keys() >= set(flags):
                groups.add(values_of(args, flags))
    return sorted(groups, key=lambda group: [(isinstance(value, str), value) for value in group])


def values_of(args, flags):
    return tuple(value_of(args, flag) for flag in flags)


def value_of(args, flag):
    """Return the value of a flag as a number or a text.

    An unset flag is "default". But an unset num_examples is "all", since it means all examples. A
    path does not tell the number of a seed, since seeds are repeats: start_seed0/ is "start_seed".
    """
    value = args.get(flag)
    if value is None:
        return "all" if flag == "num_examples" else "default"
    if isinstance(value, int | float):
        return value
    return re.sub(r"seed\d+", "seed", str(value)).rstrip("/")


def group_label(group, flags, study_groups):
    """Return a group's value of each flag in words that tell it from the values of other groups."""
    words = []
    for i, flag in enumerate(flags):
        study_values = {study_group[i] for study_group in study_groups}
        words.append(in_words(flag, group[i], study_values))
    return ", ".join(words)


def in_words(flag, value, all_values):
    """Return the value of a flag as a legend shows it.

    Of a path one component is shown: the last one that sets it apart from the other paths in
    `all_values`. `out/a/model` and `out/b/model` become `a` and `b`. A number or a word is a
    path of one component.
    """
    if isinstance(value, bool):
        words = flag.removeprefix("use_").replace("_", " ")
        return f"with {words}" if value else f"without {words}"
    if flag == "parameters" and not isinstance(value, str):
        return parameters_in_words(value)
    path = components_from_end(value)
    other_paths = [components_from_end(other) for other in all_values if other != value]
    for i, component in enumerate(path):
        others_at_i = [other_path[i] for other_path in other_paths if i < len(other_path)]
        if component not in others_at_i:
            return component
    return path[0]


def components_from_end(value):
    """Return the components of a path, the last one first."""
    return str(value).rstrip("/").split("/")[::-1]


def rate_in_words(rate):
    """Return a learning rate as the pages write it: 2e-4."""
    if isinstance(rate, str):
        return rate
    mantissa, exponent = f"{rate:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def parameters_in_words(number):
    return f"{number / 1e6:.2f} M" if number < 1e9 else f"{number / 1e9:.2f} B"


def adapt_to_stories(words, runs):
    """Return the words, or their entry in STORY_WORDS if all runs wrote stories.

    For "accuracy (strict)" the result is the entry of "strict". A run wrote stories if its
    evaluator is `creative` or, where that flag is unset, its data set.
    """
    for run in runs:
        if (run.args.get("evaluator") or run.args.get("dataset_name")) != "creative":
            return words
    usual = words.split("(", 1)[-1].rstrip(")")  # the words in brackets, or all if there are none
    return STORY_WORDS.get(usual, words)


def has_number_axis(runs, flags):
    """Return whether the values of --by are places on an axis: one flag of positive numbers."""
    if len(flags) != 1:
        return False
    values = [value_of(run.args, flags[0]) for run in runs]
    return all(not isinstance(value, str | bool) and value > 0 for value in values)


# ---- display names


def load_names(path):
    """Return {"STUDY/ARM": DisplayName}, as the JSON file of --names has them.

    Raises:
        ValueError: the file cannot be read, or has something else.
    """
    try:
        entries = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"--names {path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--names {path}: not valid JSON ({error})") from None
    if not isinstance(entries, dict):
        raise ValueError(f'--names {path}: not an object {{"STUDY/ARM": [display name, colour]}}')
    names = {}
    for side, entry in entries.items():
        is_pair_of_texts = (
            isinstance(entry, list)
            and len(entry) == 2
            and all(isinstance(value, str) and value for value in entry)
        )
        if not is_pair_of_texts:
            raise ValueError(f"--names {path}: {side!r} needs [display name, colour], two texts")
        text, color = entry
        if not re.fullmatch("#[0-9A-Fa-f]{6}", color):
            raise ValueError(
                f"--names {path}: {side!r} has the colour {color!r}; write it as '#0072B2'"
            )
        names[side] = DisplayName(text, color.upper())
    return names


def name_runs(runs, names):
    """Give each run that has an entry in the names its display name, also as "name" in its args.

    The directory of a run is STUDY/ARM_seedN or STUDY/ARM_rateX_seedN. An entry of STUDY/ARM_rateX
    goes before one of STUDY/ARM.
    """
    named_runs = []
    for run in runs:
        study = run.path.parent.name
        arm_and_rate = re.sub(r"_seed\d+$", "", run.path.name)
        arm, *rate = re.split(r"_rate(?=[^_]+$)", arm_and_rate)
        name = names.get(f"{study}/{arm_and_rate}") or names.get(f"{study}/{arm}")
        if name:
            args = run.args | {"name": name.text}
            if rate:  # An args.json without the learning rate must not hide that rates differ.
                args.setdefault("learning_rate", rate[0])
            run = replace(run, args=args, display_name=name)
        named_runs.append(run)
    return named_runs


def group_by_name(runs):
    """Group the runs that share a display name. Every other run stays alone."""
    flags = flags_of_groups([run for run in runs if run.display_name], ["name"])
    grouped_runs = []
    for run in runs:
        # The path of a run is never equal to the display name of others.
        group = values_of(run.args, flags) if run.display_name else (run.path,)
        grouped_runs.append(replace(run, group=group))
    return label_by_names(grouped_runs, flags)


def label_by_names(runs, flags):
    """Label and colour each group whose runs share a display name by that name.

    flags: those whose values are the groups. Where several groups have one name, their labels also
        say the values in which they differ.
    """
    groups_of_name = {}  # {display name: its groups}
    for group, group_runs in groups_of(runs).items():
        names = {run.args.get("name") for run in group_runs}
        if len(names) == 1:
            groups_of_name.setdefault(names.pop(), []).append(group)
    groups_of_name.pop(None, None)  # None: the groups of runs without a display name
    labels = {}
    for name, groups in groups_of_name.items():
        for group in groups:
            labels[group] = name + difference_in_words(group, groups, flags)
    labelled_runs = []
    for run in runs:
        if run.group in labels:
            run = replace(run, label=labels[run.group], color=run.display_name.color)
        labelled_runs.append(run)
    return labelled_runs


def difference_in_words(group, groups, flags):
    """Return the values that tell a group from others of the same name, to stand after the name."""
    words = ""
    for i, flag in enumerate(flags):
        values = {other_group[i] for other_group in groups}
        if len(values) == 1:
            continue
        value = group[i]
        if flag == "learning_rate":
            words += f" at {rate_in_words(value)}"
        elif isinstance(value, bool):
            words += f", {in_words(flag, value, values)}"
        else:
            words += f", {flag.replace('_', ' ')} {in_words(flag, value, values)}"
    return words


# ---- metrics and curves


def unit_of_step(run):
    """Return what `step` counts in the logs of a run.

    main.py counts iterations, which are rollout batches. sft.py and expert_iteration.py count
    updates, and they log how many examples these were trained on.
    """
    is_fine_tuning = not run.args.keys().isdisjoint({"train_file", "n_ei_steps"})
    has_examples = any("examples" in row for row in run.rows["train"])
    return "update" if is_fine_tuning or has_examples else "iteration"


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


def value_and_interval(row, key):
    """Return (value, low, high) of a metric in a row of the evaluation log."""
    return [to_float(row.get(key + suffix)) for suffix in ("", "_low", "_high")]


def find_metrics(runs, log):
    """Return the metrics of a log ("train" or "eval") in order of appearance.

    A metric has a finite number in some row of some run. Counters, settings and the ends of other
    metrics' intervals are not metrics.
    """
    metrics = {}  # a dict serves as an ordered set
    for run in runs:
        for row in run.rows[log]:
            metrics |= {key: None for key in row if key not in NO_METRICS and has_number(row, key)}
    if log == "train":
        return list(metrics)
    interval_ends = {f"{key}_low" for key in metrics} | {f"{key}_high" for key in metrics}
    return [key for key in metrics if key not in interval_ends]


def first_and_last(rows):
    return [rows[0], rows[-1]] if len(rows) > 1 else rows


def log_of(runs, key):
    """Return the log that a metric is read from: "train" if it has the metric, else "eval".

    For accuracies and pass@k it is the other way round.

    Raises:
        ValueError: neither log has the metric.
    """
    metrics = {log: find_metrics(runs, log) for log in ("train", "eval")}
    is_accuracy = key.startswith(("accuracy", "pass"))
    order = ("eval", "train") if is_accuracy else ("train", "eval")
    for log in order:
        if key in metrics[log]:
            return log
    all_metrics = sorted({*metrics["train"], *metrics["eval"]})
    raise ValueError(f"--metrics {key}: not in the logs, which have {', '.join(all_metrics)}")


def smooth(values):
    """Return a centred running median over about a fifteenth of the points. A gap stays a gap.

    A mean would turn a spike into a plateau as wide as its window.
    """
    half_width = len(values) // 30
    finite = np.isfinite(values)
    medians = np.full(len(values), np.nan)
    for i in np.flatnonzero(finite):
        window = slice(max(0, i - half_width), i + half_width + 1)
        medians[i] = np.median(values[window][finite[window]])
    return medians


def pool(logs, x_key, y_key):
    """Return (x, mean, least, greatest) of y_key along x_key over the logs of several runs.

    Each is an array with a value per point. Between the rows of a log y is interpolated, since runs
    are logged at different numbers of tokens, or evaluated at different steps. Next to a missing
    number there is a gap, and a log with a gap is left out there.

    If x_key is "step", the points are all steps that some log has, and a log that ended earlier is
    left out. Otherwise they are evenly spread over the range that all logs share, so that the mean
    never jumps to the value of those that go on.

    Raises:
        ValueError: the logs share no part of the axis.
    """
    x_of_logs = [column(rows, x_key) for rows in logs]
    if x_key == "step":
        points = np.unique(np.concatenate(x_of_logs))
    else:
        start = max(x.min() for x in x_of_logs)
        end = min(x.max() for x in x_of_logs)
        if start > end:
            raise ValueError(
                f"the runs of a group share no range of {x_key}: draw them over steps (--x step)"
            )
        points = np.unique(np.linspace(start, end, max(map(len, logs))))
    table = []  # a row per log, a column per point
    for x, rows in zip(x_of_logs, logs, strict=True):
        y = column(rows, y_key)
        table.append(np.interp(points, x, y, left=np.nan, right=np.nan))
    table = np.ma.masked_invalid(table)
    mean = table.mean(axis=0).filled(np.nan)
    least = table.min(axis=0).filled(np.nan)
    greatest = table.max(axis=0).filled(np.nan)
    return points, mean, least, greatest


# ---- comparisons and tables


def first_answers(path):
    """Return {question: row} of a transcript of an evaluation, its last question first.

    Questions are the same if both id and gold answer are. If a question was sampled several times,
    its first sample counts.
    """
    # Reversed, so that the first sample of a question overwrites the later ones.
    rows = reversed(read_log(path, "id"))
    return {(str(row["id"]), str(row.get("gold"))): row for row in rows}


def compare(label, path_before, path_after, runs):
    """Compare two transcripts of evaluations, question by question.

    Returns a line for strict and one for flexible accuracy, or a note if they share no question.
    """
    rows_before = first_answers(path_before)
    rows_after = first_answers(path_after)
    questions = rows_before.keys() & rows_after.keys()
    lines = []
    for kind in ACCURACIES:
        key = f"correct_{kind}"
        pairs = [(rows_before[name].get(key), rows_after[name].get(key)) for name in questions]
        pairs = [pair for pair in pairs if None not in pair]  # null: the verdict is not known
        if not pairs:
            continue
        num_fixed = pairs.count((False, True))
        num_broken = pairs.count((True, False))
        changes = f"{num_fixed} fixed, {num_broken} broken of {len(pairs)} questions"
        p_value = mcnemar(num_fixed, num_broken)
        # A p-value of 0 has underflowed: the true one is too small for a float.
        p_text = f"= {p_value:.2g}" if p_value else "< 1e-300"
        kind_text = adapt_to_stories(kind, runs)
        lines.append(f"{label}, {kind_text}: {changes}, exact McNemar p {p_text}")
    return lines or [f"note: {label}: no question in common, not compared"]


def compare_runs(runs):
    """Compare the first and the last evaluation of each run, and then the runs with each other.

    The last evaluation of the first run is compared with that of every further run.
    """
    lines = []
    last_transcripts = []  # (run, its name with the step, path)
    for run in runs:
        paths = transcripts(run, "eval")
        steps = list(paths)
        if len(steps) > 1:
            label = f"{run.name}, step {steps[0]} -> {steps[-1]}"
            lines += compare(label, paths[steps[0]], paths[steps[-1]], [run])
        if steps:
            name = f"{run.name} (step {steps[-1]})"
            last_transcripts.append((run, name, paths[steps[-1]]))
    for run, name, path in last_transcripts[1:]:
        first_run, first_name, first_path = last_transcripts[0]
        lines += compare(f"{first_name} -> {name}", first_path, path, [first_run, run])
    return lines


def accuracy_lines(run):
    """Return a line for strict and one for flexible accuracy, at the first and last evaluation."""
    lines = []
    for kind, key in ACCURACIES.items():
        rows = rows_with_number(run.rows["eval"], key)
        if rows:
            lines.append(accuracy_line(run, kind, first_and_last(rows)))
    return lines or ["not evaluated yet"]


def accuracy_line(run, kind, rows):
    """Return one kind of accuracy in these rows of the evaluation log, with n and intervals."""
    shares = []
    intervals = []
    for row in rows:
        value, low, high = value_and_interval(row, ACCURACIES[kind])
        shares.append(f"{100 * value:.1f} %")
        intervals.append(f"[{100 * low:.1f}, {100 * high:.1f}]")
    sizes = " and ".join(dict.fromkeys(str(row.get("n")) for row in rows))
    split = f", {run.args['eval_split']}" if "eval_split" in run.args else ""
    name = adapt_to_stories(f"accuracy ({kind})", [run])
    change = " -> ".join(shares)
    noun = "interval" if len(rows) == 1 else "intervals"
    return f"{name}  {change}  (n = {sizes}{split}, 95 % {noun} {' and '.join(intervals)})"


def last_evaluations(runs):
    """Return {group: for each of its runs the last row with an accuracy}.

    Raises:
        ValueError: a run was not evaluated.
    """
    last_rows = {}
    for run in runs:
        rows = rows_with_number(run.rows["eval"], "accuracy")
        if not rows:
            raise ValueError(f"{run.path}: not evaluated")
        last_rows.setdefault(run.group, []).append(rows[-1])
    return last_rows


def end_table(runs, flags, keys):
    """Return a Markdown table of metrics at the end of each run: a row per group, a column per key.

    A metric of the evaluation log is shown as at the last evaluation, with its interval, and one of
    the training log as its mean over the last tenth of the iterations.
    """
    logs = {key: log_of(runs, key) for key in keys}
    rows = []
    for group_runs in groups_of(runs).values():
        cells = [group_runs[0].label]
        for key in keys:
            cells.append(", ".join(end_of_run(run, logs[key], key) for run in group_runs))
        rows.append(cells)
    return markdown.table([", ".join(flags) or "run", *keys], rows)


def end_of_run(run, log, key):
    """Return a metric at the end of a run as text, "none" if the run lacks it."""
    rows = rows_with_number(run.rows[log], key)
    if not rows:
        return "none"
    if log == "train":
        last_tenth = rows[-math.ceil(len(rows) / 10) :]
        return f"{column(last_tenth, key).mean():.3g}"
    value, low, high = value_and_interval(rows[-1], key)
    has_interval = math.isfinite(low)
    return f"{value:.3g} [{low:.3g}, {high:.3g}]" if has_interval else f"{value:.3g}"
