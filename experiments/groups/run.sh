#!/usr/bin/env bash
# The 64 completions of an iteration as 32 prompts x 2 completions, and as 2 prompts x 32
# completions.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

tuned --arm "group2: --group_size 2 --learning_rate $(rates 1e-4 2e-4 4e-4)" \
    --arm "group32: --group_size 32 --learning_rate $(rates 5e-5 1e-4 2e-4 4e-4)" -- $GRPO
