#!/usr/bin/env bash
# GRPO on the four sizes of tiny/, the demo's flags, equal iterations, 3 seeds.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/study.sh"

for seed in $SEEDS; do
    for size in 0.1m 0.3m 1m 3m; do
        run ${size}_seed$seed $PYTHON main.py $DEMO --eval_iterations 5 --model_name tiny/$size --seed $seed
    done
done
