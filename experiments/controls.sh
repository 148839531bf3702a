#!/usr/bin/env bash
# The demo with a random reward, and with the rewards for the format alone: what of its rise did the reward teach? 3 seeds.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/study.sh"

for seed in $SEEDS; do
    for reward in random format; do
        run ${reward}_seed$seed $PYTHON experiments/controls.py $DEMO --evaluator $reward --seed $seed
    done
done
