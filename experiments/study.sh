# What the run.sh of every study shares; each of them sources this file.
#
# A study can be stopped at any moment and started again: it does not repeat a run that has logs.
# With QUICK=1 a study has one seed, one learning rate, few iterations and few problems, and
# its logs go to output/quick instead of experiments.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python}
QUICK=${QUICK:-}
# $0 is the run.sh that sources this file, and its folder has the name of the study.
STUDY=$(basename "$(dirname "$(realpath "$0")")")
LADDER="2.5e-6 5e-6 1e-5 2.5e-5 5e-5 1e-4 2e-4 4e-4 8e-4"
if [ -n "$QUICK" ]; then
    SEEDS="0"
    RATES="2e-4"
    LOGS=output/quick/$STUDY
    OUT=output/quick/runs/$STUDY
else
    SEEDS="0 1 2"
    RATES="1e-4 2e-4 4e-4"
    LOGS=experiments/$STUDY
    OUT=output/studies/$STUDY
    $PYTHON experiments/archive.py unpack
fi
# MODEL and DEMO are flags; GRPO and SFT are commands with flags. With --max_kl 1000 no run is
# stopped for being far from the reference.
MODEL="--model_name tiny/1m --dataset_name arithmetic --max_completion_length 160 \
    --micro_batch_tokens 4096 --eval_size 500 --device cpu"
DEMO="$MODEL --num_train_iters 100 --rollout_batch_size 128 --group_size 16 --learning_rate 1e-4 \
    --eval_iterations 20 --save_iterations 100"
GRPO_FLAGS="$MODEL --num_train_iters 60 --rollout_batch_size 64 --group_size 8 \
    --eval_iterations 20 --save_iterations 60 --max_kl 1000"
GRPO="$PYTHON main.py $GRPO_FLAGS"
SFT="$PYTHON sft.py $MODEL --num_updates 60 --eval_updates 20 --save_updates 1000 --log_entropy"
# With one thread, all machines of one kind give the same numbers, and runs can go side by side.
export OMP_NUM_THREADS=1
mkdir -p "$OUT"

# compare FLAGS...: a call of compare.py, which makes the runs of this study that have no logs yet
compare() {
    local quick_flags=
    if [ -n "$QUICK" ]; then
        quick_flags="--num_train_iters 2 --eval_iterations 1 --eval_size 16"
    fi
    echo "== $STUDY"
    $PYTHON experiments/compare.py --output_dir "$OUT" --logs_dir "$LOGS" "$@" $quick_flags
}

# run NAME PYTHON PROGRAM FLAGS...: make a run in $OUT/NAME and keep its logs in $LOGS/NAME.
run() {
    local name=$1
    local out=$OUT/$name logs=$LOGS/$name
    local program=$3 quick_flags= file
    shift
    if [ -e "$logs/answers.jsonl" ]; then return; fi
    if [ -n "$QUICK" ]; then
        case $program in
            sft.py) quick_flags="--num_updates 4 --eval_updates 2" ;;
            */expert_iteration.py) quick_flags="--n_ei_steps 2 --num_questions 16" ;;
            *) quick_flags="--num_train_iters 2 --eval_iterations 1" ;;
        esac
        quick_flags="$quick_flags --eval_size 16"
    fi
    echo "== $STUDY: $name"
    rm -rf "$out"
    # Of what the program prints, show only the lines that start with "examples" or "expert". With
    # pipefail, which run.sh sets, `fail` runs if the program fails.
    "$@" $quick_flags --output_dir "$out" 2>"$OUT/$name.err" \
        | { grep -E "^(examples|expert)" || true; } || fail "$OUT/$name.err"
    mkdir -p "$logs"
    for file in args.json train_log.jsonl eval_log.jsonl; do
        # --eval_only writes no train_log.jsonl.
        if [ -e "$out/$file" ]; then cp "$out/$file" "$logs"; fi
    done
    $PYTHON experiments/answers.py "$out" "$logs/answers.jsonl"
}

# on_test NAME FILE FLAGS...: evaluate the last checkpoint of a run on the 2,000 test problems, and
# keep which answers were right in $LOGS/NAME/FILE.
on_test() {
    local name=$1 file=$2
    local test=$OUT/$name/test model
    shift 2
    if [ -e "$LOGS/$name/$file" ]; then return; fi
    model=$(last_checkpoint "$name")
    rm -rf "$test"
    # If a flag is given twice, as some of $MODEL are here, the last one counts.
    $PYTHON main.py $MODEL --model_name "$model" --eval_only --eval_split test --eval_size 2000 \
        "$@" ${QUICK:+--eval_size 16} --output_dir "$test" >"$OUT/$name.err" 2>&1 \
        || fail "$OUT/$name.err"
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

# tune NAME PYTHON PROGRAM FLAGS...: find the learning rate that is best on validation with seed 0,
# and leave it in $rate. It tries $RATES first. As long as the best one is the lowest or the highest
# of those tried, it goes on to the next rate of $LADDER.
tune() {
    local name=$1 rates=$RATES tried= next
    shift
    while [ "$rates" != "$tried" ]; do
        for rate in $rates; do
            run "${name}_rate${rate}_seed0" "$@" --learning_rate "$rate" --seed 0
        done
        tried=$rates
        # printf repeats its pattern for each of the rates.
        rate=$($PYTHON experiments/table.py best $(printf "$LOGS/${name}_rate%s_seed0 " $rates))
        if [ -n "$QUICK" ]; then break; fi
        if [ "$rate" = "${rates%% *}" ]; then # the lowest
            next=$(rate_below "$rate") # empty at the end of $LADDER, and then nothing is added
            rates="${next:+$next }$rates"
        fi
        if [ "$rate" = "${rates##* }" ]; then # the highest
            next=$(rate_above "$rate")
            rates="$rates${next:+ $next}"
        fi
    done
}

# rate_below RATE, rate_above RATE: the next rate of $LADDER, or nothing at its end
rate_below() {
    local step previous=
    for step in $LADDER; do
        if [ "$step" = "$1" ]; then break; fi
        previous=$step
    done
    echo "$previous"
}
rate_above() {
    local step previous=
    for step in $LADDER; do
        if [ "$previous" = "$1" ]; then echo "$step"; fi
        previous=$step
    done
}

# arm NAME PYTHON PROGRAM FLAGS...: one side of a comparison, at its best learning rate. The tuning
# and the final runs get the flags in $PROMPT, and so does the evaluation on the test problems.
arm() {
    tune "$@" ${PROMPT:-}
    at_rate "$@" # which adds $PROMPT itself
}

# at_rate NAME PYTHON PROGRAM FLAGS...: a run at $rate for each seed, evaluated on the test problems
at_rate() {
    local name=$1 seed
    shift
    for seed in $SEEDS; do
        run "${name}_rate${rate}_seed$seed" "$@" ${PROMPT:-} --learning_rate "$rate" --seed "$seed"
        on_test "${name}_rate${rate}_seed$seed" test.jsonl ${PROMPT:-}
    done
}
