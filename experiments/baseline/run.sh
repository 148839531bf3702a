#!/usr/bin/env bash
# REINFORCE without a baseline: a log-probability is multiplied by its reward, not by its advantage.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

arm no_baseline $GRPO --loss_type no_baseline
