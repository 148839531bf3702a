r"""Decide whether an answer equals the gold answer as mathematics.

`MathGrader().grade(gold, answer)` returns "equal", "different", "timeout" or "failed". A wrong
answer must never score; to miss a right one is the lesser evil. So whatever has a structure
(tuples, intervals, sets, unions, matrices, units, assignments, words) is compared by the plain
rules below, and numbers are compared exactly, as fractions. Only single expressions such as
`x^2+1` go to math-verify, which reads them. Two of them are equal where it can be proved that their
difference is 0. That both agree in many digits is no proof.

The rules:

- Brackets count: (1,2) is neither [1,2] nor 1,2.
- Tuples are ordered, sets are not: `1,2`, `2 and 1` and `\{2,1\}` are the same set.
- `x=5`, `x \in [1,2]` and `1 \le x \le 2` mean their value or interval. Two assignments to
  different names are never equal. `k=2n-1` means 2n-1 where the gold answer is no equation.
- Of `\sqrt{2} \approx 1.41` only the exact side counts.
- A unit is a label: `5 cm` equals 5 and `5 centimeters`, but never `5 m`. So 50\% equals 50 and
  not 0.5; and as it might mean 0.005, 0.5\% does not equal 0.5.
- Decimals are exact: 0.333 is not 1/3.
- Words are compared as words.
- What can be read in two ways, such as `1/2x`, equals only itself.

Sympy can hang inside C code or eat all memory on a short input (`9^{9^{9^9}}`), and a Python
signal handler can stop it only in the main thread. So expressions are compared in another process:
a server that has math-verify loaded. It forks once for each question, and an alarm ends the fork in
time. The server ends when its input is closed, which also happens when its owner dies. This works
only on POSIX systems.
"""

import itertools
import json
import logging
import math
import os
import random
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
MAX_MEMORY = 2 * 2**30  # bytes of address space for one question

# --- Normalization: the many ways to write an answer become one plain LaTeX -----------------------

# Normalized LaTeX has no spaces except where they mean something, as in `\pi r` and `1 2`. Its
# text, such as \text{cm}, stands in "quotes".
UNICODE_TO_LATEX = str.maketrans(
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
        "≈": r"\approx ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "±": r"\pm ",
        "°": r"^\circ ",
        "²": "^2",
        "³": "^3",
        "θ": r"\theta ",
        "⟨": "(",
        "⟩": ")",
        "\xa0": " ",
        # Two characters must go, for they get a meaning below: " encloses text, \0 is a kept space.
        '"': "",
        "\0": "\ufffd",
    }
)
FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln"
ARGUMENT = r"(\d|[a-zA-Z]|\\pi)"  # what LaTeX takes as an argument without braces
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
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
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
        # \sqrt2 becomes \sqrt{2}, and \frac12 becomes \frac{1}2 and then \frac{1}{2}. But \sqrt13
        # and \frac123 stay, because writers mean different things by them.
        (rf"(\\sqrt(?:\[\d\])?)\s*{ARGUMENT}(?!\d)", r"\1{\2}"),
        (rf"\\frac\s*{ARGUMENT}(?!\d\d)", r"\\frac{\1}"),
        (rf"(\\frac\{{[^{{}}]*\}})\s*{ARGUMENT}(?!\d)", r"\1{\2}"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"\^\s*(-?\d+|[a-zA-Z])", r"^{\1}"),
        (r"_\s*(\d+|[a-zA-Z])", r"_{\1}"),
        # Mixed numbers: 1\frac{2}{3} and 1 2/3 become (1+\frac{2}{3}).
        (r"(?<![\d.^_])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})"),
        (r"(?<![\d.^_/])(\d+)\s+(\d+)/(\d+)(?![\d.])", r"(\1+\\frac{\2}{\3})"),
        # A space that means something first becomes \0: one between a command (group 1) and a
        # letter, or between a digit (group 2) and a digit or point. Only one of the two groups is
        # filled. Then all other spaces go, and \0 becomes a space again.
        (r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])|(\d)\s+(?=[\d.])", r"\1\2\0"),
        (r"\s+", ""),
        (r"\0", " "),
        (r"(?<=[(\[,=])\+", ""),
    ]
]
DOLLAR = re.compile(r"(?<!\\)\$")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
INEQUALITY = re.compile(r"[<>≤≥]|\\(?:[lg]t|[lg]e|[lg]eq|[lg]eqslant)(?![a-zA-Z])")


