#!/usr/bin/env bash
# Advantages that are not divided by the standard deviation of their group.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

arm no_std $GRPO --no-use_std_normalization
