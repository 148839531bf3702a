"""What stops a run before its last iteration: signals, and training that has diverged."""

import math
import signal

import distributed

# A warning is printed when the entropy falls below this share of its first value.
LOW_ENTROPY_SHARE = 0.05
# A warning is printed when all rewards are equal in more than this share of the groups.
HIGH_FLAT_GROUP_SHARE = 0.9


class Interrupted(BaseException):
    """A signal asked the run to stop, at a moment from which the run can be continued.

    It is a BaseException so that no library's `except Exception` can swallow it.
    """


class Diverged(Exception):
    """Training has left the range in which it could recover. The message says by what measure."""


class Interrupts:
    """Turns SIGTERM, SIGHUP and Ctrl-C into an Interrupted exception.

    The exception is raised at once, except between `hold` and `release`: there it waits for
    `release`, so that an iteration is either finished or not begun. Several processes wait for
    `release` in any case and stop together, whichever of them got the signal, because a process
    that left alone would leave the others waiting for it.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self):
        self.requested = None  # the name of a signal that has come
        self.is_held = False
        self.loading = False  # True during setup: nothing can be lost, so a signal stops at once

    def install(self) -> None:
        """Handle the signals here, until `uninstall`."""
        self.previous_handlers = {number: signal.getsignal(number) for number in self.SIGNALS}
        for number, handler in self.previous_handlers.items():
            # A run that nohup has started must outlive its terminal.
            is_started_by_nohup = number == signal.SIGHUP and handler == signal.SIG_IGN
            if not is_started_by_nohup:
                signal.signal(number, self._handle)

    def uninstall(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number, frame):
        self.requested = signal.Signals(number).name
        may_stop_alone = not self.is_held and distributed.world_size() == 1
        if self.loading or may_stop_alone:
            raise Interrupted(self.requested)

    def hold(self) -> None:
        """Keep signals waiting until `release`."""
        self.is_held = True

    def release(self) -> None:
        """All processes: raise Interrupted if any of them got a signal."""
        self.is_held = False
        for requested in distributed.gather([self.requested]):
            if requested is not None:
                raise Interrupted(requested)

    def ignore(self) -> None:
        """From here on signals change nothing: the run is being saved and is about to end."""
        self.requested = None
        for number in self.SIGNALS:
            signal.signal(number, signal.SIG_IGN)


class Guard:
    """Watches the metrics of each iteration: it stops a diverged run, and warns of other trouble.

    A run has diverged if, in `patience` iterations in a row, an update was skipped because its loss
    or gradient was not finite, or the mean KL to the reference was above `max_kl` nats per token.
    """

    def __init__(self, max_kl: float = 3.0, patience: int = 3):
        self.max_kl = max_kl
        self.patience = patience
        self.skipped_streak = 0  # how many iterations in a row have skipped an update
        self.high_kl_streak = 0  # how many iterations in a row had too high a KL
        self.first_entropy = None
        self.issued_warnings = set()  # names of warnings, each of which is issued once

    def check(self, metrics: dict) -> list[str]:
        """Look at the metrics of an iteration and return new warnings, each a line of text.

        Raises:
            Diverged: the run should stop.
        """
        self._check_divergence(metrics)
        warnings = {
            "entropy": self._entropy_warning(metrics),
            "saturation": self._saturation_warning(metrics),
        }
        new_warnings = []
        for name, text in warnings.items():
            if text is not None and name not in self.issued_warnings:
                self.issued_warnings.add(name)
                new_warnings.append(text)
        return new_warnings

    def _check_divergence(self, metrics: dict) -> None:
        kl = metrics.get("kl_per_token", 0.0)
        is_kl_high = kl > self.max_kl or not math.isfinite(kl)
        self.skipped_streak = self.skipped_streak + 1 if metrics["skipped_updates"] else 0
        self.high_kl_streak = self.high_kl_streak + 1 if is_kl_high else 0
        advice = (
            "the run has diverged; lower --learning_rate or raise --beta, and start again from a"
            " checkpoint"
        )
        if self.skipped_streak >= self.patience:
            raise Diverged(
                f"in {self.skipped_streak} iterations in a row an update was skipped, because its"
                f" loss or gradient is not finite: {advice}"
            )
        if self.high_kl_streak >= self.patience:
            raise Diverged(
                f"mean KL to the reference was above {self.max_kl:g} nats in"
                f" {self.high_kl_streak} iterations in a row, now {kl:.3g}: {advice}"
            )

    def _entropy_warning(self, metrics: dict) -> str | None:
        entropy = metrics.get("entropy")
        if entropy is None:
            return None
        if not self.first_entropy:
            self.first_entropy = entropy
        if entropy < LOW_ENTROPY_SHARE * self.first_entropy:
            return (
                f"entropy fell to {entropy:.4f} nats, under {LOW_ENTROPY_SHARE:.0%} of its first"
                " value: the samples of a group hardly differ, so they teach little; lower"
                " --learning_rate, or raise --beta or --temperature"
            )
        return None

    def _saturation_warning(self, metrics: dict) -> str | None:
        flat_share = metrics.get("zero_std_fraction", 0)
        if flat_share > HIGH_FLAT_GROUP_SHARE:
            return (
                f"in {flat_share:.0%} of the groups all rewards are equal, which teaches nothing:"
                " the reward is saturated or out of reach; use harder or easier problems"
            )
        return None