def normalize_answer(text: str) -> str:
    """Return `text` in one notation: answers that differ only in notation become equal strings."""
    # "or" between inequalities makes a union of intervals, elsewhere a set like "and".
    or_separator = r" \\cup " if INEQUALITY.search(text) else ","
    for word, separator in [("or", or_separator), ("and", ",")]:
        separating_word = (
            rf",?\s*(?:\\(?:text|mbox)\{{\s*{word}\s*\}}|(?<![a-zA-Z\\]){word}(?![a-zA-Z]))"
        )
        text = re.sub(separating_word, separator, text)
    # If the number of dollar signs is even, they enclose mathematics; if odd, they are taken for
    # money.
    num_dollars = len(DOLLAR.findall(text))
    text = DOLLAR.sub("" if num_dollars % 2 == 0 else r"\\$", text)
    text = re.sub(r"(?<!\\)\\[()\[\]]", "", text)  # \( \) \[ \] enclose mathematics too
    text = text.translate(UNICODE_TO_LATEX)
    has_brackets = re.search(r"[(\[]|\\\{", text)
    if not has_brackets:  # inside brackets a comma separates items, elsewhere maybe thousands
        text = THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = text.rstrip(".").removeprefix("+")
    # The number after an \approx is rounded, and the answer is what stands before it.
    exact, _, rounded = text.partition(r"\approx")
    is_rounded = exact_number(split_unit(rounded.strip())[0]) is not None
    return exact if exact and is_rounded else text


# --- Words, numbers and units: what needs no algebra. From here on every text is normalized -------

DECIMAL = r"[-+]?(?:\d+\.?\d*|\.\d+)"
EXACT_NUMBER = re.compile(
    rf"(?P<decimal>{DECIMAL})(?:/(?P<divisor>{DECIMAL}))?"
    rf"|(?P<sign>[-+]?)(?:\\frac\{{(?P<numerator>{DECIMAL})\}}\{{(?P<denominator>{DECIMAL})\}}"
    r"|\((?P<integer>\d+)\+\\frac\{(?P<mixed_numerator>\d+)\}\{(?P<mixed_denominator>\d+)\}\))",
    re.ASCII,
)


def exact_number(text: str) -> Fraction | None:
    """Return the value of a decimal, a fraction or a mixed number; None for anything else."""
    match = EXACT_NUMBER.fullmatch(text)
    if match is None:
        return None
    if match["decimal"]:
        quotients = [(match["decimal"], match["divisor"] or "1")]
    elif match["numerator"]:
        quotients = [(match["numerator"], match["denominator"])]
    else:
        quotients = [
            (match["integer"], "1"),
            (match["mixed_numerator"], match["mixed_denominator"]),
        ]
    value = Fraction(0)
    for numerator, denominator in quotients:
        if Fraction(denominator) == 0:
            return None
        value += Fraction(numerator) / Fraction(denominator)
    return -value if match["sign"] == "-" else value


# Each line lists the names of one unit. The first one is the name that split_unit returns. Names
# after a bar are units only inside \text{}: a bare `5m` is 5 times m.
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
UNIT_OF = {}  # {any name of a unit: the first name in its line}
BARE_UNITS = []  # the names that are units also outside of \text{}
for names in UNITS:
    bare_names, _, quoted_names = names.partition("|")
    BARE_UNITS += bare_names.split()
    for unit_name in bare_names.split() + quoted_names.split():
        UNIT_OF[unit_name] = names.split()[0]


def _any_of(names: Iterable[str]) -> str:
    longest_first = sorted(names, key=len, reverse=True)
    return "|".join(re.escape(name) for name in longest_first)


