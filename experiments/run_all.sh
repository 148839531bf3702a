#!/usr/bin/env bash
# Every study of analysis.md: experiments/run_all.sh [--quick]
#   without --quick   what has no logs yet in experiments/; it can be stopped and started again, and STUDIES="rates sft" names some
#   --quick           a small version of everything, in output/quick
# STORIES names a directory of stories260K, for the study of the judge.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHON=${PYTHON:-.venv/bin/python} QUICK=
case "${1:-}" in
    "") ;;
    --quick) QUICK=1 ;;
    *) echo "error: $1: the only flag is --quick" >&2; exit 2 ;;
esac
# sft_then_grpo starts from sft's checkpoints, and is last
studies=${STUDIES:-rates sft zero_shot baseline std length beta filtered groups off_policy prompts expert_iteration family dynamics scaling judge sft_then_grpo}
printf 'experiments/%s/run.sh\n' $studies | xargs -P 2 -n 1 bash
