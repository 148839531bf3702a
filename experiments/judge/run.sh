#!/usr/bin/env bash
# A policy that learns from a judge, the frozen copy of itself, at two weights of the KL, and that judge's reports, 3 seeds. STORIES: a
# directory of stories260K, a Llama of 260 thousand parameters in Hugging Face's format, pretrained on TinyStories.
set -euo pipefail
[ -n "${STORIES:-}" ] || { echo "judge: left out, since STORIES names no directory of stories260K"; exit 0; }
STORIES=$(realpath "$STORIES")
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

CREATIVE="--model_name $STORIES --dataset_name creative --max_completion_length 128 --device cpu --judge_type policy"
report() { # FILE lines flags...: the judge's report on 8 stories for each of so many lines
    local file=$1 lines=${QUICK:+2}
    lines=${lines:-$2}
    shift 2
    if [ ! -e "$LOGS/$file" ]; then
        mkdir -p "$(dirname "$LOGS/$file")"
        $PYTHON selfcheck.py --check_judge $lines $CREATIVE "$@" --output_dir "$OUT/report"
        cp "$OUT/report/judge_report.json" "$LOGS/$file"
    fi
}
for seed in $SEEDS; do
    for beta in 0.04 0.4; do
        name=beta${beta}_seed$seed
        run $name $PYTHON main.py $CREATIVE --judge_score likelihood --num_train_iters 60 --rollout_batch_size 128 --learning_rate 3e-4 --beta $beta \
            --micro_batch_tokens 8192 --eval_iterations 20 --eval_temperature 1 --save_iterations 60 --seed $seed
        [ -e $LOGS/$name/eval ] || cp -r $OUT/$name/eval $LOGS/$name
        sed -i "s#$STORIES#stories260K#g" $LOGS/$name/args.json # no path of this machine
    done
    report likelihood_seed$seed.json 80 --judge_score likelihood --seed $seed
done
report rating.json 10 --judge_score rating