POWER = r"square|sq\.?|cubic"
UNIT = re.compile(
    r'(?:(?<![a-zA-Z\\"])'  # no letter stands before a bare unit: \sin does not end in inches
    rf"(?P<power>{POWER})?(?P<bare>{_any_of(BARE_UNITS)})"
    rf'|"(?P<quoted_power>{POWER})?(?P<quoted>{_any_of(UNIT_OF)})\.?")'
    r"(?:\^\{(?P<exponent>[23])\})?$"
)


def split_unit(text: str) -> tuple[str, str]:
    r"""Split a text into its value and its unit, which is "" where there is none.

    `15"cm"^{2}` gives ("15", "cm^2"), `\$5` gives ("5", "dollars"), `x` gives ("x", "").
    """
    if re.match(r"-?\\\$", text):
        value, unit = split_unit(text.replace(r"\$", "", 1))
        return value, unit or "dollars"
    match = UNIT.search(text)
    if match is None or match.start() == 0:  # a unit needs a value before it
        return text, ""
    unit = UNIT_OF[match["bare"] or match["quoted"]]
    power = match["power"] or match["quoted_power"]
    exponent = match["exponent"]
    if power and not exponent:
        exponent = "3" if power == "cubic" else "2"
    if exponent:
        unit = f"{unit}^{exponent}"
    return text[: match.start()].rstrip(), unit


def plain_verdict(gold: str, answer: str) -> bool | None:
    """Whether two texts are equal, if words, numbers and units suffice to tell.

    None if only structure or algebra can tell.
    """
    if not gold or not answer:
        return False
    unquoted = [text.replace('"', "") for text in (gold, answer)]
    if unquoted[0] == unquoted[1]:
        return True
    if all(re.fullmatch(r"\(?[A-Z]\)?", text) for text in unquoted):  # letters of a multiple choice
        return unquoted[0].strip("()") == unquoted[1].strip("()")
    # Upper and lower case are the same in words, but not in variables: ab is a times b.
    if all(re.fullmatch(r"[a-zA-Z]{3,}|no", text, re.IGNORECASE) for text in unquoted):
        return unquoted[0].lower() == unquoted[1].lower()
    gold_value, gold_unit = split_unit(gold)
    answer_value, answer_unit = split_unit(answer)
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return False
    gold_number = exact_number(gold_value)
    answer_number = exact_number(answer_value)
    if gold_number is None or answer_number is None:
        return None
    is_small = 0 < abs(gold_number) <= 1
    if is_small and (gold_unit == r"\%") != (answer_unit == r"\%"):
        return False  # 0.5 may mean 50\% or 0.5\%
    return gold_number == answer_number


# --- Structure: tuples, intervals, sets, unions, matrices, assignments ----------------------------

# A name, "=" or "\in", and the value or range of the name: x=5, f(x)=x^2, (x,y)=(1,2), x \in [1,2].
ASSIGNMENT = re.compile(
    r"(\\?[a-zA-Z]+(?:_\{\w+\})?(?:\([a-zA-Z]\))?|\([a-zA-Z](?:,[a-zA-Z])+\))(=|\\in ?)([^=]*)"
)
MATRIX = re.compile(r"\\begin\{([pbv])matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
BRACKETS = re.compile(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})", re.DOTALL)
GREEK = "alpha|beta|gamma|theta|lambda|mu|phi|omega"


@dataclass
class Structure:
    """How an answer is built.

    kind: "" for a single expression; otherwise "set", "union", "(]", "matrix 2x2" and the like.
    items: what the kind is made of; for a single expression the expression itself.
    name: the variable or function whose value or range this is, "" where there is none.
    """

    kind: str
    items: list[str]
    name: str = ""


def split_outside_brackets(text: str, separator: str) -> list[str] | None:
    """Split a text at the separators that stand outside all brackets.

    None where a bracket is closed that was never opened.
    """
    items = []
    depth = 0
    start = 0  # of the current item
    position = 0
    while position < len(text):
        if text[position] in "([{":
            depth += 1
        elif text[position] in ")]}":
            depth -= 1
        if depth < 0:
            return None
        if depth == 0 and text.startswith(separator, position):
            items.append(text[start:position].strip())
            position += len(separator)
            start = position
        else:
            position += 1
    items.append(text[start:].strip())
    return items


