#!/usr/bin/env bash
# Several updates for each batch of rollouts: so many epochs, with so many sequences an update. Then
# two of these settings without the clip.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

epochs1="--epochs_per_rollout_batch 1 --train_batch_size 32"
epochs2="--epochs_per_rollout_batch 2 --train_batch_size 32"
epochs4="--epochs_per_rollout_batch 4 --train_batch_size 16"
no_clip="--loss_type grpo_no_clip"
four_rates=$(rates 2.5e-5 5e-5 1e-4 2e-4)
tuned --arm "epochs1_batch32: $epochs1 --learning_rate $(rates 5e-5 1e-4 2e-4)" \
    --arm "epochs2_batch32: $epochs2 --learning_rate $four_rates" \
    --arm "epochs4_batch16: $epochs4 --learning_rate $(rates 5e-6 1e-5 2.5e-5 5e-5 1e-4 2e-4)" \
    --arm "epochs2_batch32_no_clip: $epochs2 $no_clip --learning_rate $four_rates" \
    --arm "epochs4_batch16_no_clip: $epochs4 $no_clip
        --learning_rate $(rates 1e-5 2.5e-5 5e-5 1e-4 2e-4)" -- $GRPO

# These runs were added later: with the clip, at the learning rate that is best without it.
tuned --arm "epochs4_batch16: $epochs4" --learning_rate $(rates 2.5e-5) -- $GRPO
