"""Draw the figures and write the tables of the studies' pages from their data.

    python experiments/report.py            # every figure, and every table into its page
    python experiments/report.py --check    # are the tables on the pages what the data give?

A table stands on its page between the lines `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402

import plotter  # noqa: E402
from experiments import public_runs, real_model  # noqa: E402

TABLES = {
    "experiments/public/README.md": public_runs.tables,
    "experiments/real/README.md": real_model.tables,
}
FIGURES = {"experiments/public/carries_over.png": public_runs.draw_carries_over}


def fill(page: str, tables: dict[str, str]) -> str:
    """Return a page with its tables between their two lines."""
    for name, table in tables.items():
        first, last = f"<!-- table: {name} -->", "<!-- end of table -->"
        between = re.compile(f"({re.escape(first)}\n).*?({re.escape(last)})", re.DOTALL)
        page, count = between.subn(
            lambda lines, table=table: f"{lines[1]}\n{table}\n\n{lines[2]}", page
        )
        assert count == 1, f"{first} is on the page {count} times"
    return page


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the pages, write nothing")
    args = parser.parse_args(arguments)
    for name, make_tables in TABLES.items():
        page = (ROOT / name).read_text("utf-8")
        new_page = fill(page, make_tables())
        if not args.check:
            (ROOT / name).write_text(new_page, "utf-8")
        elif new_page != page:
            print(f"{name} is not what the data give: run python experiments/report.py")
            return 1
    if args.check:
        return 0
    with matplotlib.rc_context(plotter.STYLE):
        for name, draw in FIGURES.items():
            draw().savefig(ROOT / name, metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
