"""Compare MATH answers in another process, which a hostile answer may hang, exhaust or crash.

`MathGrader().grade(gold, answer)` returns "equal", "different", "timeout" or "failed". What counts
as equal is decided and described in math_equality.py. This works only on POSIX systems.
"""

import json
import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

from grading.extraction import to_number

SERVER = Path(__file__).resolve().parent / "math_equality.py"
MAX_LENGTH = 500  # characters; a longer answer equals the gold only if it is the same text


class MathGrader:
    """Compares answers, one at a time: threads and forked processes need graders of their own.

    Its server starts at once, and loads its libraries while the caller goes on.

    seconds: CPU time that one question may take.
    """

    def __init__(self, seconds: float = 2.0):
        self.seconds = seconds
        self._start_server()

    def grade(self, gold: str, answer: str) -> str:
        """Compare an answer with the gold answer.

        Returns "equal", "different", "timeout", or "failed" where the answer cannot be read or
        memory ran out. Raises ChildProcessError where the server does not start.
        """
        gold = gold.strip()
        answer = answer.strip()
        if gold == answer and gold:
            return "equal"
        if not gold or not answer or max(len(gold), len(answer)) > MAX_LENGTH:
            return "different"
        gold_number = to_number(gold)
        answer_number = to_number(answer)
        if gold_number is not None and answer_number is not None and "%" not in gold + answer:
            return "equal" if gold_number == answer_number else "different"
        return self._ask(gold, answer)

    def _start_server(self) -> None:
        # The channel is a socket of its own, so whatever a library prints is no reply. The server
        # ends when its owner, and with it the other end of the channel, is gone. Its own session
        # keeps Ctrl-C in a terminal from it, and a fixed hash seed makes its verdicts repeatable.
        self._channel, server_channel = Pipe()
        with server_channel:
            file_descriptor = server_channel.fileno()
            self._server = subprocess.Popen(
                [sys.executable, SERVER, str(file_descriptor)],
                pass_fds=[file_descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"PYTHONHASHSEED": "0"},
            )

    def _ask(self, gold: str, answer: str) -> str:
        question = json.dumps([gold, answer, self.seconds]).encode()
        for _ in range(2):  # the server may have been killed since the last question
            try:
                self._channel.send_bytes(question)
                return self._channel.recv_bytes().decode()
            except (EOFError, ConnectionError):
                exit_code = self._replace_server()
            except BaseException:
                # The caller was interrupted. A reply that is still under way must not answer the
                # next question.
                self._replace_server()
                raise
            if exit_code == -signal.SIGPROF:
                return "timeout"
        if exit_code < 0:
            return "failed"
        raise ChildProcessError(
            "the grading process ends before it replies; its error message stands above (is"
            " math-verify installed?)"
        )

    def _replace_server(self) -> int:
        """Start a new server, and return the exit code of the old one."""
        self._channel.close()
        self._server.kill()
        exit_code = self._server.wait()
        self._start_server()
        return exit_code
