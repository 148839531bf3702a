r"""Is an answer equal to the gold answer as mathematics?

`MathGrader().grade(gold, answer)` says "equal", "different", "timeout" or "failed". What is not equal may never score;
a miss is the lesser evil. So what has a structure (tuples, intervals, sets, unions, matrices, units, assignments,
words) is compared by the plain rules below, numbers exactly as fractions, and only single expressions such as `x^2+1`
go to math-verify, whose "equal" must then hold numerically to 40 digits as well. The rules:

- brackets count: (1,2) is neither [1,2] nor 1,2; tuples are ordered; `1,2`, `2 and 1` and `\{2,1\}` are the same set;
- `x=5`, `x \in [1,2]`, `1 \le x \le 2` are their value or interval, but two different names are never equal;
- a unit is a label: `5 cm` equals 5 and `5 centimeters`, never `5 m`; so 50\% equals 50 and not 0.5;
- decimals are exact: 0.333 is not 1/3; words are compared as words; what reads in two ways (`1/2x`) equals only itself.

Sympy can hang inside C code or eat all memory on a short input (`9^{9^{9^9}}`), and a signal stops it only in the main
thread. So expressions are compared in another process: a server that has math-verify loaded, forks once per question,
with an alarm that ends the fork in time, and ends when its input closes, as it does when its owner dies. POSIX only.
"""

import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 500  # characters; a longer answer equals the gold only if it is the same text
MEMORY = 2 * 2**30  # bytes of address space for one question

# --- One notation: from the many ways to write an answer to one plain LaTeX without spaces; text stands in "quotes"

UNICODE = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\cdot ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "±": r"\pm ",
        "°": r"^\circ ",
        "²": "^2",
        "³": "^3",
        "θ": r"\theta ",
        "⟨": "(",
        "⟩": ")",
        '"': "",
        "\xa0": " ",
        "\0": "\ufffd",
    }
)
FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln"
ONE = r"(\d|[a-zA-Z]|\\pi)"  # what LaTeX takes as an argument without braces
REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"√\s*(\d+|[a-z])", r"\\sqrt{\1}"),
        (r"√", r"\\sqrt "),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![a-zA-Z])", ""),
        (r"(?<=\d)(?:,\\!\s*|\{,\}|\\[,!;]\s?)(?=\d{3}(?!\d))", ""),  # 1{,}000 and 10,\!080
        (r"(?<!\\)\\[,;:! ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:text|mbox|hbox|mathrm|textrm|textbf|textit|mathbf|mathit)\s*\{([^{}]*)\}", r'"\1"'),
        (
            r"\\(?:lbrace|rbrace)(?![a-zA-Z])",
            lambda match: r"\{" if match[0] == r"\lbrace" else r"\}",
        ),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\(?:leqslant|leq|le)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:geqslant|geq|ge)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:times|cdot|ast)(?![a-zA-Z])", r"\\cdot "),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
        (rf"(?<![\\a-zA-Z])(sqrt|pi|theta|{FUNCTIONS})(?![a-zA-Z])", r"\\\1 "),
        (r"(?<![\\a-zA-Z])(?:infinity|inf)(?![a-zA-Z])", r"\\infty "),
        (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),
        (r"\^\s*\{\s*\\circ\s*\}", r"^\\circ "),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (rf"(\\sqrt(?:\[\d\])?)\s*{ONE}(?!\d)", r"\1{\2}"),
        (rf"\\frac\s*{ONE}(?!\d\d)", r"\\frac{\1}"),
        (rf"(\\frac\{{[^{{}}]*\}})\s*{ONE}(?!\d)", r"\1{\2}"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"\^\s*(-?\d+|[a-zA-Z])", r"^{\1}"),
        (r"_\s*(\d+|[a-zA-Z])", r"_{\1}"),
        (r"(?<![\d.^_])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})"),  # a mixed number
        (r"(?<![\d.^_/])(\d+)\s+(\d+)/(\d+)(?![\d.])", r"(\1+\\frac{\2}{\3})"),
        (
            r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])|(\d)\s+(?=[\d.])",
            r"\1\2\0",
        ),  # the spaces that mean something
        (r"\s+", ""),
        (r"\0", " "),
        (r"(?<=[(\[,=])\+", ""),
    ]
]
INEQUALITY = re.compile(r"[<>≤≥]|\\(?:[lg]t|[lg]e|[lg]eq|[lg]eqslant)(?![a-zA-Z])")


