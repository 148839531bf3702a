#!/usr/bin/env bash
# Every study of analysis.md and its figures: experiments/run_all.sh [--quick]
#   without --quick   what is not yet in experiments/; delete a study's folder there to run it again (about 4 hours on 2 cores)
#   --quick           a small version of everything, in output/quick (under 20 minutes on 2 cores)
# STORIES names a directory of stories260K, for the study of the judge.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHON=${PYTHON:-.venv/bin/python} QUICK=
case "${1:-}" in
    "") logs=experiments ;;
    --quick) logs=output/quick QUICK=1 ;;
    *) echo "error: $1: the only flag is --quick" >&2; exit 2 ;;
esac
studies=${STUDIES:-scaling ablations off_policy controls sft cs336_sft sft_then_grpo expert_iteration creative}
printf 'experiments/%s.sh\n' $studies | xargs -P 2 -n 1 bash

# The figures: the commands that analysis.md prints, on the logs that are there.
mkdir -p $logs/figures
grep -E '^    python plotter\.py .* --output experiments/figures/' analysis.md | sed "s#^    python#$PYTHON#; s#experiments/#$logs/#g" | while read -r command; do
    for folder in $(grep -o "$logs/[a-z0-9_]*/" <<<"$command"); do
        [ -d "$folder" ] || { echo "== left out, since $folder is not there: $command"; continue 2; }
    done
    echo "== $command"
    bash -c "$command" </dev/null
done
