"""Signals that ask a run to stop: Ctrl-C, SIGTERM, and the SIGHUP of a closed terminal.

While a run trains, a signal is only noted. The run looks at it between iterations, in an
evaluation, and while it waits for a judge: at these moments it can be saved so that --resume goes
on as if it had never stopped. A second Ctrl-C or SIGTERM ends the process at once.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO

import distributed

POLL_SECONDS = 0.2  # how often a wait looks whether a signal has come

_asked: signal.Signals | None = None  # the first signal that has asked this process to stop


class Stopped(BaseException):
    """The process stops because of a signal, which `str` names.

    It is a BaseException so that no library's `except Exception` can swallow it.
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number  # as a shell reports it: 130 for Ctrl-C, 143 for SIGTERM


@contextmanager
def handled(handler: Callable | signal.Handlers) -> Iterator[None]:
    """Within the block, the signals call this handler."""
    previous_handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A run that nohup has started must outlive its terminal.
        is_ignored_by_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        if not is_ignored_by_nohup:
            previous_handlers[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous_handler in previous_handlers.items():
            signal.signal(number, previous_handler)


def stop_at_once(number: int, frame=None) -> None:
    """A handler for times at which there is nothing to save."""
    raise Stopped(number)


def ask_to_stop(number: int, frame=None) -> None:
    """A handler that notes the signal, for stop_if_asked."""
    global _asked
    if _asked is None:
        _asked = signal.Signals(number)
        if distributed.is_main():
            line = f"{_asked.name}: stopping at the next moment from which the run can be resumed\n"
            with suppress(OSError):  # the terminal may be gone
                os.write(2, line.encode())  # not print, which this signal may have interrupted
    # A terminal that closes may send SIGHUP twice, and SIGTERM with it. torchrun hands a SIGTERM on
    # to processes that have got it themselves.
    may_be_repeated = distributed.world_size() > 1
    if number in (signal.SIGINT, signal.SIGTERM) and not may_be_repeated:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# --- Where a run can stop -------------------------------------------------------------------------


def stop_together_if_asked() -> None:
    """All: raise Stopped if a signal has come to any process."""
    for number in distributed.gather([_asked]):
        if number is not None:
            raise Stopped(number)


def stop_if_asked() -> None:
    """Raise Stopped if a signal has come and this is the only process.

    One of several goes on until all of them stop together, because the others would wait for it.
    """
    if distributed.world_size() == 1:
        stop_together_if_asked()


async def wait_unless_stopped(work: Coroutine) -> Any:
    """The result of a coroutine. If a signal comes first, the coroutine is cancelled.

    Raises Stopped in that case, as stop_if_asked does.
    """
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait([task], timeout=POLL_SECONDS)
        if not task.done():
            stop_if_asked()
    return task.result()


# --- Output that nobody reads ---------------------------------------------------------------------


@contextmanager
def output_watched() -> Iterator[None]:
    """Within the block, the run is asked to stop when nobody reads its output any more.

    This happens in `python main.py | head`, or when a terminal closes.
    """
    global _asked
    _asked = None
    output = Output(sys.stdout)
    errors = Output(sys.stderr)
    with redirect_stdout(output), redirect_stderr(errors):
        yield
        output.flush()
        errors.flush()


class Output:
    """A stream such as stdout, which asks to stop instead of raising an OSError.

    What is printed afterwards is dropped.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError:
            self._drop_the_rest()
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            self._drop_the_rest()

    def _drop_the_rest(self) -> None:
        ask_to_stop(signal.SIGPIPE)
        # Python writes what is left in the buffer as it ends, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def __getattr__(self, name):
        return getattr(self.stream, name)
