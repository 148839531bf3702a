#!/usr/bin/env bash
# Try the commands of cs336.md with a tiny model, for a few iterations and with fewer values of each
# flag, to see that they work:
# experiments/cs336.sh [output folder]
#
# The model is tiny/1m and the data set is `arithmetic`. PYTHON names the interpreter, which is
# .venv/bin/python by default.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${1:-output/cs336}
PYTHON=${PYTHON:-.venv/bin/python}
MODEL="--model_name tiny/1m --dataset_name arithmetic --max_completion_length 160 --eval_size 16 \
    --device cpu"
R1="--prompt r1_zero --evaluator math"
GRPO="$PYTHON main.py $MODEL --num_train_iters 3 --rollout_batch_size 32 --group_size 8 \
    --learning_rate 1e-4 --eval_iterations 3"
SFT="$PYTHON sft.py $MODEL $R1 --train_file $OUT/gold.jsonl --learning_rate 1e-4 --eval_updates 8"

# run NAME COMMAND...: run a command with its output in $OUT/NAME.log, and show its main lines.
run() {
    local name=$1
    local log=$OUT/$name.log
    shift
    echo "== $name: $*"
    mkdir -p "$OUT"
    if ! "$@" >"$log" 2>&1; then
        tail -n 5 "$log"
        exit 1
    fi
    grep -E "^(evaluation|format|examples|expert|done|accuracy)" "$log" | tail -n 5 || true
}

# Section 3: zero-shot
run math_baseline $PYTHON main.py $MODEL $R1 --eval_only --output_dir $OUT/math_baseline

# Section 4: SFT
run gold $PYTHON generate_gold.py --from_reference --dataset_name arithmetic --num_problems 256 \
    $R1 --output $OUT/gold.jsonl
run sft_128 $SFT --num_examples 128 --output_dir $OUT/sft_128
run sft_256 $SFT --num_examples 256 --output_dir $OUT/sft_256
run sft_filtered $SFT --filter_correct --output_dir $OUT/sft_filtered

# Section 5: expert iteration
run expert_iteration $PYTHON experiments/expert_iteration.py $MODEL $R1 --n_ei_steps 2 \
    --num_questions 32 --group_size 4 --learning_rate 1e-4 --output_dir $OUT/expert_iteration

# Section 7: GRPO
for rate in 1e-5 1e-4; do
    run grpo_learning_rate_$rate $GRPO $R1 --learning_rate $rate --output_dir $OUT/rate_$rate
done
for loss in no_baseline reinforce_with_baseline; do
    run grpo_baselines_$loss $GRPO $R1 --loss_type $loss --output_dir $OUT/$loss
done
for length in masked_mean masked_normalize; do
    run grpo_length_$length $GRPO $R1 --length_normalization $length --output_dir $OUT/$length
done
run grpo_no_std $GRPO $R1 --no-use_std_normalization --output_dir $OUT/no_std
OFF_POLICY="--epochs_per_rollout_batch 2 --train_batch_size 16"
run grpo_off_policy $GRPO $R1 $OFF_POLICY --loss_type grpo_clip --output_dir $OUT/off_policy
run grpo_off_policy_no_clip $GRPO $R1 $OFF_POLICY --loss_type grpo_no_clip \
    --output_dir $OUT/off_policy_no_clip
run grpo_prompt_question_only $GRPO --prompt question_only --evaluator math \
    --output_dir $OUT/question_only
run grpo_prompt_reasoning_answer $GRPO --output_dir $OUT/reasoning_answer
run plot $PYTHON plotter.py --log_dir $OUT/no_baseline $OUT/reinforce_with_baseline \
    --output $OUT/baselines.pdf

echo "all commands of cs336.md ran; logs and plots are in $OUT"
