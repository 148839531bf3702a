# The commands of the study. README.md of this folder says what each row asks, and where the model and the problems come
# from: they lie in output/smollm2 and output/svamp.
#
#     bash experiments/real/study.sh start      # the runs of one row
set -euo pipefail
cd "$(dirname "$0")/../.."
REAL=output/real
DATA="--dataset_name gsm8k --dataset_path output/svamp --max_completion_length 96"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

two_at_a_time() { xargs -P 2 -I COMMAND bash -c COMMAND; }

# R1: SFT on 32, 128 and 512 solutions, then accuracy on validation, greedy and of eight samples.
start() {
    python generate_gold.py --from_reference $DATA --output $REAL/solutions.jsonl
    for examples in 32 128 512; do
        for seed in 0 1; do
            run=$REAL/sft${examples}_seed$seed
            checkpoint=$run/checkpoints/$(printf step_%06d $((examples / 8)))  # two epochs of batches of 16
            evaluate="python main.py --eval_only --model_name $checkpoint $DATA --eval_split validation"
            echo "python sft.py --model_name output/smollm2 --train_file $REAL/solutions.jsonl $DATA" \
                "--num_examples $examples --epochs 2 --train_batch_size 16 --learning_rate 3e-5 --warmup_steps 3" \
                "--eval_split validation --eval_size 32 --seed $seed --output_dir $run > $run.log 2>&1" \
                "&& $evaluate --eval_size 300 --output_dir ${run}_greedy >> $run.log 2>&1" \
                "&& $evaluate --eval_size 100 --eval_samples 8 --output_dir ${run}_sampled >> $run.log 2>&1"
        done
    done | two_at_a_time
}

# R2 and its relatives begin here: the rule of predictions.md chose it.
START=$REAL/sft128_seed0/checkpoints/step_000016
GRPO="--model_name $START $DATA --rollout_batch_size 128 --group_size 8 --beta 0 --micro_batch_tokens 4096
    --max_concurrent_sequences 128 --eval_split validation --eval_size 300 --eval_iterations 20 --save_iterations 10"

# Print the command of a run: its name, script and flags.
command_of() {
    local run=$REAL/$1
    shift
    echo python "$@" --output_dir $run "> $run.log 2>&1"
}

# R1: three learning rates of GRPO for twenty iterations, with half of the prompts.
rates() {
    for rate in 1e-5 2e-5 5e-6; do
        command_of rate${rate}_seed0 main.py $GRPO --rollout_batch_size 64 --num_train_iters 20 \
            --learning_rate $rate --seed 0
    done | two_at_a_time
}

# The rate that the rule of predictions.md chose.
RATE=2e-5

# R2: GRPO.
grpo() {
    for seed in ${SEEDS:-1 2 3}; do
        command_of grpo_seed$seed main.py $GRPO --num_train_iters 60 --learning_rate $RATE --seed $seed
    done | two_at_a_time
}

# R3: the same with rewards for the format alone.
format() {
    for seed in ${SEEDS:-1 2}; do
        command_of format_seed$seed experiments/controls.py --evaluator format $GRPO --num_train_iters 60 \
            --learning_rate $RATE --seed $seed
    done | two_at_a_time
}

# R4: 60 more updates of SFT.
more_sft() {
    for seed in ${SEEDS:-1 2}; do
        command_of more_sft_seed$seed sft.py --model_name $START --train_file $REAL/solutions.jsonl $DATA \
            --num_examples 1920 --train_batch_size 32 --learning_rate 3e-5 --warmup_steps 3 \
            --eval_split validation --eval_size 300 --eval_updates 20 --save_updates 20 --seed $seed
    done | two_at_a_time
}

# R5: raw rewards instead of advantages.
raw_rewards() {
    for seed in ${SEEDS:-1 2}; do
        command_of raw_rewards_seed$seed main.py $GRPO --loss_type no_baseline --num_train_iters 30 \
            --learning_rate $RATE --seed $seed
    done | two_at_a_time
}

# R7: the same on GSM8K, whose last 500 training problems are output/gsm8k/validation.jsonl.
gsm8k() {
    command_of gsm8k_seed1 main.py $GRPO --dataset_path output/gsm8k --max_completion_length 256 --num_train_iters 60 \
        --learning_rate $RATE --seed 1 | two_at_a_time
}

# Longer and slower, from the starting point and from SFT on 512 solutions. These were not planned.
longer() {
    for seed in ${SEEDS:-1 2}; do
        command_of slow_seed$seed main.py $GRPO --num_train_iters 240 --eval_iterations 40 --learning_rate 5e-6 \
            --seed $seed
        command_of strong_seed$seed main.py $GRPO --model_name $REAL/sft512_seed0/checkpoints/step_000064 \
            --num_train_iters 240 --eval_iterations 40 --learning_rate 1e-5 --seed $seed
    done | two_at_a_time
}

# Accuracy on test, greedy and at temperature 1, of the starting point and of the last checkpoint of each run named.
on_test() {
    for run in sft128_seed0 "$@"; do
        checkpoint=$(ls -d $REAL/$run/checkpoints/step_* | tail -n 1)
        evaluate="main.py --eval_only --model_name $checkpoint $DATA --eval_split test --eval_size 1000"
        command_of ${run}_test $evaluate
        command_of ${run}_test_sampled $evaluate --eval_temperature 1
    done | two_at_a_time
}

# R6: 32 samples of 100 validation problems, by the starting point and by the last checkpoint of each run named.
pass_at_k() {
    for run in sft128_seed0 "$@"; do
        checkpoint=$(ls -d $REAL/$run/checkpoints/step_* | tail -n 1)
        command_of ${run}_pass_at_k main.py --eval_only --model_name $checkpoint $DATA --eval_split validation \
            --eval_size 100 --eval_samples 32 --max_concurrent_sequences 128
    done | two_at_a_time
}

# How far each run named has moved from the starting point.
kl() {
    for run in "$@"; do
        checkpoint=$(ls -d $REAL/$run/checkpoints/step_* | tail -n 1)
        echo python experiments/real/kl.py $checkpoint --start $START --dataset_path output/svamp \
            --output $REAL/kl.jsonl
    done | two_at_a_time
}

# Solutions by the model after GRPO, of 500 training problems.
gold() {
    echo python generate_gold.py --model_name $REAL/grpo_seed1/checkpoints/step_000060 $DATA --num_problems 500 \
        --concurrency 64 --output $REAL/gold.jsonl | two_at_a_time
}

# R8: stories that the model before training rates. Can it tell intact stories from damaged ones? Then GRPO on its ratings.
STORIES="--model_name output/smollm2 --dataset_name creative --judge_type policy --min_judge_spread 0
    --max_completion_length 128 --micro_batch_tokens 4096 --rollout_batch_size 16 --group_size 4"
judge() {
    command_of judge_seed0 -m experiments.judge_report 6 $STORIES | two_at_a_time
}
stories() {
    command_of stories_seed0 main.py $STORIES --num_train_iters 40 --learning_rate 1e-5 \
        --eval_size 20 --eval_temperature 1 --eval_iterations 20 --save_iterations 10 | two_at_a_time
}

"$@"
