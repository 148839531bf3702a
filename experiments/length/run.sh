#!/usr/bin/env bash
# The per-token loss summed over a sequence and divided by a constant, and averaged over all tokens of the batch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

arm masked_normalize $GRPO --length_normalization masked_normalize
arm token_mean $GRPO --length_normalization token_mean
