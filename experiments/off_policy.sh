#!/usr/bin/env bash
# Several updates on each batch of rollouts, 3 seeds. Broad: epochs x batch, 40 iterations, and without the clip where it matters most
# (1 epoch with batches of 128 is the ablations' base). Focused: 200 iterations at 3e-5, on policy and with 4 updates a batch, 2 seeds.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/study.sh"

grpo() { # NAME iterations epochs batch flags...
    local name=$1 iterations=$2 epochs=$3 batch=$4
    shift 4
    run ${name}_seed$seed $PYTHON main.py $DEMO --num_train_iters $iterations --epochs_per_rollout_batch $epochs --train_batch_size $batch \
        --max_kl 1000 --seed $seed "$@"
}
for seed in $SEEDS; do
    grpo epochs4_batch32 40 4 32 --eval_iterations 10
    grpo epochs4_batch32_no_clip 40 4 32 --eval_iterations 10 --loss_type grpo_no_clip
    for setting in "1 32" "2 128" "2 32" "4 128"; do
        grpo "epochs${setting/ /_batch}" 40 $setting --eval_iterations 10
    done
    if [ $seed != 2 ]; then
        grpo long_epochs1_batch128 200 1 128 --learning_rate 3e-5
        grpo long_epochs2_batch64 200 2 64 --learning_rate 3e-5
    fi
done
