#!/usr/bin/env bash
# Losses where they differ, with 16 updates for each batch of rollouts. The run of grpo_clip with
# these flags is off_policy/epochs4_batch16. Also DAPO's dynamic sampling, with one update for each
# batch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

sixteen="--epochs_per_rollout_batch 4 --train_batch_size 16"
cispo="$sixteen --loss_type cispo --cliprange_high 4"
tuned --arm "dynamic_sampling: --dynamic_sampling 3 --learning_rate $(rates 1e-4 2e-4 4e-4)" \
    --arm "gspo: $sixteen --loss_type gspo --cliprange 3e-4 --cliprange_high 4e-4
        --learning_rate $(rates 2.5e-5 5e-5 1e-4 2e-4)" \
    --arm "cispo: $cispo --learning_rate $(rates 5e-6 1e-5 2.5e-5 5e-5 1e-4 2e-4)" \
    --arm "reinforce: $sixteen --loss_type reinforce_with_baseline
        --learning_rate $(rates 1e-5 2.5e-5 5e-5 1e-4 2e-4)" -- $GRPO

# These runs were added later: CISPO at a learning rate at which two other losses were run too, and
# GSPO with a clip range ten times as wide as in its paper.
tuned --arm "cispo: $cispo" --learning_rate $(rates 2.5e-5) -- $GRPO
tuned --arm "gspo_wide: $sixteen --loss_type gspo --cliprange 3e-3 --cliprange_high 4e-3" \
    --learning_rate $(rates 1e-5 2.5e-5 5e-5 1e-4 2e-4) -- $GRPO
