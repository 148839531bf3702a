#!/usr/bin/env bash
# The runs of ../rates at their best learning rate once more, evaluated often. The curves of SFT are
# compared with these.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

rate=$($PYTHON experiments/table.py best ${LOGS%/*}/rates/base_rate*_seed0)
for seed in $SEEDS; do
    run grpo_seed$seed $GRPO --learning_rate $rate --eval_iterations 5 --seed $seed
done
