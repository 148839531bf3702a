"""`make exercise`: a copy of the repository in which the body of main.compute_loss is left to you; see exercise.md."""

import argparse
import ast
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLANK = '''\
    """The loss of GRPO, yours to write: experiments/exercise.md says in three stages what it must do."""
    raise NotImplementedError("compute_loss is yours to write: see experiments/exercise.md")
'''


def blank(source):
    """main.py's source with the body of compute_loss, and nothing else, left to be written."""
    functions = [
        node for node in ast.parse(source).body if getattr(node, "name", None) == "compute_loss"
    ]
    assert len(functions) == 1, f"main.py defines compute_loss {len(functions)} times"
    first, last = functions[0].body[0], functions[0].body[-1]
    lines = source.splitlines(keepends=True)
    return "".join([*lines[: first.lineno - 1], BLANK, *lines[last.end_lineno :]])


def write_exercise(folder):
    """Copy every tracked file to a new folder, with compute_loss blanked. ValueError where that is not possible."""
    if folder.exists():
        raise ValueError(
            f"{folder} already exists, perhaps with your solution in it; move or remove it first"
        )
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT)
    if listed.returncode:
        raise ValueError(
            f"git cannot list the tracked files of {ROOT}: the exercise is made in a clone"
        )
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    main = folder / "main.py"
    main.write_text(blank(main.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Write a copy of the repository with compute_loss left to you."
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("output/exercise"),
        help="a folder that is not there",
    )
    folder = parser.parse_args().output_dir
    try:
        write_exercise(folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(
        f"write compute_loss in {folder}/main.py, as {folder}/experiments/exercise.md asks; the judge of it is"
    )
    print(f"    make test-exercise EXERCISE={folder}")
