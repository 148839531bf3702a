# What the studies' run.sh share; they source it. A study can be stopped and started again at any moment: what has its logs is not run again.
# QUICK=1: one seed, one rate, few iterations and problems, with logs in output/quick instead of experiments.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python}
STUDY=$(basename "$(dirname "$(realpath "$0")")")
SEEDS="0 1 2" RATES="1e-4 2e-4 4e-4" LADDER=" 2.5e-6 5e-6 1e-5 2.5e-5 5e-5 1e-4 2e-4 4e-4 8e-4 " LOGS=experiments/$STUDY OUT=output/studies/$STUDY
[ -z "${QUICK:-}" ] || SEEDS=0 RATES=2e-4 LOGS=output/quick/$STUDY OUT=output/quick/runs/$STUDY
MODEL="--model_name tiny/1m --dataset_name arithmetic --max_completion_length 160 --micro_batch_tokens 4096 --eval_size 500 --device cpu"
DEMO="$MODEL --num_train_iters 100 --rollout_batch_size 128 --group_size 16 --learning_rate 1e-4 --eval_iterations 20 --save_iterations 100"
GRPO="$PYTHON main.py $MODEL --num_train_iters 60 --rollout_batch_size 64 --group_size 8 --eval_iterations 20 --save_iterations 60 --max_kl 1000"
SFT="$PYTHON sft.py $MODEL --num_updates 60 --eval_updates 20 --save_updates 1000 --log_entropy"
export OMP_NUM_THREADS=1 # one thread: the same numbers on every machine of one kind, and runs side by side

# run NAME PYTHON PROGRAM FLAGS...: a run in $OUT/NAME, unless it is finished; its logs are kept in $LOGS/NAME
run() {
    local name=$1 out=$OUT/$1 logs=$LOGS/$1 quick=
    shift
    if [ -n "${QUICK:-}" ]; then
        case $2 in
            sft.py) quick="--num_updates 4 --eval_updates 2 --eval_size 16" ;;
            */expert_iteration.py) quick="--n_ei_steps 2 --num_questions 16 --eval_size 16" ;;
            *) quick="--num_train_iters 2 --eval_iterations 1 --eval_size 16" ;;
        esac
    fi
    if [ ! -e "$logs/answers.jsonl" ]; then
        echo "== $STUDY: $name"
        rm -rf "$out"
        "$@" $quick --output_dir "$out" 2>"$OUT/$name.err" | grep -E "^(examples|expert)" || [ "${PIPESTATUS[0]}" = 0 ] || { tail -n 20 "$OUT/$name.err"; exit 1; }
        mkdir -p "$logs"
        cp $(ls "$out"/{args.json,train_log.jsonl,eval_log.jsonl} 2>/dev/null) "$logs" # --eval_only has no train_log
        $PYTHON experiments/answers.py "$out" "$logs/answers.jsonl"
    fi
}

checkpoint_of() { # NAME: the last one of a run
    ls -d "$OUT/$1"/checkpoints/step_* 2>/dev/null | tail -n 1 | grep . || { echo "$OUT/$1 has no checkpoint; remove $LOGS/$1, so that it is run again" >&2; exit 1; }
}

# on_test NAME FILE FLAGS...: the last checkpoint of a run on the 2,000 test problems; what was right is kept in $LOGS/NAME/FILE
on_test() {
    local name=$1 file=$2 model
    shift 2
    if [ ! -e "$LOGS/$name/$file" ]; then
        model=$(checkpoint_of "$name")
        rm -rf "$OUT/$name/test"
        $PYTHON main.py $MODEL --model_name "$model" --eval_only --eval_split test --eval_size 2000 "$@" ${QUICK:+--eval_size 16} \
            --output_dir "$OUT/$name/test" >"$OUT/$name.err" 2>&1 || { tail -n 20 "$OUT/$name.err"; exit 1; }
        $PYTHON experiments/answers.py "$OUT/$name/test" "$LOGS/$name/$file"
    fi
}

# tune NAME PYTHON PROGRAM FLAGS...: seed 0 at each of $RATES, and on along the $LADDER for as long as the best one on validation is
# at an end; that one is left in $rate
tune() {
    local name=$1 rates=$RATES last= beyond
    shift
    while [ "$rates" != "$last" ]; do
        for rate in $rates; do
            run "${name}_rate${rate}_seed0" "$@" --learning_rate "$rate" --seed 0
        done
        last=$rates
        rate=$($PYTHON experiments/table.py best $(printf "$LOGS/${name}_rate%s_seed0 " $rates))
        [ -z "${QUICK:-}" ] || break
        beyond=${LADDER%% ${rates%% *} *}
        [ "$rate" != "${rates%% *}" ] || rates="${beyond##* } $rates"
        beyond=${LADDER##* ${rates##* } }
        [ "$rate" != "${rates##* }" ] || rates="$rates ${beyond%% *}"
    done
}

# arm NAME PYTHON PROGRAM FLAGS...: one side of a comparison: the tuned rate gets the other seeds, and each of these runs one
# evaluation on the test problems. $PROMPT is given to both.
arm() {
    tune "$@" ${PROMPT:-}
    at_rate "$@"
}

# at_rate NAME PYTHON PROGRAM FLAGS...: the seeds at $rate
at_rate() {
    local name=$1 seed
    shift
    for seed in $SEEDS; do
        run "${name}_rate${rate}_seed$seed" "$@" ${PROMPT:-} --learning_rate "$rate" --seed "$seed"
        on_test "${name}_rate${rate}_seed$seed" test.jsonl ${PROMPT:-}
    done
}
mkdir -p "$OUT"
