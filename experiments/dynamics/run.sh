#!/usr/bin/env bash
# The demo, and the same flags with a reward for the format alone and with a random reward, each
# with three seeds; and pass@k before and after the demo.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

run before $PYTHON main.py $MODEL --eval_only --eval_split test --eval_size $NUM_TEST
run pass_before $PYTHON main.py $MODEL --eval_only --eval_split test --eval_samples 16 \
    --eval_size $NUM_PASS
tuned --arm "grpo:" --arm "format: experiments/controls.py --evaluator format" \
    --arm "random: experiments/controls.py --evaluator random" -- $DEMO
for seed in $SEEDS; do
    on_test grpo_seed$seed pass.jsonl --eval_samples 16 --eval_size $NUM_PASS
done
# The answers of one run are kept as texts, to be read. Of all others only a bit each is kept.
if [ -e "$OUT/grpo_seed0/eval" ]; then cp -r "$OUT/grpo_seed0/eval" "$LOGS/grpo_seed0"; fi
