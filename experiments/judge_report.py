"""Measure a judge before training on it: does it prefer a story to a damaged copy of that story?

    python -m experiments.judge_report 20 --dataset_name creative --judge_type local --judge_model X

The number is that of the opening lines; main.py's flags follow. --model_name writes a group of
stories for each line, as in training. The judge scores them, and four damaged copies of each. The
report is printed, and kept in judge_report.json of --output_dir; judge_pairs.jsonl there has each
story beside its copies, to be read.
"""

import math
import random
import re
import sys

import numpy as np
import pandas as pd
from scipy import stats
from training import completions
from training.run import resolve

import distributed
import main
import utils
from config import ArgumentParser, GRPOConfig, parse
from evaluator import CreativeWritingEvaluator
from judges.judges import spread_within_groups
from logs import jsonl

SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’]))\s+")


def shuffle_words(story, rng):
    words = story.split()
    rng.shuffle(words)
    return " ".join(words)


def shuffle_sentences(story, rng):
    sentences = SENTENCE_END.split(story)
    rng.shuffle(sentences)
    return " ".join(sentences)


def cut(story, rng):
    """Let the story break off in its middle."""
    words = story.split()
    return " ".join(words[: len(words) // 2])


def repeat(story, rng):
    """Return a text as long as the story, whose second half says nothing new."""
    return f"{cut(story, rng)} {cut(story, rng)}"


DAMAGES = {
    "shuffled words": shuffle_words,
    "shuffled sentences": shuffle_sentences,
    "cut": cut,
    "repeated": repeat,
}


def measure(evaluator, prompts, stories, group_size, seed=0) -> tuple[dict, list[dict]]:
    """Return the report on a judge, and the pairs that it rests on.

    group_size consecutive stories share a prompt. A pair is a story, a damaged copy of it, and
    their scores.

    Texts below the floor are left out, since a judge never sees them.

    missing: the number of stories above the floor that got no score.
    spread: the mean standard deviation of the scores within a group.
    length_correlation: the rank correlation between a story's score and its number of words.
    For each damage: what `compare` returns.

    Raises ValueError where fewer than two stories are above the floor.
    """
    stories = [story.strip() for story in stories]
    rows = []
    for i, story in enumerate(stories):
        if evaluator.broken_rule(prompts[i], story) is None:
            rows.append(i)
    if len(rows) < 2:
        raise ValueError(f"only {len(rows)} of {len(stories)} stories are above the floor")
    prompts = [prompts[i] for i in rows]
    shown_stories = [stories[i] for i in rows]
    scores = np.array(evaluator.judge.score(prompts, shown_stories)[0])
    all_scores = np.full(len(stories), math.nan)
    all_scores[rows] = scores
    lengths = [len(story.split()) for story in shown_stories]
    correlations = pd.DataFrame({"score": scores, "length": lengths}).corr("spearman")
    report = {
        "stories": len(stories),
        "below_floor": len(stories) - len(rows),
        "missing": int(np.isnan(scores).sum()),
        "mean": float(np.nanmean(scores)),
        "spread": spread_within_groups(all_scores.tolist(), group_size),
        "length_correlation": correlations.loc["score", "length"],
    }
    pairs = []
    rng = random.Random(f"damage/{seed}")
    for name, damage in DAMAGES.items():
        copies = [damage(story, rng) for story in shown_stories]
        copy_scores = np.array(evaluator.judge.score(prompts, copies)[0])
        is_damaged = [c.split() != s.split() for c, s in zip(copies, shown_stories, strict=True)]
        usable = np.array(is_damaged) & ~np.isnan(scores + copy_scores)
        report[name] = compare(scores[usable], copy_scores[usable])
        for i in usable.nonzero()[0]:
            pairs.append(
                {
                    "prompt": prompts[i],
                    "damage": name,
                    "story": shown_stories[i],
                    "score": scores[i],
                    "copy": copies[i],
                    "copy_score": copy_scores[i],
                }
            )
    return report, pairs


def auc(better, worse, axis=-1):
    """Return P(a random one of `better` exceeds a random one of `worse`); ties count half."""
    num_pairs = better.shape[axis] * worse.shape[axis]
    return stats.mannwhitneyu(better, worse, axis=axis).statistic / num_pairs


def compare(story_scores, copy_scores) -> dict:
    """Return how n stories score beside their damaged copies.

    higher: the share of stories that score higher than their own copy. A tie counts half.
    auc: the chance that a story scores higher than the copy of any story; low and high are its
        95 % interval (percentiles of a bootstrap). It is less sensitive: where stories differ much
        in quality, the effect of the damage hardly shows.

    With fewer than two stories all but n are NaN.
    """
    n = len(story_scores)
    if n < 2:
        return {"n": n, "higher": math.nan, "auc": math.nan, "low": math.nan, "high": math.nan}
    higher = np.mean(np.sign(story_scores - copy_scores) + 1) / 2
    low, high = stats.bootstrap(
        (story_scores, copy_scores),
        auc,
        n_resamples=1000,
        method="percentile",
        rng=0,
    ).confidence_interval
    area = auc(story_scores, copy_scores)
    return {"n": n, "higher": higher, "auc": area, "low": low, "high": high}


def run(argv=None):
    """The command line; returns its exit code."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("num_lines", type=int, help="the number of opening lines")
    own_args, training_argv = parser.parse_known_args(argv)
    config = resolve(parse(GRPOConfig, [*training_argv, "--eval_only"]))
    try:
        distributed.init(config.device, allow_several=False)
        training_run = main.setup(config)
        if not isinstance(training_run.evaluator, CreativeWritingEvaluator):
            raise ValueError(
                f"--dataset_name {config.dataset_name} has no judge; use --dataset_name creative"
            )
        examples = training_run.train_loader.examples[: own_args.num_lines]
        with utils.isolated_seed(config.seed):
            rollout = completions.sample(
                config, training_run, examples, config.group_size, config.temperature
            )
        questions = [example["question"] for example in examples]
        prompts = utils.repeat_each(questions, config.group_size)
        config.output_dir.mkdir(parents=True, exist_ok=True)
        report, pairs = measure(
            training_run.evaluator, prompts, rollout.texts, config.group_size, config.seed
        )
        print(jsonl.dumps(report, indent=2))
        jsonl.write_json(config.output_dir / "judge_report.json", report)
        jsonl.write(config.output_dir / "judge_pairs.jsonl", pairs)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run())
