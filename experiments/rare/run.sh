#!/usr/bin/env bash
# How rare may the careful way be? Models that take it more and less often before training, trained
# with groups of 8 and of 32.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

# careful0.3 uses the careful way in 30 % of the steps of its habits, and saw it in the problems of
# its first stage. drills0.02 uses it in 2 %, and saw it before in drills only. careful0.12 is
# tiny/1m.
names="careful0 careful0.12 careful0.3 drills0 drills0.005 drills0.02 drills0.12"
folder=output/rare_models
last_run=$LOGS/drills0.12_group32_rate2e-4_seed4
if [ -n "$QUICK" ]; then
    names="careful0 drills0.02"
    folder=$OUT/models
fi
model_of() {
    case $1 in
        careful0.12) echo tiny/1m ;;
        careful*) echo "$folder/1m_$1" ;;
        drills*) echo "$folder/drills/1m_careful${1#drills}" ;;
    esac
}
make_models() {
    $PYTHON tiny/make_tiny_models.py --sizes 1m --careful_shares 0 0.3 --output_dir $folder
    $PYTHON tiny/make_tiny_models.py --sizes 1m --careful_shares 0 0.005 0.02 0.12 \
        --subject_careful_share 0 --output_dir $folder/drills
}
if [ -n "$QUICK" ]; then
    # Making models takes long. The smallest one of tiny/ takes their places.
    for name in $names; do
        mkdir -p "$(model_of $name)"
        cp tiny/0.1m/* "$(model_of $name)"
    done
elif [ ! -e "$(model_of drills0.12)/losses.json" ] && [ ! -e "$last_run/answers.jsonl" ]; then
    make_models
fi
# Samples of the models before training show how often they really take the careful way.
for name in $names; do
    run ${name}_before $PYTHON main.py $MODEL --model_name "$(model_of $name)" --eval_only \
        --eval_temperature 1 --eval_samples 4
done
arms=()
for name in $names; do
    for group_size in 8 32; do
        arms+=(--arm "${name}_group$group_size: --group_size $group_size
            --model_name $(model_of $name)")
    done
done
compare --seeds 2 --first_seed 3 --learning_rate 2e-4 "${arms[@]}" -- $GRPO $hundred $OFTEN
# The tables by operator need transcripts: those before training and those at the end.
for name in $names; do
    [ -e $LOGS/${name}_before/eval ] || cp -r "$OUT/${name}_before/eval" $LOGS/${name}_before
done
for run in $LOGS/*_seed*; do
    if [ -e $run/eval ]; then continue; fi
    mkdir $run/eval
    cp "$(ls "$OUT/$(basename $run)/eval"/step_* | tail -n 1)" $run/eval
done
