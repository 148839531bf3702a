"""Checks that the pages say what the logs of the studies say.

A table on a page stands below the command that prints it. A measured number in a sentence stands
before a comment that names its source, which GitHub does not show:

    The demo ends at 93.0 %<!--ends dynamics/grpo: mean-->. That is 51.3 points
    higher<!--difference dynamics/grpo dynamics/format: mean--> than with rewards for format alone,
    and significant<!--difference dynamics/grpo dynamics/format: verdict-->.

A source is `COMMAND: COLUMN`, or `COMMAND: ROW: COLUMN` if the table has several rows. COMMAND is
what follows table.py on a command line. ROW is the first cell of a row. COLUMN is a heading, or
how one begins. Words after the heading say which of several numbers is meant:

    min, max, mean    of the numbers of all seeds
    before, after     of a cell such as 0.31 -> 0.02
    low, high         of the interval in brackets

A source can also be a file of the project that has the number, for what others have measured.

A difference has a sign. So the sentence gives its number with the sign, or it says which side is
higher, in one of the words below. An interval may follow the number. A verdict stands before a
comment as a number does.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from logs import markdown

# A command on a page, an empty line, and the table that the command printed.
COMMAND_AND_TABLE = re.compile(
    r"^    python experiments/table\.py (?P<command>.*)\n(?:\n|\Z)(?P<table>(?:\|.*\n)*)",
    re.MULTILINE,
)
NUMBER = r"(?<![\w.-])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w-])"
NUMBER_IN_CELL = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?")
INTERVAL = rf"\[(?P<low>{NUMBER}),\s(?P<high>{NUMBER})\]"
VERDICT = r"not\s+significant|significant|equal\s+within\s+3\s+points|undecided"
SOURCE = r"<!--(?P<source>[^>]*)-->"
# A verdict, or a number, perhaps with an interval, and the words up to the comment.
CLAIM = re.compile(
    rf"(?P<said>(?P<verdict>{VERDICT})"
    rf"|(?P<number>{NUMBER})(?P<unit>[^<\d\[]*)(?P<interval>{INTERVAL})?(?P<words>[^<\d]*)"
    rf"(?<!significant)(?<!undecided)){SOURCE}"
)
# What a sentence may say without a source: code, links, and the commands of figures and tables.
# Indented lines are code after an empty line, and otherwise they go on with a list.
NOT_PROSE = re.compile(
    r"(?:(?<=\n\n)|\A)(?:    .*(?:\n|\Z))+|`[^`\n]*`|\]\(\S+\)|arXiv:\S+|https?://\S+"
)
# A verdict, a number with a decimal point, or one with the unit of a result. Settings such as 2e-4
# and a 95 % interval are none of these.
MEASURED = re.compile(
    rf"\b(?:{VERDICT})\b|(?<![\w.-])[-+]?\d+\.\d+(?![\w-])"
    rf"|{NUMBER}(?=\s(?:%(?!\s(?:interval|power))|points\b|percentage))"
)
HIGHER = ("above", "ahead", "gain", "gains", "higher", "larger", "longer", "more")
LOWER = ("behind", "below", "costs", "fewer", "less", "loses", "lower", "shorter", "smaller")

Table = Callable[[str], Iterable[tuple[str, ...]]]  # a command's headings, and then its rows


# --- Tables ---------------------------------------------------------------------------------------


def fill_in_tables(text: str, rows_of: Table) -> str:
    """The text of a page with what its commands print now."""

    def command_and_new_table(match):
        command = match["command"]
        head, *rows = rows_of(command)
        # A table that is new on the page needs an empty line before the text that follows.
        is_new = not match["table"] and match.end() < len(text)
        end = "\n\n" if is_new else "\n"
        return f"    python experiments/table.py {command}\n\n{markdown.table(head, rows)}{end}"

    return COMMAND_AND_TABLE.sub(command_and_new_table, text)


# --- The cell that a source names -----------------------------------------------------------------


def cells_of_source(source: str, rows_of: Table) -> tuple[list[str], list[str]]:
    """The cells that a source names, and the words that say which of their numbers.

    Raises:
        ValueError: the source names no row or no column.
    """
    command, *row_and_column = re.split(r":\s+", source)
    if len(row_and_column) not in (1, 2):
        raise ValueError("a source is COMMAND: COLUMN, or COMMAND: ROW: COLUMN")
    column = row_and_column[-1]
    head, *rows = rows_of(command)
    if len(row_and_column) == 2:
        rows = [row for row in rows if row[0] == row_and_column[0]]
        if not rows:
            raise ValueError(f"{command} has no row {row_and_column[0]}")
    which = []
    while not (matching := matching_columns(column, head)):
        column, space, word = column.rpartition(" ")
        if not space:
            raise ValueError(f"{command} has no column {word}; it has {', '.join(head)}")
        which.insert(0, word)
    return [row[matching[0]] for row in rows], which


def matching_columns(name, head):
    """The places of the columns of that name, or else of the one that begins so."""
    exact = [i for i, heading in enumerate(head) if heading == name]
    similar = [i for i, heading in enumerate(head) if heading.startswith(name)]
    return exact or (similar if len(similar) == 1 else [])


def numbers_of_cells(cells: list[str], which: list[str]) -> list[float]:
    """The number that is meant, or several if it is not said which.

    Raises:
        ValueError: a word does not say which number.
    """
    for word in which:
        if word in ("before", "after"):
            seeds = ", ".join(cells).split(", ")
            cells = [seed.split(" -> ")[word == "after"] for seed in seeds]
    if "low" in which or "high" in which:
        (interval,) = re.findall(r"\[(.*?), (.*?)\]", " ".join(cells))
        return [to_number(interval["high" in which])]
    numbers = []
    for cell in cells:
        without_intervals = re.sub(r"\[.*?\]|\(.*?\)", "", cell)
        numbers += map(to_number, NUMBER_IN_CELL.findall(without_intervals))
    for word in which:
        if word in ("min", "max"):
            numbers = [{"min": min, "max": max}[word](numbers)]
        elif word == "mean":
            numbers = [sum(numbers) / len(numbers)]
        elif word not in ("before", "after"):
            raise ValueError(f"{word} does not say which number")
    return numbers


def to_number(text):
    return float(text.replace(",", ""))


# --- Sentences ------------------------------------------------------------------------------------


def fill_in_claims(text: str, rows_of: Table, root: Path) -> tuple[str, list[str]]:
    """The text of a page with the numbers that its sources have now, and what cannot be found."""
    problems = []

    def claim(match):
        source = " ".join(match["source"].split())
        try:
            return f"{said_by_source(match, source, rows_of, root)}<!--{match['source']}-->"
        except (ValueError, LookupError, OSError) as error:
            said = " ".join(match["said"].split())
            problems.append(f"{said}<!--{source}-->: {error}")
            return match[0]

    return CLAIM.sub(claim, text), problems


def said_without_source(text: str) -> list[str]:
    """The measured numbers and the verdicts in sentences that no source follows, each once."""
    prose = NOT_PROSE.sub("", CLAIM.sub("", COMMAND_AND_TABLE.sub("", text)))
    return list(dict.fromkeys(" ".join(said.split()) for said in MEASURED.findall(prose)))


def said_by_source(match, source, rows_of, root):
    """What a claim should say, without its comment.

    Raises:
        ValueError: the source does not have what the claim says.
    """
    if (root / source).is_file():
        if match["said"] not in (root / source).read_text("utf-8"):
            raise ValueError("this is not in the file")
        return match["said"]
    cells, which = cells_of_source(source, rows_of)
    if match["verdict"]:
        verdict = " ".join(match["verdict"].split())
        if not all(agrees(verdict, cell) for cell in cells):
            raise ValueError(f"the verdict is {', '.join(cells)}")
        return match["said"]
    numbers = numbers_of_cells(cells, which)
    if len(numbers) != 1:
        raise ValueError(f"which of {', '.join(cells)}?")
    sign = 1
    is_difference = re.match(r"[-+]\d", cells[0])
    if is_difference and match["number"][0] not in "+-":
        sign = direction(match["unit"] + match["words"])
        if sign * numbers[0] < 0:
            raise ValueError(f"the difference is {cells[0]}")
    said = like(match["number"], sign * numbers[0]) + match["unit"]
    if match["interval"]:
        ends = [numbers_of_cells(cells, [end])[0] for end in ("low", "high")]
        low, high = sorted(sign * end for end in ends)
        said += f"[{like(match['low'], low)}, {like(match['high'], high)}]"
    return said + match["words"]


def agrees(verdict, cell):
    """Whether a verdict is one of those in a cell, such as "significant, equal within 3 points"."""
    verdicts = re.split(r", | \(", cell)
    if verdict == "not significant":
        return "significant" not in verdicts
    return verdict in verdicts


def direction(words):
    """1 or -1 for words that say which side is higher. ValueError: they do not."""
    said = [word for word in re.findall(r"\w+", words) if word in HIGHER + LOWER]
    if len(said) != 1:
        raise ValueError("one word must say which side is higher, or the number needs a sign")
    return 1 if said[0] in HIGHER else -1


def like(written, number):
    """A number written as another one was: with its decimals, its comma and its sign."""
    decimals = len(written.partition(".")[2])
    sign = "+" if written[0] in "+-" else "-"  # "-" writes it before negative numbers only
    return f"{number:{sign},.{decimals}f}"


# --- Pages ----------------------------------------------------------------------------------------


def check(
    pages: Iterable[Path],
    rows_of: Table,
    root: Path,
    write: bool,
) -> list[str]:
    """What is wrong on the pages, a line each.

    Args:
        rows_of: the headings and the rows of the table that a command prints.
        root: what the names of pages and files are relative to.
        write: put today's tables and numbers into the pages, instead of listing what differs.
    """
    problems = []
    texts = {page: page.read_text("utf-8") for page in pages}
    texts_with_tables = {page: fill_in_tables(text, rows_of) for page, text in texts.items()}
    for page, text in texts.items():
        name = page.relative_to(root)
        with_tables = texts_with_tables[page]
        with_claims, problems_of_claims = fill_in_claims(with_tables, rows_of, root)
        problems += [f"{name}: {problem}" for problem in problems_of_claims]
        for said in said_without_source(with_claims):
            problems.append(f"{name}: {said} has no source")
        if with_claims == text:
            continue
        if write:
            page.write_text(with_claims, "utf-8")
            continue
        if with_tables != text:
            problems.append(f"{name}: a table is not what the logs say (--write puts it right)")
        claims = zip(CLAIM.finditer(with_tables), CLAIM.finditer(with_claims), strict=True)
        for old, new in claims:
            if old["said"] != new["said"]:
                problem = f"{old['said']} should be {new['said']} (--write puts it right)"
                problems.append(f"{name}: {' '.join(problem.split())}")
    return problems