def normalize(text: str) -> str:
    """`text` in one notation, so that answers which differ only in dress become the same string."""
    either = r" \cup " if INEQUALITY.search(text) else ","
    for word, separator in ("or", either), ("and", ","):
        spelled = rf",?\s*(?:\\(?:text|mbox)\{{\s*{word}\s*\}}|(?<![a-zA-Z\\]){word}(?![a-zA-Z]))"
        text = re.sub(spelled, lambda _, separator=separator: separator, text)
    dollars = re.compile(
        r"(?<!\\)\$"
    )  # an even number of them encloses mathematics, an odd one is money
    text = dollars.sub("" if len(dollars.findall(text)) % 2 == 0 else r"\\$", text)
    text = re.sub(r"(?<!\\)\\[()\[\]]", "", text)  # \( \) \[ \] enclose mathematics too
    text = text.translate(UNICODE)
    if not re.search(r"[(\[]|\\\{", text):  # inside brackets a comma separates
        text = re.sub(
            r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)",
            lambda match: match[0].replace(",", ""),
            text,
        )
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    return text.rstrip(".").removeprefix("+")


# --- Words, numbers, units: what needs no algebra. From here on every text is normalized ----------

DECIMAL = r"[-+]?(?:\d+\.?\d*|\.\d+)"
EXACT_NUMBER = re.compile(
    rf"(?P<whole>{DECIMAL})(?:/(?P<below>{DECIMAL}))?"
    rf"|(?P<sign>[-+]?)(?:\\frac\{{(?P<top>{DECIMAL})\}}\{{(?P<bottom>{DECIMAL})\}}"
    r"|\((?P<integer>\d+)\+\\frac\{(?P<part>\d+)\}\{(?P<parts>\d+)\}\))",
    re.ASCII,
)


def exact_number(text: str) -> Fraction | None:
    """The value of a decimal, fraction or mixed number, None for anything else."""
    match = EXACT_NUMBER.fullmatch(text)
    if match is None:
        return None
    whole, below, sign, top, bottom, integer, part, parts = match.groups()
    terms = (
        [(whole, below or "1")]
        if whole
        else [(top, bottom)]
        if top
        else [(integer, "1"), (part, parts)]
    )
    if any(Fraction(denominator) == 0 for _, denominator in terms):
        return None
    value = sum(Fraction(numerator) / Fraction(denominator) for numerator, denominator in terms)
    return -value if sign == "-" else value


# A line is a unit and its other names; what follows a bar is a unit only inside \text{}: a bare `5m` is 5 times m.
UNITS = [
    r"^\circ degrees degree deg",
    r"\% % percent",
    "dollars dollar",
    "cents cent",
    "units unit",
    "mph milesperhour",
    "mm millimeters millimeter",
    "cm centimeters centimeter centimetres",
    "km kilometers kilometer",
    "meters meter metres | m",
    "inches inch in",
    "feet foot ft",
    "yards yard yd",
    "miles mile | mi",
    "seconds second sec | s",
    "minutes minute min",
    "hours hour hr hrs | h",
    "days day",
    "weeks week",
    "months month",
    "years year",
    "grams gram | g",
    "kg kilograms kilogram",
    "pounds pound lb lbs",
    "ounces ounce oz",
    "liters liter litres | L",
    "gallons gallon",
]
UNIT_OF = {name: line.split()[0] for line in UNITS for name in line.replace("|", "").split()}


def _any_of(names: Iterable[str]) -> str:
    return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))


POWER = r"(?:square|sq\.?|(?P<cubic{0}>cubic))"
UNIT = re.compile(
    r'(?:(?:(?<![a-zA-Z\\"])|(?<=\\pi ))'
    rf"(?P<power>{POWER.format('')})?(?P<bare>{_any_of(name for line in UNITS for name in line.split('|')[0].split())})"
    rf'|"(?P<quoted_power>{POWER.format("_quoted")})?(?P<quoted>{_any_of(UNIT_OF)})\.?")'
    r"(?:\^\{(?P<exponent>[23])\})?$"
)


def split_unit(text: str) -> tuple[str, str]:
    r"""`15"cm"^{2}` -> ("15", "cm^2"), `\$5` -> ("5", "dollars"), `x` -> ("x", "")."""
    if re.match(r"-?\\\$", text):
        value, unit = split_unit(text.replace(r"\$", "", 1))
        return value, unit or "dollars"
    match = UNIT.search(text)
    if match is None or match.start() == 0:
        return text, ""
    power = match["power"] or match["quoted_power"]
    exponent = match["exponent"] or ("" if not power else "3" if power == "cubic" else "2")
    unit = UNIT_OF[match["bare"] or match["quoted"]]
    return text[: match.start()].rstrip(), f"{unit}^{exponent}" if exponent else unit


