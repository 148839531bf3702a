#!/usr/bin/env bash
# Four losses where they differ, at 16 updates a batch (grpo_clip there: off_policy/epochs4_batch16); and DAPO's sampler on policy.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

arm dynamic_sampling $GRPO --dynamic_sampling 3
[ -n "${QUICK:-}" ] || RATES="5e-5 1e-4 2e-4"
OFF="--epochs_per_rollout_batch 4 --train_batch_size 16"
arm gspo $GRPO $OFF --loss_type gspo --cliprange 3e-4 --cliprange_high 4e-4
arm cispo $GRPO $OFF --loss_type cispo --cliprange_high 4
arm reinforce $GRPO $OFF --loss_type reinforce_with_baseline
rate=2.5e-5 # later: three losses at one rate
at_rate cispo $GRPO $OFF --loss_type cispo --cliprange_high 4
arm gspo_wide $GRPO $OFF --loss_type gspo --cliprange 3e-3 --cliprange_high 4e-3 # later: ten times its paper's range
