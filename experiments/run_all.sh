#!/usr/bin/env bash
# Make every study of analysis.md, and draw its figures: experiments/run_all.sh [--quick]
#
#   without --quick   make the runs that have no logs in experiments/ yet. The script can be stopped
#                     and started again. A clone has all logs, so that only figures are drawn.
#   --quick           make a small version of every study, with its logs in output/quick
#
# Two environment variables can be set: STUDIES="rates sft" makes only these studies, and STORIES is
# the directory of the model stories260K, which the study of the judge needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHON=${PYTHON:-.venv/bin/python}
case "${1:-}" in
    "") export QUICK= ;;
    --quick) export QUICK=1 ;;
    *)
        echo "error: $1: the only flag is --quick" >&2
        exit 2
        ;;
esac
[ -n "$QUICK" ] || $PYTHON experiments/archive.py unpack

# exchange and sft_then_grpo come last: they need the runs of rates and the checkpoints of sft.
all_studies="rates sft zero_shot beta filtered expert_iteration dynamics scaling judge choices
    noise hacks rare exchange sft_then_grpo"
studies=${STUDIES:-$all_studies}
for study in $studies; do
    if [ ! -e experiments/$study/run.sh ]; then
        echo "error: STUDIES: there is no study $study; a study is a folder of experiments/" >&2
        exit 2
    fi
done
printf 'experiments/%s/run.sh\n' $studies | xargs -P 2 -n 1 bash # two studies at a time

# The figures are drawn by the commands that stand on the pages.
figure_commands() {
    grep -Eh '^    python (plotter|experiments/figures)\.py .*--output experiments/' \
        analysis.md experiments/*.md experiments/*/README.md | sed "s#^    python#$PYTHON#"
}
# A quick study has its logs and figures in output/quick. It has one learning rate, which can be
# another than the one in the command, so that the pattern _rate*_ takes its place. The figures of
# figures.py need the runs of several studies in full.
quick_commands() {
    figure_commands | grep ' plotter\.py ' | sed "
        s#experiments/\([a-z_]*\)/#output/quick/\1/#g
        s#--output experiments/#--output output/quick/#
        s/_rate[0-9.e-]*_/_rate*_/g"
}
if [ -n "$QUICK" ]; then quick_commands; else figure_commands; fi | while read -r command; do
    # Is there a folder for each pattern of the command? With failglob bash fails if there is none.
    if bash -O failglob -c "printf '%s' $command" >/dev/null 2>&1; then
        echo "== $command"
        bash -c "$command" </dev/null
    else
        echo "== left out, since not all of its runs are there: $command"
    fi
done
