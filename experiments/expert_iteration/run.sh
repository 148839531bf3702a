#!/usr/bin/env bash
# Expert iteration in 5 steps, with as many samples as 60 iterations of GRPO (5 x 96 questions x 8
# completions), and three settings that each change one thing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

three_rates=$(rates 3e-5 1e-4 3e-4)
four_rates=$(rates 3e-5 1e-4 3e-4 1e-3)
# arm QUESTIONS GROUP EPOCHS RATES: an arm of compare.py
arm() {
    local num_questions=$1
    if [ -n "$QUICK" ]; then num_questions=$(($1 / 6)); fi
    echo "questions$1_group$2_epochs$3: experiments/expert_iteration.py" \
        "--num_questions $num_questions --group_size $2 --epochs $3 --learning_rate $4"
}
tuned --arm "$(arm 96 8 4 "$three_rates")" --arm "$(arm 96 8 1 "$four_rates")" \
    --arm "$(arm 192 4 4 "$four_rates")" --arm "$(arm 512 8 4 "$three_rates")" \
    -- $EXPERT_ITERATION
