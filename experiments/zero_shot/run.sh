#!/usr/bin/env bash
# Without training, as CS336 asks: the three categories of form and answer, and the first ten completions of each.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

for form in r1_zero question_only reasoning_answer; do
    for size in 1m 3m; do
        run ${form}_$size $PYTHON main.py $MODEL --model_name tiny/$size --prompt $form --evaluator math --eval_only --eval_split test --eval_size 2000 --eval_temperature 1
    done
done
[ -e $LOGS/cases.jsonl ] || $PYTHON - $OUT/r1_zero_1m/eval/step_000000.jsonl $LOGS/cases.jsonl <<'END'
import sys
from logs import jsonl
from logs.statistics import CATEGORIES
rows = jsonl.read(sys.argv[1])
kept = {name: [row for row in rows if (row["format"], row["correct_strict"]) == pair][:10] for name, pair in CATEGORIES.items()}
jsonl.write(sys.argv[2], [{"category": name, "question": row["prompt"].split("User: ")[-1].split("\n")[0], **{key: row[key] for key in ("completion", "gold", "parsed")}} for name in kept for row in kept[name]])
END
