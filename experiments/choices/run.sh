#!/usr/bin/env bash
# The choices that a GRPO trainer makes, each beside the usual one: PROTOCOL.md, "The choices".
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

# The learning rates are a factor of 2 apart. Where the best one lies was seen in runs with seed 0.
sixteen="--epochs_per_rollout_batch 4 --train_batch_size 16
    --learning_rate $(rates 1.25e-5 2.5e-5 5e-5)"
if [ -n "$QUICK" ]; then seeds=2; else seeds=4; fi
compare --seeds $seeds --first_seed 3 --learning_rate $(rates 1e-4 2e-4 4e-4) \
    --arm "base:" \
    --arm "token_mean: --length_normalization token_mean" \
    --arm "masked_normalize: --length_normalization masked_normalize" \
    --arm "no_std: --no-use_std_normalization" \
    --arm "dr_grpo: --no-use_std_normalization --length_normalization masked_normalize" \
    --arm "no_baseline: --loss_type no_baseline --learning_rate $(rates 1.25e-5 2.5e-5 5e-5)" \
    --arm "beta0: --beta 0" \
    --arm "group2: --group_size 2" \
    --arm "group32: --group_size 32" \
    --arm "dynamic_sampling: --dynamic_sampling 3" \
    --arm "answer_reward: --prompt reasoning_answer --evaluator math" \
    --arm "r1_zero: --prompt r1_zero --evaluator math" \
    --arm "question_only: --prompt question_only --evaluator math" \
    --arm "updates2: --train_batch_size 32" \
    --arm "updates4: --epochs_per_rollout_batch 2 --train_batch_size 32
        --learning_rate $(rates 5e-5 1e-4 2e-4)" \
    --arm "updates16: $sixteen" \
    --arm "updates16_no_clip: $sixteen --loss_type grpo_no_clip" \
    --arm "updates16_clip_higher: $sixteen --cliprange_high 0.28" \
    --arm "updates16_gspo: $sixteen --loss_type gspo --cliprange 3e-3 --cliprange_high 4e-3
        --learning_rate $(rates 2.5e-5 5e-5 1e-4)" \
    --arm "updates16_cispo: $sixteen --loss_type cispo --cliprange_high 4" \
    --arm "updates16_reinforce: $sixteen --loss_type reinforce_with_baseline" \
    -- $GRPO $OFTEN

# Expert iteration in small steps, with as many samples and updates as the others.
compare --seeds $seeds --first_seed 3 --learning_rate $(rates 2e-4 4e-4 8e-4) \
    --arm "expert_iteration: experiments/expert_iteration.py" \
    -- $EXPERT_ITERATION $SMALL_STEPS
