"""What ends a run whose training has diverged."""

import math

from logs.diagnose import PATIENCE

MAX_SAMPLING_GAP = 0.1  # nats per token on average; bfloat16 alone gives up to 0.04


class Diverged(Exception):
    """Training has left the range in which it could recover. The message says by what measure."""


class Guard:
    """Watches the metrics of each iteration, and stops a run that has diverged.

    It has if, in PATIENCE iterations in a row, an update was skipped because its loss or gradient
    was not finite, or the mean KL to the reference was above `max_kl` nats per token. With
    `checks_sampler` it also stops a run whose first iteration has a large `sampling_logp_gap`.
    """

    def __init__(self, max_kl: float, checks_sampler: bool = False):
        self.max_kl = max_kl
        self.checks_sampler = checks_sampler
        self.skipped_streak = 0  # how many iterations in a row have skipped an update
        self.high_kl_streak = 0  # how many iterations in a row had too high a KL

    def check(self, metrics: dict) -> None:
        """Look at the metrics of an iteration. Raises Diverged."""
        if self.checks_sampler and "sampling_logp_gap" in metrics:
            self.checks_sampler = False
            gap = metrics["sampling_logp_gap"]
            if not gap <= MAX_SAMPLING_GAP:
                raise Diverged(
                    f"the sampler's log-probs differ from the policy's by {gap:.2g} nats on average"
                    f" (at most {MAX_SAMPLING_GAP} expected), so it samples from another"
                    " distribution; use --sampler torch"
                )
        kl = metrics.get("kl_per_token", 0.0)
        is_kl_high = kl > self.max_kl or not math.isfinite(kl)
        self.skipped_streak = self.skipped_streak + 1 if metrics["skipped_updates"] else 0
        self.high_kl_streak = self.high_kl_streak + 1 if is_kl_high else 0
        advice = (
            "the run has diverged; lower --learning_rate or raise --beta, and start again from a"
            " checkpoint"
        )
        if self.skipped_streak >= PATIENCE:
            raise Diverged(
                f"in {self.skipped_streak} iterations in a row an update was skipped, because its"
                f" loss or gradient is not finite: {advice}"
            )
        if self.high_kl_streak >= PATIENCE:
            raise Diverged(
                f"mean KL to the reference was above {self.max_kl:g} nats in"
                f" {self.high_kl_streak} iterations in a row, now {kl:.3g}: {advice}"
            )
