#!/usr/bin/env bash
# SFT on the samples of a teacher: on all of them, on those that are right, and on as many drawn at
# random. The teacher is tiny/3m, with one sample at temperature 1 for each of 2,048 training
# problems.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

if [ -n "$QUICK" ]; then problems=64; else problems=2048; fi
TEACHER=$OUT/teacher.jsonl
$PYTHON generate_gold.py --model_name tiny/3m --dataset_name arithmetic --num_problems $problems \
    --max_completion_length 160 --keep_incorrect --output $TEACHER
mkdir -p $LOGS
cp $TEACHER $LOGS # table.py counts them
right=$(grep -c '"correct": true' $TEACHER)
tuned --arm "all: sft.py --num_examples $problems
        --learning_rate $(rates 1e-6 3e-6 1e-5 3e-5 1e-4 3e-4)" \
    --arm "right: sft.py --num_examples $right --filter_correct
        --learning_rate $(rates 1e-5 3e-5 1e-4 3e-4)" \
    --arm "as_many: sft.py --num_examples $right
        --learning_rate $(rates 3e-6 1e-5 3e-5 1e-4 3e-4)" \
    -- $SFT --train_file $TEACHER