def read_inequality(text: str) -> Structure | None:
    r"""Return `1\le x<2` or `x>1` as the interval of x; None for anything else."""
    terms = [term.strip() for term in re.split(r"(<|>|\\[lg]e(?![a-zA-Z]))", text)]
    if ">" in terms or r"\ge" in terms:
        # It is read from right to left: 3>x becomes x<3. In 1<x>2 the "<" becomes ">" as well, so
        # this is refused below.
        mirrored = {">": "<", r"\ge": r"\le", "<": ">", r"\le": r"\ge"}
        terms = [mirrored.get(term, term) for term in reversed(terms)]
    if len(terms) == 3:  # one-sided
        if re.fullmatch("[a-zA-Z]", terms[0]):
            terms = [r"-\infty", "<", *terms]
        else:
            terms = [*terms, "<", r"\infty"]
    if len(terms) != 5:
        return None
    low, low_relation, name, high_relation, high = terms
    are_ascending = {low_relation, high_relation} <= {"<", r"\le"}
    if not are_ascending or not re.fullmatch("[a-zA-Z]", name):
        return None
    opening = "(" if low_relation == "<" else "["
    closing = ")" if high_relation == "<" else "]"
    return Structure(opening + closing, [low, high], name)


def _split_assignment(text: str) -> tuple[str, str]:
    """Return the assigned name, "" where there is none, and the text that stands for its value."""
    match = ASSIGNMENT.fullmatch(text)
    if match is None:
        return "", text
    name, relation, value = match.groups()
    # What is left without commands such as \sqrt: digits, signs, letters and Greek letters.
    symbols = re.sub(rf"\\(?!{GREEK})[a-zA-Z]+", "", split_unit(value)[0])
    has_letter = re.search(r"[a-df-hj-zA-Z]", symbols)  # any letter but e and i, which are numbers
    has_greek_letter_or_set = "\\" in symbols  # the backslash of \theta, or of the braces of a set
    is_plain_name = "(" not in name  # neither f(x) nor (x,y)
    # `y=2x` stays an equation.
    if relation == "=" and is_plain_name and (has_letter or has_greek_letter_or_set):
        return "", text
    return name, value


def assigned_expression(text: str) -> str | None:
    r"""Return the 2n-1 of `k=2n-1`; None if this is no value of a new variable.

    In `n=2n-1` the n is no new variable, and `k=n` may well be an answer of its own.
    """
    name, _, value = text.partition("=")
    is_variable = re.fullmatch(rf"[a-zA-Z](?:_\{{\w+\}})?|\\(?:{GREEK})", name)
    is_expression = re.search(r"\d|[-+]", value) and not INEQUALITY.search(value)
    if not is_variable or not is_expression or "=" in value or name in value:
        return None
    return value


def _read_matrix(text: str, name: str) -> Structure | None:
    """Return a matrix or determinant without another one inside; None for anything else."""
    match = MATRIX.fullmatch(text)
    if match is None or r"\begin" in match[2]:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\", match[2]) if row]
    kind = "determinant" if match[1] == "v" else "matrix"
    row_lengths = "x".join(str(len(row)) for row in rows)  # "2x2x2" has three rows of two cells
    cells = list(itertools.chain.from_iterable(rows))
    return Structure(f"{kind} {row_lengths}", cells, name)


def read_structure(text: str) -> Structure:
    """Return how a normalized text is built."""
    name, text = _split_assignment(text)
    structure = read_inequality(text) or _read_matrix(text, name)
    if structure:
        return structure
    match = BRACKETS.fullmatch(text)
    items = split_outside_brackets(match[2], ",") if match else None
    if items:
        brackets = match[1] + match[3]
        if brackets == r"\{\}":
            return _read_unordered("set", items, name)
        is_tuple_or_interval = len(items) > 1 and "\\" not in brackets
        if is_tuple_or_interval:
            return Structure(brackets, items, name)
        if brackets == "()":  # they only group
            inner = read_structure(match[2])
            return Structure(inner.kind, inner.items, name or inner.name)
    items = split_outside_brackets(text, r"\cup")
    if items and len(items) > 1:
        return _read_unordered("union", items, name)
    items = split_outside_brackets(text, ",")
    if items and (len(items) > 1 or text.count(r"\pm") == 1):
        return _read_unordered("set", items, name)
    return Structure("", [text], name)


