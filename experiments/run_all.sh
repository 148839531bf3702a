#!/usr/bin/env bash
# Every study of analysis.md and its figures: experiments/run_all.sh [--quick]
#   without --quick   what has no logs yet in experiments/; it can be stopped and started again
#   --quick           a small version of everything, in output/quick
# STUDIES="rates sft" names some. STORIES names a directory of stories260K, for the study of the judge.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHON=${PYTHON:-.venv/bin/python} QUICK=
case "${1:-}" in
    "") logs=experiments ;;
    --quick) logs=output/quick QUICK=1 ;;
    *) echo "error: $1: the only flag is --quick" >&2; exit 2 ;;
esac
# Two at a time. exchange needs the runs of rates, sft_then_grpo the checkpoints of sft: they come last.
studies=${STUDIES:-rates sft zero_shot baseline std length beta filtered groups off_policy prompts expert_iteration family dynamics scaling judge exchange sft_then_grpo}
for study in $studies; do
    [ -e experiments/$study/run.sh ] || { echo "error: STUDIES: there is no study $study; a study is a folder of experiments/" >&2; exit 2; }
done
printf 'experiments/%s/run.sh\n' $studies | xargs -P 2 -n 1 bash

# The figures: the commands that the studies' pages print, on the logs that are there. A quick study has one rate, whichever it is.
quick=s/^//
[ -z "$QUICK" ] || quick="s#experiments/#$logs/#g; s/_rate[0-9.e-]*_/_rate*_/g"
grep -h '^    python plotter\.py .* --output experiments/' analysis.md experiments/*/README.md | sed "s#^    python#$PYTHON#; $quick" | while read -r command; do
    if bash -O failglob -c "printf '%s' $command" >/dev/null 2>&1; then
        echo "== $command"
        bash -c "$command" </dev/null
    else
        echo "== left out, since not all of its runs are there: $command"
    fi
done
