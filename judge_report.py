"""The judge's own report: can it tell stories apart, twice the same way, and a story from its damaged copy?

    python evaluator.py --check_judge --judge openai --judge_model NAME ...    with main.py's flags

Also made before the first update of a run. Stories come in groups, the samples of one opening line, as in training.
A score that could not be had is NaN and left out wherever it would count.
"""

import math
import random
import re

import torch

import distributed
import utils

# ---------------------------------------------------------------------------------------------------------------------
# Damages: a judge that does not mind them has not read the story
# ---------------------------------------------------------------------------------------------------------------------


def shuffle_words(story, rng):
    words = story.split()
    rng.shuffle(words)
    return " ".join(words)


def shuffle_sentences(story, rng):
    sentences = re.split(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’]))\s+", story)
    rng.shuffle(sentences)
    return " ".join(sentences)


def cut(story, rng):
    """The first half of the words: the story breaks off."""
    words = story.split()
    return " ".join(words[: len(words) // 2])


def repeat(story, rng):
    """The first half twice: as long as the story, and nothing new in the second half."""
    half = cut(story, rng)
    return f"{half} {half}"


DAMAGES = {"shuffled words": shuffle_words, "shuffled sentences": shuffle_sentences, "cut": cut, "repeated": repeat}

# ---------------------------------------------------------------------------------------------------------------------
# Statistics
# ---------------------------------------------------------------------------------------------------------------------


def ranks(values):
    """1 to N, equal values sharing the mean of theirs."""
    return [sum(other < v for other in values) + (sum(other == v for other in values) + 1) / 2 for v in values]


def correlation(x, y):
    """Pearson's; NaN where either is constant or has fewer than two values."""
    n = len(x)
    mx, my = (sum(v) / n if n else math.nan for v in (x, y))
    sxy = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    sx, sy = (sum((a - m) ** 2 for a in v) for v, m in ((x, mx), (y, my)))
    return sxy / math.sqrt(sx * sy) if sx * sy > 0 else math.nan


def auc(better, worse):
    """P(a better one scores higher than a worse one), ties counting half: (AUC, low, high).

    The 95 % interval is method 5 of Newcombe (2006, Statistics in Medicine 25:559): the theta with |theta - AUC| =
    z s(theta), s being Hanley and McNeil's with their group sizes replaced by the mean of both. It stays sensible at 1.
    It takes all scores as independent, as those of one opening line are not quite.
    """
    m, n = len(better), len(worse)
    if not m or not n:
        return math.nan, math.nan, math.nan
    rank_sum = sum(ranks(better + worse)[:m])
    area = (rank_sum - m * (m + 1) / 2) / (m * n)

    def distance(theta):  # |theta - area| - z s(theta), which rises away from the area
        spread = 1 + ((m + n) / 2 - 1) * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return abs(theta - area) - 1.959963984540054 * math.sqrt(theta * (1 - theta) * spread / (m * n))

    def bound(inside, outside):
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if distance(middle) > 0 else (middle, outside)
        return inside

    return area, bound(area, 0.0), bound(area, 1.0)


def spread_and_ties(scores, group_size):
    """Mean std (over n - 1) within groups, and the share of equal pairs among the pairs within groups."""
    stds, equal, pairs = [], 0, 0
    for start in range(0, len(scores), group_size):
        group = [s for s in scores[start : start + group_size] if not math.isnan(s)]
        if len(group) > 1:
            stds.append(torch.tensor(group, dtype=torch.float64).std().item())
            equal += sum(a == b for i, a in enumerate(group) for b in group[:i])
            pairs += len(group) * (len(group) - 1) // 2
    return (sum(stds) / len(stds), equal / pairs) if stds else (math.nan, math.nan)


# ---------------------------------------------------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------------------------------------------------


def measure(evaluator, prompts, stories, group_size, seed=0):
    """The report as a flat dict, on N stories of which group_size consecutive ones share a prompt.

    Texts below the floor are never shown to a judge, so they are left out here as well, and counted; damaged copies are
    shown whatever the floor says to them, and auc_total/ is that of judge and floor together.
    """
    stories = [story.strip() for story in stories]
    asked = [i for i, pair in enumerate(zip(prompts, stories, strict=True)) if evaluator.floor(*pair) is None]
    given = [prompts[i] for i in asked]
    told = [stories[i] for i in asked]
    scores, _ = evaluator.judge.score(given, told, fresh=True)
    again, _ = evaluator.judge.score(given, told, fresh=True)
    in_place = dict(zip(asked, scores, strict=True))
    spread, ties = spread_and_ties([in_place.get(i, math.nan) for i in range(len(stories))], group_size)
    both = [pair for pair in zip(scores, again, strict=True) if not math.isnan(sum(pair))]
    lengths = [(s, len(story.split())) for s, story in zip(scores, told, strict=True) if not math.isnan(s)]
    have = [s for s in scores if not math.isnan(s)]
    report = {
        "stories": len(stories),
        "groups": len(stories) // group_size,
        "below_floor": len(stories) - len(asked),
        "missing": len(scores) - len(have),
        "mean": sum(have) / len(have) if have else math.nan,
        "spread": spread,
        "ties": ties,
        "retest_correlation": correlation(*map(list, zip(*both, strict=True))) if both else math.nan,
        "length_correlation": correlation(*map(ranks, zip(*lengths, strict=True))) if lengths else math.nan,
    }
    rng = random.Random(f"damage/{seed}")
    for name, damaged in DAMAGES.items():
        copies = [damaged(story, rng) for story in told]
        rows = [i for i, copy in enumerate(copies) if copy.split() != told[i].split() and not math.isnan(scores[i])]
        marks, _ = evaluator.judge.score([given[i] for i in rows], [copies[i] for i in rows], fresh=True)
        floors = [evaluator.floor(given[i], copies[i]) is not None for i in rows]
        pairs = [(scores[i], mark, floor) for i, mark, floor in zip(rows, marks, floors, strict=True)]
        pairs = [pair for pair in pairs if not math.isnan(pair[1])]
        better = [score for score, _, _ in pairs]
        totals = [evaluator.judge.lowest - 1 if floor else mark for _, mark, floor in pairs]
        report[f"n/{name}"] = len(pairs)
        for key, worse in (("auc", [mark for _, mark, _ in pairs]), ("auc_total", totals)):
            area, low, high = auc(better, worse)
            report |= {f"{key}/{name}": area, f"{key}_low/{name}": low, f"{key}_high/{name}": high}
    report |= {f"judge/{kind}": n for kind, n in evaluator.judge.take_counts().items()}
    return report


def lines(report):
    """The report in words."""
    r = report
    counts = ", ".join(
        f"{n} {kind.removeprefix('judge/').replace('_', ' ')}" for kind, n in r.items() if kind.startswith("judge/")
    )
    yield f"the judge on {r['stories']} stories in {r['groups']} groups: mean {r['mean']:.3f}"
    yield f"  spread within groups  {r['spread']:.3f} (mean std), {r['ties']:.1%} of pairs tied"
    yield f"  test-retest           r = {r['retest_correlation']:.3f}"
    yield f"  length in words       rank correlation {r['length_correlation']:+.3f}"
    yield f"  without a score       {r['missing']}, and {r['below_floor']} below the floor" + f" ({counts})" * bool(
        counts
    )
    yield "  stories above their damaged copies, AUC with 95 % interval: judge alone, and with the floor"
    for name in DAMAGES:
        alone, both = (
            f"{r[f'{key}/{name}']:.3f} [{r[f'{key}_low/{name}']:.3f}, {r[f'{key}_high/{name}']:.3f}]"
            for key in ("auc", "auc_total")
        )
        yield f"  {name:20s}  {alone}   {both}   n = {r[f'n/{name}']}"


def make(args, run, sample, num_prompts=8):
    """The report on one group of the policy's stories for each of so many opening lines: printed, and kept.

    sample: main.sample. Of several processes the first one measures, and all get its report.
    """
    report = {}
    if distributed.is_main():
        examples = run.train_loader.examples[:num_prompts]
        with utils.isolated_seed(args.seed):
            rollout = sample(args, run, examples, num_samples=args.group_size, temperature=args.temperature)
        prompts = [example["question"] for example in examples for _ in range(args.group_size)]
        report = measure(run.evaluator, prompts, rollout.texts, args.group_size, args.seed)
        print("\n".join(lines(report)))
        args.output_dir.mkdir(parents=True, exist_ok=True)
        utils.write_json(args.output_dir / "judge_report.json", report)
    return distributed.from_main(report)


def check_spread(report, least):
    """Raise ValueError where scores spread less within groups than the least that training makes sense with."""
    if least and not report["spread"] >= least:
        raise ValueError(
            f"the judge's scores spread by {report['spread']:.3g} within groups, under --min_judge_spread {least:g}:"
            " it cannot tell these stories apart (or has seen too few above the floor), so there is nothing to learn"
            " from it; take another judge, or train in any case with --min_judge_spread 0"
        )
