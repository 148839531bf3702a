#!/usr/bin/env bash
# The 60-iteration baseline with three rewards that can be had without solving the problem.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

arms=(--arm "usual: --evaluator gsm8k")
for evaluator in answer_anywhere bonus_for_steps bonus_for_length; do
    arms+=(--arm "$evaluator: experiments/controls.py --evaluator $evaluator")
done
compare --seeds $NUM_SEEDS --first_seed 3 --learning_rate 2e-4 "${arms[@]}" -- $GRPO $OFTEN
