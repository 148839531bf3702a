"""`make exercise`: a copy of the repository in which the body of main.compute_loss is left to you.

experiments/exercise.md says what the body must do.
"""

import argparse
import ast
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLANK_BODY = '''\
    """The loss of GRPO, yours to write: experiments/exercise.md says what it must do."""
    raise NotImplementedError("compute_loss is yours to write: see experiments/exercise.md")
'''


def blank(source):
    """main.py's source, in which only the body of compute_loss is replaced by BLANK_BODY."""
    functions = [
        node for node in ast.parse(source).body if getattr(node, "name", None) == "compute_loss"
    ]
    assert len(functions) == 1, f"main.py defines compute_loss {len(functions)} times"
    first_statement = functions[0].body[0]
    last_statement = functions[0].body[-1]
    lines = source.splitlines(keepends=True)
    lines_before = lines[: first_statement.lineno - 1]
    lines_after = lines[last_statement.end_lineno :]
    return "".join([*lines_before, BLANK_BODY, *lines_after])


def write_exercise(folder):
    """Copy every tracked file to a new folder, and blank compute_loss there.

    Raises:
        ValueError: The folder exists already, or the repository is no git clone.
        OSError: A file cannot be copied.
    """
    if folder.exists():
        raise ValueError(
            f"{folder} already exists, perhaps with your solution in it; move or remove it first"
        )
    git = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT)
    if git.returncode != 0:
        raise ValueError(
            f"git cannot list the files of {ROOT}: `make exercise` works only in a git clone"
        )
    for name in git.stdout.removesuffix("\0").split("\0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    main_path = folder / "main.py"
    main_path.write_text(blank(main_path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Write a copy of the repository with compute_loss left to you."
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("output/exercise"),
        help="a folder that does not exist yet (default: output/exercise)",
    )
    folder = parser.parse_args().output_dir.expanduser()
    try:
        write_exercise(folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"write compute_loss in {folder}/main.py, as {folder}/experiments/exercise.md asks.")
    print("These tests judge it:")
    print(f"    make test-exercise EXERCISE={folder}")
