#!/usr/bin/env bash
# The 64 completions of an iteration as 32 prompts x 2 completions, and as 2 prompts x 32
# completions.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

arm group2 $GRPO --group_size 2
arm group32 $GRPO --group_size 32
