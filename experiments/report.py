"""Draw the figures of the report and of the studies' pages, and write their tables.

    python experiments/report.py             # every figure, every table into its page; captions
    python experiments/report.py training    # only those whose names begin so
    python experiments/report.py --check     # do the pages say what the kept logs give?

A table of a page is found by its header, and a caption must be on the page word for word. The check
also reads the sentences of analysis.md: each percentage, each number of points and each number with
a decimal point must be in a table or a caption of its section, rounded or not. The abstract may use
those of all sections. Code is not read, nor are sizes of models. Whether it is the right number for
its sentence, only a reader can tell.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402
from matplotlib.testing.compare import compare_images  # noqa: E402

import plotter  # noqa: E402
from experiments import public_runs, real_model, report_choices, report_methods  # noqa: E402

FIGURES = ROOT / "experiments" / "figures"
REPORT = "analysis.md"
ABSTRACT = "Abstract"
NUMBER = r"\d[\d,]*(?:\.\d+)?"
MEASURED = re.compile(rf"{NUMBER}(?=%| points)|\d[\d,]*\.\d+(?!\d|B| million)")
# What the check does not read: code, formulas, the targets of links.
NOT_READ = re.compile(r"^ {4}.*$|```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$|\]\([^)]*\)", re.M | re.S)


@dataclass(frozen=True)
class Table:
    """A table in Markdown; `make` returns its text."""

    name: str
    make: Callable[[], str]
    pages: tuple[str, ...] = (REPORT,)


@dataclass(frozen=True)
class Picture:
    """A figure; `make` returns it with its caption, a paragraph in asterisks."""

    name: str
    make: Callable
    pages: tuple[str, ...] = (REPORT,)


STUDIES = "experiments/README.md"
REAL = "experiments/real/README.md"
PUBLIC = "experiments/public/README.md"
ITEMS = [
    *(Picture(name, draw) for name, draw in report_methods.FIGURES.items()),
    *(Table(name, make) for name, make in report_methods.TABLES.items()),
    *(Picture(name, draw) for name, draw in report_choices.FIGURES.items()),
    *(Table(name, make) for name, make in report_choices.TABLES.items()),
    Table("checks", real_model.checks_table, (REAL,)),
    Table("start", real_model.start_table, (REAL,)),
    Table("rates_of_real_model", real_model.rates_table, (REAL,)),
    Picture("real_model", real_model.draw_real_model, (REAL, REPORT)),
    Table("training_of_real_model", real_model.training_table, (REAL,)),
    Table("calculations_of_real_model", real_model.calculations_table, (REAL,)),
    Table("samples_of_real_model", real_model.rollouts_table, (REAL,)),
    Table("pass_at_k_of_real_model", real_model.pass_at_k_table, (REAL,)),
    Table("longer_runs_of_real_model", real_model.longer_table, (REAL,)),
    Table("raw_rewards_of_real_model", real_model.raw_rewards_table, (REAL,)),
    Table("gains_of_real_model", real_model.gains_table, (REAL,)),
    Table("gains_in_short", real_model.short_gains_table),
    Table("judge", report_choices.judge_table, (STUDIES,)),
    Table("mechanism", report_methods.mechanism_table, (STUDIES,)),
    Table("operands", report_methods.operands_table, (STUDIES,)),
    Table("rewards", report_choices.rewards_table, (STUDIES,)),
    Table("lora", report_choices.lora_table, (STUDIES,)),
    Table("carries_over", public_runs.decided_table),
    *(Table(name, make, (PUBLIC,)) for name, make in public_runs.TABLES.items()),
    Picture("carries_over", public_runs.draw_decided_questions),
    Picture("public_runs", public_runs.draw_all_questions, (PUBLIC,)),
]


# --- Writing --------------------------------------------------------------------------------------


def fill(page: str, table: str) -> str:
    """The page with this table in the place of the one that has the same header.

    Raises ValueError if the page has no such table or several.
    """
    header, _, _ = table.partition("\n")
    with_rows = re.compile(rf"^{re.escape(header)}\n(?:\|.*\n?)*", re.MULTILINE)
    page, count = with_rows.subn(lambda _: f"{table}\n", page)
    if count != 1:
        raise ValueError(f"this header is on the page {count} times: {header}")
    return page


def save(figure, name: str, folder: Path = FIGURES) -> None:
    """As PNG, which a page shows, and as SVG for whoever wants it sharp."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", metadata={"Software": None})
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def write(items: list[Table | Picture]) -> None:
    for item in items:
        if isinstance(item, Picture):
            figure, caption = item.make()
            save(figure, item.name)
            print(f"{item.name}:\n{caption}\n")
        else:
            table = item.make()
            print(f"{item.name}:\n{table}\n")
            for name in item.pages:
                page = ROOT / name
                page.write_text(fill(page.read_text("utf-8"), table), "utf-8")


