"""Tables in Markdown, as every page and every script of the project has them."""


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table with a line for its header and for each row, without a line break at the end.

    Cells are text as it shall stand there: a "|" in one must be escaped before.
    """
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *rows])
