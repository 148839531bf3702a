#!/usr/bin/env bash
# REINFORCE without a baseline: each log-prob times its reward instead of its advantage.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

arm no_baseline $GRPO --loss_type no_baseline
