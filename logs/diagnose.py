"""Rules that tell from the logs of a GRPO run whether it is healthy, and if not, why.

plotter.py --diagnose applies them to runs, also to one that is still going. It is an audit and no
oracle: a run that breaks no rule can still be bad. docs/tuning.md lists the rules with their hits
and false alarms on runs whose end is known.

The start and the end of a run are means over the first and over the last tenth of its iterations,
or over five where a tenth is less.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from logs.read import RunLog, column, rows_with_number

PATIENCE = 3  # training.guard, too, ends a run after so many bad iterations in a row.
MIN_ITERATIONS = 20  # A rule that compares the start of a run with its end needs as many.
MIN_WINDOW = 5  # The start and the end of a run have as many iterations, if it has them.
TRUNCATED = 0.25
# The rewards for the format, and what a completion in the format earns (evaluator.py).
FORMAT_REWARDS = {"rewards/format": 1.0, "rewards/strict_format": 0.5}

WARNING = "warning"
NOTE = "note"


class NotLogged(Exception):
    """The logs lack what a rule needs, so that the rule cannot be applied."""


@dataclass(frozen=True)
class Finding:
    """What one rule has found in a run."""

    rule: str  # the name of the rule
    severity: str  # WARNING or NOTE
    sentence: str  # what was found, with the numbers
    why: str  # why it matters
    advice: str  # what to change, with the flags


@dataclass(frozen=True)
class Change:
    """How far a metric has moved from the start of a run to its end."""

    start: float
    end: float
    error: float  # the standard error of end - start

    def rises(self, num_errors: float) -> bool:
        """Whether the end is more than so many standard errors above the start."""
        return self.end - self.start > num_errors * self.error

    def __str__(self):
        return f"{self.start:.3g} -> {self.end:.3g}"


@dataclass
class Logs:
    """The rows of a run's two logs, and its flags as far as they are known."""

    train: list[dict] = field(default_factory=list)
    evaluations: list[dict] = field(default_factory=list)
    flags: dict = field(default_factory=dict)

    @classmethod
    def of(cls, run: RunLog):
        return cls(run.rows["train"], run.rows["eval"], run.args)

    def values(self, key: str) -> np.ndarray:
        """The numbers under a key of train_log.jsonl. Raises NotLogged if there is none."""
        rows = rows_with_number(self.train, key)
        if not rows:
            raise NotLogged(key)
        return column(rows, key)

    def end(self, key: str) -> float:
        """The mean at the end of the run. Raises NotLogged."""
        values = self.values(key)
        return values[-window(values) :].mean().item()

    def change(self, key: str) -> Change:
        """How far a metric has moved. Raises NotLogged where there are too few iterations.

        The noise of an iteration is estimated from the jumps between neighbours (von Neumann 1941),
        which a trend hardly enlarges: the variance of a jump is twice that of an iteration.
        """
        values = self.values(key)
        if len(values) < MIN_ITERATIONS:
            raise NotLogged(f"{key} in {MIN_ITERATIONS} iterations")
        n = window(values)
        variance = (np.diff(values) ** 2).mean() / 2
        return Change(
            start=values[:n].mean().item(),
            end=values[-n:].mean().item(),
            error=math.sqrt(variance * 2 / n),
        )

    def has_answers(self) -> bool:
        """Whether answers are right or wrong. Of what a judge reads, `accuracy` says less."""
        return not any("rewards/judge" in row for row in self.train)

    def accuracies(self) -> list[dict]:
        """The evaluations with an accuracy. Raises NotLogged for fewer than two."""
        rows = self.evaluations
        for key in ("step", "accuracy", "accuracy_low", "accuracy_high"):
            rows = rows_with_number(rows, key)
        if len(rows) < 2 or not self.has_answers():
            raise NotLogged("accuracy in two evaluations")
        return rows


def window(values) -> int:
    """How many iterations are the start or the end of a run with these values."""
    return max(MIN_WINDOW, math.ceil(len(values) / 10))


