#!/usr/bin/env bash
# GRPO at four learning rates. Three of them have three seeds, which are evaluated on the test
# problems. The runs at the best rate are the control of most other studies.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

arm base $GRPO
for rate in $RATES; do
    at_rate base $GRPO
done
run base_rate1e-3_seed0 $GRPO --learning_rate 1e-3
