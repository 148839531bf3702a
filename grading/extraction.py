"""Find the answer in a text: a number, or what stands in tags or in a box.

A completion may be megabytes of anything. So the whole text is only searched with `str.find` and
`str.count`, which take linear time; a regular expression only ever sees text of bounded length.
"""

import re
from fractions import Fraction

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
MAX_NUMBER_LENGTH = 50  # characters of one number; a longer one is not read
MAX_PHRASE = 1000  # characters of an answer in words; a number in a longer one is not read
TAIL = 20_000  # characters at the end of a text in which a \boxed{} is looked for
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
# An escaped brace is matched together with its backslash, so it is not taken for a brace.
BRACE = re.compile(r"\\[\\{}]|[{}]")

# Hyphens, dashes and minus signs, all of which people write for a minus.
DASHES = "-‐‑‒–—―−⁻₋➖﹘﹣－"
# A minus is a sign if no word character or closing parenthesis stands before it (-5, $-5, -$5). In
# 10-5 it is a subtraction, so the last number there is 5.
ANY_NUMBER = re.compile(
    # A sign, a currency, or both in any order
    rf"(?:(?<![\w)])[{DASHES}][$€£]?|[$€£][{DASHES}]?)?"
    r"(?:(?<![\w.])\.)?"  # the point of .5
    r"[0-9](?:[0-9.,]*[0-9])?%?"  # digits, with points and commas between them
)
WELL_WRITTEN = re.compile(
    rf"(?:[{DASHES}][$€£]?|[$€£][{DASHES}]?)?"  # a sign, a currency, or both in any order
    r"(?=\.?[0-9])"  # a digit must follow, because the integer and the decimals may each be missing
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)"  # an integer: its commas separate groups of three digits
    r"(?:\.[0-9]+)?%?"  # decimals
)
# Commands around a number or words that leave them as they are.
WRAPPER = re.compile(r"\\(?:[fm]?box|boxed|(?:text|math)(?:bf|it|rm)?)(?![a-zA-Z])")
# Text that changes the value of a number. In the patterns, [^\W\d_] is any letter.
CHANGES_VALUE = re.compile(
    # A minus that is not the number's own sign: `- 5` (-5, or an item of a list), -(5), x-5
    rf"(?:(?<=[\w)])[{DASHES}]|[{DASHES}](?![$€£]?\.?[0-9]))\W*[0-9]"
    r"|[0-9][^\W\d_]|[^\W\d_][({]?[0-9]"  # 72k, x72, f(72)
    r"|[0-9][\s)}]*!"  # 72! and (72)!
    r"|[√∛∜^~±≈≠≤≥‰π]|\\[a-zA-Z]|(?:^|\s)[<>]=?\s*[$€£]?[0-9]"
    r"|[^\W\d_] *[+×÷] *[0-9]|[0-9] *[+×÷] *[^\W\d_]|\w \* \w"  # x + 72, 72 * x
    r"|[0-9]\W*(?:k|(?-i:[MBT])|[bm]n|mil|mln)\b|[$€£][0-9.,]+\s*m\b"  # 72 k, $72 m
    r"|\b(?:hundred|thousand|million|billion|trillion|lakh|crore|dozen|hal(?:f|ve)|third|quarter"
    r"|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|million)th)s?\b"
    r"|\b(?:(?:square|cube|root) of|squared|cubed|factorial|times\W+\w+|twice|thrice|doubled?"
    r"|tripled?|quadrupled?|multiplied|divided|plus|minus|point|negative|not|pi)\b"
    r"|\b(?:sqrt|root|log|ln|exp|sin|cos|tan)\W*[0-9]",
    re.IGNORECASE,
)


def to_number(text: str) -> Fraction | None:
    """Return the exact value of a number such as `-1,234.50`, also with a $ or %.

    Anything else gives None: `1,00`, `1.2.3`, `72 eggs`, the empty text.
    """
    if len(text) > MAX_NUMBER_LENGTH:
        return None
    if WELL_WRITTEN.fullmatch(text) is None:
        return None
    text = re.sub("[,$€£%]", "", text)
    return Fraction(re.sub(f"[{DASHES}]", "-", text))


