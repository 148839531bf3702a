"""The tables of the studies, out of the logs that are kept: the program behind every number of analysis.md.

    python experiments/table.py rates std length              validation accuracy at each rate that was tried
    python experiments/table.py ends rates/base std/no_std    each side's runs: accuracy, length, how steps are written
    python experiments/table.py compare std length            comparisons.txt: told apart, or a tie, and of what size
    python experiments/table.py curve careful rates/base      strict, tokens, careful ... by iteration, on validation
    python experiments/table.py metrics entropy kl -- std/no_std    train_log's last 10 iterations; change: both ends
    python experiments/table.py judge judge/rating.json    a judge's report; texts judge/beta0.4: its last texts
    python experiments/table.py categories zero_shot/r1_zero_1m    form and answer; cases zero_shot/cases.jsonl: to read
    python experiments/table.py pass dynamics/before dynamics/grpo  pass@k
    python experiments/table.py exchange exchange/grpo sft/direct10    the GRPO iterations that reach where SFT ends
    python experiments/table.py check [--write]               that every table on the pages is what its command prints

A side is STUDY/ARM: its runs are ARM_seed0, ... there, at the rate that is best on validation. Accuracies are strict,
in %, of greedy answers to the 2,000 test problems where nothing else is said.
"""

import json
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from logs import jsonl  # noqa: E402
from logs.statistics import CATEGORIES, pass_at_k, wilson_interval  # noqa: E402

LOGS = ROOT / "experiments"
read = cache(jsonl.read)


def right(row, kind="strict"):
    """(questions, samples), 1 where the answer is right."""
    return np.array([int(bit) for bit in f"{int(row[kind], 16):b}"[1:]]).reshape(-1, row["samples"])


def percent(value, n=0):
    low, high = wilson_interval(value * n, n)
    return f"{100 * value:.1f}" + (f" [{100 * low:.1f}, {100 * high:.1f}]" if n else "")


def measured(row, key):
    """A share, or tokens. careful: of the steps with easier pieces; careful_right ...: of such steps. NaN: none."""
    if key in ("strict", "flexible"):
        return right(row, key).mean()
    if key == "tokens":
        return row[key]
    part, whole = row[key.removesuffix("_right")]
    if key == "careful":
        part, whole = whole, whole + row["direct"][1]
    return part / whole if whole else np.nan


def shown(row, key):
    value = measured(row, key)
    return f"{value:.0f}" if key == "tokens" else "none" if np.isnan(value) else percent(value)


def final(run):
    return measured(read(run / "answers.jsonl")[-1], "strict")


def rate_of(run):
    return "".join(re.findall(r"_rate([^_]+)_", run.name))  # "" where only one was tried


def best(runs):
    """Of runs at several rates the one that ends best on validation; of equals the lowest rate."""
    return max(sorted(runs, key=lambda run: float(rate_of(run))), key=final)


def runs_of(side):
    """The folders of a side, one per seed. FileNotFoundError: it has none."""
    folder, arm = (LOGS / side).parent, (LOGS / side).name
    if (folder / arm / "answers.jsonl").exists():
        return [folder / arm]
    if not (runs := sorted(folder.glob(f"{arm}_seed?"))):
        tried = list(folder.glob(f"{arm}_rate*_seed0"))
        runs = sorted(folder.glob(f"{arm}_rate{rate_of(best(tried))}_seed?")) if tried else []
    if not runs:
        raise FileNotFoundError(f"{side}: no runs in {folder}")
    return runs


def on_test(run, file="test.jsonl"):
    """The evaluation on the test problems: its own file, or that of a model that was not trained."""
    return read(run / (file if (run / "train_log.jsonl").exists() else "answers.jsonl"))[-1]