def plain_verdict(gold: str, answer: str) -> bool | None:
    """The verdict where plain means decide, None where structure or algebra must be looked at."""
    if not gold or not answer:
        return False
    words = [text.replace('"', "") for text in (gold, answer)]
    if words[0] == words[1]:
        return True
    if all(re.fullmatch(r"\(?[A-Z]\)?", word) for word in words):  # a multiple choice
        return words[0].strip("()") == words[1].strip("()")
    if all(re.fullmatch(r"[a-zA-Z]{3,}|no", word, re.IGNORECASE) for word in words):
        return words[0].lower() == words[1].lower()
    (gold, gold_unit), (answer, answer_unit) = split_unit(gold), split_unit(answer)
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return False
    numbers = exact_number(gold), exact_number(answer)
    return None if None in numbers else numbers[0] == numbers[1]


# --- Structure: tuples, intervals, sets, unions, matrices, assignments ----------------------------

NAMED = re.compile(
    r"(\\?[a-zA-Z]+(?:_\{\w+\})?(?:\([a-zA-Z]\))?|\([a-zA-Z](?:,[a-zA-Z])+\))(=|\\in ?)([^=]*)"
)
MATRIX = re.compile(r"\\begin\{([pbv])matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
BRACKETS = re.compile(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})", re.DOTALL)
GREEK = "alpha|beta|gamma|theta|lambda|mu|phi|omega"


@dataclass
class Form:
    """An answer's shape: `kind` is "" for one expression (its only item), else "set", "union", "(]", "matrix 2x2"..."""

    kind: str
    items: list[str]
    name: str = ""  # of the variable or function whose value or range this is


