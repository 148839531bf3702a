#!/usr/bin/env bash
# GRPO at four learning rates, and what it makes of the test problems at three of them, 3 seeds: the control of the other studies.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

arm base $GRPO
for rate in $RATES; do
    at_rate base $GRPO
done
run base_rate1e-3_seed0 $GRPO --learning_rate 1e-3
