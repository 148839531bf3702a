#!/usr/bin/env bash
# How rare may the careful way be? Models whose habits use it in 0 to 30 % of the steps that have
# it, trained with groups of 8 and of 32.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

shares="0 0.005 0.02 0.05 0.12 0.3"
models=output/rare_models
size=1m
if [ -n "$QUICK" ]; then
    shares="0 0.3"
    size=0.1m
fi
if [ ! -e "$models/${size}_careful0.3/model.safetensors" ]; then
    $PYTHON tiny/make_tiny_models.py --sizes $size --careful_shares $shares --output_dir $models
fi
# Samples of the models before training show how often they really take the careful way.
for share in $shares; do
    run careful${share}_before $PYTHON main.py $MODEL --model_name $models/${size}_careful$share \
        --eval_only --eval_temperature 1
done
arms=()
for share in $shares; do
    for group_size in 8 32; do
        arms+=(--arm "careful${share}_group$group_size: --group_size $group_size
            --model_name $models/${size}_careful$share")
    done
done
compare --seeds 2 --first_seed 3 --learning_rate 2e-4 "${arms[@]}" \
    -- $GRPO $hundred $OFTEN
