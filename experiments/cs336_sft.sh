#!/usr/bin/env bash
# CS336's SFT problem: 128, 256, 512, 1,024 and all 10,000 gold examples; then the samples of a teacher, as they come, those of them
# that are right, and as many drawn blindly, with 3 seeds. 4 epochs (all 10,000: 1 epoch).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/study.sh"

GOLD=$OUT/gold.jsonl TEACHER=$OUT/teacher.jsonl
problems=2048
[ -z "${QUICK:-}" ] || problems=256
$PYTHON generate_gold.py --from_reference --dataset_name arithmetic --output $GOLD
$PYTHON generate_gold.py --model_name tiny/3m --dataset_name arithmetic --num_problems $problems --max_completion_length 160 --keep_incorrect --output $TEACHER
right=$(grep -c '"correct": true' $TEACHER)
fine_tune() { # NAME seed flags...
    local name=$1 seed=$2
    shift 2
    run ${name}_seed$seed $PYTHON sft.py $DEMO_MODEL --epochs 4 --learning_rate 1e-4 --warmup_steps 3 --eval_updates 10000 --log_entropy --seed $seed "$@"
}
for seed in $SEEDS; do
    fine_tune teacher_all $seed --train_file $TEACHER --num_examples $problems
    fine_tune teacher_right $seed --train_file $TEACHER --num_examples $right --filter_correct
    fine_tune teacher_as_many $seed --train_file $TEACHER --num_examples $right
done
for examples in 128 256 512 1024; do
    fine_tune gold_$examples 0 --train_file $GOLD --num_examples $examples
done
fine_tune gold_10000 0 --train_file $GOLD --num_examples 10000 --epochs 1
