#!/usr/bin/env bash
# Advantages that are not divided by the standard deviation of their group.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

tuned --arm "no_std: --no-use_std_normalization" --learning_rate $(rates 1e-4 2e-4 4e-4) -- $GRPO
