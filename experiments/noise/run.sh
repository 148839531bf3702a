#!/usr/bin/env bash
# The 60-iteration baseline with a reward for right answers that errs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

arms=(--arm "no_errors: --evaluator gsm8k")
for evaluator in noise0.1 noise0.2 noise0.3 noise0.4 false_positives0.2 false_positives0.4 \
    false_negatives0.2 false_negatives0.4; do
    arms+=(--arm "$evaluator: experiments/controls.py --evaluator $evaluator")
done
compare --seeds $NUM_SEEDS --first_seed 3 --learning_rate 2e-4 "${arms[@]}" -- $GRPO $OFTEN

# Not planned: whether the KL penalty holds the policy back where the reward says little. These two
# were added when the results above were known.
compare --seeds $NUM_SEEDS --first_seed 3 --learning_rate 2e-4 \
    --arm "noise0.4_beta0: experiments/controls.py --evaluator noise0.4 --beta 0" \
    --arm "noise0.3_beta0: experiments/controls.py --evaluator noise0.3 --beta 0" -- $GRPO $OFTEN
