# What the scripts of the studies share; they source it. A study can be stopped and started again at any moment.
# QUICK=1: one seed, few iterations and evaluations on 64 problems, with logs in output/quick instead of experiments.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python}
STUDY=$(basename "$0" .sh)
SEEDS="0 1 2" LOGS=experiments/$STUDY OUT=output/$STUDY
[ -z "${QUICK:-}" ] || SEEDS=0 LOGS=output/quick/$STUDY OUT=output/quick/runs/$STUDY
DEMO_MODEL="--model_name tiny/1m --dataset_name arithmetic --max_completion_length 160 --micro_batch_tokens 4096 --eval_size 500 --device cpu"
DEMO="$DEMO_MODEL --num_train_iters 100 --rollout_batch_size 128 --group_size 16 --learning_rate 1e-4 --eval_iterations 20 --save_iterations 100"
export OMP_NUM_THREADS=1 # one thread: the same numbers on every machine of one kind, and runs side by side

# run NAME PYTHON PROGRAM FLAGS...: a run in $OUT/NAME, unless it is finished; its logs are kept in $LOGS/NAME
run() {
    local name=$1 out=$OUT/$1 logs=$LOGS/$1 quick=
    shift
    if [ -n "${QUICK:-}" ]; then
        case $2 in
            sft.py) quick="--epochs 1 --eval_size 64" ;;
            */expert_iteration.py) quick="--n_ei_steps 2 --eval_size 64" ;;
            *) quick="--num_train_iters 4 --eval_iterations 2 --eval_size 64" ;;
        esac
    fi
    if [ ! -e "$logs/eval_log.jsonl" ]; then
        echo "== $STUDY: $name"
        rm -rf "$out"
        "$@" $quick --output_dir "$out" 2>"$OUT/$name.err" | grep -E "^(examples|evaluation|expert)" || { cat "$OUT/$name.err"; exit 1; }
        mkdir -p "$logs"
        cp $(ls "$out"/{args.json,train_log.jsonl,eval_log.jsonl} 2>/dev/null) "$logs" # --eval_only has no train_log
        [ -n "${KEEP:-}" ] || rm -rf "$out/checkpoints"
    fi
}
mkdir -p "$OUT"
