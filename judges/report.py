"""The judge's own report: can it tell stories apart, twice the same way, and a story from its damaged copy?

    python selfcheck.py --check_judge 20 --dataset_name creative --judge_type openai --judge_model NAME ...

Also made before the first update of a run. Stories come in groups, the samples of one opening line, as in training.
A score that could not be had is NaN and left out wherever it would count.
"""

import math
import random
import re

import distributed
import utils
from logs import jsonl
from logs.statistics import auc, correlation, ranks, spread_and_ties

SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’]))\s+")


def shuffled(parts, rng):
    rng.shuffle(parts)
    return " ".join(parts)


def half(story):
    words = story.split()
    return " ".join(words[: len(words) // 2])


DAMAGES = {  # a judge that does not mind them has not read the story
    "shuffled words": lambda story, rng: shuffled(story.split(), rng),
    "shuffled sentences": lambda story, rng: shuffled(SENTENCE_END.split(story), rng),
    "cut": lambda story, rng: half(story),  # the story breaks off
    "repeated": lambda story, rng: (
        f"{half(story)} {half(story)}"
    ),  # as long as it was, and nothing new in its end
}


def measure(evaluator, prompts, stories, group_size, seed=0):
    """The report as a flat dict, on N stories of which group_size consecutive ones share a prompt.

    Texts below the floor are never shown to a judge, so they are left out here as well, and counted; damaged copies are
    shown whatever the floor says to them. auc/: the chance that a story scores higher than the copy of any story, which
    differences between stories drown; pairs/: than its own copy; auc_total/: auc of judge and floor together.
    """

    def score(texts, asked):
        """N scores of N texts; NaN where one is not asked for."""
        rows = [i for i, ask in enumerate(asked) if ask]
        scores, _ = evaluator.judge.score(
            [prompts[i] for i in rows], [texts[i] for i in rows], fresh=True
        )
        found = dict(zip(rows, scores, strict=True))
        return [found.get(i, math.nan) for i in range(len(texts))]

    stories = [story.strip() for story in stories]
    above = [evaluator.floor(*pair) is None for pair in zip(prompts, stories, strict=True)]
    scores, again = score(stories, above), score(stories, above)
    scored = [i for i, s in enumerate(scores) if not math.isnan(s)]
    twice = [i for i in scored if not math.isnan(again[i])]
    lengths = [len(stories[i].split()) for i in scored]
    spread, ties = spread_and_ties(scores, group_size)
    report = {
        "stories": len(stories),
        "groups": len(stories) // group_size,
        "below_floor": above.count(False),
        "missing": above.count(True) - len(scored),
        "mean": sum(scores[i] for i in scored) / len(scored) if scored else math.nan,
        "spread": spread,
        "ties": ties,
        "retest_correlation": correlation([scores[i] for i in twice], [again[i] for i in twice]),
        "length_correlation": correlation(ranks([scores[i] for i in scored]), ranks(lengths)),
    }
    rng = random.Random(f"damage/{seed}")
    for name, damage in DAMAGES.items():
        copies = [
            damage(story, rng) if ask else story for story, ask in zip(stories, above, strict=True)
        ]
        differ = [
            copies[i].split() != story.split() and i in scored for i, story in enumerate(stories)
        ]
        damaged = score(copies, differ)
        rows = [i for i, s in enumerate(damaged) if not math.isnan(s)]
        below = {i for i in rows if evaluator.floor(prompts[i], copies[i])}
        totals = [evaluator.judge.lowest - 1 if i in below else damaged[i] for i in rows]
        ahead = [(scores[i] > damaged[i]) + (scores[i] == damaged[i]) / 2 for i in rows]
        report |= {
            f"n/{name}": len(rows),
            f"pairs/{name}": sum(ahead) / len(rows) if rows else math.nan,
        }
        for key, worse in (("auc", [damaged[i] for i in rows]), ("auc_total", totals)):
            area, low, high = auc([scores[i] for i in rows], worse)
            report |= {f"{key}/{name}": area, f"{key}_low/{name}": low, f"{key}_high/{name}": high}
    return report | {f"judge/{kind}": n for kind, n in evaluator.judge.take_counts().items()}


def lines(report):
    """The report in words."""
    r = report
    kinds = [
        f"{n} {key.removeprefix('judge/').replace('_', ' ')}"
        for key, n in r.items()
        if key.startswith("judge/")
    ]
    counts = f" ({', '.join(kinds)})" if kinds else ""
    yield f"the judge on {r['stories']} stories in {r['groups']} groups: mean {r['mean']:.3f}"
    yield f"  spread within groups  {r['spread']:.3f} (mean std), {r['ties']:.1%} of pairs tied"
    yield f"  test-retest           r = {r['retest_correlation']:.3f}"
    yield f"  length in words       rank correlation {r['length_correlation']:+.3f}"
    yield f"  without a score       {r['missing']}, and {r['below_floor']} below the floor{counts}"
    yield "  stories above damaged copies, AUC with 95 % interval: judge alone, with the floor; above their own"
    for name in DAMAGES:
        alone, both = (
            f"{r[f'{key}/{name}']:.3f} [{r[f'{key}_low/{name}']:.3f}, {r[f'{key}_high/{name}']:.3f}]"
            for key in ("auc", "auc_total")
        )
        yield f"  {name:20s}  {alone}   {both}   {r[f'pairs/{name}']:4.0%} of {r[f'n/{name}']}"


def make(args, run, sample, num_prompts=8):
    """The report on one group of the policy's stories for each of so many opening lines: printed, and kept.

    sample: main.sample. Of several processes the first one measures, and all get its report.
    """
    report = {}
    if distributed.is_main():
        examples = run.train_loader.examples[:num_prompts]
        with utils.isolated_seed(args.seed):
            rollout = sample(
                args, run, examples, num_samples=args.group_size, temperature=args.temperature
            )
        prompts = [example["question"] for example in examples for _ in range(args.group_size)]
        n, more = len(prompts), len(DAMAGES)
        print(
            f"measuring the judge: {n} stories, twice, and {more} copies of each: {n * (2 + more)} scores at most"
        )
        report = measure(run.evaluator, prompts, rollout.texts, args.group_size, args.seed)
        print("\n".join(lines(report)))
        args.output_dir.mkdir(parents=True, exist_ok=True)
        jsonl.write_json(args.output_dir / "judge_report.json", report)
    return distributed.from_main(report)


def check_spread(report, least):
    """Raise ValueError where scores spread less within groups than the least that training makes sense with."""
    if least and not report["spread"] >= least:
        raise ValueError(
            f"the judge's scores spread by {report['spread']:.3g} within groups, under --min_judge_spread {least:g}:"
            " it cannot tell these stories apart (or has seen too few above the floor), so there is nothing to learn"
            " from it; take another judge, or train in any case with --min_judge_spread 0"
        )
