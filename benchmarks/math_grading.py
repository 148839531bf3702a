r"""How often graders of MATH answers are wrong, and how long they take: one table.

The graders: grading/math_answers.py; math-verify's `parse` and `verify` with their defaults; and,
with --trl_python, TRL's accuracy_reward, which calls math-verify with other settings. The other
graders get the gold answer between dollar signs, and the answer in a \boxed{}, as they expect it.

Right answers are the gold answers themselves, and the same ones in another notation. Wrong answers
are the gold answers of other problems, gold answers in which one digit or one sign is changed, and
the pairs of NEAR_MISSES. Some of the pairs in which wrong answers are called equal are equal after
all, so all of them are listed under the table for a person to judge. What is called equal among
the hostile answers is counted as well, and so is what takes longer than --deadline.
"""

import json
import os
import random
import re
import resource
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from grading.math_answers import MathGrader
from logs import jsonl

MAX_MEMORY = 8 * 2**30  # bytes of address space for another grader

# Pairs of a gold answer and a wrong answer that is nearly right.
NEAR_MISSES = [
    (r"10^{20}", r"\sqrt{10^{40}+1}"),
    (r"10^{40}", r"\sqrt{10^{80}+1}"),
    (r"\sqrt{2}", "1.41421356"),
    (r"\sqrt{2}", r"\sqrt{2}+10^{-60}"),
    (r"\sqrt{2}", r"\frac{577}{408}"),
    (r"\sqrt{2}+\sqrt{3}", r"\pi"),
    (r"\pi", r"\frac{22}{7}"),
    (r"\pi", "3.14159265"),
    (r"\pi", r"\pi+e^{-1000}"),
    (r"\frac{1}{3}", "0.333333"),
    (r"2^{-200}", r"3^{-200}"),
    (r"10^{-30}", r"\sin(10^{-30})"),
    ("1", r"\tanh(100)"),
    ("640320^3+744", r"e^{\pi\sqrt{163}}"),
    ("0", r"10^{-50}"),
    ("x", r"x+10^{-60}"),
    ("x", r"\sqrt{x^2}"),
    (r"2\ln x", r"\ln x^2"),
    ("(a+b)^2", "a^2+b^2"),
    ("2x+3", "3x+2"),
    ("y=2x+3", "y=2x+3.0000001"),
    ("y=2x+3", "x=2y+3"),
    ("y=2x+3", "2x+3"),
    ("x^2=4", "x=2"),
    ("f(x)", "g(x)"),
    ("x>2", r"x\ge 2"),
    ("(2,1]", r"1\le x>2"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "1,2"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("1,2", "1"),
    ("5", r"\pm 5"),
    ("5", "5,6"),
    ("x=1,y=2", "x=2,y=1"),
    (r"1\pm\sqrt{19}", r"1+\sqrt{19}"),
    (r"(-\infty,2)\cup(3,\infty)", r"(-\infty,2]\cup(3,\infty)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    (r"5\text{ cm}", r"5\text{ m}"),
    ("0.5", r"0.5\%"),
    ("52_8", "52"),
    ("7", "4(3)"),
    ("12", "1 2"),
    ("6-5i", "6+5i"),
    (r"\text{even}", r"\text{odd}"),
    (r"\text{east}", r"\text{seat}"),
    (r"\text{(C)}", r"\text{(B)}"),
]
HOSTILE = [
    "9^{9^{9^{9}}}",
    "9**9**9**9",
    "10^{10^{10^{10}}}",
    "9!!!!!!",
    "999999999!",
    "(x+1)^{99999}",
    r"(1+\sqrt{2})^{99999999}",
    r"\binom{99999999}{4999999}",
    r"\frac{" * 80 + "1" + "}{2}" * 80,
    r"\sqrt{" * 80 + "x" + "}" * 80,
    r"\sqrt{2+" * 60 + "x" + "}" * 60,
    r"\sin(" * 60 + "x" + ")" * 60,
    "+".join(rf"\sqrt[{n}]{{{n}}}" for n in range(2, 30)),
    "(" * 250 + ")" * 250,
    r"\{" * 120 + r"\}" * 120,
    "{" * 10**6,
    r"\boxed{" * 150_000,
    "9" * 10**6,
    "x\0+1",
    "x+\\ud800",
]

# --- The questions, as pairs (gold, answer) -------------------------------------------------------


def rewritten(gold: str) -> Iterator[str]:
    """Yield the same answer in other notations."""
    if r"\frac" in gold:
        yield gold.replace(r"\frac", r"\dfrac")
    if r"\left" in gold:
        yield gold.replace(r"\left", "").replace(r"\right", "")
    elif re.fullmatch(r"[(\[].*[)\]]", gold):
        yield rf"\left{gold[:-1]}\right{gold[-1]}"
        yield gold.replace(",", " , ")
    if re.fullmatch(r"\d+", gold):
        yield f"{gold}.0"
        yield f"x = {gold}"
        yield f"{int(gold):,}"
    is_expression = re.search("[a-z]", gold) and re.fullmatch(r"[-+^{}()\w ]+", gold)
    if is_expression and "k" not in gold:
        yield f"k = {gold}"
    simple_fraction = re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", gold)
    if simple_fraction:
        sign, numerator, denominator = simple_fraction.groups()
        quotient = int(numerator) / int(denominator)
        yield f"{sign}{numerator}/{denominator}"
        yield rf"\frac{{{sign}{2 * int(numerator)}}}{{{2 * int(denominator)}}}"
        yield rf"{gold} \approx {sign}{quotient:.3f}"
        if quotient == round(quotient, 3):
            yield f"{sign}{quotient}"
    multiple_of_root = re.fullmatch(r"(\d+)(\\sqrt\{\d+\})", gold)
    if multiple_of_root:
        factor, root = multiple_of_root.groups()
        yield rf"{root} \cdot {factor}"


def altered(gold: str) -> Iterator[str]:
    """Yield answers that differ from this one in a digit or in a sign."""
    for digit in re.finditer(r"\d", gold):
        other_digit = str((int(digit[0]) + 1) % 10)
        yield gold[: digit.start()] + other_digit + gold[digit.end() :]
    for sign in re.finditer(r"(?<=[\w})])\s*[-+]", gold):
        other_sign = "+" if "-" in sign[0] else "-"
        yield gold[: sign.start()] + other_sign + gold[sign.end() :]


def make_questions(golds: list[str]) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of gold and answer by what they are, right ones first."""
    random_numbers = random.Random(0)
    others = []
    for gold in golds:
        different_golds = [other for other in golds if other != gold]
        others += [(gold, other) for other in random_numbers.sample(different_golds, 5)]
    return {
        "right: gold answers": [(gold, gold) for gold in golds],
        "right: other notations": [(gold, text) for gold in golds for text in rewritten(gold)],
        "wrong: other golds": others,
        "wrong: a digit or sign changed": [
            (gold, text) for gold in golds for text in altered(gold)
        ],
        "wrong: near misses": NEAR_MISSES,
        "wrong: hostile": [("x+1", text) for text in HOSTILE],
    }


# --- The graders ----------------------------------------------------------------------------------


def math_verify_equal(gold: str, answer: str) -> bool:
    from math_verify import parse, verify

    return verify(parse(f"${gold}$"), parse(rf"$\boxed{{{answer}}}$"))


def trl_equal(gold: str, answer: str) -> bool:
    from trl.rewards import accuracy_reward

    completion = [{"role": "assistant", "content": rf"$\boxed{{{answer}}}$"}]
    return accuracy_reward([completion], [f"${gold}$"]) == [1.0]


def serve(grader_name: str) -> None:
    """Answer questions on standard input, each a JSON line [gold, answer]."""
    are_equal = {"math-verify": math_verify_equal, "TRL": trl_equal}[grader_name]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    for line in sys.stdin:
        gold, answer = json.loads(line)
        try:
            verdict = "equal" if are_equal(gold, answer) else "different"
        except Exception:
            verdict = "error"
        print(verdict, file=replies, flush=True)


class OtherGrader:
    """A grader in a process of its own, which is killed when it takes longer than the deadline."""

    def __init__(self, name: str, python: str, deadline: float):
        self.command = [python, __file__, "serve", name]
        self.deadline = deadline
        self._start()

    def _start(self):
        self._server = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )

    def grade(self, gold: str, answer: str) -> str:
        """Return "equal", "different", "error", "hang" or "crash"."""
        self._server.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
        has_reply = select.select([self._server.stdout], [], [], self.deadline)[0]
        reply = self._server.stdout.readline().decode().strip() if has_reply else "hang"
        if reply in ("hang", ""):
            self._server.kill()
            self._server.wait()
            self._start()
        return reply or "crash"


# --- The command line and its table ---------------------------------------------------------------


def measure(grader, questions: list[tuple[str, str]]) -> tuple[list[str], list[float]]:
    """Return a grader's verdict on each question, and the seconds that it took."""
    verdicts = []
    seconds = []
    for gold, answer in questions:
        start = time.perf_counter()
        verdicts.append(grader.grade(gold, answer))
        seconds.append(time.perf_counter() - start)
    return verdicts, seconds


def parse_args(argv):
    from config import ArgumentParser

    parser = ArgumentParser(description="How often graders of MATH answers are wrong.")
    data_help = "MATH-500 as JSON lines; default: data/math/math500.jsonl below $GRPO_LITE_DATA"
    parser.add_argument("--data", type=Path, help=data_help)
    trl_help = "python of an environment with trl and math-verify; default: no TRL"
    parser.add_argument("--trl_python", help=trl_help)
    deadline_help = "seconds after which another grader is killed; this project's has its own limit"
    parser.add_argument("--deadline", type=float, default=30.0, help=deadline_help)
    args = parser.parse_args(argv)
    if args.data is None and "GRPO_LITE_DATA" in os.environ:
        args.data = Path(os.environ["GRPO_LITE_DATA"]) / "data" / "math" / "math500.jsonl"
    if args.data is None or not args.data.is_file():
        parser.error(f"there is no file {args.data or 'to read'}: name one by --data")
    args.trl_version = None
    if args.trl_python:
        args.trl_version = version_of_trl(args.trl_python)
        if not args.trl_version:
            parser.error(f"{args.trl_python} is no python with trl: make an environment with it")
    return args


def version_of_trl(python: str) -> str | None:
    """Return the version of trl in an environment; None where it is not there."""
    code = "from importlib.metadata import version; print(version('trl'))"
    try:
        run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def main(argv=None):
    args = parse_args(argv)
    golds = [row["answer"] for row in jsonl.read(args.data)]
    graders = {
        "GRPO-Lite": MathGrader(),
        f"math-verify {version('math-verify')}": OtherGrader(
            "math-verify", sys.executable, args.deadline
        ),
    }
    if args.trl_python:
        graders[f"TRL {args.trl_version}"] = OtherGrader("TRL", args.trl_python, args.deadline)
    for grader in graders.values():
        grader.grade("x+1", "1+x")  # it loads its libraries

    print(f"| answers | n | {' | '.join(graders)} |\n|---|---:|{'---:|' * len(graders)}")
    called_equal = []  # (name of the grader, gold, answer)
    seconds_by_grader = {name: [] for name in graders}
    for kind, questions in make_questions(golds).items():
        cells = []
        for name, grader in graders.items():
            verdicts, seconds = measure(grader, questions)
            seconds_by_grader[name] += seconds
            num_equal = verdicts.count("equal")
            if kind.startswith("right"):
                cells.append(f"{len(questions) - num_equal} refused")
                continue
            num_stuck = verdicts.count("hang") + verdicts.count("crash")
            stuck = f", {num_stuck} hang or crash" if num_stuck else ""
            cells.append(f"{num_equal} equal{stuck}")
            for (gold, answer), verdict in zip(questions, verdicts, strict=True):
                if verdict == "equal":
                    called_equal.append((name, gold, answer))
        print(f"| {kind} | {len(questions)} | {' | '.join(cells)} |", flush=True)
    num_questions = sum(map(len, make_questions(golds).values()))
    medians = []
    maxima = []
    for seconds in seconds_by_grader.values():
        medians.append(f"{1000 * median(seconds):.1f} ms")
        maxima.append(f"{max(seconds):.1f} s")
    print(f"| time: median | {num_questions} | {' | '.join(medians)} |")
    print(f"| time: longest | {num_questions} | {' | '.join(maxima)} |")
    print("\nWrong answers that were called equal, as `gold` | `answer`:\n")
    for name, gold, answer in called_equal:
        print(f"- {name}: `{gold[:80]}` | `{answer[:80]}`")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        sys.exit(main())
