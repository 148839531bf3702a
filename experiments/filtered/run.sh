#!/usr/bin/env bash
# SFT on the samples of a teacher: on all of them, on those that are right, and on as many drawn at
# random. The teacher is tiny/3m, with one sample at temperature 1 for each of 2,048 training
# problems.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

LADDER="1e-6 3e-6 1e-5 3e-5 1e-4 3e-4 1e-3"
[ -n "$QUICK" ] || RATES="3e-5 1e-4 3e-4"
if [ -n "$QUICK" ]; then problems=64; else problems=2048; fi
TEACHER=$OUT/teacher.jsonl
$PYTHON generate_gold.py --model_name tiny/3m --dataset_name arithmetic --num_problems $problems \
    --max_completion_length 160 --keep_incorrect --output $TEACHER
right=$(grep -c '"correct": true' $TEACHER)
arm all $SFT --train_file $TEACHER --num_examples $problems
arm right $SFT --train_file $TEACHER --num_examples $right --filter_correct
arm as_many $SFT --train_file $TEACHER --num_examples $right
