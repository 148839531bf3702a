"""JSON lines, and JSON: the project's one reader and one writer of each."""

import json
import math
import os
from pathlib import Path


def read(path, required=(), torn=None):
    """The rows of a file of JSON objects, empty lines aside. Raises ValueError, which names file and line, and OSError.

    required: keys that each row must have. torn: called with a message instead of raising where the last line is cut,
    as a kill leaves it, or another process that still writes.
    """
    lines = [
        (f"{path}, line {i}", line)
        for i, line in enumerate(Path(path).read_bytes().split(b"\n"), 1)
    ]
    rows = []
    for where, line in lines:
        if not line.strip():
            continue
        try:
            rows.append(parse(line, where))
        except ValueError:
            if torn is None or (where, line) != lines[-1]:  # a whole line ends in a line break
                raise
            torn(f"{where}: torn last line skipped (the run was killed or is still writing)")
            break
        if missing := [key for key in required if key not in rows[-1]]:
            raise ValueError(f'{where}: not an object with "{missing[0]}"')
    return rows


def parse(line, where):
    """The object that a line of JSON holds. Raises ValueError; `where` names the line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError as well
        raise ValueError(f"{where}: not valid JSON ({getattr(error, 'msg', error)})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not a JSON object")
    return row


def append(path, row):
    """Append one row in a single write: a killed process tears at most the last line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(dumps(row) + "\n")


def write(path, rows):
    """Write a whole file of rows; its folder is made."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace(path, "".join(dumps(row) + "\n" for row in rows))


def write_json(path, value):
    """Write one JSON file."""
    replace(path, dumps(value, indent=2) + "\n")


def replace(path, text):
    """Write a file under a temporary name and rename it: it is complete or absent."""
    temporary = Path(path).with_suffix(".tmp")
    try:
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def dumps(value, **options):
    """JSON in ASCII. NaN and infinity are not JSON: a missing number is null; a path is text. Raises TypeError."""
    return json.dumps(_finite(value), default=os.fspath, **options)


def _finite(value):
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
