#!/usr/bin/env bash
# Three forms of prompt, each with the answer's reward alone.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

for form in reasoning_answer r1_zero question_only; do
    PROMPT="--prompt $form --evaluator math"
    arm $form $GRPO
done
