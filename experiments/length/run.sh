#!/usr/bin/env bash
# Two other means of the loss per token: the sum over a sequence divided by a constant, and the mean
# over all tokens of the batch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

arm masked_normalize $GRPO --length_normalization masked_normalize
arm token_mean $GRPO --length_normalization token_mean