def difference(*sides):
    """Points by seed, and of the mean over seeds its value and 95 % interval: a bootstrap of the questions."""
    sides = [runs_of(side) for side in sides]
    count, rows = max(map(len, sides)), [[on_test(run) for run in runs] for runs in sides]
    if any(
        len(runs) < count and "_seed" in runs[0].name for runs in sides
    ):  # what was not trained has no seeds
        raise FileNotFoundError("other seeds on the other side")
    if len({row["questions"] for row in sum(rows, [])}) > 1:
        raise ValueError("other questions on the other side")
    one, other = (
        np.stack([right(row)[:, 0] for row in side] * (count // len(side))) for side in rows
    )
    by_question = (one - other).sum(0)
    values, counts = np.unique(
        by_question, return_counts=True
    )  # so few values that drawing questions is a multinomial
    draws = (
        np.random.default_rng(0).multinomial(counts.sum(), counts / counts.sum(), 10_000) @ values
    )
    points = 100 / counts.sum() / count
    low, high = np.percentile(draws, [2.5, 97.5]) * points
    return 100 * (one - other).mean(1), by_question.sum() * points, low, high


def verdict(seeds, low, high):
    """PROTOCOL.md has the rule. What a tie would have shown in four cases of five: 5.6 and 2.8 standard errors."""
    if len(seeds) < 3:
        return "one seed"
    error, same_sign = np.std(seeds, ddof=1) / len(seeds) ** 0.5, min(seeds) > 0 or max(seeds) < 0
    if same_sign and (low > 0 or high < 0):
        return (
            "told apart" if abs(np.mean(seeds)) > 4.303 * error else "leans"
        )  # Student's t, of three seeds
    return f"tie (up to {max(5.6 * error, 2.8 * (high - low) / 3.92):.1f})"


# --- The tables: each yields rows, the first one its head -----------------------------------------


def compare(*studies):
    yield (
        "question",
        "one side",
        "other side",
        "seeds 0, 1, 2 (points)",
        "mean [95 %, questions]",
        "",
    )
    for line in (LOGS / "comparisons.txt").read_text().splitlines()[1:]:
        if not line.startswith(" "):
            study, question = line.split(": ")
        elif not studies or study in studies:
            try:
                seeds, mean, low, high = difference(*line.split())
                found = f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]", verdict(seeds, low, high)
                yield (
                    question,
                    *line.split(),
                    ", ".join(f"{points:+.1f}" for points in seeds),
                    *found,
                )
            except FileNotFoundError:
                yield question, *line.split(), "", "", "not run yet"
            question = ""


def rates(*studies):
    tried = [run for study in studies for run in sorted((LOGS / study).glob("*_rate*_seed0"))]
    grid = sorted({rate_of(run) for run in tried}, key=float)
    yield "side", *grid
    for arm in dict.fromkeys(f"{run.parent.name}/{run.name.split('_rate')[0]}" for run in tried):
        own = {
            rate_of(run): run
            for run in tried
            if f"{run.parent.name}/{run.name}".startswith(f"{arm}_rate")
        }
        ends = {rate: percent(final(run)) for rate, run in own.items()}
        yield (
            arm,
            *(
                f"**{ends[r]}**" if own.get(r) == best(own.values()) else ends.get(r, "")
                for r in grid
            ),
        )


def ends(*sides):
    keys = "flexible", "tokens", "careful", "careful_right", "direct_right"
    yield (
        "side",
        "rate",
        "strict, each seed [95 %]",
        "mean",
        *(key.replace("_", ", ") for key in keys),
    )
    for side in sides:
        runs = runs_of(side)
        rows = [on_test(run) for run in runs]
        strict = [measured(row, "strict") for row in rows]
        each = ", ".join(percent(share, rows[0]["n"]) for share in strict)
        cells = (", ".join(shown(row, key) for row in rows) for key in keys)
        yield side, rate_of(runs[0]), each, percent(np.mean(strict)), *cells


def curve(key, *sides):
    logs = {
        side: [{r["step"]: r for r in read(run / "answers.jsonl")} for run in runs_of(side)]
        for side in sides
    }
    steps = sorted({step for seeds in logs.values() for log in seeds for step in log})
    yield f"{key.replace('_', ', ')}, each seed, at", *map(str, steps)
    for side, seeds in logs.items():
        yield (
            side,
            *(", ".join(shown(log[step], key) for log in seeds if step in log) for step in steps),
        )


def metrics(*keys_and_sides, ends=((-10, None),)):
    keys, _, sides = (tuple(words.split()) for words in " ".join(keys_and_sides).partition(" -- "))
    if not sides:
        raise ValueError("keys, then --, then sides")
    yield "side", *keys
    for side in sides:
        parts = [
            [read(run / "train_log.jsonl")[slice(*end)] for end in ends] for run in runs_of(side)
        ]

        def mean(rows, key):
            return f"{np.mean([row[key] for row in rows if row[key] is not None]):.3g}"

        yield (
            side,
            *(
                ", ".join(" -> ".join(mean(rows, key) for rows in seed) for seed in parts)
                for key in keys
            ),
        )


def change(*keys_and_sides):
    return metrics(*keys_and_sides, ends=((0, 5), (-5, None)))


def texts(*sides):
    yield "side", "its most frequent text in the last evaluation, each seed"
    for side in sides:
        last = [read(max(run.glob("eval/step_*.jsonl"))) for run in runs_of(side)]
        common = (
            Counter(row["completion"].strip() for row in rows).most_common(1)[0] for rows in last
        )
        yield side, "; ".join(f"{n} of {len(last[0])}: {text}" for text, n in common)


def categories(*sides):
    yield (
        "side",
        *(name.replace("format", "form ").replace("_answer", ", answer ") for name in CATEGORIES),
    )
    for side in sides:
        row = read(runs_of(side)[0] / "eval_log.jsonl")[-1]
        counts = [row[f"count/{name}"] for name in CATEGORIES]
        yield side, *(f"{count}: {percent(count / row['n'], row['n'])}" for count in counts)


def cases(name):
    yield "form, answer", "question", "completion", "gold"
    for row in read(LOGS / name):
        text = re.sub(r"[|<>`]", lambda m: f"&#{ord(m[0])};", row["completion"].strip()).replace(
            "\n", " / "
        )
        yield ", ".join(re.findall(r"\d", row["category"])), row["question"], text, row["gold"]


def judge(*reports):
    kinds = "shuffled words", "shuffled sentences", "cut", "repeated"
    yield (
        "report",
        "stories",
        "spread",
        "with length",
        *(f"{kind}: AUC [95 %]; with floor; pairs" for kind in kinds),
    )
    for name in reports:
        report = json.loads((LOGS / name).read_text("utf-8"))
        areas = (
            [report[f"{key}/{kind}"] for key in "auc auc_low auc_high auc_total pairs".split()]
            for kind in kinds
        )
        areas = ("{:.3f} [{:.3f}, {:.3f}]; {:.3f}; {:.0%}".format(*area) for area in areas)
        yield (
            name,
            str(report["stories"]),
            f"{report['spread']:.3f}",
            f"{report['length_correlation']:+.2f}",
            *areas,
        )


def exchange(grpo, *sides):
    """Where GRPO's mean curve first is as high as a side's end, both on validation; the bootstrap draws questions."""
    yield "side", "validation", "GRPO iterations to it [95 %, questions]", "by GRPO's seed"
    steps = [row["step"] for row in read(runs_of(grpo)[0] / "answers.jsonl")]
    curves = np.array(
        [[right(row)[:, 0] for row in read(run / "answers.jsonl")] for run in runs_of(grpo)]
    )
    n = curves.shape[2]  # of (seeds, steps, questions)
    draws = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), 2_000)
    draws = (
        np.concatenate([np.ones((1, n)), draws]) / n
    )  # the first is the sample itself; after these each seed's own:
    rising = np.maximum.accumulate(np.concatenate([draws @ curves.mean(0).T, curves.mean(2)]), 1)
    rising += 1e-9 * np.arange(
        len(steps)
    )  # for a first crossing falls do not matter, but equals would
    for side in sides:
        ends = np.array([right(read(run / "answers.jsonl")[-1])[:, 0] for run in runs_of(side)])
        levels = np.append(draws @ ends.mean(0), [ends.mean()] * len(curves))
        found = [
            np.interp(level, y, steps, right=np.inf)
            for level, y in zip(levels, rising, strict=True)
        ]
        found[1 : len(draws)] = np.quantile(found[: len(draws)], [0.025, 0.975], method="nearest")
        first, low, high, *each = (f"{x:.0f}" if x < np.inf else "never" for x in found)
        yield side, percent(ends.mean()), f"{first} [{low}, {high}]", ", ".join(each)


