r"""Decide whether two answers are equal as mathematics: math-verify, with a guard before it.

math-verify reads the LaTeX of both and compares what it read. Alone it accepts some wrong answers,
and training finds any wrong answer that scores, whereas a right answer that is missed costs little.
So the guard first asks for

    the same units, where both answers have one         5 cm is not 5 m
    the same brackets and number of items               (1,2) is not 1,2
    the same variables, and an equation for an equation x is not X, y=2x+3 is not 2x+3
    the same words                                      east is not seat; their case is free
    numbers that are exact or agree in 1,000 digits     1/3 is not 0.333333, but 2^{10} is 1024
    a text that can be read in one way                  7 is not 4(3), and 1/2x is only itself
    known commands                                      \max(3,5) is a question, not an answer

A missing unit or percent sign is forgiven, since gold answers often leave it out, except that of a
number of at most 1, where 0.5 might mean 50\%. i and e are always numbers. Some right answers are
refused: rounded ones, sentences, x<2 \text{ or } x>3 for a union of intervals, qp for pq (letters
alone are words), and sets with an item that stands twice.

As a script this is the server of math_answers.MathGrader.
"""

import json
import logging
import re
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from latex2sympy2_extended.sets import FiniteSet
from math_verify import verify
from sympy import Basic, Set, Tuple, preorder_traversal

MAX_MEMORY = 2 * 2**30  # bytes of address space
MAX_RESIDENT = 2**29  # bytes of memory; a server that holds more ends after its reply
DIGITS = 1000  # in which two numbers must agree where sympy finds no proof

# The names of one unit are separated by spaces, and an s may follow each.
UNITS = (
    "cm centimeter centimetre|mm millimeter|km kilometer|m meter metre|in inch inche|ft foot feet"
    "|yd yard|mi mile|s sec second|min minute|h hr hour|day|week|month|year|g gram|kg kilogram"
    "|lb pound|oz ounce|L liter litre|gallon|mph|dollar|cent|unit|degree deg|percent"
)
UNIT_OF = {}  # {any name of a unit: its first name}
for names in UNITS.split("|"):
    first_name, *_ = names.split()
    UNIT_OF |= dict.fromkeys(names.split(), first_name)
# A single letter is a unit inside \text{} only: a bare `5m` is 5 times m.
BARE_UNIT = "|".join(sorted((name for name in UNIT_OF if len(name) > 1), key=len, reverse=True))

UNICODE = {"−": "-", "–": "-", "×": r"\cdot ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty "}
UNICODE |= {"≤": r"\le ", "≥": r"\ge ", "≈": r"\approx ", "∪": r"\cup ", "∈": r"\in "}
UNICODE |= {"±": r"\pm ", "√": r"sqrt", "°": r"^\circ ", "²": "^2", "³": "^3"}
# One dollar sign before a number is money. math-verify drops all of them.
MONEY = re.compile(r"(-?)\\?\$ ?(?=[.\d])([^$]*)")
# Rewrites after those of math-verify, which removes \left and \right, makes \frac{1}{2} of \dfrac12
# and a comma of \text{ or }.
NOTATIONS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:text|[mh]box) ?\{\s*([^{}]*?)\s*\}", r"\\text{\1}"),
        (r"(?<=\d)\\[,;: ]\s*(?=\d{3}(?!\d))", ""),  # 10\,080
        (r"(?<!\\)\\[()\[\]]", ""),  # \( and \) enclose mathematics
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\s+", " "),
        (r"(?<![\\a-zA-Z])(pi|sin|cos|tan|log|ln)(?![a-zA-Z])", r"\\\1 "),
        (r"(?<!\\)sqrt ?(\d+|[a-z](?![a-z]))", r"\\sqrt{\1}"),
        (r"([_^]) ?(\d+|[a-zA-Z]) ?", r"\1{\2}"),
        (r"(?<![\d.^_/])(\d+) (\d+)/(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
        (r"\\approx.*", ""),  # what stands on its right is rounded
        (r"\^(?:\\circ|\{\\circ\}) ?\.?$", r"\\text{degree}"),
        (r"\\?% ?\.?$", r"\\text{percent}"),
        (rf"(?<=[\d}}]) ((?:square |cubic )?(?:{BARE_UNIT})s?)(?=\.?$|\^)", r"\\text{\1}"),
        (r"(?<![a-zA-Z\d,]) | (?![a-zA-Z\d.])|\.$", ""),  # spaces that mean nothing, a full stop
        (r"^\{([^{},]*)\}$", r"\1"),
    ]
]

