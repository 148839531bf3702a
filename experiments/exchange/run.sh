#!/usr/bin/env bash
# The runs of ../rates at their best learning rate once more, evaluated often. The curves of SFT are
# compared with these.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

rate=$($PYTHON experiments/table.py best ${LOGS%/*}/rates/base_rate*_seed0)
if [ -n "$QUICK" ]; then often=; else often="--eval_iterations 5"; fi
compare --seeds $NUM_SEEDS --outcome last --arm "grpo:" -- $GRPO --learning_rate $rate $often
