"""Reads and writes JSON lines: one object on each line, and null for what is no finite number."""

import json
import os
from pathlib import Path


def read(path, required=(), may_be_cut=False) -> list[dict]:
    """The rows of a file.

    Args:
        required: the keys that every row must have.
        may_be_cut: leave out a last line that is no JSON, whose writer was killed or still writes.

    Raises:
        ValueError: a line is no JSON object or lacks a key. The message names the file and line.
    """
    lines = Path(path).read_text("utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if may_be_cut and rows and number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not valid JSON ({error})") from error
        if not isinstance(row, dict) or not row.keys() >= set(required):
            raise ValueError(f"{path}, line {number}: not a JSON object with {', '.join(required)}")
        rows.append(row)
    return rows


def read_log(path, required=()) -> list[dict]:
    """The rows of a file to which rows are appended; none before the first of them is written."""
    return read(path, required, may_be_cut=True) if Path(path).exists() else []


def append(path, row: dict) -> None:
    """Append a row in a single write, so that a killed process can cut only the last line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(dumps(row) + "\n")


def write(path, rows: list[dict]) -> None:
    """Write a file of JSON lines, whole or not at all, and make its folder if there is none."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace(path, "".join(dumps(row) + "\n" for row in rows))


def write_json(path, value) -> None:
    """Write one JSON file, whole or not at all."""
    replace(path, dumps(value, indent=2) + "\n")


def replace(path, text: str) -> None:
    """Write a text file under a temporary name and rename it, so that it is never incomplete."""
    temporary = Path(path).with_suffix(".tmp")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)


def dumps(value, **options) -> str:
    """The value as JSON in ASCII; a path becomes its text. `options` are those of json.dumps."""
    text = json.dumps(value, default=os.fspath)
    value = json.loads(text, parse_constant=lambda constant: None)  # JSON lacks NaN and Infinity
    return json.dumps(value, **options)