# ---- the rules


@dataclass(frozen=True)
class Rule:
    name: str
    # Returns (severity, sentence), or None where nothing is wrong. Its docstring is the condition.
    # Raises NotLogged where the logs lack what it needs.
    check: Callable[[Logs], tuple[str, str] | None]
    why: str  # it matters
    advice: str  # what to change, with the flags


RULES = []


def rule(name, why, advice):
    """Add the function below to the rules."""

    def add(check):
        RULES.append(Rule(name, check, why, advice))
        return check

    return add


@rule(
    "divergence",
    why="The weights are damaged, and whatever else is found here may follow from that.",
    advice="Lower --learning_rate or raise --beta, and start again from a checkpoint.",
)
def divergence(logs):
    """In the last three iterations the KL is above --max_kl or no number, or updates were left out.

    It is the KL to the reference.
    """
    skipped = logs.values("skipped_updates")[-PATIENCE:]
    last_rows = [row for row in logs.train[-PATIENCE:] if "kl_per_token" in row]
    kls = column(last_rows, "kl_per_token")
    max_kl = logs.flags.get("max_kl", 3.0)
    if len(skipped) == PATIENCE and (skipped > 0).all():
        reason = "an update was left out"
    elif len(kls) == PATIENCE and not (kls <= max_kl).any():
        reason = (
            f"the KL to the reference was above {max_kl:g} nats a token (at last {kls[-1]:.3g})"
        )
    else:
        return None
    return WARNING, f"the run has diverged: {reason} in each of the last {PATIENCE} iterations"


@rule(
    "collapse",
    why="Text without the format, or short answers that are wrong, earn little, and few runs"
    " return from there.",
    advice="Lower --learning_rate and go back to an earlier checkpoint. Subtract the group's mean"
    " and keep the clip (--loss_type grpo_clip), and take fewer updates on a batch. If hardly any"
    " answer was right at first, show some solutions first (sft.py).",
)
def collapse(logs):
    """The format is lost, or the answers become short and wrong.

    Lost: over the last three iterations, the share of completions in the format is less than 80% of
    what it was over the best three, and that was more than half. Short and wrong: at the end the
    completions are less than a third as long as at the start, and under half of the answers are
    right.
    """
    for key, weight in FORMAT_REWARDS.items():
        shares = column(rows_with_number(logs.train, key), key) / weight
        if len(shares) < PATIENCE:
            continue
        means = np.convolve(shares, np.ones(PATIENCE) / PATIENCE, "valid")
        best = means.max()
        last = means[-1]
        if best > 0.5 and last < 0.8 * best:
            return WARNING, (
                f"the policy loses the format: {last:.0%} of the completions have it, and at best"
                f" {best:.0%} had"
            )
    if not logs.has_answers():
        raise NotLogged("accuracy")
    length = logs.change("response_length")
    accuracy = logs.end("accuracy")
    if length.end < length.start / 3 and accuracy < 0.5:
        return WARNING, (
            f"the answers have become short and wrong: {length} tokens, and {accuracy:.0%} are"
            " right at the end"
        )
    return None


@rule(
    "missing rewards",
    why="An iteration without any reward teaches nothing.",
    advice="Read what the judge or the reward function says of the completions in rollouts/.",
)
def missing_rewards(logs):
    """The reward is missing in all completions of an iteration."""
    rewards = column([row for row in logs.train if "reward" in row], "reward")
    if not len(rewards):
        raise NotLogged("reward")
    num_missing = np.isnan(rewards).sum()
    if num_missing:
        return WARNING, f"all rewards are missing in {num_missing} of {len(rewards)} iterations"
    return None


@rule(
    "no gradient",
    why="Nothing is learnt where no weight moves.",
    advice="Look at the share of groups with equal rewards and at --learning_rate; run selfcheck.py"
    " with the same flags.",
)
def no_gradient(logs):
    """The gradient's norm is below 1e-7 in more than half of the iterations."""
    share = (logs.values("grad_norm") < 1e-7).mean()
    if share > 0.5:
        return WARNING, f"the gradient is 0 in {share:.0%} of the iterations"
    return None


