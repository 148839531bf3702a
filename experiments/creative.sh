#!/usr/bin/env bash
# A policy that learns from a judge, the frozen copy of itself, and that judge's reports, 3 seeds. STORIES: a directory of stories260K,
# a Llama of 260 thousand parameters in Hugging Face's format, pretrained on TinyStories.
set -euo pipefail
[ -n "${STORIES:-}" ] || { echo "creative: left out, since STORIES names no directory of stories260K"; exit 0; }
STORIES=$(realpath "$STORIES")
source "$(dirname "${BASH_SOURCE[0]}")/study.sh"

CREATIVE="--model_name $STORIES --dataset_name creative --max_completion_length 128 --device cpu --judge_type policy"
report() { # NAME lines flags...: the judge's report on 8 stories for each of so many lines
    local name=$1 lines=${QUICK:-$2}
    shift 2
    if [ ! -e "$LOGS/$name.json" ]; then
        $PYTHON selfcheck.py --check_judge $lines $CREATIVE "$@" --output_dir $OUT/report_$name
        cp $OUT/report_$name/judge_report.json "$LOGS/$name.json"
    fi
}
for seed in $SEEDS; do
    run seed$seed $PYTHON main.py $CREATIVE --judge_score likelihood --num_train_iters 60 --rollout_batch_size 128 --learning_rate 3e-4 \
        --micro_batch_tokens 8192 --eval_iterations 20 --eval_temperature 1 --save_iterations 60 --seed $seed
    report seed$seed/judge_report_640 80 --judge_score likelihood --seed $seed
done
report judge_report_rating 10 --judge_score rating
