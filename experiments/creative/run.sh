#!/bin/bash
# What is behind "Task 5" of analysis.md: bash experiments/creative/run.sh DIRECTORY_OF_STORIES260K
set -e
python=${PYTHON:-python}
creative="--model_name $1 --dataset_name creative --max_completion_length 128 --judge policy"
for seed in 0 1 2; do
    $python main.py $creative --judge_score likelihood --num_train_iters 60 --rollout_batch_size 128 \
        --learning_rate 3e-4 --micro_batch_tokens 8192 --eval_iterations 20 --eval_temperature 1 --save_iterations 60 \
        --seed $seed --output_dir output/creative/seed$seed
    # the judge's report on 640 stories: kept in experiments/creative as seed$seed/judge_report_640.json
    $python evaluator.py --check_judge 80 $creative --judge_score likelihood --seed $seed --output_dir output/creative/report$seed
done
$python evaluator.py --check_judge 10 $creative --judge_score rating --output_dir output/creative/report_rating
$python plotter.py --log_dir output/creative/seed{0,1,2} --output output/creative/training_plots.pdf
