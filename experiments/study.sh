# What the scripts of the studies share; they source it. A study can be stopped and started again at any moment.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python}
STUDY=$(basename "$0" .sh)
DEMO_MODEL="--model_name tiny/1m --dataset_name arithmetic --max_completion_length 96 --micro_batch_tokens 4096 --device cpu"
DEMO="$DEMO_MODEL --num_train_iters 80 --rollout_batch_size 128 --learning_rate 1e-4 --eval_iterations 20 --save_iterations 80"
export OMP_NUM_THREADS=1 # one thread: the same numbers on every machine of one kind, and runs side by side

# run NAME COMMAND...: a run in output/STUDY/NAME, unless it is finished; its logs are kept in experiments/STUDY/NAME
run() {
    local name=$1 out=output/$STUDY/$1 logs=experiments/$STUDY/$1
    shift
    if [ ! -e "$logs/eval_log.jsonl" ]; then
        echo "== $name"
        rm -rf "$out"
        "$@" --output_dir "$out" 2>/dev/null | grep -E "^(examples|evaluation|expert|error)"
        mkdir -p "$logs"
        cp "$out"/args.json "$out"/train_log.jsonl "$out"/eval_log.jsonl "$logs"
        rm -rf "$out/checkpoints" "$out/model"
    fi
}