# What math-verify's rewrites would change: f' loses its prime, 0.3\ldots its dots, and (5)_{2}
# becomes 5!/3!. \frac123 and \sqrt13 mean different things to different writers.
MISREAD = re.compile(r"['\"]|dots|\)\s*_|\\[dtc]?frac\s*\d\s*\d\d|\\sqrt\s*\d\d")
UNCLEAR = re.compile(
    r"[^a-zA-Z0-9.,;+\-*/^_!=<>|&(){}\[\]\\ ]"
    r"|\d [\d.]|\d\{[\d.]"  # 1 2, and 1{2}, which LaTeX sets as 12
    r"|!!"  # 3!! is 3 or 720
    r"|[\d}i]_"  # 52_{8}, of which math-verify drops the 8
    r"|(?<!\\sqrt)\[[^,\[\]]*\]"  # [x] may be a floor
    # A quotient and a further factor, as in 1/2x
    r"|/(?:\d+(?!\d)|[a-zA-Z]|\([^()]*\)|\\[a-z]+(?![a-z])(?:\{[^{}]*\})*)(?:\^\{\w+\})? ?"
    r"(?:[\w(]|\\(?:frac|sqrt|pi))"
)
# Sums, integrals and the like are questions and no answers, so they are not among these.
COMMANDS = set(r"\frac \sqrt \binom \pi \cdot \times \div \pm \infty \cup \in \circ".split())
COMMANDS |= set(r"\le \leq \ge \geq \lt \gt \log \ln \sin \cos \tan \cot \sec \csc".split())
COMMANDS |= set(r"\arcsin \arccos \arctan \alpha \beta \theta \lambda \mu \phi \omega".split())
COMMANDS |= set(r"\{ \} \\ \begin{pmatrix} \end{pmatrix} \begin{bmatrix} \end{bmatrix}".split())
# A command, or a letter in group 1.
SYMBOL = re.compile(r"\\(?:[a-zA-Z]+(?:\{[pb]matrix\})?|.)|([a-zA-Z])")
# The start of x=5, a_{n}=2n-1, f(x)=x^{2}, (x,y)=(1,2) and x\in [1,2]; group 1 is the variable.
ASSIGNMENT = re.compile(
    r"(?:\\?(?!not)([a-zA-Z]+)(?:_\{\w+\})?(?:\([a-z]\))?|\([a-z](?:,[a-z])+\))"
    r"(?:=|\\in(?![a-z]) ?)"
)
RELATION = re.compile(r"=|\\in(?![a-z])")
INEQUALITY = re.compile(r"[<>]|\\[lg](?:e|eq|t)(?![a-z])")
UNIT = re.compile(r"(.+?) ?\\text\{(square |cubic )?([a-zA-Z]+)\.?\}(?:\^\{([23])\})?")
THOUSANDS = re.compile(r"-?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
# Where a product may start with an integer and go on with another number, as in 4(3).
PRODUCT = re.compile(
    r"(?:\)|\\(?:frac|binom)\{-?\d+\}\{-?\d+\})(?=[\d({]|\\frac|\\binom)|\d(?=[({]|\\binom)"
)


def in_one_notation(text: str) -> str:
    """Return an answer in plain LaTeX, so that many notations of it become the same."""
    text = text.strip().translate(str.maketrans(UNICODE))
    if MONEY.fullmatch(text):
        text = MONEY.sub(r"\1\2\\text{dollar}", text)
    text = normalize_latex(text, NormalizationConfig(malformed_operators=True, boxed="none"))
    for pattern, replacement in NOTATIONS:
        text = pattern.sub(replacement, text)
    return text


def split_unit(text: str) -> tuple[str, str]:
    r"""Split `15\text{cm}^{2}` into "15" and "cm2"; the unit is "" where there is none."""
    match = UNIT.fullmatch(text)
    if match is None:
        return text, ""
    value, power, name, exponent = match.groups()
    unit = UNIT_OF.get(name) or UNIT_OF.get(name.removesuffix("s"))
    if unit is None:
        return text, ""
    if power:
        exponent = "3" if power == "cubic " else "2"
    return value, unit + (exponent or "")


def variables(text: str) -> set[str]:
    """Return the letters of a text but e and i, which are numbers."""
    return {match[1] for match in SYMBOL.finditer(text) if match[1]} - {"e", "i"}


def assigned_value(text: str) -> str:
    r"""Return the 2n-1 of `k=2n-1`, the 1,2 of `x=1,x=2`, and the range of `x \in [1,2]`.

    Any other text is returned as it is. In `n=2n-1` the n is no new variable, and `k=n` may well be
    an answer of its own.
    """
    match = ASSIGNMENT.match(text)
    if match is None:
        return text
    value = text.replace(match[0], "")
    is_new = "=" not in value and match[1] not in variables(value)
    return value if is_new and re.search(r"[-+\d\\]", value) else text


def has_words(text: str) -> bool:
    r"""Whether there is a \text{} or a word of at least four letters."""
    without_commands = SYMBOL.sub(lambda match: match[1] or "", text)
    return r"\text" in text or re.search("[a-zA-Z]{4}", without_commands) is not None


def words_of(text: str, ignore_case: bool) -> str:
    r"""Return a text without \text{} and parentheses: \text{(C)} is C."""
    words = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).replace(" ", "").strip("().")
    return words.casefold() if ignore_case else words


