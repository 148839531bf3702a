# What the run.sh of every study shares; each of them sources this file.
#
# A study can be stopped at any moment and started again: it does not repeat a run that has logs.
# With QUICK=1 a study has two seeds, one learning rate, few iterations and few problems, and its
# logs go to output/quick instead of experiments.
# $0 is the run.sh that sources this file, and its folder has the name of the study. It may be a
# relative path, so it is read before the directory changes.
STUDY=$(basename "$(dirname "$(realpath "$0")")")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python}
QUICK=${QUICK:-}
if [ -n "$QUICK" ]; then
    SEEDS="0 1"
    NUM_SEEDS=2
    NUM_TEST=16 # problems
    NUM_PASS=16
    LOGS=output/quick/$STUDY
    OUT=output/quick/runs/$STUDY
    validation="--eval_size 16"
    sixty="--num_train_iters 2 --eval_iterations 1 --save_iterations 2"
    hundred=$sixty
    OFTEN=
    updates="--num_updates 4 --eval_updates 2"
    steps="--n_ei_steps 2"
    small_steps=$steps
else
    SEEDS="0 1 2"
    NUM_SEEDS=3
    NUM_TEST=2000
    NUM_PASS=1000
    LOGS=experiments/$STUDY
    OUT=output/studies/$STUDY
    validation="--eval_size 500"
    sixty="--num_train_iters 60 --eval_iterations 20 --save_iterations 60"
    hundred="--num_train_iters 100 --eval_iterations 20 --save_iterations 100"
    OFTEN="--eval_iterations 10"
    updates="--num_updates 60 --eval_updates 20"
    steps="--n_ei_steps 5"
    small_steps="--n_ei_steps 60 --eval_ei_steps 10"
    $PYTHON experiments/archive.py unpack
fi
# Flags of every model, of the demo, of GRPO with 60 iterations, of SFT and of expert iteration.
# With --max_kl 1000 no run is stopped for being far from the reference.
MODEL="--model_name tiny/1m --dataset_name arithmetic --max_completion_length 160 \
    --micro_batch_tokens 4096 --device cpu $validation"
DEMO="$MODEL $hundred --rollout_batch_size 128 --group_size 16 --learning_rate 1e-4"
GRPO="$MODEL $sixty --rollout_batch_size 64 --group_size 8 --max_kl 1000"
SFT="$MODEL $updates --save_updates 1000 --log_entropy"
EXPERT_ITERATION="$MODEL $steps"
# Expert iteration with the samples and the updates of $GRPO.
SMALL_STEPS="$small_steps --num_questions 8 --group_size 8 --epochs 1 --train_batch_size 64"
# With one thread, all machines of one kind give the same numbers, and runs can go side by side.
export OMP_NUM_THREADS=1
mkdir -p "$OUT"

# compare FLAGS...: a call of compare.py, which makes the runs of this study that have no logs yet.
# What follows after -- are the flags of all runs.
compare() {
    echo "== $STUDY"
    $PYTHON experiments/compare.py --output_dir "$OUT" --logs_dir "$LOGS" "$@"
}

# tuned FLAGS...: the same by the first protocol. Seed 0 alone chooses the learning rate, by the
# last evaluation on validation. The best rate gets all seeds, which are evaluated on test.
tuned() {
    compare --seeds $NUM_SEEDS --tuning_seeds 1 --outcome last --test_size $NUM_TEST "$@"
}

# rates RATE...: these learning rates, or with QUICK=1 a single one
rates() {
    if [ -n "$QUICK" ]; then echo 2e-4; else echo "$@"; fi
}

# run NAME PYTHON PROGRAM FLAGS...: make a run in $OUT/NAME and keep its logs in $LOGS/NAME.
run() {
    local name=$1
    local out=$OUT/$name logs=$LOGS/$name
    local file
    shift
    if [ -e "$logs/answers.jsonl" ]; then return; fi
    echo "== $STUDY: $name"
    rm -rf "$out"
    "$@" --output_dir "$out" >"$OUT/$name.log" 2>&1 || fail "$OUT/$name.log"
    mkdir -p "$logs"
    for file in args.json train_log.jsonl eval_log.jsonl; do
        # --eval_only writes no train_log.jsonl.
        if [ -e "$out/$file" ]; then cp "$out/$file" "$logs"; fi
    done
    $PYTHON experiments/answers.py "$out" "$logs/answers.jsonl"
}

# on_test NAME FILE FLAGS...: evaluate the last checkpoint of a run on test problems, and keep which
# answers were right in $LOGS/NAME/FILE.
on_test() {
    local name=$1 file=$2
    local test=$OUT/$name/$2.run model
    shift 2
    if [ -e "$LOGS/$name/$file" ]; then return; fi
    model=$(last_checkpoint "$name")
    rm -rf "$test"
    # If a flag is given twice, as some of $MODEL are here, the last one counts.
    $PYTHON main.py $MODEL --model_name "$model" --eval_only --eval_split test "$@" \
        --output_dir "$test" >"$OUT/$name.log" 2>&1 || fail "$OUT/$name.log"
    $PYTHON experiments/answers.py "$test" "$LOGS/$name/$file"
}

# last_checkpoint NAME: the folder of the last checkpoint of a run
last_checkpoint() {
    # The numbers in the names are zero-padded, so that the last name has the last step. grep prints
    # it, and fails if there is none.
    if ! ls -d "$OUT/$1"/checkpoints/step_* 2>/dev/null | tail -n 1 | grep .; then
        echo "$OUT/$1 has no checkpoint; remove $LOGS/$1, so that it is run again" >&2
        exit 1
    fi
}

# fail FILE: show the end of what a program wrote, and end the study.
fail() {
    tail -n 20 "$1"
    exit 1
}
