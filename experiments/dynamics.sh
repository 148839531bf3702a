#!/usr/bin/env bash
# The demo, 3 seeds, beside rewards for form alone and a coin at its own flags, and the other sizes of tiny/ (one seed);
# then each on the test problems, how its steps are written, and pass@k before and after.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/study.sh"
KEEP=1

evaluate() { # NAME MODEL FLAGS...
    local name=$1 model=${2:-no-checkpoint-is-left-to-evaluate}
    shift 2
    run "$name" $PYTHON main.py $DEMO_MODEL --model_name "$model" --eval_only --eval_split test --eval_size 2000 "$@"
}

steps() { # NAME: how the steps of its evaluations are written
    [ -e $LOGS/$1/steps.txt ] || $PYTHON experiments/wrong_steps.py $OUT/$1/eval/step_*.jsonl >$LOGS/$1/steps.txt
}

evaluate test_before tiny/1m
evaluate pass_before tiny/1m --eval_samples 16 --eval_size 1000
for seed in $SEEDS; do
    for reward in grpo format random; do
        program=main.py name=${reward}_seed$seed
        [ $reward = grpo ] || program="experiments/controls.py --evaluator $reward"
        run $name $PYTHON $program $DEMO --seed $seed
        last=$(ls -d $OUT/$name/checkpoints/step_* 2>/dev/null | tail -1) || true # gone where only the logs were kept
        evaluate test_$name "$last"
        steps $name
        [ $reward != grpo ] || evaluate pass_$name "$last" --eval_samples 16 --eval_size 1000
    done
done
for size in 0.1m 0.3m 3m; do
    run ${size}_seed0 $PYTHON main.py $DEMO --model_name tiny/$size
    steps ${size}_seed0
done