def _read_unordered(kind: str, items: list[str], name: str) -> Structure:
    r"""Return a set or union, in which `1 \pm x` counts as two items.

    `x=1,y=2` is not a set of values but of assignments to several names, which is another kind.
    """
    signed_items = []
    for item in items:
        if item.count(r"\pm") == 1:
            signed_items.append(item.replace(r"\pm", "+").removeprefix("+"))
            signed_items.append(item.replace(r"\pm", "-"))
        else:
            signed_items.append(item.removeprefix("+"))
    names = {read_structure(item).name for item in signed_items} - {""}
    if len(names) > 1:
        kind += " of several names"
    return Structure(kind, signed_items, name)


def equal_answers(gold: str, answer: str) -> bool:
    """Whether two normalized texts are equal.

    This hands single expressions to math-verify, so it must be called in a process that may hang.
    """
    verdict = plain_verdict(gold, answer)
    if verdict is not None:
        return verdict
    gold_structure = read_structure(gold)
    answer_structure = read_structure(answer)
    gold_items = gold_structure.items
    answer_items = answer_structure.items
    if gold_structure.kind != answer_structure.kind or len(gold_items) != len(answer_items):
        return False
    names = {gold_structure.name, answer_structure.name} - {""}
    if len(names) > 1:
        return False
    if gold_structure.kind.startswith(("set", "union")):
        return _equal_in_any_order(gold_items, answer_items)
    # If read_structure took a text apart, its parts are compared in the same way. Otherwise both
    # texts are single expressions, and the recursion ends.
    if gold_structure.kind or gold_items != [gold] or answer_items != [answer]:
        item_pairs = zip(gold_items, answer_items, strict=True)
        return all(equal_answers(gold_item, item) for gold_item, item in item_pairs)
    return equal_expressions(split_unit(gold)[0], split_unit(answer)[0])


def _equal_in_any_order(gold_items: list[str], answer_items: list[str]) -> bool:
    """Whether the items can be paired so that both of each pair are equal.

    Both lists have the same length.
    """
    unmatched = list(answer_items)
    for gold_item in gold_items:
        for item in unmatched:
            if equal_answers(gold_item, item):
                unmatched.remove(item)
                break
        else:
            return False
    return True


# --- Algebra: math-verify reads expressions, sympy proves that they are equal ---------------------

COMMAND = re.compile(rf"\\(?:frac|sqrt|binom|cdot|pi|{FUNCTIONS}|{GREEK})(?![a-zA-Z])")
EXPRESSION = re.compile(r"[a-zA-Z0-9.+\-^_{}()\[\]|/!= ]+", re.ASCII)
UNCLEAR = re.compile(
    r"\d [\d.]"  # 1 2
    r"|\d\.(?!\d)"  # 3.
    r"|\)\d"  # (x)2
    r"|\}(?<!_\{\w\})(?<!_\{\d\d\})\d"  # x^{2}3, but not \log_{2}8
    r"|[\d)}]_"  # 52_{8}
    r"|\^(?!\{)"  # x^\pi
    r"|(?<!\\sqrt)\["  # [x], but not \sqrt[3]{x}
    r"|\\(?:sqrt|frac)(?![{\[])"  # \sqrt13
    rf"|\\(?:{FUNCTIONS})\^\{{-"  # \sin^{-1}
    # A quotient with a further factor, which may or may not belong to the divisor: 1/2x, 1/(x)y,
    # 1/\sqrt{2}x and 1/x^{2}y.
    r"|/(?:\d+(?!\d)|[a-zA-Z]|\([^()]*\)|\\[a-z]+(?![a-z])(?:\{[^{}]*\})*)"
    r"(?:\^\{[^{}]*\})?(?=[^-+)}\]=|])"
)


