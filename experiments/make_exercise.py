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
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    (function,) = (function for function in functions if function.name == "compute_loss")
    lines = source.splitlines(keepends=True)
    lines_before = lines[: function.body[0].lineno - 1]
    lines_after = lines[function.body[-1].end_lineno :]
    return "".join([*lines_before, BLANK_BODY, *lines_after])


def main():
    parser = argparse.ArgumentParser(description="Leave compute_loss to you, in a copy.")
    parser.add_argument("--output_dir", type=Path, default=Path("output/exercise"))
    folder = parser.parse_args().output_dir
    if folder.exists():
        print(f"error: {folder} exists, perhaps with your solution in it", file=sys.stderr)
        sys.exit(2)
    git = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=True)
    for name in git.stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    main_path = folder / "main.py"
    main_path.write_text(blank(main_path.read_text("utf-8")), "utf-8")
    print(f"Write compute_loss in {folder}/main.py, as {folder}/experiments/exercise.md asks.")
    print(f"These tests judge it: make test-exercise EXERCISE={folder}")


if __name__ == "__main__":
    main()
