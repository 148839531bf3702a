#!/usr/bin/env bash
# GRPO from the model with which SFT ends, on 1,000 direct and on 100 careful gold solutions. A run
# starts from the run of ../sft that has the same seed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

for kind in direct1000 careful100; do
    sft_rate=$($PYTHON experiments/table.py best ${LOGS%/*}/sft/${kind}_rate*_seed0)
    for seed in $SEEDS; do
        sft_run=$PWD/${OUT%/*}/sft/${kind}_rate${sft_rate}_seed$seed
        mkdir -p $OUT/start_seed$seed
        ln -sfn "$sft_run"/checkpoints/step_* $OUT/start_seed$seed/$kind
    done
    tune $kind $GRPO --model_name $OUT/start_seed0/$kind
    for seed in $SEEDS; do
        run ${kind}_rate${rate}_seed$seed $GRPO --learning_rate $rate --seed $seed \
            --model_name $OUT/start_seed$seed/$kind
        on_test ${kind}_rate${rate}_seed$seed test.jsonl
    done
done
