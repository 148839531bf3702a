#!/usr/bin/env bash
# Losses where they differ, with 16 updates for each batch of rollouts. The run of grpo_clip with
# these flags is off_policy/epochs4_batch16. Also DAPO's dynamic sampling, with one update for each
# batch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

arm dynamic_sampling $GRPO --dynamic_sampling 3
[ -n "$QUICK" ] || RATES="5e-5 1e-4 2e-4"
OFF="--epochs_per_rollout_batch 4 --train_batch_size 16"
arm gspo $GRPO $OFF --loss_type gspo --cliprange 3e-4 --cliprange_high 4e-4
arm cispo $GRPO $OFF --loss_type cispo --cliprange_high 4
arm reinforce $GRPO $OFF --loss_type reinforce_with_baseline

# These runs were added later: CISPO at a learning rate at which two other losses were run too, and
# GSPO with a clip range ten times as wide as in its paper.
rate=2.5e-5
at_rate cispo $GRPO $OFF --loss_type cispo --cliprange_high 4
arm gspo_wide $GRPO $OFF --loss_type gspo --cliprange 3e-3 --cliprange_high 4e-3
