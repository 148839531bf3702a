#!/usr/bin/env bash
# Several updates for each batch of rollouts: so many epochs, with so many sequences an update. Then
# two of these settings without the clip.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

[ -n "$QUICK" ] || RATES="5e-5 1e-4 2e-4"
arm epochs1_batch32 $GRPO --epochs_per_rollout_batch 1 --train_batch_size 32
arm epochs2_batch32 $GRPO --epochs_per_rollout_batch 2 --train_batch_size 32
arm epochs4_batch16 $GRPO --epochs_per_rollout_batch 4 --train_batch_size 16
arm epochs2_batch32_no_clip $GRPO --epochs_per_rollout_batch 2 --train_batch_size 32 \
    --loss_type grpo_no_clip
arm epochs4_batch16_no_clip $GRPO --epochs_per_rollout_batch 4 --train_batch_size 16 \
    --loss_type grpo_no_clip

# These runs were added later: with the clip, at the learning rate that is best without it.
rate=2.5e-5
at_rate epochs4_batch16 $GRPO --epochs_per_rollout_batch 4 --train_batch_size 16