def pass_(*sides, file="pass.jsonl"):
    ks = (1, 2, 4, 8, 16)
    yield "side", *(f"pass@{k}" for k in ks), "pass@16, flexible"
    for side in sides:
        for seed, run in enumerate(runs_of(side)):
            row = on_test(run, file)
            counts = {kind: right(row, kind).sum(1).tolist() for kind in ("strict", "flexible")}
            shares = [
                percent(pass_at_k(counts["strict"], row["samples"], k), row["n"] // row["samples"])
                for k in ks
            ]
            yield (
                f"{side}, seed {seed}",
                *shares,
                percent(pass_at_k(counts["flexible"], row["samples"], 16)),
            )


# --- The pages ------------------------------------------------------------------------------------


def table(command):
    """The markdown that "NAME ARGUMENTS" prints."""
    name, *arguments = command.split()
    head, *rows = TABLES[name](*arguments)
    if not rows:
        raise ValueError(f"{command}: there is nothing of that")
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def check(*flags):
    """Run the commands that stand on the pages above their tables; with --write put the tables in. A number with a
    decimal point in the text must stand in one of the tables, or in a study's script as a setting."""
    command = re.compile(r"^    python experiments/table\.py (.*)\n\n((?:\|.*\n)*)", re.MULTILINE)
    number, wrong = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)"), []
    texts = {
        page: page.read_text("utf-8")
        for page in (ROOT / "analysis.md", *sorted(LOGS.glob("*/README.md")))
    }

    def filled(match):
        return f"    python experiments/table.py {match[1]}\n\n{table(match[1])}" + "\n" * (
            not match[2]
        )

    new = {page: command.sub(filled, text) for page, text in texts.items()}
    known = "".join(match[2] for text in new.values() for match in command.finditer(text))
    known = set(
        number.findall(known + "".join(path.read_text("utf-8") for path in LOGS.rglob("*.sh")))
    )
    for page, text in new.items():
        name = page.relative_to(ROOT)
        prose = re.sub(r"\]\(\S+\)|arXiv:\S+", "", command.sub("", text))
        wrong += [
            f"{name}: {n} is in no table"
            for n in dict.fromkeys(number.findall(prose))
            if n not in known
        ]
        if text != texts[page] and flags == ("--write",):
            page.write_text(text, "utf-8")
        elif text != texts[page]:
            wrong.append(f"{name}: a table is not what the logs say (--write puts it right)")
    if wrong:
        raise ValueError("; ".join(wrong))
    print(f"{len(texts)} pages say what the logs say")


TABLES = (
    compare,
    rates,
    ends,
    curve,
    metrics,
    change,
    texts,
    judge,
    categories,
    cases,
    pass_,
    exchange,
)
TABLES = {function.__name__.strip("_"): function for function in TABLES}


def main(name="", *arguments):
    if name == "best":
        print(rate_of(best(map(Path, arguments))))
    elif name == "check" and arguments in ((), ("--write",)):
        check(*arguments)
    elif name in TABLES:
        print(table(" ".join([name, *arguments])), end="")
    else:
        raise ValueError(
            f"{name or 'nothing'} is none of check [--write], best, {', '.join(TABLES)}"
        )


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (ValueError, OSError, LookupError) as error:
        sys.exit(
            print(f"error: {error} (the head of table.py shows what it takes)", file=sys.stderr)
            or 2
        )
