#!/usr/bin/env bash
# One change at a time to the demo's flags, 50 iterations: learning rate, baseline, normalisations, prompt, off-policy, clip.
# 3 seeds; the broad off-policy sweep (40 iterations) and the focused one (200 iterations) have seed 0 alone.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/study.sh"

grpo() { # NAME seed flags...
    local name=$1 seed=$2
    shift 2
    run ${name}_seed$seed $PYTHON main.py $DEMO --num_train_iters 50 --eval_iterations 10 --seed $seed --max_kl 1000 "$@"
}
for seed in 0 1 2; do
    grpo base $seed
    grpo no_baseline $seed --loss_type no_baseline
    grpo reinforce_with_baseline $seed --loss_type reinforce_with_baseline
    grpo masked_normalize $seed --length_normalization masked_normalize
    grpo token_mean $seed --length_normalization token_mean
    grpo no_std $seed --no-use_std_normalization
    grpo question_only $seed --prompt question_only --evaluator math
    grpo r1_zero $seed --prompt r1_zero --evaluator math
    for rate in 1e-5 3e-5 3e-4 1e-3; do
        grpo rate$rate $seed --learning_rate $rate
    done
done
for epochs in 1 2 4; do
    for batch in 128 64 32; do
        grpo epochs${epochs}_batch$batch 0 --num_train_iters 40 --epochs_per_rollout_batch $epochs --train_batch_size $batch
    done
done
grpo epochs4_batch32_no_clip 0 --num_train_iters 40 --epochs_per_rollout_batch 4 --train_batch_size 32 --loss_type grpo_no_clip
grpo long_on_policy 0 --num_train_iters 200
grpo long_epochs2_batch64 0 --num_train_iters 200 --epochs_per_rollout_batch 2 --train_batch_size 64
