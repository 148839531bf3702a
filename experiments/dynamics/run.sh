#!/usr/bin/env bash
# The demo, and at its own flags the rewards for form alone and a coin, 3 seeds; pass@k before and after the demo.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

run before $PYTHON main.py $MODEL --eval_only --eval_split test --eval_size 2000
run pass_before $PYTHON main.py $MODEL --eval_only --eval_split test --eval_samples 16 --eval_size 1000
for seed in $SEEDS; do
    for reward in grpo format random; do
        program=main.py
        [ $reward = grpo ] || program="experiments/controls.py --evaluator $reward"
        run ${reward}_seed$seed $PYTHON $program $DEMO --seed $seed
        on_test ${reward}_seed$seed test.jsonl
        [ $reward != grpo ] || on_test grpo_seed$seed pass.jsonl --eval_samples 16 --eval_size 1000
    done
done
