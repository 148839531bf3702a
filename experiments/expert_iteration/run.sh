#!/usr/bin/env bash
# Expert iteration in 5 steps, with as many samples as 60 iterations of GRPO (5 x 96 questions x 8
# completions), and three settings that each change one thing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

EI="$PYTHON experiments/expert_iteration.py $MODEL --n_ei_steps 5"
LADDER="1e-6 3e-6 1e-5 3e-5 1e-4 3e-4 1e-3"
[ -n "$QUICK" ] || RATES="3e-5 1e-4 3e-4"
arm questions96_group8_epochs4 $EI --num_questions 96 --group_size 8 --epochs 4
arm questions96_group8_epochs1 $EI --num_questions 96 --group_size 8 --epochs 1
arm questions192_group4_epochs4 $EI --num_questions 192 --group_size 4 --epochs 4
arm questions512_group8_epochs4 $EI --num_questions 512 --group_size 8 --epochs 4
