#!/usr/bin/env bash
# SFT on so many gold solutions, 60 updates of 32 (10,000: 313, one epoch): the data set's own, which write each step directly, and
# the same problems' in easier pieces.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

[ -n "${QUICK:-}" ] || RATES="3e-5 1e-4 3e-4" LADDER=" 1e-6 3e-6 1e-5 3e-5 1e-4 3e-4 1e-3 "
gold() { # KIND SHARE: gold_KIND.jsonl, of which that share of the steps is careful
    [ -e $OUT/gold_$1.jsonl ] && return
    mkdir -p $OUT/$1
    $PYTHON -c "
import sys; sys.path.insert(0, '.')
from data import word_problems; from logs import jsonl
jsonl.write(sys.argv[1], word_problems.generate('train', 10_000, careful=float(sys.argv[2])))" $OUT/$1/train.jsonl $2
    $PYTHON generate_gold.py --from_reference --dataset_name gsm8k --dataset_path $OUT/$1 --output $OUT/gold_$1.jsonl
}
gold direct 0
gold careful 1
for kind in direct careful; do
    for examples in 10 100 1000; do
        arm ${kind}$examples $SFT --train_file $OUT/gold_$kind.jsonl --num_examples $examples
    done
done
arm direct10000 $SFT --train_file $OUT/gold_direct.jsonl --num_updates 313 --eval_updates 100
