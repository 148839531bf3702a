#!/usr/bin/env bash
# The demo, and the same flags with a reward for the format alone and with a random reward, each
# with three seeds; and pass@k before and after the demo.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

run before $PYTHON main.py $MODEL --eval_only --eval_split test --eval_size 2000
run pass_before $PYTHON main.py $MODEL --eval_only --eval_split test --eval_samples 16 \
    --eval_size 1000
for seed in $SEEDS; do
    for reward in grpo format random; do
        if [ $reward = grpo ]; then
            program=main.py
        else
            program="experiments/controls.py --evaluator $reward"
        fi
        run ${reward}_seed$seed $PYTHON $program $DEMO --seed $seed
        on_test ${reward}_seed$seed test.jsonl
    done
    on_test grpo_seed$seed pass.jsonl --eval_samples 16 --eval_size 1000
done
