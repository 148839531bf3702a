#!/usr/bin/env bash
# GRPO from where SFT ends: on 1,000 direct and on 100 careful gold solutions (the runs of sft/, of the same seed).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

for kind in direct1000 careful100; do
    model=$OUT/$kind
    for seed in $SEEDS; do
        run_of_sft=$(ls -d ${OUT%/*}/sft/${kind}_rate*_seed$seed/test | head -n 1) # the one at the best rate
        mkdir -p $OUT/start_seed$seed
        ln -sfn "$PWD/$(ls -d ${run_of_sft%/test}/checkpoints/step_* | tail -n 1)" $OUT/start_seed$seed/$kind
    done
    for rate in $RATES; do
        run ${kind}_rate${rate}_seed0 $GRPO --learning_rate $rate --model_name $OUT/start_seed0/$kind
    done
    rate=$($PYTHON experiments/table.py best $(printf "$LOGS/${kind}_rate%s_seed0 " $RATES))
    for seed in $SEEDS; do
        run ${kind}_rate${rate}_seed$seed $GRPO --learning_rate $rate --seed $seed --model_name $OUT/start_seed$seed/$kind
        on_test ${kind}_rate${rate}_seed$seed test.jsonl
    done
done
