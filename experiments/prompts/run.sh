#!/usr/bin/env bash
# Three prompt formats, each with a reward for the right answer alone.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

for prompt in reasoning_answer r1_zero question_only; do
    PROMPT="--prompt $prompt --evaluator math"
    arm $prompt $GRPO
done
