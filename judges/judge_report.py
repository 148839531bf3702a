"""The report on a judge: what its scores are worth, measured before a run trains on them.

Can it tell stories apart, does it give the same score twice, and does it prefer a story to a
damaged copy?

    python selfcheck.py --check_judge 20 --dataset_name creative --judge_type openai ...

A report is also made before the first update of a run. The stories come in groups as in training: a
group is the samples of one opening line. A score that the judge does not give is NaN, and is left
out of every statistic. In shapes and docstrings, N is the number of stories.
"""

import math
import random
import re

import distributed
import utils
from logs import jsonl
from logs.statistics import auc, correlation, ranks, spread_and_ties

SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’]))\s+")


# --- Damages: a judge that does not mind them has not read the story ------------------------------


def shuffle_words(story, rng):
    words = story.split()
    rng.shuffle(words)
    return " ".join(words)


def shuffle_sentences(story, rng):
    sentences = SENTENCE_END.split(story)
    rng.shuffle(sentences)
    return " ".join(sentences)


def first_half(story):
    words = story.split()
    return " ".join(words[: len(words) // 2])


def cut(story, rng):
    """Let the story break off."""
    return first_half(story)


def repeat(story, rng):
    """Return a text as long as the story, whose second half says nothing new."""
    return f"{first_half(story)} {first_half(story)}"


# {name of the damage: a function of a story and a random generator, which some do not use}
DAMAGES = {
    "shuffled words": shuffle_words,
    "shuffled sentences": shuffle_sentences,
    "cut": cut,
    "repeated": repeat,
}


# --- The report -----------------------------------------------------------------------------------


def measure_judge(evaluator, prompts, stories, group_size, seed=0) -> dict:
    """Return the report on a judge, measured on N stories, as a flat dict.

    It has the keys of `describe_scores`, those of `compare_with_copies` once for each damage, as in
    "pairs/shuffled words", and the judge's own counts, as in "judge/asked". In training, texts
    below the floor are never shown to a judge, so here they are only counted. Damaged copies are
    shown even if they are below the floor.

    group_size: how many consecutive stories share a prompt.
    """
    stories = [story.strip() for story in stories]
    above_floor = [
        evaluator.broken_rule(prompt, story) is None
        for prompt, story in zip(prompts, stories, strict=True)
    ]
    scores = score_selected(evaluator.judge, prompts, stories, above_floor)
    retest_scores = score_selected(evaluator.judge, prompts, stories, above_floor)
    report = describe_scores(stories, above_floor, scores, retest_scores, group_size)
    rng = random.Random(f"damage/{seed}")
    for name, damage in DAMAGES.items():
        # A story below the floor stays as it is; compare_with_copies leaves out such copies.
        copies = [
            damage(story, rng) if is_above else story
            for story, is_above in zip(stories, above_floor, strict=True)
        ]
        comparison = compare_with_copies(evaluator, prompts, stories, scores, copies)
        for statistic, value in comparison.items():
            report[f"{statistic}/{name}"] = value
    for kind, count in evaluator.judge.take_counts().items():
        report[f"judge/{kind}"] = count
    return report


def score_selected(judge, prompts, texts, selected) -> list[float]:
    """Return fresh scores of N texts, with NaN for each text that is not selected."""
    rows = [i for i, is_selected in enumerate(selected) if is_selected]
    row_prompts = [prompts[i] for i in rows]
    row_texts = [texts[i] for i in rows]
    row_scores, _ = judge.score(row_prompts, row_texts, fresh=True)
    scores = [math.nan] * len(texts)
    for i, score in zip(rows, row_scores, strict=True):
        scores[i] = score
    return scores


def describe_scores(stories, above_floor, scores, retest_scores, group_size) -> dict:
    """Return statistics of the scores that a judge gave N stories the first and the second time.

    spread: the mean standard deviation of the scores within a group.
    ties: the share of the pairs of stories within a group that have equal scores.
    retest_correlation: the correlation between the first scores and the second ones.
    length_correlation: the rank correlation between a story's score and its number of words.
    """
    scored_rows = [i for i, score in enumerate(scores) if not math.isnan(score)]
    present_scores = [scores[i] for i in scored_rows]
    lengths = [len(stories[i].split()) for i in scored_rows]
    twice_scored_rows = [i for i in scored_rows if not math.isnan(retest_scores[i])]
    spread, ties = spread_and_ties(scores, group_size)
    return {
        "stories": len(stories),
        "groups": len(stories) // group_size,
        "below_floor": above_floor.count(False),
        "missing": above_floor.count(True) - len(scored_rows),
        "mean": mean(present_scores),
        "spread": spread,
        "ties": ties,
        "retest_correlation": correlation(
            [scores[i] for i in twice_scored_rows], [retest_scores[i] for i in twice_scored_rows]
        ),
        "length_correlation": correlation(ranks(present_scores), ranks(lengths)),
    }


def compare_with_copies(evaluator, prompts, stories, scores, copies) -> dict:
    """Return how the scores of stories compare with those of their damaged copies.

    n: how many stories were compared with a copy that differs from them.
    pairs: the share of stories that score higher than their own copy. A tie counts half.
    auc: the probability that a random story scores higher than the copy of a random story. This
        is less sensitive than `pairs`: if stories differ much in quality, the effect of the damage
        hardly shows. auc_low and auc_high are its 95 % interval.
    auc_total: the same if a copy below the floor counts as worse than every score of the judge.
    """
    comparable = [
        not math.isnan(score) and copy.split() != story.split()
        for story, score, copy in zip(stories, scores, copies, strict=True)
    ]
    all_copy_scores = score_selected(evaluator.judge, prompts, copies, comparable)
    rows = [i for i, score in enumerate(all_copy_scores) if not math.isnan(score)]
    story_scores = [scores[i] for i in rows]
    copy_scores = [all_copy_scores[i] for i in rows]
    copy_totals = []
    for i in rows:
        is_above_floor = evaluator.broken_rule(prompts[i], copies[i]) is None
        copy_totals.append(all_copy_scores[i] if is_above_floor else evaluator.judge.lowest - 1)
    wins = [
        (story_score > copy_score) + (story_score == copy_score) / 2
        for story_score, copy_score in zip(story_scores, copy_scores, strict=True)
    ]
    auc_value, auc_low, auc_high = auc(story_scores, copy_scores)
    total_value, total_low, total_high = auc(story_scores, copy_totals)
    return {
        "n": len(rows),
        "pairs": mean(wins),
        "auc": auc_value,
        "auc_low": auc_low,
        "auc_high": auc_high,
        "auc_total": total_value,
        "auc_total_low": total_low,
        "auc_total_high": total_high,
    }


def mean(values) -> float:
    """Return the mean of a list; NaN if it is empty."""
    return sum(values) / len(values) if values else math.nan


def describe_report(report):
    """Yield the lines of a report in words."""
    counts = [
        f"{count} {key.removeprefix('judge/').replace('_', ' ')}"
        for key, count in report.items()
        if key.startswith("judge/")
    ]
    counts_text = f" ({', '.join(counts)})" if counts else ""
    yield (
        f"the judge on {report['stories']} stories in {report['groups']} groups:"
        f" mean {report['mean']:.3f}"
    )
    yield (
        f"  spread within groups  {report['spread']:.3f} (mean std),"
        f" {report['ties']:.1%} of pairs tied"
    )
    yield f"  test-retest           r = {report['retest_correlation']:.3f}"
    yield f"  length in words       rank correlation {report['length_correlation']:+.3f}"
    yield (
        f"  without a score       {report['missing']},"
        f" and {report['below_floor']} below the floor{counts_text}"
    )
    # This table says how often a story scores higher than a damaged copy. Its columns are the AUC
    # by the judge alone, the AUC by judge and floor, and the share of stories that beat the copy
    # of themselves.
    yield (
        "  stories above damaged copies, AUC with 95 % interval:"
        " judge alone, with the floor; above their own"
    )
    for name in DAMAGES:
        judge_alone = describe_auc(report, "auc", name)
        with_floor = describe_auc(report, "auc_total", name)
        pairs = f"{report[f'pairs/{name}']:4.0%} of {report[f'n/{name}']}"
        yield f"  {name:20s}  {judge_alone}   {with_floor}   {pairs}"


def describe_auc(report, statistic, damage) -> str:
    area = report[f"{statistic}/{damage}"]
    low = report[f"{statistic}_low/{damage}"]
    high = report[f"{statistic}_high/{damage}"]
    return f"{area:.3f} [{low:.3f}, {high:.3f}]"


def make_judge_report(config, run, sample, num_prompts=8) -> dict:
    """Print and write the report on the run's judge, and return it.

    It is measured on one group of the policy's stories for each of `num_prompts` opening lines. If
    there are several processes, the first one measures, and all get its report.

    sample: the function by which main.py samples completions.
    """
    report = {}
    if distributed.is_main():
        examples = run.train_loader.examples[:num_prompts]
        with utils.isolated_seed(config.seed):
            rollout = sample(
                config, run, examples, num_samples=config.group_size, temperature=config.temperature
            )
        questions = [example["question"] for example in examples]
        prompts = utils.repeat_each(questions, config.group_size)
        num_stories = len(prompts)
        num_scores = num_stories * (2 + len(DAMAGES))
        print(
            f"measuring the judge: {num_stories} stories, twice, and {len(DAMAGES)} copies of each:"
            f" {num_scores} scores at most"
        )
        report = measure_judge(
            run.evaluator, prompts, rollout.texts, config.group_size, config.seed
        )
        print("\n".join(describe_report(report)))
        config.output_dir.mkdir(parents=True, exist_ok=True)
        jsonl.write_json(config.output_dir / "judge_report.json", report)
    return distributed.from_main(report)


def check_spread(report, min_spread):
    """Raise ValueError where scores spread less within groups than a run needs to learn from them.

    min_spread: the least mean standard deviation within groups; 0 accepts any, also NaN.
    """
    spread = report["spread"]
    is_enough = spread >= min_spread  # False for NaN
    if min_spread and not is_enough:
        raise ValueError(
            f"the judge's scores spread by {spread:.3g} within groups, under --min_judge_spread"
            f" {min_spread:g}: it cannot tell these stories apart (or has seen too few above the"
            " floor), so there is nothing to learn from it; take another judge, or train in any"
            " case with --min_judge_spread 0"
        )
