#!/usr/bin/env bash
# SFT on 10 to 10,000 gold solutions of two kinds. Those of the data set write each step directly;
# the others solve the same problems in easier pieces. SFT makes 60 updates of 32 examples; with
# 10,000 solutions it makes 313, which is one epoch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

LADDER="1e-6 3e-6 1e-5 3e-5 1e-4 3e-4 1e-3"
[ -n "$QUICK" ] || RATES="3e-5 1e-4 3e-4"

# gold KIND SHARE: write gold_KIND.jsonl, in which that share of the steps is in easier pieces.
gold() {
    local kind=$1 careful=$2
    [ ! -e $OUT/gold_$kind.jsonl ] || return 0
    mkdir -p $OUT/$kind
    $PYTHON - $OUT/$kind/train.jsonl $careful <<'END'
import sys

from data import word_problems
from logs import jsonl

problems = word_problems.generate("train", 10_000, careful=float(sys.argv[2]))
jsonl.write(sys.argv[1], problems)
END
    $PYTHON generate_gold.py --from_reference --dataset_name gsm8k --dataset_path $OUT/$kind \
        --output $OUT/gold_$kind.jsonl
}
gold direct 0
gold careful 1
for kind in direct careful; do
    for examples in 10 100 1000; do
        arm ${kind}$examples $SFT --train_file $OUT/gold_$kind.jsonl --num_examples $examples
    done
done
arm direct10000 $SFT --train_file $OUT/gold_direct.jsonl --num_updates 313 --eval_updates 100