def only_number(text: str) -> Fraction | None:
    """Return the value of the number in a text that holds exactly one; otherwise None.

    There may be words around the number, but none that change its value (`half of 72`).
    """
    if len(text) > MAX_PHRASE:
        return None
    text = WRAPPER.sub("", text)
    if CHANGES_VALUE.search(text):
        return None
    num_digits = sum(character in "0123456789" for character in text)
    num_numerals = sum(character.isnumeric() for character in text)  # counts ², ½ and ７ too
    if num_numerals > num_digits:
        return None
    numbers = ANY_NUMBER.findall(text)
    return to_number(numbers[0]) if len(numbers) == 1 else None


def last_number(text: str) -> str | None:
    """Return the last number of a text as it is written there; None if there is no number."""
    last_digit = max(text.rfind(digit) for digit in "0123456789")
    if last_digit < 0:
        return None
    # A number that begins before this window is cut, but what is left is still too long to be read.
    start = max(0, last_digit - 2 * MAX_NUMBER_LENGTH)
    # A % may follow the last digit.
    return ANY_NUMBER.findall(text[start : last_digit + 2])[-1]


def tagged_answer(text: str) -> str | None:
    """Return what stands in the answer tags.

    None unless both tags occur exactly once and in order, with no reasoning tag between them.
    """
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return None
    content, closing_tag, _ = text.partition("<answer>")[2].partition("</answer>")
    if not closing_tag or "reasoning>" in content:
        return None
    return content.strip()


def soft_format(text: str) -> bool:
    """Whether each of the four tags occurs exactly once and in order, with any text around them."""
    positions = [text.find(tag) for tag in TAGS]
    in_order = positions == sorted(positions)
    return in_order and all(text.count(tag) == 1 for tag in TAGS)


def strict_format(text: str) -> bool:
    """Whether a text is <reasoning>...</reasoning> <answer>...</answer> and nothing else.

    White space may stand before, between and after the two pairs of tags.
    """
    text = text.strip()
    if not text.startswith("<reasoning>") or not text.endswith("</answer>"):
        return False
    if not soft_format(text):
        return False
    reasoning_end = text.find("</reasoning>") + len("</reasoning>")
    between = text[reasoning_end : text.find("<answer>")]
    return not between.strip()


def last_boxed(text: str) -> str | None:
    r"""Return what the last balanced \boxed{...} in the last TAIL characters holds, or None.

    \fbox{...} is a box as well, and so is `\boxed 5`, which ends at the next $.
    """
    text = text[-TAIL:]
    end = len(text)
    for box in reversed(list(BOX.finditer(text))):
        start = box.end()
        if text[start : start + 1] != "{":
            content, dollar, _ = text[start:].partition("$")
            if dollar:
                return content.strip()
            continue
        depth = 0
        for brace in BRACE.finditer(text, start, end):
            if brace[0] == "{":
                depth += 1
            elif brace[0] == "}":
                depth -= 1
            if depth == 0:
                return text[start + 1 : brace.start()].strip()
        # This box is not closed before `end`, so a box around it is not closed there either. An
        # earlier box can only be closed before this one begins, so no search needs to look past
        # that point. This keeps the time linear.
        end = box.start()
    return None


def last_tagged(text: str, closed: bool = True) -> str | None:
    """Return what follows the last <answer>, up to the next </answer>; None without these tags.

    closed: whether a missing </answer> gives None; otherwise the answer runs to the end.
    """
    _, opening_tag, after_opening = text.rpartition("<answer>")
    content, closing_tag, _ = after_opening.partition("</answer>")
    if not opening_tag or (closed and not closing_tag):
        return None
    return content.strip()


def answer_in_format(prompt: str, text: str) -> tuple[bool, str | None]:
    """Return whether a text has the format that a prompt asks for, and the answer in it.

    prompt: the name of the prompt: "question_only", "r1_zero" or "reasoning_answer".
    """
    if prompt == "question_only":
        answer = last_boxed(text)
        return answer is not None, answer
    if prompt == "r1_zero":
        start = text.find("</think> <answer>")
        has_format = start >= 0 and text.find("</answer>", start) >= 0
    else:
        has_format = strict_format(text)
    answer = last_tagged(text) if has_format else None
    if answer is None:
        return has_format, None
    boxed = last_boxed(answer)
    return has_format, boxed or answer


def final_answer(text: str) -> str | None:
    """Return the answer of a text that lacks the required format; None if it holds no answer.

    It is what the last box holds, otherwise what follows the last <answer>, otherwise the last
    number.
    """
    answer = last_boxed(text)
    if answer is None:
        answer = last_tagged(text, closed=False)
    if answer is None:
        answer = last_number(text)
    return answer
