#!/usr/bin/env bash
# GRPO from where SFT on 50 or 1,000 gold examples ends, 40 iterations of the demo's, at its rate and at the best of the sweep, 3 seeds.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/study.sh"

GOLD=$OUT/gold.jsonl
$PYTHON generate_gold.py --from_reference --dataset_name arithmetic --output $GOLD
for seed in $SEEDS; do
    for examples in 50 1000; do
        sft=$OUT/sft_${examples}_seed$seed
        if [ ! -e "$LOGS/${examples}_rate1e-4_seed$seed/eval_log.jsonl" ] || [ ! -e "$LOGS/${examples}_rate3e-5_seed$seed/eval_log.jsonl" ]; then
            rm -rf "$sft"
            echo "== $STUDY: SFT on $examples, seed $seed"
            $PYTHON sft.py $DEMO_MODEL --train_file $GOLD --num_examples $examples --epochs 4 --learning_rate 1e-4 --warmup_steps 3 \
                --eval_updates 1000 --save_updates 1000 --seed $seed --output_dir "$sft" >"$sft.log" 2>&1 || { cat "$sft.log"; exit 1; }
            ln -sfn "$PWD/$(echo "$sft"/checkpoints/step_*)" $OUT/sft_$examples # one name for the models of all seeds
        fi
        for rate in 1e-4 3e-5; do
            run ${examples}_rate${rate}_seed$seed $PYTHON main.py $DEMO --num_train_iters 40 --eval_iterations 5 --seed $seed \
                --learning_rate $rate --model_name $OUT/sft_$examples
        done
    done
done
