#!/usr/bin/env bash
# A policy that learns from a judge, which is a frozen copy of the policy, with two weights of the
# KL divergence; and reports on that judge. Each with three seeds.
#
# STORIES names a directory of stories260K, a Llama of 260 thousand parameters that was pretrained
# on TinyStories, in Hugging Face's format.
set -euo pipefail
if [ -z "${STORIES:-}" ]; then
    echo "judge: left out, since STORIES names no directory of stories260K"
    exit 0
fi
STORIES=$(realpath "$STORIES")
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

if [ -n "$QUICK" ]; then iterations=2; else iterations=60; fi
CREATIVE="--model_name $STORIES --dataset_name creative --max_completion_length 128 --device cpu \
    --judge_type policy"

# report FILE LINES FLAGS...: the judge's report on 8 stories for each of LINES opening lines
report() {
    local file=$1 lines=$2
    shift 2
    [ ! -e "$LOGS/$file" ] || return 0
    [ -z "$QUICK" ] || lines=2
    mkdir -p "$LOGS"
    $PYTHON selfcheck.py --check_judge $lines $CREATIVE "$@" --output_dir "$OUT/report"
    cp "$OUT/report/judge_report.json" "$LOGS/$file"
}

for seed in $SEEDS; do
    for beta in 0.04 0.4; do
        name=beta${beta}_seed$seed
        run $name $PYTHON main.py $CREATIVE --judge_score likelihood --num_train_iters $iterations \
            --rollout_batch_size 128 --learning_rate 3e-4 --beta $beta --micro_batch_tokens 8192 \
            --eval_iterations 20 --eval_temperature 1 --save_iterations 60 --seed $seed
        [ -e $LOGS/$name/eval ] || cp -r $OUT/$name/eval $LOGS/$name
        # The logs are published, so they name the model and not its path on this machine.
        sed -i "s#$STORIES#stories260K#g" $LOGS/$name/args.json
    done
    report likelihood_seed$seed.json 80 --judge_score likelihood --seed $seed
done
