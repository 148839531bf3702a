"""Put a model's own answers into the format of `reasoning_answer`: a round of expert iteration.

For a model that solves problems when it is asked freely, but not in the format that is trained.
FOLDER has the same training problems as train.jsonl and as test.jsonl.

    D="--dataset_name gsm8k --dataset_path FOLDER"
    python main.py --eval_only $D --eval_split test --eval_samples 4 --prompt question_only \
        --evaluator math --max_completion_length 200 --output_dir output/own
    python experiments/own_answers.py output/own --output own.jsonl
    python generate_gold.py $D --solutions own.jsonl --output gold.jsonl    # keeps the right ones
    python sft.py --dataset_name gsm8k --train_file gold.jsonl
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evaluator import last_number
from grpo import jsonl
from rl_datasets import find_prompt


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of the evaluation")
    parser.add_argument("--output", type=Path, default="own.jsonl")
    args = parser.parse_args(argv)
    prompt = find_prompt("reasoning_answer")
    solutions = []
    try:
        path = args.run / "eval" / "step_000000.jsonl"
        for answer in jsonl.read(path, required=("id", "completion", "finished")):
            text = answer["completion"].strip()
            number = last_number(text)
            if answer["finished"] and number is not None:
                problem = answer["id"].replace("/test/", "/train/")
                solution = prompt.format_solution(text, number)
                solutions.append({"id": problem, "completion": solution})
        jsonl.write(args.output, solutions)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: {len(solutions)} answers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