# --- Checking -------------------------------------------------------------------------------------


def check(items: list[Table | Picture]) -> list[str]:
    """What the pages do not say as the kept logs give it, one line for each fault."""
    faults = []
    report_texts = []  # its tables and captions
    for item in items:
        if isinstance(item, Picture):
            figure, text = item.make()
            if not is_drawn_so(figure, item.name):
                faults.append(f"the figure {item.name} is not what the kept logs give")
        else:
            text = item.make()
        for name in item.pages:
            page = (ROOT / name).read_text("utf-8")
            if one_line(text) not in one_line(page):
                faults.append(f"{name} does not have {item.name} as it is now:\n{text}")
        if REPORT in item.pages:
            report_texts.append(text)
    return faults + check_sentences((ROOT / REPORT).read_text("utf-8"), report_texts)


def is_drawn_so(figure, name: str) -> bool:
    """Whether the kept picture is this figure, but for what versions of fonts change."""
    with tempfile.TemporaryDirectory() as folder:
        save(figure, name, Path(folder))
        kept = FIGURES / f"{name}.png"
        return compare_images(str(kept), str(Path(folder) / kept.name), tol=2) is None


def check_sentences(report: str, texts: list[str]) -> list[str]:
    """The measured numbers in sentences that no table or caption of their section has.

    Args:
        texts: the tables and captions of the whole report.
    """
    known_texts = {one_line(text) for text in texts}
    faults = []
    for section in re.split(r"^## ", report, flags=re.MULTILINE):
        title, _, text = section.partition("\n")
        paragraphs = text.split("\n\n")
        sentences = [text for text in paragraphs if one_line(text) not in known_texts]
        tables = known_texts if title == ABSTRACT else known_texts & {*map(one_line, paragraphs)}
        known_numbers = numbers_in(" ".join(tables))
        for paragraph in sentences:
            for number in MEASURED.findall(NOT_READ.sub(" ", paragraph)):
                if not is_among(number, known_numbers):
                    faults.append(f"{REPORT}, {title}: {number} is in no table or caption there")
    return faults


def one_line(text: str) -> str:
    return " ".join(text.split())


def numbers_in(text: str) -> set[str]:
    return set(re.findall(NUMBER, text))


def is_among(number: str, known_numbers: set[str]) -> bool:
    """Whether one of the numbers is this one, if it is rounded to as many digits."""
    _, _, decimals = number.partition(".")
    value = as_float(number)
    return any(round(as_float(known), len(decimals)) == value for known in known_numbers)


def as_float(number: str) -> float:
    return float(number.replace(",", ""))


# --- The command line -----------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="?", default="", help="only what has a name that begins so")
    parser.add_argument("--check", action="store_true", help="compare the pages, write nothing")
    args = parser.parse_args(arguments)
    items = [item for item in ITEMS if item.name.startswith(args.name)]
    if not items:
        print(f"error: there is no {args.name}; there are {names_of(ITEMS)}", file=sys.stderr)
        return 2
    with matplotlib.rc_context(plotter.STYLE | {"svg.hashsalt": "report"}):
        if args.check:
            faults = check(items)
            print("\n".join(faults) or "the pages say what the kept logs give")
            return 1 if faults else 0
        try:
            write(items)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def names_of(items: list[Table | Picture]) -> str:
    return ", ".join(sorted({item.name for item in items}))


if __name__ == "__main__":
    sys.exit(main())
