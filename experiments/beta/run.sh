#!/usr/bin/env bash
# Two other weights of the KL divergence from the reference.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

arm beta0 $GRPO --beta 0
arm beta0.4 $GRPO --beta 0.4