def split_top(text: str, separator: str) -> list[str] | None:
    """The parts between separators that stand outside all brackets; None where brackets close that were not opened."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        depth += (text[position] in "([{") - (text[position] in ")]}")
        if depth < 0:
            return None
        if depth == 0 and text.startswith(separator, position):
            parts.append(text[start:position].strip())
            start = position = position + len(separator)
        else:
            position += 1
    return parts + [text[start:].strip()]


def read_inequality(text: str) -> Form | None:
    r"""`1\le x<2` or `x>1` as the interval of x, None for anything else."""
    parts = [part.strip() for part in re.split(r"(<|>|\\[lg]e(?![a-zA-Z]))", text)]
    if {">", r"\ge"} & set(parts):
        parts = [{">": "<", r"\ge": r"\le", "<": ">"}.get(part, part) for part in reversed(parts)]
    if len(parts) == 3:  # one-sided
        parts = (
            [r"-\infty", "<", *parts]
            if re.fullmatch("[a-zA-Z]", parts[0])
            else [*parts, "<", r"\infty"]
        )
    if (
        len(parts) != 5
        or not {parts[1], parts[3]} <= {"<", r"\le"}
        or not re.fullmatch("[a-zA-Z]", parts[2])
    ):
        return None
    low, opening, name, closing, high = parts
    return Form(
        ("(" if opening == "<" else "[") + (")" if closing == "<" else "]"), [low, high], name
    )


def read(text: str) -> Form:
    """The shape of a text."""
    name = ""
    if match := NAMED.fullmatch(text):
        letters = re.sub(rf"\\(?!{GREEK})[a-zA-Z]+", "", split_unit(match[3])[0])
        # `x=5` is its value; `y=2x` stays an equation
        if match[2] != "=" or "(" in match[1] or not re.search(r"[a-df-hj-zA-Z]|\\", letters):
            name, text = match[1], match[3]
    if form := read_inequality(text):
        return form
    if (match := MATRIX.fullmatch(text)) and r"\begin" not in match[2]:
        rows = [row.split("&") for row in re.split(r"\\\\", match[2]) if row]
        kind = ("determinant " if match[1] == "v" else "matrix ") + "x".join(
            str(len(row)) for row in rows
        )
        return Form(kind, [cell for row in rows for cell in row], name)
    match = BRACKETS.fullmatch(text)
    inside = match and split_top(match[2], ",")
    if inside and match[1] == r"\{" and match[3] == r"\}":
        return _unordered("set", inside, name)
    if inside and len(inside) > 1 and "\\" not in match[1] + match[3]:
        return Form(match[1] + match[3], inside, name)
    if inside and match[1] + match[3] == "()":
        inner = read(match[2])
        return Form(inner.kind, inner.items, name or inner.name)
    for kind, separator in ("union", r"\cup"), ("set", ","):
        parts = split_top(text, separator)
        if parts and (len(parts) > 1 or kind == "set" and text.count(r"\pm") == 1):
            return _unordered(kind, parts, name)
    return Form("", [text], name)


def _unordered(kind: str, items: list[str], name: str) -> Form:
    r"""A set or union; `1 \pm x` is two items; `x=1,y=2` is not a set of values but of assignments."""
    items = [
        item.replace(r"\pm", sign).removeprefix("+")
        for item in items
        for sign in ("+-" if item.count(r"\pm") == 1 else [r"\pm"])
    ]
    names = {read(item).name for item in items} - {""}
    return Form(kind + " of several names" * (len(names) > 1), items, name)


def equal(gold: str, answer: str) -> bool:
    """Whether two normalized texts are equal; hands single expressions to math-verify, so call it where it may hang."""
    verdict = plain_verdict(gold, answer)
    if verdict is not None:
        return verdict
    form, other = read(gold), read(answer)
    if form.kind != other.kind or len(form.items) != len(other.items):
        return False
    if form.name and other.name and form.name != other.name:
        return False
    if form.kind.startswith(("set", "union")):
        unmatched = list(other.items)
        for item in form.items:
            match = next((candidate for candidate in unmatched if equal(item, candidate)), None)
            if match is None:
                return False
            unmatched.remove(match)
        return True
    if form.kind or (form.items, other.items) != ([gold], [answer]):
        return all(
            equal(item, candidate) for item, candidate in zip(form.items, other.items, strict=True)
        )
    return same_expression(split_unit(gold)[0], split_unit(answer)[0])


# --- Algebra: math-verify, and a check of its "equal" ---------------------------------------------

COMMAND = re.compile(rf"\\(?:frac|sqrt|binom|cdot|pi|{FUNCTIONS}|{GREEK})(?![a-zA-Z])")
EXPRESSION = re.compile(r"[a-zA-Z0-9.+\-^_{}()\[\]|/!= ]+", re.ASCII)
UNCLEAR = re.compile(
    r"\d [\d.]|\d\.(?!\d)|\)\d|\}(?<!_\{\w\})(?<!_\{\d\d\})\d|[\d)}]_|\^(?!\{)"  # 1 2, 3., (x)2 but not \log_{2}8, 52_8
    r"|(?<!\\sqrt)\[|\\(?:sqrt|frac)(?![{\[])"  # [x], \sqrt13
    rf"|\\(?:{FUNCTIONS})\^\{{-"  # \sin^{-1}
    r"|/(?:\d+(?!\d)|[a-zA-Z]|\([^()]*\)|\\[a-z]+(?![a-z])(?:\{[^{}]*\})*)(?:\^\{[^{}]*\})?(?=[^-+)}\]=|])"  # 1/2x
)


def is_clear(gold: str, answer: str) -> bool:
    """Whether both are expressions in known commands that every reader would read in the same way."""
    bare = [COMMAND.sub(" ", text) for text in (gold, answer)]
    if not all(map(EXPRESSION.fullmatch, bare)) or any(map(UNCLEAR.search, (gold, answer))):
        return False
    if any(
        text.count("{") != text.count("}") or re.search(r"[a-zA-Z]{4,}|[a-zA-Z]\d", text)
        for text in bare
    ):
        return False
    letters = set(re.findall("[a-zA-Z]", "".join(bare)))
    one_case = len({letter.lower() for letter in letters}) == len(
        letters
    )  # math-verify takes R and r for one
    return one_case and gold.count("=") == answer.count("=") < 2


def same_expression(gold: str, answer: str) -> bool:
    """Whether two expressions or equations are equal, numerically and by math-verify."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    if not is_clear(gold, answer):
        return False
    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(basic_latex=False, boxed="none")
    )
    parsed = []
    for text in gold, answer:
        text = re.sub(
            r"(\d*)\.(\d+)",
            lambda match: rf"\frac{{{match[1]}{match[2]}}}{{1{'0' * len(match[2])}}}",
            text,
        )
        text = re.sub(
            r"(?<=[\d)])(?=\(|\\frac)", r"\\cdot ", text
        )  # math-verify takes 4(3) for a mixed number, 7
        parsed.append(
            parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
        )
    return (
        all(parsed) and _agree(parsed[0][0], parsed[1][0]) and verify(*parsed, timeout_seconds=None)
    )


