"""Rows of a data set, from the hub or from files in a folder, each with the place that an error should name."""

from pathlib import Path

from logs import jsonl


def read_hub(name: str, configs: list[str], split: str) -> list[tuple[str, dict]]:
    """Rows of a data set of the Hugging Face hub, as (where, row). Raises OSError."""
    import datasets  # here, because it takes a second to import

    try:
        parts = [(config, datasets.load_dataset(name, config, split=split)) for config in configs]
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise OSError(f"cannot load {name} from the hub ({reason}); give a local folder by --dataset_path") from error
    return [(f"{name} {config} {split}, row {i}", row) for config, part in parts for i, row in enumerate(part, 1)]


def read_folder(folder: str, split: str) -> list[tuple[str, dict]]:
    """Rows of the files of a split in a folder, as (where, row); none for a folder without training data."""
    return [row for path in find_files(folder, split) for row in _read_file(path)]


def find_files(folder: str, split: str) -> list[Path]:
    """`split`.jsonl or .parquet in a folder (the hub's `split`-00000-of-00001.parquet too).

    A folder with a single file of another name is test data alone. No training file: []. Raises ValueError.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"--dataset_path {folder} is not a folder; it should hold train and test .jsonl or .parquet")
    for pattern in (f"{split}.jsonl", f"{split}.parquet", f"{split}-*-of-*.parquet"):
        if paths := sorted(folder.glob(pattern)):
            return paths
    if split == "train":
        return []
    paths = [*folder.glob("*.jsonl"), *folder.glob("*.parquet")]
    if len(paths) == 1 and not paths[0].name.startswith("train"):
        return paths
    found = ", ".join(sorted(path.name for path in paths)) or "no data files"
    if others := sorted(path.name for path in folder.glob("*.json")):
        found += f"; {', '.join(others)} must have one row a line, and be named .jsonl"
    raise ValueError(f"{folder} has no test.jsonl or test.parquet (found: {found})")


def _read_file(path):
    if path.suffix == ".parquet":
        import datasets

        try:
            rows = list(datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True))
        except ValueError as error:
            raise ValueError(f"{path}: cannot be read as parquet ({error})") from error
        rows = [(f"{path}, row {i}", row) for i, row in enumerate(rows, 1)]
    else:
        with open(path, "rb") as file:
            lines = [(f"{path}, line {i}", line) for i, line in enumerate(file, 1) if line.strip()]
        rows = [(where, jsonl.parse(line, where)) for where, line in lines]
    if not rows:
        raise ValueError(f"{path} is empty")
    return rows
