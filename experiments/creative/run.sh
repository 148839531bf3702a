#!/bin/bash
# What is behind "Task 5" of analysis.md: bash experiments/creative/run.sh DIRECTORY_OF_STORIES260K
set -e
python=${PYTHON:-python}
creative="--model_name $1 --dataset_name creative --max_completion_length 128"
for seed in 0 1 2; do
    $python main.py $creative --judge policy --judge_score likelihood --num_train_iters 60 --rollout_batch_size 128 \
        --learning_rate 3e-4 --micro_batch_tokens 8192 --eval_iterations 20 --eval_temperature 1 --save_iterations 60 \
        --seed $seed --output_dir output/creative/seed$seed
    for score in likelihood rating; do # the judge's report on 640 stories
        $python evaluator.py --check_judge 80 $creative --judge policy --judge_score $score --seed $seed \
            --output_dir output/creative/report_$score$seed
    done
done
$python plotter.py --log_dir output/creative/seed{0,1,2} --output output/creative/training_plots.pdf