def _agree(left, right) -> bool:
    """Whether two sympy expressions agree at three points to 40 digits: math-verify itself is content with 15."""
    from sympy import Eq

    if isinstance(left, Eq) and isinstance(
        right, Eq
    ):  # equations are equal where their residuals are proportional
        ratios = _values((left.lhs - left.rhs) / (right.lhs - right.rhs))
        return all(
            ratio.is_finite and ratio != 0 and abs(ratio / ratios[0] - 1) < 1e-40
            for ratio in ratios
        )
    return all(
        gap == 0 or gap.is_number and gap.is_finite and abs(gap) < 1e-40 * max(1, abs(value))
        for gap, value in zip(_values(left - right), _values(left), strict=True)
    )


def _values(expression) -> list:
    """A sympy expression at three points, to 50 digits."""
    from sympy import Rational

    symbols = sorted(expression.free_symbols, key=str)
    points = [
        {symbol: Rational(7 * k + 5, 2 * i + 9) for i, symbol in enumerate(symbols)}
        for k in (-2, 0, 1)
    ]
    return [expression.subs(point).evalf(50) for point in points]


# What each fork would otherwise load and cache for itself: sympy's lazy imports, the parser's automaton.
WARM_UP = [
    ("(a+5)(b-2)", r"ab+5b-2a-\frac{20}{2}"),
    (r"\frac{\sqrt{2}}{2}", r"2^{-1/2}"),
    ("y=2x+3", r"x=\frac{1}{2}y-3\pi"),
    (r"\sin^{2}x+|x|", r"1-\cos^{2}(2x)+5!"),
    (r"e^{x}\log_{2}x", r"e\ln x\cdot 3^{n}"),
    ("f(x_{1})+2i", r"6\theta-5i"),
]

VERDICTS = {0: "equal", 1: "different", -signal.SIGALRM: "timeout"}  # by a fork's exit code


def serve() -> None:
    """Answer questions, one JSON line [gold, answer, seconds] each on standard input, until it closes."""
    replies = os.fdopen(os.dup(1), "w")  # a channel of our own: libraries print to standard output
    os.dup2(2, 1)
    signal.signal(
        signal.SIGPIPE, signal.SIG_DFL
    )  # end in silence when nobody wants the reply any more
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whatever the owner was started with
    logging.disable()  # math-verify warns that its timeouts are off
    for question in WARM_UP:
        equal(*question)
    for line in sys.stdin.buffer:
        *question, seconds = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 2
            try:
                signal.setitimer(
                    signal.ITIMER_REAL, seconds
                )  # without a handler SIGALRM ends also what hangs in C
                if sys.platform == "linux":
                    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                code = 0 if equal(*question) else 1
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(VERDICTS.get(code, "failed"), file=replies, flush=True)


class MathGrader:
    """Compares answers; may be shared by threads. Its server starts at once and loads while the caller goes on.

    seconds: wall time for one question.
    """

    def __init__(self, seconds: float = 1.7):
        self.seconds = seconds
        self._lock = threading.Lock()
        self._start()

    def grade(self, gold: str, answer: str) -> str:
        """Return "equal", "different", "timeout" or "failed" (out of memory, too deeply nested)."""
        if len(gold) > MAX_LENGTH or len(answer) > MAX_LENGTH:
            return "equal" if gold.strip() and gold.strip() == answer.strip() else "different"
        gold, answer = normalize(gold), normalize(answer)
        verdict = plain_verdict(gold, answer)
        if verdict is not None:
            return "equal" if verdict else "different"
        with self._lock:
            return self._ask(json.dumps([gold, answer, self.seconds]).encode() + b"\n")

    def _start(self) -> None:
        command = [sys.executable, os.path.abspath(__file__)]
        # A session of its own, so that Ctrl-C in a terminal does not reach it. It ends when these pipes are closed.
        self._server = subprocess.Popen(
            command, stdin=-1, stdout=-1, bufsize=0, start_new_session=True
        )

    def _ask(self, question: bytes) -> str:
        for _ in range(2):  # the server may have been killed since the last question
            try:
                self._server.stdin.write(question)
                reply = self._server.stdout.readline().decode().strip()
            except BrokenPipeError:
                reply = ""
            except (
                BaseException
            ):  # interrupted before the reply, which must not answer the next question
                self._start()
                raise
            if reply:
                return reply
            self._start()
        raise ChildProcessError(
            "the grading process ends at once, for the reason above (is math-verify installed?)"
        )


if __name__ == "__main__":
    serve()
