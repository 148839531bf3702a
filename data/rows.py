"""Rows of a data set, from the hub or a folder, and how rows of GSM8K and MATH are read.

A row is a dict. Its location, such as "data/train.jsonl, row 3", names it in messages.
"""

import re
from pathlib import Path

from grading.extraction import last_boxed
from logs import jsonl


def read_hub(name: str, configs: list[str], split: str) -> list[tuple[str, dict]]:
    """Rows of a data set of the Hugging Face hub, as pairs (location, row).

    Raises:
        OSError: The hub cannot be reached, or has no such data set.
    """
    import datasets  # this import takes a second, which other data sets need not wait

    located_rows = []
    for config in configs:
        try:
            rows = datasets.load_dataset(name, config, split=split)
        except (OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise OSError(
                f"cannot load {name} from the hub ({reason}); give a local folder by --dataset_path"
            ) from error
        for number, row in enumerate(rows, start=1):
            located_rows.append((f"{name} {config} {split}, row {number}", row))
    return located_rows


def read_folder(folder: str | Path, split: str) -> list[tuple[str, dict]]:
    """Rows of the files of a split in a folder, as pairs (location, row).

    The list is empty for the training split of a folder that holds only test data.

    Raises:
        ValueError: There is no such folder or split, or a file cannot be read.
    """
    located_rows = []
    for path in find_files(folder, split):
        located_rows += _read_file(path)
    return located_rows


def find_files(folder: str | Path, split: str) -> list[Path]:
    """The data files of a split in a folder.

    They are named `split`.jsonl, `split`.parquet or `split`-00000-of-00001.parquet, as on the hub.

    A folder with a single data file of another name holds only test data: that file is the test
    split, and the training split has no files.

    Raises:
        ValueError: There is no such folder, or it has no file of that split.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f"--dataset_path {folder} is not a folder; "
            "it should hold train and test .jsonl or .parquet"
        )
    for pattern in (f"{split}.jsonl", f"{split}.parquet", f"{split}-*-of-*.parquet"):
        paths = sorted(folder.glob(pattern))
        if paths:
            return paths
    if split == "train":
        return []
    paths = [*folder.glob("*.jsonl"), *folder.glob("*.parquet")]
    if split == "test" and len(paths) == 1:
        is_other_split = paths[0].name.startswith(("train", "validation"))
        if not is_other_split:
            return paths
    file_names = ", ".join(sorted(path.name for path in paths)) or "no data files"
    json_names = ", ".join(sorted(path.name for path in folder.glob("*.json")))
    if json_names:
        file_names += f"; {json_names} must have one row a line, and be named .jsonl"
    raise ValueError(f"{folder} has no {split}.jsonl or {split}.parquet (found: {file_names})")


def _read_file(path):
    """Rows of one file, as pairs (location, row)."""
    if path.suffix == ".parquet":
        rows = _read_parquet(path)
    else:
        rows = jsonl.read(path)
    if not rows:
        raise ValueError(f"{path} is empty")
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]


def _read_parquet(path):
    import datasets

    try:
        stream = datasets.load_dataset(
            "parquet", data_files=str(path), split="train", streaming=True
        )
        return list(stream)
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as parquet ({error})") from error


def gsm8k_example(row: dict, location: str) -> dict:
    """The example in a row of GSM8K's schema, whose gold answer follows the last ####.

    Raises:
        ValueError: A column is missing or has no such answer.
    """
    text = text_of(row, "answer", location)
    solution, separator, answer = text.rpartition("####")
    answer = answer.strip().replace(",", "")
    if not separator or not answer:
        raise ValueError(f"{location}: column 'answer' has no final line '#### <answer>'")
    solution = re.sub(r"<<.*?>>", "", solution).strip()  # <<48/2=24>> is meant for a calculator
    return {"question": text_of(row, "question", location), "answer": answer, "solution": solution}


def math_example(row: dict, location: str) -> dict:
    r"""The example in a row of MATH.

    The columns are `problem`, and `answer` or a `solution` whose last \boxed{} is the answer.
    `level` and `subject` may be missing. The original data set calls the subject `type`.

    Raises:
        ValueError: A column is missing or has no such answer.
    """
    solution = ""
    if "solution" in row:
        solution = text_of(row, "solution", location).strip()
    # If the row has neither answer nor solution, text_of raises ValueError.
    if "answer" in row or not solution:
        answer = text_of(row, "answer", location)
    else:
        answer = last_boxed(solution)
    if answer is None:
        raise ValueError(f"{location}: no column 'answer', and no \\boxed{{}} in column 'solution'")
    level = str(row.get("level", "")).removeprefix("Level ")
    return {
        "question": text_of(row, "problem", location),
        "answer": answer.strip(),
        "solution": solution,
        "level": int(level) if level.isdigit() else None,
        "subject": row.get("subject", row.get("type")),
    }


def with_other_columns(example: dict, row: dict) -> dict:
    """The example of a row, and the columns of the row that the example does not have.

    A level or a subject comes from the example alone, because logs divide accuracies by them.
    """
    columns = {name: value for name, value in row.items() if name not in ("level", "subject")}
    return columns | example


def text_of(row: dict, column: str, location: str) -> str:
    """The text in a column of a row. Raises ValueError if there is none."""
    if column not in row:
        raise ValueError(f"{location}: no column {column!r} (columns: {', '.join(row)})")
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{location}: column {column!r} must be text, not {value!r}")
    return value
