"""What stops a run before its last iteration: signals, and training that has diverged."""

import math
import signal

import distributed
from logs.diagnose import MIN_ITERATIONS, WARNING, Logs, diagnose


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

    What it warns of are the rules of logs/diagnose.py, applied to the iterations so far. They are
    applied whenever the run has grown by a twentieth, so that a long run costs no more per
    iteration than a short one. Each rule warns once in the life of a process, and not of a note. A
    rule that compares the start with the end waits for half of the run, since many a healthy run
    begins slowly.
    """

    def __init__(self, max_kl: float = 3.0, patience: int = 3):
        self.max_kl = max_kl
        self.patience = patience
        self.skipped_streak = 0  # how many iterations in a row have skipped an update
        self.high_kl_streak = 0  # how many iterations in a row had too high a KL
        self.logs = Logs()
        self.next_diagnosis = 1  # the number of iterations at which the rules are applied again
        self.rules_that_warned = set()

    def set_flags(self, flags: dict) -> None:
        """Tell it the flags of the run, which some rules need."""
        self.logs.flags = flags
        half_of_run = flags.get("num_train_iters", 0) // 2
        self.logs.min_iterations = max(MIN_ITERATIONS, half_of_run)

    def check(self, metrics: dict) -> list[str]:
        """Look at the metrics of an iteration and return new warnings, each a line of text.

        Raises:
            Diverged: the run should stop.
        """
        self._check_divergence(metrics)
        self.logs.train.append(metrics)
        num_iterations = len(self.logs.train)
        if num_iterations < self.next_diagnosis:
            return []
        self.next_diagnosis = num_iterations + 1 + num_iterations // 20
        return self.new_warnings()

    def new_warnings(self) -> list[str]:
        """Apply the rules to all iterations so far; return a line for each that did not warn yet.

        Of several processes the first one alone does this.
        """
        if not distributed.is_main():
            return []
        lines = []
        for finding in diagnose(self.logs).findings:
            if finding.severity == WARNING and finding.rule not in self.rules_that_warned:
                self.rules_that_warned.add(finding.rule)
                lines.append(f"{finding.sentence}. {finding.why} To do: {finding.advice}")
        return lines

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
