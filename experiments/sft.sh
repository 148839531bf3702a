#!/usr/bin/env bash
# SFT of tiny/1m on 10 to 1,000 gold examples of arithmetic, 4 epochs, 3 seeds (a seed draws the examples and their order).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/study.sh"

GOLD=$OUT/gold.jsonl
$PYTHON generate_gold.py --from_reference --dataset_name arithmetic --output $GOLD
for seed in $SEEDS; do
    for examples in 10 25 50 100 250 500 1000; do
        run ${examples}_seed$seed $PYTHON sft.py $DEMO_MODEL --train_file $GOLD --num_examples $examples --epochs 4 \
            --learning_rate 1e-4 --warmup_steps 3 --eval_updates 1000 --log_entropy --seed $seed
    done
done
