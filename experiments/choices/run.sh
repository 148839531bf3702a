#!/usr/bin/env bash
# The choices that a GRPO trainer makes, each beside the usual one: PROTOCOL.md, "The choices".
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

sixteen="--epochs_per_rollout_batch 4 --train_batch_size 16"
answer="--evaluator math"
declare -A flags=(
    [base]=""
    [token_mean]="--length_normalization token_mean"
    [masked_normalize]="--length_normalization masked_normalize"
    [no_std]="--no-use_std_normalization"
    [dr_grpo]="--no-use_std_normalization --length_normalization masked_normalize"
    [no_baseline]="--loss_type no_baseline"
    [beta0]="--beta 0"
    [group2]="--group_size 2"
    [group32]="--group_size 32"
    [dynamic_sampling]="--dynamic_sampling 3"
    [answer_reward]="--prompt reasoning_answer $answer"
    [r1_zero]="--prompt r1_zero $answer"
    [question_only]="--prompt question_only $answer"
    [updates2]="--train_batch_size 32"
    [updates4]="--epochs_per_rollout_batch 2 --train_batch_size 32"
    [updates16]="$sixteen"
    [updates16_no_clip]="$sixteen --loss_type grpo_no_clip"
    [updates16_clip_higher]="$sixteen --cliprange_high 0.28"
    [updates16_gspo]="$sixteen --loss_type gspo --cliprange 3e-3 --cliprange_high 4e-3"
    [updates16_cispo]="$sixteen --loss_type cispo --cliprange_high 4"
    [updates16_reinforce]="$sixteen --loss_type reinforce_with_baseline"
)

# with_rates "RATE..." NAME...: let the next call of compare have these arms, each with these rates
with_rates() {
    local learning_rates name
    learning_rates=$(rates $1)
    for name in "${@:2}"; do
        arms+=(--arm "$name: ${flags[$name]} --learning_rate $learning_rates")
    done
}

# The first look. The rates are a factor of 2 apart. Where the best one lies was seen with seed 0.
if [ -n "$QUICK" ]; then seeds=2; else seeds=4; fi
arms=()
with_rates "1e-4 2e-4 4e-4" base token_mean masked_normalize no_std dr_grpo beta0 group2 group32 \
    dynamic_sampling answer_reward r1_zero question_only updates2
with_rates "1.25e-5 2.5e-5 5e-5" no_baseline
with_rates "5e-5 1e-4 2e-4" updates4
with_rates "1.25e-5 2.5e-5 5e-5" updates16 updates16_no_clip updates16_clip_higher \
    updates16_cispo updates16_reinforce
with_rates "2.5e-5 5e-5 1e-4" updates16_gspo
compare --seeds $seeds --first_seed 3 "${arms[@]}" -- $GRPO $OFTEN
# Expert iteration in small rounds, with as many samples and updates as the others.
compare --seeds $seeds --first_seed 3 --learning_rate $(rates 2e-4 4e-4 8e-4) \
    --arm "expert_iteration: experiments/expert_iteration.py" -- $EXPERT_ITERATION $SMALL_STEPS

# A quick study has no second look: it would show nothing that the first one does not.
if [ -n "$QUICK" ]; then exit; fi

# The second look: the arms of comparisons that the first look left undecided, at their two best
# rates.
arms=()
with_rates "2e-4 4e-4" base token_mean masked_normalize no_std dr_grpo dynamic_sampling \
    answer_reward r1_zero question_only
with_rates "1e-4 2e-4" updates2 updates4
with_rates "2.5e-5 5e-5" updates16
with_rates "1.25e-5 2.5e-5" updates16_clip_higher
with_rates "5e-5 1e-4" updates16_gspo
compare --seeds 2 --first_seed 7 "${arms[@]}" -- $GRPO $OFTEN
compare --seeds 2 --first_seed 7 --learning_rate 2e-4 4e-4 \
    --arm "expert_iteration: experiments/expert_iteration.py" -- $EXPERT_ITERATION $SMALL_STEPS

# Outcome C: the finalists for 100 iterations, with the first look's seeds, evaluated on test.
arms=()
for finalist in "base 2e-4" "answer_reward 2e-4" "updates16 2.5e-5" "updates16_cispo 5e-5"; do
    read -r name rate <<<"$finalist"
    arms+=(--arm "${name}_100: ${flags[$name]} --learning_rate $rate")
done
compare --seeds 4 --first_seed 3 --outcome last --test_size $NUM_TEST "${arms[@]}" -- $GRPO $hundred
