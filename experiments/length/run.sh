#!/usr/bin/env bash
# Two other means of the loss per token: the sum over a sequence divided by a constant, and the mean
# over all tokens of the batch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

tuned --arm "masked_normalize: --length_normalization masked_normalize" \
    --arm "token_mean: --length_normalization token_mean" \
    --learning_rate $(rates 1e-4 2e-4 4e-4) -- $GRPO
