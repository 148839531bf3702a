#!/usr/bin/env bash
# The demo with the other three models of tiny/, three seeds each. The runs with tiny/1m are those
# of ../dynamics.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

for size in 0.1m 0.3m 3m; do
    run ${size}_before $PYTHON main.py $MODEL --model_name tiny/$size --eval_only \
        --eval_split test --eval_size $NUM_TEST
done
tuned --arm "0.1m: --model_name tiny/0.1m" --arm "0.3m: --model_name tiny/0.3m" \
    --arm "3m: --model_name tiny/3m" -- $DEMO
# The answers of one run are kept as texts, to be read. Of all others only a bit each is kept.
if [ -e "$OUT/0.3m_seed0/eval" ]; then cp -r "$OUT/0.3m_seed0/eval" "$LOGS/0.3m_seed0"; fi
