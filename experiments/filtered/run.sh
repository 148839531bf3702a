#!/usr/bin/env bash
# SFT on a teacher's samples (tiny/3m at temperature 1, one of each of 2,048 training problems): all, those that are right, and as
# many drawn blindly.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

[ -n "${QUICK:-}" ] || RATES="3e-5 1e-4 3e-4" LADDER=" 1e-6 3e-6 1e-5 3e-5 1e-4 3e-4 1e-3 "
problems=${QUICK:+64} TEACHER=$OUT/teacher.jsonl
$PYTHON generate_gold.py --model_name tiny/3m --dataset_name arithmetic --num_problems ${problems:-2048} --max_completion_length 160 --keep_incorrect --output $TEACHER
right=$(grep -c '"correct": true' $TEACHER)
arm all $SFT --train_file $TEACHER --num_examples ${problems:-2048}
arm right $SFT --train_file $TEACHER --num_examples $right --filter_correct
arm as_many $SFT --train_file $TEACHER --num_examples $right