@rule(
    "groups without a signal",
    why="A group of equal rewards has no advantage and teaches nothing.",
    advice="If nearly all answers are right, use harder problems. If nearly all are wrong, use"
    " easier ones, or show some solutions first (sft.py). Otherwise raise --group_size or"
    " --temperature, or set --dynamic_sampling 10.",
)
def flat_groups(logs):
    """More than 80% of the groups have equal rewards at the end, or 90% in one iteration.

    It is a note from 50%.
    """
    # With --dynamic_sampling, flat groups are replaced, and this is the share after that.
    trained_key = "zero_std_fraction_trained"
    was_replaced = any(trained_key in row for row in logs.train)
    key = trained_key if was_replaced else "zero_std_fraction"
    # Where all rewards are missing, none are equal.
    logs = replace(logs, train=rows_with_number(logs.train, "reward"))
    share = logs.end(key)
    worst = logs.values(key).max()
    sentence = f"{share:.0%} of the groups have equal rewards at the end{kind_of_flat_group(logs)}"
    if share > 0.8:
        return WARNING, sentence
    if worst > 0.9:
        return WARNING, f"all rewards are equal in {worst:.0%} of the groups of an iteration"
    if share > 0.5:
        return NOTE, sentence
    return None


def kind_of_flat_group(logs) -> str:
    """Why groups may be flat, as the end of a sentence; "" where the logs do not tell."""
    if not logs.has_answers():
        return ""
    try:
        accuracy = logs.end("accuracy")
    except NotLogged:
        return ""
    if accuracy >= 0.9:
        return f": nearly all answers are right ({accuracy:.0%})"
    if accuracy <= 0.1:
        return f": nearly all answers are wrong ({accuracy:.0%} are right)"
    return (
        f", though {accuracy:.0%} of the answers are right: the samples of a group are alike, or"
        " the reward does not tell them apart"
    )


@rule(
    "truncation",
    why="A completion that is cut has no answer, so that its reward says nothing of its thought.",
    advice="Raise --max_completion_length, or set --mask_truncated_completions.",
)
def truncation(logs):
    """More than 25% of the completions are cut at the end."""
    share = logs.end("truncated_fraction")
    if share > TRUNCATED:
        return WARNING, f"{share:.0%} of the completions are cut at the end"
    return None


@rule(
    "reward does not rise",
    why="GRPO maximises this reward and nothing else.",
    advice="Check that rewards differ within groups, change --learning_rate, or show some solutions"
    " first (sft.py); docs/tuning.md lists more causes.",
)
def flat_reward(logs):
    """The reward rises by less than 2 standard errors."""
    reward = logs.change("reward")
    if reward.rises(2):
        return None
    return WARNING, f"the reward does not rise: {reward} (standard error {reward.error:.2g})"


@rule(
    "KL",
    why="The policy is far from the model it began with, and may have lost what that could do.",
    advice="Lower --learning_rate or raise --beta.",
)
def high_kl(logs):
    """The KL to the reference is above 0.5 nats a token at the end (median).

    The warning says if the reward has not risen either.
    """
    # k3 grows exponentially with what the policy has given up, so that one iteration can have
    # hundreds of nats in a healthy run. The median does not see it.
    values = logs.values("kl_per_token")
    if len(values) < MIN_ITERATIONS:
        raise NotLogged(f"kl_per_token in {MIN_ITERATIONS} iterations")
    kl = np.median(values[-window(values) :])
    if not kl > 0.5:
        return None
    sentence = f"the KL to the reference is {kl:.2g} nats a token at the end"
    try:
        reward_is_flat = flat_reward(logs) is not None
    except NotLogged:
        reward_is_flat = False
    if reward_is_flat:
        sentence += ", and the reward has not risen, which is critical: the policy only drifts"
    return WARNING, sentence


