#!/usr/bin/env bash
# REINFORCE without a baseline: a log-probability is multiplied by its reward, not by its advantage.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

tuned --arm "no_baseline: --loss_type no_baseline" \
    --learning_rate $(rates 5e-6 1e-5 2.5e-5 5e-5 1e-4 2e-4 4e-4) -- $GRPO
