#!/usr/bin/env bash
# One change at a time to the demo's flags, 50 iterations, 3 seeds: baseline, length and std normalisation, prompt, learning rate.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/study.sh"

grpo() { # NAME seed flags...
    local name=$1 seed=$2
    shift 2
    run ${name}_seed$seed $PYTHON main.py $DEMO --num_train_iters 50 --eval_iterations 10 --seed $seed --max_kl 1000 "$@"
}
for seed in $SEEDS; do
    grpo base $seed
    grpo no_baseline $seed --loss_type no_baseline
    [ $seed != 0 ] || grpo reinforce_with_baseline 0 --loss_type reinforce_with_baseline # on policy equal to base, bit for bit
    grpo masked_normalize $seed --length_normalization masked_normalize
    grpo no_std $seed --no-use_std_normalization
    grpo question_only $seed --prompt question_only --evaluator math
    grpo r1_zero $seed --prompt r1_zero --evaluator math
    for rate in 1e-5 3e-5 3e-4 1e-3; do
        grpo rate$rate $seed --learning_rate $rate
    done
done
