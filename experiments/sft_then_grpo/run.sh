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
done
tuned --arm "direct1000: --model_name $OUT/start_seed{seed}/direct1000
        --learning_rate $(rates 1e-4 2e-4 4e-4)" \
    --arm "careful100: --model_name $OUT/start_seed{seed}/careful100
        --learning_rate $(rates 2.5e-5 5e-5 1e-4 2e-4 4e-4)" -- $GRPO
