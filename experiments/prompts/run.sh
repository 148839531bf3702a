#!/usr/bin/env bash
# Three prompt formats, each with a reward for the right answer alone.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

four_rates=$(rates 5e-5 1e-4 2e-4 4e-4)
tuned --arm "reasoning_answer: --prompt reasoning_answer --learning_rate $four_rates" \
    --arm "r1_zero: --prompt r1_zero --learning_rate $(rates 1e-4 2e-4 4e-4)" \
    --arm "question_only: --prompt question_only --learning_rate $four_rates" \
    -- $GRPO --evaluator math
