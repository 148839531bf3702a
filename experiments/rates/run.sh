#!/usr/bin/env bash
# GRPO at four learning rates. Three of them have three seeds, which are evaluated on the test
# problems. The runs at the best rate are the control of most other studies.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

for rate in $(rates 1e-4 2e-4 4e-4); do
    tuned --arm "base:" --learning_rate $rate -- $GRPO
done
run base_rate1e-3_seed0 $PYTHON main.py $GRPO --learning_rate 1e-3
