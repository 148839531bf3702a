"""What plotter.py prints of runs: their accuracies, and how they differ question by question."""

from scipy.stats import binomtest

from logs.read import first_answers, rows_with_number, to_float, transcripts

ACCURACIES = {"strict": "accuracy", "flexible": "accuracy_flexible"}  # {kind: key in the logs}


def first_and_last(rows):
    return [rows[0], rows[-1]] if len(rows) > 1 else rows


def accuracy_lines(run):
    """Return a line for strict and one for flexible accuracy, at the first and last evaluation."""
    lines = []
    for kind, key in ACCURACIES.items():
        rows = rows_with_number(run.rows["eval"], key)
        if rows:
            lines.append(f"accuracy ({kind})  {accuracy_line(run, key, first_and_last(rows))}")
    if not run.rows["eval"]:
        return ["not evaluated yet"]
    return lines


def accuracy_line(run, key, rows):
    """Return an accuracy in these rows of the evaluation log, with n and intervals."""
    change = " -> ".join(f"{row[key]:.1%}" for row in rows)
    intervals = []
    for row in rows:
        low = to_float(row.get(f"{key}_low"))
        high = to_float(row.get(f"{key}_high"))
        intervals.append(f"[{100 * low:.1f}, {100 * high:.1f}]")
    sizes = " and ".join(dict.fromkeys(str(row.get("n")) for row in rows))
    split = f", {run.args['eval_split']}" if "eval_split" in run.args else ""
    return f"{change}  (n = {sizes}{split}, 95% CI {' and '.join(intervals)})"


def compare_runs(runs):
    """Compare the first and the last evaluation of each run, and then the runs with each other.

    The last evaluation of the first run is compared with that of every further run.
    """
    lines = []
    last_evaluations = []  # (name of the run with the step, path of the transcript)
    for run in runs:
        paths = transcripts(run, "eval")
        if len(paths) > 1:
            first, last = first_and_last(list(paths))
            label = f"{run.name}, step {first} -> {last}"
            lines += compare(label, paths[first], paths[last])
        if paths:
            step, path = list(paths.items())[-1]
            last_evaluations.append((f"{run.name} (step {step})", path))
    for name, path in last_evaluations[1:]:
        first_name, first_path = last_evaluations[0]
        lines += compare(f"{first_name} -> {name}", first_path, path)
    return lines


def compare(label, path_before, path_after):
    """Compare two transcripts of evaluations, question by question.

    Returns a line for strict and one for flexible accuracy, or a note if they share no question.
    """
    old_answers = first_answers(path_before)
    new_answers = first_answers(path_after)
    questions = old_answers.keys() & new_answers.keys()
    lines = []
    for kind in ACCURACIES:
        key = f"correct_{kind}"
        pairs = [(old_answers[name].get(key), new_answers[name].get(key)) for name in questions]
        pairs = [pair for pair in pairs if None not in pair]  # null: the verdict is not known
        if pairs:
            num_fixed = pairs.count((False, True))
            num_broken = pairs.count((True, False))
            lines.append(
                f"{label}, {kind}: {num_fixed} fixed, {num_broken} broken of {len(pairs)}"
                f" questions, exact McNemar p = {mcnemar(num_fixed, num_broken):.2g}"
            )
    if not questions:
        return [f"note: {label}: no question in common, not compared"]
    return lines


def mcnemar(num_fixed, num_broken):
    """Return the exact two-sided p-value of McNemar's test on the pairs that changed."""
    if num_fixed + num_broken == 0:
        return 1.0
    return float(binomtest(num_fixed, num_fixed + num_broken).pvalue)
