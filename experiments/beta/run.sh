#!/usr/bin/env bash
# A heavier weight of the KL divergence from the reference.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

tuned --arm "beta0.4: --beta 0.4 --learning_rate $(rates 5e-5 1e-4 2e-4 4e-4)" -- $GRPO
