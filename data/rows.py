"""Rows of a data set, from the hub or from files in a folder, and the examples that GSM8K's and MATH's rows are.

`where` is the place of a row, for errors.
"""

import re
from pathlib import Path

from grading.extraction import last_boxed
from logs import jsonl


def read_hub(name: str, configs: list[str], split: str) -> list[tuple[str, dict]]:
    """Rows of a data set of the Hugging Face hub, as (where, row). Raises OSError."""
    import datasets  # here, because it takes a second to import

    try:
        parts = [(config, datasets.load_dataset(name, config, split=split)) for config in configs]
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise OSError(
            f"cannot load {name} from the hub ({reason}); give a local folder by --dataset_path"
        ) from error
    return [
        (f"{name} {config} {split}, row {i}", row)
        for config, part in parts
        for i, row in enumerate(part, 1)
    ]


def read_folder(folder: str, split: str) -> list[tuple[str, dict]]:
    """Rows of the files of a split in a folder, as (where, row); none for a folder without training data."""
    return [row for path in find_files(folder, split) for row in _read_file(path)]


def find_files(folder: str, split: str) -> list[Path]:
    """`split`.jsonl or .parquet in a folder (the hub's `split`-00000-of-00001.parquet too).

    A folder with a single file of another name is test data alone. No training file: []. Raises ValueError.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f"--dataset_path {folder} is not a folder; it should hold train and test .jsonl or .parquet"
        )
    for pattern in (f"{split}.jsonl", f"{split}.parquet", f"{split}-*-of-*.parquet"):
        if paths := sorted(folder.glob(pattern)):
            return paths
    if split == "train":
        return []
    paths = [*folder.glob("*.jsonl"), *folder.glob("*.parquet")]
    if (
        split == "test"
        and len(paths) == 1
        and not paths[0].name.startswith(("train", "validation"))
    ):
        return paths
    found = ", ".join(sorted(path.name for path in paths)) or "no data files"
    if others := sorted(path.name for path in folder.glob("*.json")):
        found += f"; {', '.join(others)} must have one row a line, and be named .jsonl"
    raise ValueError(f"{folder} has no {split}.jsonl or {split}.parquet (found: {found})")


def _read_file(path):
    if path.suffix == ".parquet":
        import datasets

        try:
            rows = list(
                datasets.load_dataset(
                    "parquet", data_files=str(path), split="train", streaming=True
                )
            )
        except ValueError as error:
            raise ValueError(f"{path}: cannot be read as parquet ({error})") from error
    else:
        rows = jsonl.read(path)
    if not rows:
        raise ValueError(f"{path} is empty")
    return [(f"{path}, row {i}", row) for i, row in enumerate(rows, 1)]


def gsm8k_example(row: dict, where: str) -> dict:
    """A row of GSM8K's schema: the gold answer is what follows the last ####. `where` names the row in errors."""
    text = text_of(row, "answer", where)
    solution, mark, answer = text.rpartition("####")
    answer = answer.strip().replace(",", "")
    if not mark or not answer:
        raise ValueError(f"{where}: column 'answer' has no final line '#### <answer>'")
    solution = re.sub(r"<<.*?>>", "", solution).strip()  # <<48/2=24>> marks are for a calculator
    return {"question": text_of(row, "question", where), "answer": answer, "solution": solution}


def math_example(row: dict, where: str) -> dict:
    """A row of MATH: problem; answer, or solution whose last \\boxed{} is the answer; level and subject where given."""
    solution = text_of(row, "solution", where).strip() if "solution" in row else ""
    answer = (
        text_of(row, "answer", where) if "answer" in row or not solution else last_boxed(solution)
    )
    if answer is None:
        raise ValueError(f"{where}: no column 'answer', and no \\boxed{{}} in column 'solution'")
    level = str(row.get("level", "")).removeprefix("Level ")
    return {
        "question": text_of(row, "problem", where),
        "answer": answer.strip(),
        "solution": solution,
        "level": int(level) if level.isdigit() else None,
        "subject": row.get("subject", row.get("type")),
    }


def text_of(row, column, where):
    if column not in row:
        raise ValueError(f"{where}: no column {column!r} (columns: {', '.join(row)})")
    if not isinstance(row[column], str) or not row[column].strip():
        raise ValueError(f"{where}: column {column!r} must be text, not {row[column]!r}")
    return row[column]
