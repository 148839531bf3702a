#!/usr/bin/env bash
# SFT on 10 to 10,000 gold solutions of two kinds. Those of the data set write each step directly;
# the others solve the same problems in easier pieces. SFT makes 60 updates of 32 examples; with
# 10,000 solutions it makes 313, which is one epoch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../study.sh"

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
arm() { # arm KIND EXAMPLES RATES: an arm of compare.py
    echo "$1$2: sft.py --train_file $OUT/gold_$1.jsonl --num_examples $2 --learning_rate $3"
}
if [ -n "$QUICK" ]; then epoch=; else epoch="--num_updates 313 --eval_updates 100"; fi
five_rates=$(rates 3e-6 1e-5 3e-5 1e-4 3e-4)
three_rates=$(rates 3e-5 1e-4 3e-4)
tuned --arm "$(arm direct 10 "$five_rates")" --arm "$(arm direct 100 "$five_rates")" \
    --arm "$(arm direct 1000 "$five_rates")" --arm "$(arm careful 10 "$three_rates")" \
    --arm "$(arm careful 100 "$(rates 1e-5 3e-5 1e-4 3e-4)")" \
    --arm "$(arm careful 1000 "$three_rates")" \
    --arm "direct10000: sft.py --train_file $OUT/gold_direct.jsonl $epoch
        --learning_rate $(rates 3e-5 1e-4 3e-4 1e-3)" -- $SFT
