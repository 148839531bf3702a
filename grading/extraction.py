"""Reading an answer in a text: numbers, tags, boxes.

A completion may be megabytes of anything, so: str.find and str.count over the whole of it, and regular expressions only
where the length is bounded.
"""

import re
from fractions import Fraction
from functools import partial

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
MAX_DIGITS = 50  # characters of one number; longer ones are not read
TAIL = 20_000  # characters at the end of a text in which a \boxed{} is looked for
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")

# A sign counts where nothing it could be subtracted from stands before it: -5, $-5 and -$5, but in 10-5 the last is 5.
ANY_NUMBER = re.compile(
    r"(?:(?<![\w)])[-−][$€£]?|[$€£][-−]?)?(?:(?<![\w.])\.)?[0-9](?:[0-9.,]*[0-9])?%?"
)
WELL_WRITTEN = re.compile(
    r"(?:-[$€£]?|[$€£]-?)?(?=\.?[0-9])(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.[0-9]+)?%?"  # the comma in its place
)


def to_number(text: str) -> Fraction | None:
    """The exact value of `-1,234.50`, also with $ or %; None for anything else (`1,00`, `1.2.3`, `72 eggs`, ``)."""
    text = text.replace("−", "-") if len(text) <= MAX_DIGITS else ""
    return Fraction(re.sub("[,$€£%]", "", text)) if WELL_WRITTEN.fullmatch(text) else None


# What makes another number of the one that is written: `- 5` (-5, or a list of one), 72k, 72!, √72, 72², 72 thousand.
CHANGED = re.compile(
    r"[-−]\s+[$€£]?\.?[0-9]|[0-9](?:[^\W\d_]|!)|[^\W\d_][0-9]|[√^~]|\b(?:hundred|thousand|million|billion|trillion|dozen"
    r"|hal(?:f|ve)|third|quarter|squared|cubed|factorial|times|plus|minus|point|negative)s?\b",
    re.IGNORECASE,
)


def only_number(text: str) -> Fraction | None:
    """The value of the number in `text` if it holds exactly one, with words around it that leave it what it is."""
    numeric = sum(c.isnumeric() for c in text)
    if (
        len(text) > 1000 or CHANGED.search(text) or numeric > sum(c in "0123456789" for c in text)
    ):  # ² ½ and ７ too
        return None
    found = ANY_NUMBER.findall(text)
    return to_number(found[0]) if len(found) == 1 else None


def last_number(text: str) -> str | None:
    """The last number of `text` as it is written there, None without one."""
    end = max(text.rfind(digit) for digit in "0123456789")
    return (
        ANY_NUMBER.findall(text[max(0, end - 2 * MAX_DIGITS) : end + 2])[-1] if end >= 0 else None
    )


def tagged_answer(text: str) -> str | None:
    """What stands in the answer tags; None unless both occur exactly once, in order, with no other tag between them."""
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return None
    content, closing, _ = text.partition("<answer>")[2].partition("</answer>")
    return content.strip() if closing and "reasoning>" not in content else None


def soft_format(text: str) -> bool:
    """Whether each of the four tags occurs exactly once and in order, with any text around and between them."""
    positions = [text.find(tag) for tag in TAGS]
    return (
        positions[0] >= 0
        and positions == sorted(positions)
        and all(text.count(tag) == 1 for tag in TAGS)
    )


def strict_format(text: str) -> bool:
    """Whether the whole text is <reasoning>...</reasoning> <answer>...</answer>, with only white space around them."""
    text = text.strip()
    if not (text.startswith("<reasoning>") and text.endswith("</answer>") and soft_format(text)):
        return False
    return not text[text.find("</reasoning>") + len("</reasoning>") : text.find("<answer>")].strip()


def last_boxed(text: str) -> str | None:
    r"""What the last balanced \boxed{...} (or \fbox{...}, or \boxed 5 up to a $) of the last TAIL characters holds."""
    text = text[-TAIL:]
    end = len(text)
    for box in reversed(list(BOX.finditer(text))):
        if text[box.end() : box.end() + 1] != "{":
            content, dollar, _ = text[box.end() :].partition("$")
            if dollar:
                return content.strip()
            continue
        depth = 0
        for brace in re.compile(r"\\[\\{}]|[{}]").finditer(
            text, box.end(), end
        ):  # \{ opens nothing
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                return text[box.end() + 1 : brace.start()].strip()
        # If this one is not closed, an earlier one that is still open here cannot be closed either: look no further.
        end = box.start()
    return None


def last_tagged(text: str, closed: bool = True) -> str | None:
    """What stands between the last <answer> and the </answer> that follows, or (not closed) the end of the text."""
    _, opening, rest = text.rpartition("<answer>")
    content, closing, _ = rest.partition("</answer>")
    return content.strip() if opening and (closing or not closed) else None


def answer_in_form(prompt: str, text: str) -> tuple[bool, str | None]:
    """Whether the text holds the form that a prompt of this name asks for, and the answer in it."""
    if prompt == "question_only":
        answer = last_boxed(text)
        return answer is not None, answer
    if prompt == "r1_zero":
        start = text.find("</think> <answer>")
        in_form = start >= 0 and text.find("</answer>", start) >= 0
    else:
        in_form = strict_format(text)
    answer = last_tagged(text) if in_form else None
    return in_form, answer and (last_boxed(answer) or answer)


def final_answer(text: str) -> str | None:
    """The answer of a text without the form: the last box's, else what follows the last <answer>, else a number."""
    for read in (last_boxed, partial(last_tagged, closed=False), last_number):
        if (answer := read(text)) is not None:
            return answer
    return None
