"""What ends a run before its last step: signals, divergence, and what it depends on failing."""

import math
import signal

import distributed


class Interrupted(BaseException):
    """A signal asked the run to stop, at a place where it can be continued from. No library's except may swallow it."""


class Diverged(Exception):
    """Training has left the range in which it could recover; the message says by what measure."""


class Interrupts:
    """Turns SIGTERM, SIGHUP and Ctrl-C into Interrupted: at once, or where `hold` was called, at the next `release`.

    Several processes stop at the same `release`, whichever of them was asked to: the rest would wait for one that left.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self):
        self.requested, self.held, self.loading = (
            None,
            False,
            False,
        )  # loading: nothing to keep, nobody to wait for

    def install(self) -> None:
        self.before = {number: signal.getsignal(number) for number in self.SIGNALS}
        for number, handler in self.before.items():
            if (
                number != signal.SIGHUP or handler != signal.SIG_IGN
            ):  # under nohup a run outlives its terminal
                signal.signal(number, self._handle)

    def uninstall(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number, frame):
        self.requested = signal.Signals(number).name
        if self.loading or not self.held and distributed.world_size() == 1:
            raise Interrupted(self.requested)

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False
        requested = next(filter(None, distributed.gather([self.requested])), None)
        if requested:
            raise Interrupted(requested)

    def ignore(self) -> None:
        """The run is being saved and left: further signals change nothing."""
        self.requested = None
        for number in self.SIGNALS:
            signal.signal(number, signal.SIG_IGN)


class Guard:
    """Watches the metrics of each iteration: stops a diverged run, and says once, in words, what looks wrong.

    Diverged: the mean KL above max_kl nats, or an update that is not finite, in `patience` iterations in a row.
    """

    def __init__(self, max_kl: float = 3.0, patience: int = 3):
        self.max_kl, self.patience = max_kl, patience
        self.high_kl = self.non_finite = 0
        self.warned, self.first_entropy = set(), None

    def check(self, metrics: dict) -> list[str]:
        """Returns new warnings, as lines of text. Raises Diverged."""
        kl, entropy = metrics.get("kl_per_token", 0.0), metrics.get("entropy")
        self.non_finite = self.non_finite + 1 if metrics["skipped_updates"] else 0
        self.high_kl = self.high_kl + 1 if kl > self.max_kl or not math.isfinite(kl) else 0
        advice = "the run has diverged; lower --learning_rate or raise --beta, and start again from a checkpoint"
        if self.non_finite >= self.patience:
            raise Diverged(
                f"updates that are not finite in {self.non_finite} iterations in a row: {advice}"
            )
        if self.high_kl >= self.patience:
            raise Diverged(
                f"mean KL to the reference was above {self.max_kl:g} nats in {self.high_kl} iterations in a row, now"
                f" {kl:.3g}: {advice}"
            )
        signs = {}
        if entropy is not None:
            self.first_entropy = self.first_entropy or entropy
            if entropy < 0.05 * self.first_entropy:
                signs["entropy"] = (
                    f"entropy fell to {entropy:.4f} nats, under 5 % of its start: the samples of a group hardly differ,"
                    " so they teach little; lower --learning_rate, or raise --beta or --temperature"
                )
        if metrics.get("zero_std_fraction", 0) > 0.9:
            signs["saturation"] = (
                f"in {metrics['zero_std_fraction']:.0%} of the groups all rewards are equal, which teaches nothing: the"
                " reward is saturated or out of reach; use harder or easier problems"
            )
        new = [text for name, text in signs.items() if name not in self.warned]
        self.warned |= signs.keys()
        return new
