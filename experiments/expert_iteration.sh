#!/usr/bin/env bash
# Expert iteration on tiny/1m: questions per step D_b, completions per question G and epochs E, one changed at a time, 3 seeds.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/study.sh"

expert_iteration() { # D_b G E seed
    run "questions$1_group$2_epochs$3_seed$4" $PYTHON experiments/expert_iteration.py $DEMO_MODEL --n_ei_steps 5 \
        --num_questions "$1" --group_size "$2" --epochs "$3" --learning_rate 1e-4 --seed "$4"
}
for seed in $SEEDS; do
    expert_iteration 256 4 1 $seed
    expert_iteration 256 8 1 $seed
    expert_iteration 256 4 2 $seed
    expert_iteration 512 4 1 $seed
done