def read(text: str) -> Basic:
    """Return what an answer in one notation means to sympy; any exception if it is unreadable."""
    if THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    text = text.replace(",", ", ")  # 0,100 would be 0.1
    text = re.sub(
        r"(\d*)\.(\d+)",
        lambda match: rf"\frac{{{match[1]}{match[2]}}}{{{10 ** len(match[2])}}}",
        text,
    )
    text = SYMBOL.sub(lambda match: "(I)" if match[0] == "i" else match[0], text)
    # Without the sign of multiplication math-verify takes 4(3) for a mixed number, 7.
    text = PRODUCT.sub(r"\g<0>\\cdot ", text)
    config = ConversionConfig(lowercase_symbols=False)
    return latex2sympy(text, is_real=True, normalization_config=None, conversion_config=config)


def containers(expression: Basic) -> list[str]:
    """Return the kinds of sets, tuples and intervals of which an expression is made.

    Raises ValueError for a set with an item that stands twice.
    """
    kinds = []
    for node in preorder_traversal(expression):
        if isinstance(node, FiniteSet):
            if len(node._unsorted_args) > len(node.args):
                raise ValueError("1,1,2 may be a set or a list")
            kinds.append(f"set of {len(node.args)}")
        elif isinstance(node, (Set, Tuple)):
            kinds.append(type(node).__name__)
    return sorted(kinds)


def are_equal(gold: str, answer: str) -> bool:
    """Whether an answer equals the gold answer; any exception if one of them is unreadable."""
    if MISREAD.search(gold) or MISREAD.search(answer):
        return False
    gold = in_one_notation(gold)
    answer = in_one_notation(answer)
    if gold == answer:
        return gold != ""
    gold, gold_unit = split_unit(gold)
    answer, answer_unit = split_unit(answer)
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return False

    gold_is_relation = RELATION.search(gold) is not None
    answer_is_relation = RELATION.search(answer) is not None
    if answer_is_relation and not gold_is_relation:
        answer = assigned_value(answer)
    elif gold_is_relation and not answer_is_relation and not variables(assigned_value(gold)):
        gold = assigned_value(gold)
    if gold.count("=") != answer.count("="):
        return False

    if has_words(gold) or has_words(answer) or re.fullmatch("[a-zA-Z]+", gold):
        ignore_case = has_words(gold)
        return words_of(gold, ignore_case) == words_of(answer, ignore_case)
    commands = {match[0] for match in SYMBOL.finditer(gold + answer) if not match[1]}
    if commands - COMMANDS or UNCLEAR.search(gold) or UNCLEAR.search(answer):
        return False
    num_inequalities = sum(INEQUALITY.search(text) is not None for text in (gold, answer))
    if num_inequalities != 1 and variables(gold) != variables(answer):
        return False

    gold = read(gold)
    answer = read(answer)
    have_same_containers = containers(gold) == containers(answer)
    if num_inequalities == 0 and not have_same_containers:
        return False
    if gold_unit != answer_unit and "percent" in (gold_unit, answer_unit) and 0 < abs(gold) <= 1:
        return False  # 0.5 may mean 50\% or 0.5\%
    return verify(
        gold,
        answer,
        float_rounding=DIGITS,
        numeric_precision=DIGITS,
        allow_set_relation_comp=True,  # x > 2 is an interval
        timeout_seconds=None,
    )


def serve(channel: Connection) -> None:
    """Answer questions [gold, answer, seconds] by a verdict until nobody asks.

    SIGPROF ends this process where a question takes more CPU time than that, even inside C code.
    """
    logging.disable()  # math-verify warns that its own time limit is off
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    while True:
        gold, answer, seconds = json.loads(channel.recv_bytes())
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            verdict = "equal" if are_equal(gold, answer) else "different"
        except Exception:  # latex2sympy raises nothing narrower for what it cannot read
            verdict = "failed"
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.send_bytes(verdict.encode())
        if sys.platform == "linux":
            # What is kept in caches would be missing for the next questions. (ru_maxrss is no
            # measure of it: a process begins with its parent's.)
            num_pages = int(Path("/proc/self/statm").read_text().split()[1])
            if num_pages * resource.getpagesize() > MAX_RESIDENT:
                return


if __name__ == "__main__":
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, ConnectionError):  # the owner has closed the channel, or has died
        pass
