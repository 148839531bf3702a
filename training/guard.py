"""What ends a run whose training has diverged."""

import math

from logs.diagnose import PATIENCE


class Diverged(Exception):
    """Training has left the range in which it could recover. The message says by what measure."""


class Guard:
    """Watches the metrics of each iteration, and stops a run that has diverged.

    It has if, in PATIENCE iterations in a row, an update was skipped because its loss or gradient
    was not finite, or the mean KL to the reference was above `max_kl` nats per token.
    """

    def __init__(self, max_kl: float):
        self.max_kl = max_kl
        self.skipped_streak = 0  # how many iterations in a row have skipped an update
        self.high_kl_streak = 0  # how many iterations in a row had too high a KL

    def check(self, metrics: dict) -> None:
        """Look at the metrics of an iteration. Raises Diverged."""
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