@rule(
    "entropy",
    why="With little entropy the samples of a group hardly differ and teach little; with much"
    " they are noise.",
    advice="Where it falls, lower --learning_rate, or raise --beta or --temperature. Where it"
    " rises, lower --learning_rate.",
)
def entropy(logs):
    """The entropy is below a tenth of its start while half of the groups have equal rewards.

    Or in a single iteration it is below a twentieth of its first value. Or it rises above 1 nat.
    """
    flat_share = logs.end("zero_std_fraction")  # sft.py has no groups, and may lower its entropy
    values = logs.values("entropy")
    first = values[0]
    least = values.min()
    if least < 0.05 * first:
        return WARNING, f"the entropy fell to {least:.2g} nats, from {first:.2g} at first"
    change = logs.change("entropy")
    if change.start < 1.0 < change.end:
        return WARNING, f"the entropy rises: {change} nats"
    is_low = change.end < 0.1 * change.start
    if is_low and flat_share >= 0.5:
        return WARNING, (
            f"the entropy falls: {change} nats, and {flat_share:.0%} of the groups have equal"
            " rewards"
        )
    return None


@rule(
    "clip",
    why="A clipped token has no gradient.",
    advice="Lower --learning_rate, or take fewer updates on a batch.",
)
def clipping(logs):
    """More than 20% of the tokens are clipped at the end (not for gspo)."""
    if logs.flags.get("loss_type") == "gspo":  # GSPO clips whole sequences, and most of them.
        return None
    share = logs.end("clip_fraction")
    if share > 0.2:
        return WARNING, f"the clip stops {share:.0%} of the tokens at the end"
    return None


@rule(
    "sampler",
    why="What is trained are not quite the tokens' chances with which they were drawn.",
    advice="Set --sampling_dtype float32, or correct for the gap with --importance_cap 2.",
)
def sampler_gap(logs):
    """Sampler and policy differ by more than 0.1 nats a token at the end.

    Or they differ by five times as much as at the start, and by more than 0.001.
    """
    gap = logs.end("sampling_logp_gap")
    if gap > 0.1:
        return WARNING, f"sampler and policy differ by {gap:.2g} nats a token at the end"
    if gap > 1e-3:
        change = logs.change("sampling_logp_gap")
        if change.end > 5 * change.start:
            return WARNING, f"sampler and policy drift apart: {change} nats a token"
    return None


@rule(
    "skipped updates",
    why="A loss or gradient was not finite.",
    advice="Lower --learning_rate or --max_grad_norm, and read the rollouts of these iterations.",
)
def skipped_updates(logs):
    """An update was left out, because its loss or gradient was not finite."""
    skipped = logs.values("skipped_updates")
    num_iterations = (skipped > 0).sum()
    if num_iterations:
        return WARNING, f"updates were left out in {num_iterations} of {len(skipped)} iterations"
    return None


@rule(
    "reward without accuracy",
    why="The policy may have found what the reward pays for beside right answers.",
    advice="Read the completions with the highest rewards in report.html, and mend the reward or"
    " raise --beta.",
)
def reward_without_accuracy(logs):
    """The reward rises by more than 4 standard errors, and the accuracy does not.

    The last evaluation's accuracy is not above the first one's interval.
    """
    reward = logs.change("reward")
    evaluations = logs.accuracies()
    if evaluations[-1]["step"] < MIN_ITERATIONS:
        raise NotLogged(f"an evaluation after {MIN_ITERATIONS} iterations")
    first = evaluations[0]["accuracy"]
    first_high = evaluations[0]["accuracy_high"]
    last = evaluations[-1]["accuracy"]
    if reward.rises(4) and last <= first_high:
        return WARNING, (
            f"the reward rises ({reward}), but accuracy does not: {first:.1%} in the first"
            f" evaluation (95% interval up to {first_high:.1%}), {last:.1%} in the last"
        )
    return None


