#!/usr/bin/env bash
# Models before any training, as CS336 asks: how many completions have the format and the right
# answer, and the first ten completions of each of the three categories.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

for prompt in r1_zero question_only reasoning_answer; do
    for size in 1m 3m; do
        run ${prompt}_$size $PYTHON main.py $MODEL --model_name tiny/$size --prompt $prompt \
            --evaluator math --eval_only --eval_split test --eval_size $NUM_TEST \
            --eval_temperature 1
    done
done
[ ! -e $LOGS/cases.jsonl ] || exit 0
$PYTHON - $OUT/r1_zero_1m/eval/step_000000.jsonl $LOGS/cases.jsonl <<'END'
import sys

from logs import jsonl
from logs.statistics import CATEGORIES

rows = jsonl.read(sys.argv[1])
cases = []
for category, verdicts in CATEGORIES.items():
    of_category = [row for row in rows if (row["format"], row["correct_strict"]) == verdicts]
    for row in of_category[:10]:
        case = {
            "category": category,
            "question": row["prompt"].split("User: ")[-1].split("\n")[0],
            "completion": row["completion"],
            "gold": row["gold"],
            "parsed": row["parsed"],
        }
        cases.append(case)
jsonl.write(sys.argv[2], cases)
END
