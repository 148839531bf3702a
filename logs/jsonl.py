"""Reads and writes all JSON files of the project, and its JSON lines: one object on each line."""

import json
import math
import os
from pathlib import Path


def read(path, required=(), on_torn_line=None):
    """Return the rows of a file of JSON lines. Empty lines are skipped.

    required: the keys that every row must have.
    on_torn_line: is called with a message if the last line is cut, which happens when its process
        is killed or is still writing. Without it, a cut line is an error.

    Raises:
        ValueError: a line is no JSON object or lacks a key. The message names the file and line.
        OSError: the file cannot be read.
    """
    lines = Path(path).read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        location = f"{path}, line {number}"
        try:
            row = parse(line, location)
        except ValueError:
            # A file that ends in a line break splits into its lines and an empty last one, so a
            # non-empty last one was cut.
            is_cut = number == len(lines)
            if not is_cut or on_torn_line is None:
                raise
            on_torn_line(
                f"{location}: torn last line skipped (the run was killed or is still writing)"
            )
            break
        for key in required:
            if key not in row:
                raise ValueError(f'{location}: not an object with "{key}"')
        rows.append(row)
    return rows


def read_to_continue(path, required=()):
    """Return the rows of a file that rows will be appended to; a cut last line is taken off.

    Raises what `read` raises, also for a file that has nothing but a cut line: it may hold
    something else.
    """
    cut_lines = []
    rows = read(path, required, on_torn_line=cut_lines.append)
    if cut_lines and not rows:
        return read(path, required)
    if cut_lines:
        os.truncate(path, Path(path).read_bytes().rindex(b"\n") + 1)
    return rows


def parse(line, location):
    """Return the object that a line of JSON holds. `location` names the line in error messages.

    Raises:
        ValueError: the line is not valid JSON or no object.
    """
    try:
        if isinstance(line, bytes):
            line = line.decode("utf-8-sig")  # json.loads takes some bytes for UTF-16
        row = json.loads(line, object_pairs_hook=_with_unique_keys)
    except (ValueError, RecursionError) as error:  # bytes that are not UTF-8 are a ValueError too
        reason = getattr(error, "msg", error)  # only a JSONDecodeError has msg
        if isinstance(error, UnicodeDecodeError):
            reason = f"{error}; save the file as UTF-8"
        raise ValueError(f"{location}: not valid JSON ({reason})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{location}: not a JSON object")
    return row


def _with_unique_keys(pairs):
    columns = dict(pairs)
    if len(columns) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r} stands twice in an object")
    return columns


def append(path, row):
    """Append one row in a single write, so that a killed process can tear only the last line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(dumps(row) + "\n")


def write(path, rows):
    """Write a file of JSON lines, complete or not at all, and make its folder if there is none."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace(path, "".join(dumps(row) + "\n" for row in rows))


def write_json(path, value):
    """Write one JSON file, complete or not at all."""
    replace(path, dumps(value, indent=2) + "\n")


def replace(path, text):
    """Write a file under a temporary name and rename it, so that it is never incomplete."""
    temporary = Path(path).with_suffix(".tmp")
    try:
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def dumps(value, **options):
    """Return the value as JSON in ASCII. NaN and infinity, which JSON lacks, become null.

    A path becomes its text. `options` are those of json.dumps.

    Raises:
        TypeError: the value holds something else that JSON lacks.
    """
    return json.dumps(_without_nan(value), default=os.fspath, **options)


def _without_nan(value):
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value