@rule(
    "reward without diversity",
    why="The policy may have found one text that the reward likes.",
    advice="Read the completions in report.html; raise --beta, or stop earlier.",
)
def reward_without_diversity(logs):
    """The reward rises by more than 4 standard errors, and the diversity falls.

    The distinct bigrams of the batch are below 70% of their start.
    """
    reward = logs.change("reward")
    distinct = logs.change("distinct_2_batch")
    if reward.rises(4) and distinct.end < 0.7 * distinct.start:
        return WARNING, (
            f"the reward rises ({reward}) while the completions become alike: the share of"
            f" distinct bigrams is {distinct}"
        )
    return None


@rule(
    "only format rises",
    why="The format is learnt within some iterations; right answers are what it is for.",
    advice="Train longer; if correctness stays, use easier problems or show some solutions first"
    " (sft.py).",
)
def only_format(logs):
    """The reward rises by more than 2 standard errors, and correctness makes under 15% of it."""
    reward = logs.change("reward")
    correctness = logs.change("rewards/correctness")
    if not reward.rises(2):
        return None
    share = (correctness.end - correctness.start) / (reward.end - reward.start)
    if share < 0.15:
        return WARNING, (
            f"only the format's reward rises: the whole is {reward}, of which correctness is"
            f" {correctness}"
        )
    return None


@rule(
    "past its best",
    why="Training on has cost accuracy.",
    advice="Take the best checkpoint, or train again with a lower --learning_rate or fewer"
    " --num_train_iters.",
)
def past_its_best(logs):
    """The last evaluation's interval lies below that of the best one."""
    evaluations = logs.accuracies()
    best = max(evaluations, key=lambda row: row["accuracy"])
    last = evaluations[-1]
    if last["accuracy_high"] < best["accuracy_low"]:
        return WARNING, (
            f"the accuracy is past its best: {best['accuracy']:.1%} at step {best['step']},"
            f" {last['accuracy']:.1%} at step {last['step']}; the checkpoint to take is"
            f" checkpoints/step_{best['step']:06.0f}, if it was saved"
        )
    return None


@dataclass(frozen=True)
class Diagnosis:
    """What the rules say of a run."""

    findings: list[Finding]  # warnings first
    rules: list[str]  # the names of the rules for which the logs have what they need


def diagnose(logs: Logs) -> Diagnosis:
    """Apply every rule. A rule that lacks a metric is left out."""
    findings = []
    names = []
    for rule in RULES:
        try:
            result = rule.check(logs)
        except NotLogged:
            continue
        names.append(rule.name)
        if result:
            severity, sentence = result
            findings.append(Finding(rule.name, severity, sentence, rule.why, rule.advice))
    findings.sort(key=lambda finding: finding.severity != WARNING)
    return Diagnosis(findings, names)


def as_text(name: str, logs: Logs) -> str:
    """The diagnosis of a run in sentences, and what was looked at."""
    diagnosis = diagnose(logs)
    lines = [f"{name}: {headline(logs, diagnosis)}"]
    for finding in diagnosis.findings:
        lines.append(f"  {finding.severity}: {finding.sentence}")
        lines.append(f"    Why it matters: {finding.why}")
        lines.append(f"    What to change: {finding.advice}")
    return "\n".join(lines)


def headline(logs: Logs, diagnosis: Diagnosis) -> str:
    """How much was found, in what, and by which rules."""
    num_iterations = counted(len(logs.train), "iteration")
    num_evaluations = counted(len(logs.evaluations), "evaluation")
    looked_at = f"{num_iterations} and {num_evaluations}"
    if not diagnosis.rules:
        return f"no rule can be applied to {looked_at}: the logs lack what the rules need"
    rules = f"{counted(len(diagnosis.rules), 'rule')} ({', '.join(diagnosis.rules)})"
    if not diagnosis.findings:
        return f"nothing looks wrong in {looked_at}, by {rules}"
    return f"{counted(len(diagnosis.findings), 'finding')} in {looked_at}, by {rules}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
