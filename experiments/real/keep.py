"""Keep the logs of finished runs of the study, without what is large or can be made again.

    python experiments/real/keep.py output/real/sft32_seed0 [output/real/...]

Of each run this writes to experiments/real/RUN: args.json, the two logs, the report on a judge and
the pairs that it rated, the answers of its evaluations as row number, completion and verdict
(without the question), and a few rollouts.
`python experiments/archive.py pack real` then packs all runs of the study.
"""

import argparse
import shutil
import sys
from pathlib import Path

STUDY = Path(__file__).resolve().parent
sys.path.insert(0, str(STUDY.parent.parent))

from logs import jsonl  # noqa: E402

KEPT_AS_THEY_ARE = (
    "args.json",
    "train_log.jsonl",
    "eval_log.jsonl",
    "judge_report.json",
    "judge_pairs.jsonl",
)
ANSWER_COLUMNS = ("id", "completion", "correct_strict", "correct_flexible", "reward", "length")
ROLLOUT_STEPS = (1, 20, 40, 60)
ROLLOUTS_OF_STEP = 16


def keep(run: Path) -> None:
    """Copy a run to the folder of the study. A copy that is there is replaced.

    Raises ValueError if the folder holds no run.
    """
    if not (run / "args.json").exists() and not (run / "judge_report.json").exists():
        raise ValueError(f"{run} holds no run: it has neither args.json nor judge_report.json")
    kept = STUDY / run.name
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    for name in KEPT_AS_THEY_ARE:
        if (run / name).exists():
            shutil.copyfile(run / name, kept / name)
    for path in sorted((run / "eval").glob("*.jsonl")):
        keep_rows(jsonl.read(path), kept / "eval" / path.name)
    for step in ROLLOUT_STEPS:
        path = run / "rollouts" / f"step_{step:06d}.jsonl"
        if path.exists():
            keep_rows(jsonl.read(path)[:ROLLOUTS_OF_STEP], kept / "rollouts" / path.name)


def keep_rows(rows: list[dict], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    jsonl.write(path, [{name: row[name] for name in ANSWER_COLUMNS if name in row} for row in rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run")
    try:
        for run in parser.parse_args().runs:
            keep(run)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
