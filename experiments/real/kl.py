"""How far has training moved a model? The KL divergence from its starting point.

    python experiments/real/kl.py output/real/grpo_seed1/checkpoints/step_000060 --start START \
        --dataset_path output/svamp --output experiments/real/kl.jsonl

The model samples one completion for each of 100 validation problems. The divergence between the
distributions of the next token is averaged over all tokens. A line is added to the output.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch  # noqa: E402

import llms  # noqa: E402
from experiments.real.checks import MAX_COMPLETION_LENGTH, next_token_logps  # noqa: E402
from logs import jsonl  # noqa: E402
from rl_datasets import get_dataloaders  # noqa: E402
from sampling.generation import generate  # noqa: E402

NUM_PROBLEMS = 100


@torch.no_grad()
def measure(model_name: str, start: str, dataset_path: str) -> dict:
    """The divergence in nats per token, and over how many tokens it is averaged."""
    torch.manual_seed(0)
    model, tokenizer = llms.get_llm_tokenizer(model_name, "cpu")
    reference, _ = llms.get_llm_tokenizer(start, "cpu")
    _, loader = get_dataloaders(
        "gsm8k",
        tokenizer,
        dataset_path=dataset_path,
        eval_split="validation",
        eval_size=NUM_PROBLEMS,
    )
    prompts = [example["prompt"] for example in loader.examples]
    samples = generate(model, tokenizer, prompts, max_completion_length=MAX_COMPLETION_LENGTH)
    total = 0.0
    for row in range(len(prompts)):
        sample = samples.select([row])
        logps = next_token_logps(model, sample)
        differences = logps - next_token_logps(reference, sample)
        divergences = (logps.exp() * differences).sum(-1)  # (1, C)
        total += (divergences * sample.completion_mask).sum().item()
    num_tokens = int(samples.completion_mask.sum())
    return {"model": model_name, "start": start, "tokens": num_tokens, "kl": total / num_tokens}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model_name", help="the trained model")
    parser.add_argument("--start", required=True, help="the model with which training began")
    parser.add_argument("--dataset_path", required=True, help="folder with validation problems")
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl to which is added")
    args = parser.parse_args()
    try:
        result = measure(args.model_name, args.start, args.dataset_path)
        jsonl.append(args.output, result)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{result['kl']:.4f} nats per token, over {result['tokens']} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
