#!/usr/bin/env bash
# The 60-iteration baseline with a reward for right answers that errs. The seeds are three of those
# of `choices`, whose runs without errors stand beside these.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

arms=()
for evaluator in noise0.1 noise0.2 noise0.3 noise0.4 false_positives0.2 false_positives0.4 \
    false_negatives0.2 false_negatives0.4; do
    arms+=(--arm "$evaluator: experiments/controls.py --evaluator $evaluator")
done
compare --seeds $NUM_SEEDS --first_seed 3 --learning_rate 2e-4 "${arms[@]}" -- $GRPO $OFTEN