def is_clear(gold: str, answer: str) -> bool:
    """Whether both are expressions of known commands, and can be read in one way only."""
    without_commands = [COMMAND.sub(" ", text) for text in (gold, answer)]
    for text in without_commands:
        # A command that is left has a backslash, which EXPRESSION does not allow.
        if not EXPRESSION.fullmatch(text) or text.count("{") != text.count("}"):
            return False
        # Four letters in a row may be a word. In x2, the 2 may be a factor or an index.
        if re.search(r"[a-zA-Z]{4,}|[a-zA-Z]\d", text):
            return False
    if UNCLEAR.search(gold) or UNCLEAR.search(answer):
        return False
    if gold.count("=") != answer.count("=") or gold.count("=") > 1:
        return False
    letters = set(re.findall("[a-zA-Z]", "".join(without_commands)))
    lower_case_letters = {letter.lower() for letter in letters}
    return len(lower_case_letters) == len(letters)  # math-verify takes R and r for one variable


def _decimal_as_fraction(match: re.Match) -> str:
    """Return the LaTeX of a decimal such as 0.25 as the exact fraction 025/100."""
    integer_digits, decimals = match.groups()
    return rf"\frac{{{integer_digits}{decimals}}}{{1{'0' * len(decimals)}}}"


def equal_expressions(gold: str, answer: str) -> bool:
    """Whether two expressions or equations are equal: math-verify reads them, sympy proves it."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse
    from sympy import Eq

    if not is_clear(gold, answer):
        return False
    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(basic_latex=False, boxed="none")
    )
    parsed = []
    for text in (gold, answer):
        text = re.sub(r"(\d*)\.(\d+)", _decimal_as_fraction, text)
        # math-verify would take 4(3) for a mixed number, 7.
        text = re.sub(r"(?<=[\d)])(?=\(|\\frac)", r"\\cdot ", text)
        readings = parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
        if not readings:
            return False
        parsed.append(readings[0])
    gold, answer = parsed
    if isinstance(gold, Eq) and isinstance(answer, Eq):
        return _are_proportional(gold.lhs - gold.rhs, answer.lhs - answer.rhs)
    return is_zero(gold - answer)


def _are_proportional(gold, answer) -> bool:
    """Whether a sympy expression is another one times a constant, so that both are 0 together."""
    from sympy import Tuple

    point = _random_points(Tuple(gold, answer))[0]
    gold_value = gold.subs(point)
    answer_value = answer.subs(point)
    if may_be_zero(gold_value) or may_be_zero(answer_value):
        return False
    return is_zero(gold * answer_value - answer * gold_value)


def is_zero(expression) -> bool:
    r"""Whether a sympy expression is proved to be 0 for all values of its variables.

    That it is small proves nothing: 10^{20} and \sqrt{10^{40}+1} agree in 40 digits. Radicals of
    integers are told from 0 by the digits that separation_digits asks for. Anything else must
    become 0 by sympy's rules. These rules alone are not enough either. They take some radicals
    for 0 that are smaller than 10^{-1000}, so they are asked last.
    """
    from sympy import expand_trig, simplify, sqrtdenest, tan

    values = [expression.subs(point).doit() for point in _random_points(expression)]
    if not all(may_be_zero(value) for value in values):
        return False
    is_number = not expression.free_symbols
    if is_number and _has_only_radicals(values[0]):
        return True
    if simplify(sqrtdenest(expression)) == 0:
        return True
    if is_number:
        # This is for \arctan(1/2)+\arctan(1/3)-\pi/4 and the like. Because the number is so small,
        # it is 0 if its tangent is 0.
        tangent = expand_trig(tan(expression))
        return _has_only_radicals(tangent) and may_be_zero(tangent)
    return False


def may_be_zero(number) -> bool:
    """Whether a sympy number is 0 in as many digits as tell radicals from 0.

    What has no value, such as 1/0, is not.
    """
    digits = separation_digits(number)
    # Twice as many digits allow for rounding.
    value = number.evalf(2, maxn=2 * digits)
    if not value.is_number or not value.is_finite:
        return False
    for coordinate in value.as_real_imag():
        # sympy calls comparable what has at least one digit that is known to be right.
        is_known = coordinate != 0 and coordinate.is_comparable
        if is_known or abs(coordinate) * 10**digits >= 1:
            return False
    return True


def _has_only_radicals(number) -> bool:
    """Whether a sympy number is made of integers by + - * / and roots."""
    from sympy import I, preorder_traversal

    for node in preorder_traversal(number):
        is_power = node.is_Pow and node.exp.is_Rational
        if not (node.is_Rational or node == I or node.is_Add or node.is_Mul or is_power):
            return False
    return True


def separation_digits(number) -> int:
    """Return n such that a number made of radicals is either 0 or greater than 10^(50-n).

    Neither it nor any part of it is greater than 10^(n-50). This is the bound of Burnikel, Funke,
    Mehlhorn, Schirra and Schmitt, "A Separation Bound for Real Algebraic Expressions", 2001: what
    is not 0 is at least 1 / (l u^(D-1)) and at most u l^(D-1). D is the product of the indices of
    all different roots. For a number with other parts, such as pi, no such bound is known, and n
    says only how large its parts are.
    """
    from sympy import I, Pow

    powers = [power for power in number.atoms(Pow) if power.exp.is_Rational]
    roots = {(power.base, power.exp.q) for power in powers}
    degree = math.prod(index for _, index in roots)
    if number.has(I):  # it is the square root of -1
        degree *= 2
    log_u, log_l = _log_bounds(number)
    return 50 + math.ceil(degree * (log_u + log_l))


def _log_bounds(number) -> tuple[float, float]:
    """Return the decimal logarithms of u and l.

    A number is a quotient of two algebraic integers. u bounds the conjugates of the numerator, l
    those of the denominator.
    """
    from sympy import log

    if number.is_Rational:
        return math.log10(max(1, abs(number.p))), math.log10(number.q)
    if number.is_Pow and number.exp.is_Rational:
        log_u, log_l = _log_bounds(number.base)
        if number.exp < 0:
            log_u, log_l = log_l, log_u
        index = number.exp.q
        # The numerator and the denominator are multiplied by the same number, so that one of the
        # two becomes a power of this index.
        if log_u >= log_l:
            log_u = (log_u + (index - 1) * log_l) / index
        else:
            log_l = (log_l + (index - 1) * log_u) / index
        exponent = abs(number.exp.p)
        return exponent * log_u, exponent * log_l
    if number.is_Add or number.is_Mul:
        bounds = [_log_bounds(argument) for argument in number.args]
        log_l = sum(bound[1] for bound in bounds)
        if number.is_Mul:
            return sum(bound[0] for bound in bounds), log_l
        largest_quotient = max(log_u - log_l for log_u, log_l in bounds)
        return math.log10(len(bounds)) + log_l + largest_quotient, log_l
    magnitude = abs(number.evalf(5))
    if not magnitude.is_Float or magnitude < 1:
        return 0, 0
    return float(log(magnitude, 10)), 0


def _random_points(expression) -> list[dict]:
    """Return three points of rational numbers, at one of which all of them are negative.

    They are random, so that no answer is written to be right at these points alone. The random
    state depends on the expression, so that the verdict does not change.
    """
    from sympy import Rational

    random_numbers = random.Random(str(expression))
    symbols = sorted(expression.free_symbols, key=str)
    points = []
    for sign in (-1, 1, 1):
        point = {}
        for symbol in symbols:
            integer = random_numbers.randint(0, 9)
            fraction = Rational(random_numbers.randint(1, 10), 11)
            point[symbol] = sign * (integer + fraction)
        points.append(point)
    return points


# --- The server, and the grader that asks it ------------------------------------------------------

# These questions make the server load what each fork would otherwise load for itself: sympy's lazy
# imports, and the parser's automaton.
WARM_UP = [
    ("(a+5)(b-2)", r"ab+5b-2a-\frac{20}{2}"),
    (r"\frac{\sqrt{2}}{2}", r"2^{-1/2}"),
    ("y=2x+3", r"x=\frac{1}{2}y-3\pi"),
    (r"\sin^{2}x+|x|", r"1-\cos^{2}(2x)+5!"),
    (r"e^{x}\log_{2}x", r"e\ln x\cdot 3^{n}"),
    ("f(x_{1})+2i", r"6\theta-5i"),
    (r"\ln(8x)", r"\ln x+3\ln 2"),
    (r"\frac{x^{2}-1}{x-1}+\sin(2x)", r"x+1+2\sin(x)\cos(x)"),
    (r"\binom{n}{2}+\arctan(2)", r"\frac{n^{2}-n}{2}+\arctan(2)"),
    (r"\frac{\pi}{4}", r"\arctan(\frac{1}{2})+\arctan(\frac{1}{3})"),
]

VERDICTS = {0: "equal", 1: "different", -signal.SIGALRM: "timeout"}  # by the exit code of a fork


def serve() -> None:
    """Answer questions until standard input closes; each is a JSON line [gold, answer, seconds]."""
    # Libraries print to standard output. So the replies get a copy of it, and whatever else is
    # printed there goes to standard error.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # The server ends in silence when nobody wants its reply any more.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # The owner may have been started with another setting, which would be inherited.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    logging.disable()  # math-verify warns that its own timeouts are off
    for gold, answer in WARM_UP:
        equal_answers(gold, answer)
    for line in sys.stdin.buffer:
        gold, answer, seconds = json.loads(line)
        child = os.fork()
        if child == 0:
            exit_code = 2
            try:
                # Without a handler SIGALRM ends even a process that hangs in C code.
                signal.setitimer(signal.ITIMER_REAL, seconds)
                if sys.platform == "linux":
                    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
                exit_code = 0 if equal_answers(gold, answer) else 1
            finally:
                os._exit(exit_code)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(VERDICTS.get(exit_code, "failed"), file=replies, flush=True)


class MathGrader:
    """Compares answers; threads may share one grader.

    Its server starts at once, and loads its libraries while the caller goes on.

    seconds: wall time that one question may take.
    """

    def __init__(self, seconds: float = 1.7):
        self.seconds = seconds
        self._lock = threading.Lock()
        self._start_server()

    def grade(self, gold: str, answer: str) -> str:
        """Compare an answer with the gold answer.

        Returns "equal", "different", "timeout", or "failed" where memory ran out or the answer is
        nested too deeply. Raises ChildProcessError where the server does not start.
        """
        if len(gold) > MAX_LENGTH or len(answer) > MAX_LENGTH:
            is_same_text = gold.strip() == answer.strip()
            is_empty = gold.strip() == ""
            return "equal" if is_same_text and not is_empty else "different"
        gold = normalize_answer(gold)
        answer = normalize_answer(answer)
        verdict = plain_verdict(gold, answer)
        if verdict is not None:
            return "equal" if verdict else "different"
        if "=" not in gold:
            answer = assigned_expression(answer) or answer
        with self._lock:
            question = json.dumps([gold, answer, self.seconds])
            return self._ask(question.encode() + b"\n")

    def _start_server(self) -> None:
        # The server gets a session of its own, so that Ctrl-C in a terminal does not reach it. It
        # ends when these pipes are closed.
        self._server = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )

    def _ask(self, question: bytes) -> str:
        for _ in range(2):  # the server may have been killed since the last question
            try:
                self._server.stdin.write(question)
                reply = self._server.stdout.readline().decode().strip()
            except BrokenPipeError:
                reply = ""
            except BaseException:
                # The caller was interrupted before the reply came. That reply must never be taken
                # for the reply to the next question, so the next question gets a new server.
                self._start_server()
                raise
            if reply:
                return reply
            self._start_server()
        raise ChildProcessError(
            "the grading process ends before it replies; its error message stands above (is"
            " math-verify installed?)"
        )


if __name__ == "__main__":
    serve()
