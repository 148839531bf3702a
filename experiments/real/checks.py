r"""Does the code sample from and train a real model exactly? It is compared with others' code.

    python experiments/real/checks.py --model_name output/start --reference output/smollm2 \
        --dataset_path output/svamp --trl_python ~/trl/bin/python --output checks.json

Eight completions are sampled for each of eight validation problems. Their log-probs, the loss and
its gradient, and greedy answers are compared with those of transformers and of TRL's trainer, which
needs an environment of its own (trl_loss.py). Each number is written to the output.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from sampling.rollout import Rollout, compute_rollout_logps  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

import llms  # noqa: E402
import main  # noqa: E402
from rl_datasets import get_dataloaders  # noqa: E402
from sampling.generation import generate  # noqa: E402

NUM_PROMPTS = 8
GROUP_SIZE = 8
NUM_IN_LOSS = (
    16  # the completions of the first two prompts; TRL holds all logits of a batch at once
)
MAX_COMPLETION_LENGTH = 96
# The settings of the loss, for both sides.
BETA = 0.04
CLIPRANGE = 0.2


def next_token_logps(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """(B, C, V): log-probs of the vocabulary at each completion token, by a pass over the rows."""
    mask = rollout.attention_mask
    outputs = model(
        input_ids=rollout.prompt_completion_ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        logits_to_keep=rollout.completion_ids.shape[1] + 1,
    )
    return outputs.logits[:, :-1].log_softmax(-1)


def plain_logps(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """(B, C): the log-probs of the completions, by one pass of the model over the padded rows."""
    with torch.no_grad():
        logps = next_token_logps(model, rollout)
    return logps.gather(2, rollout.completion_ids.unsqueeze(2)).squeeze(2)


def largest_difference(first: Tensor, second: Tensor, mask: Tensor) -> float:
    return (first - second)[mask.bool()].abs().max().item()


def our_loss(
    model: PreTrainedModel, rollout: Rollout, batch: dict[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """The loss of main.py with TRL's settings, and the gradient of each weight by its name."""
    model.zero_grad()
    loss, _ = main.compute_loss(
        model,
        None,
        rollout.prompt_completion_ids,
        rollout.completion_ids,
        rollout.attention_mask,
        rollout.completion_mask,
        batch["advantages"],
        main.LossConfig(beta=BETA, cliprange=CLIPRANGE),
        group_size=GROUP_SIZE,
        old_per_token_logps=batch["old_per_token_logps"],
        ref_per_token_logps=batch["ref_per_token_logps"],
    )
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters()}


def trl_loss(
    python: str, model_name: str, batch: dict[str, Tensor]
) -> tuple[str, float, dict[str, Tensor]]:
    """TRL's version, and its loss and gradients of the same batch."""
    with tempfile.TemporaryDirectory() as folder:
        batch_path = Path(folder) / "batch.safetensors"
        gradient_path = Path(folder) / "gradient.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in batch.items()}, batch_path)
        command = [python, HERE / "trl_loss.py", model_name, batch_path, gradient_path]
        run = subprocess.run(
            [*map(str, command), str(BETA), str(CLIPRANGE)], capture_output=True, text=True
        )
        if run.returncode:
            raise RuntimeError(f"trl_loss.py failed ({run.returncode}): {run.stderr[-2000:]}")
        result = json.loads(run.stdout.splitlines()[-1])
        return result["version"], result["loss"], load_file(gradient_path)


def relative_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The 2-norm of the difference of two gradients, divided by that of the first."""
    assert first.keys() == second.keys()
    difference = sum((first[name] - second[name]).double().square().sum() for name in first)
    norm = sum(gradient.double().square().sum() for gradient in first.values())
    return (difference / norm).sqrt().item()


def greedy_ids(model: PreTrainedModel, tokenizer, prompts: list[str]) -> list[list[int]]:
    """Greedy answers by transformers' generate, one prompt at a time, without padding."""
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_COMPLETION_LENGTH,
        )
        answers.append(output[0, ids.shape[1] :].tolist())
    return answers


def check_logps(model: PreTrainedModel, rollout: Rollout) -> dict:
    """Log-probs of the sampler and of the loss, beside a plain pass of transformers."""
    mask = rollout.completion_mask
    plain = plain_logps(model, rollout)
    logps = compute_rollout_logps(
        model, rollout, group_size=GROUP_SIZE, temperature=1.0, micro_batch_tokens=4096
    )
    return {
        "completions": len(mask),
        "completion tokens": int(mask.sum()),
        "log-probs of the sampler beside a plain pass, largest difference in nats": (
            largest_difference(rollout.sampled_logps, plain, mask)
        ),
        "log-probs of the loss beside a plain pass, largest difference in nats": (
            largest_difference(logps, plain, mask)
        ),
    }


def check_loss(args, model: PreTrainedModel, rollout: Rollout) -> dict:
    """The loss and its gradient, beside TRL's."""
    reference, _ = llms.get_llm_tokenizer(args.reference, "cpu")
    policy_logps = plain_logps(model, rollout)
    batch = {
        "prompt_ids": rollout.prompt_ids,
        "prompt_mask": rollout.prompt_mask,
        "completion_ids": rollout.completion_ids,
        "completion_mask": rollout.completion_mask,
        "advantages": torch.randn(NUM_IN_LOSS),
        # As if the policy had moved since it sampled, so that some tokens are clipped.
        "old_per_token_logps": policy_logps + 0.2 * torch.randn(policy_logps.shape),
        "ref_per_token_logps": plain_logps(reference, rollout),
    }
    loss, gradient = our_loss(model, rollout, batch)
    trl_version, loss_of_trl, gradient_of_trl = trl_loss(args.trl_python, args.model_name, batch)
    return {
        "TRL": trl_version,
        "completions in the loss": NUM_IN_LOSS,
        "loss": loss,
        "loss of TRL": loss_of_trl,
        "gradient beside TRL's, relative difference": relative_difference(
            gradient_of_trl, gradient
        ),
    }


def check_greedy_answers(model: PreTrainedModel, tokenizer, prompts: list[str]) -> dict:
    """Greedy answers of the sampler, beside those of transformers' generate."""
    rollout = generate(
        model, tokenizer, prompts, max_completion_length=MAX_COMPLETION_LENGTH, temperature=0
    )
    padded_ids = rollout.completion_ids.tolist()
    lengths = rollout.lengths.tolist()
    ours = [ids[:length] for ids, length in zip(padded_ids, lengths, strict=True)]
    theirs = greedy_ids(model, tokenizer, prompts)
    return {
        "greedy answers": len(ours),
        "greedy answers equal to generate's, token for token": sum(
            our_ids == their_ids for our_ids, their_ids in zip(ours, theirs, strict=True)
        ),
    }


def check_saving(model: PreTrainedModel, tokenizer) -> dict:
    """Whether a model that is saved and loaded has the same weights."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        loaded, _ = llms.get_llm_tokenizer(folder, "cpu")
    loaded_weights = dict(loaded.named_parameters())
    is_equal = [
        torch.equal(weight, loaded_weights[name]) for name, weight in model.named_parameters()
    ]
    return {"weights equal after saving and loading": all(is_equal)}


def check(args) -> dict:
    torch.manual_seed(0)
    model, tokenizer = llms.get_llm_tokenizer(args.model_name, "cpu")
    _, loader = get_dataloaders(
        "gsm8k", tokenizer, dataset_path=args.dataset_path, eval_split="validation", eval_size=64
    )
    prompts = [example["prompt"] for example in loader.examples]
    rollout = generate(
        model,
        tokenizer,
        prompts[:NUM_PROMPTS],
        num_samples=GROUP_SIZE,
        max_completion_length=MAX_COMPLETION_LENGTH,
    )
    return {
        "model": args.model_name,
        **check_logps(model, rollout),
        **check_loss(args, model, rollout.select(range(NUM_IN_LOSS))),
        **check_greedy_answers(model, tokenizer, prompts),
        **check_saving(model, tokenizer),
    }


def parse_args():
    parser = argparse.ArgumentParser(
        description="Compare log-probs, loss, gradient and answers with transformers and TRL."
    )
    parser.add_argument("--model_name", required=True, help="the model that is checked")
    parser.add_argument("--reference", required=True, help="the reference of the KL")
    parser.add_argument("--dataset_path", required=True, help="folder with validation problems")
    parser.add_argument("--trl_python", required=True, help="Python of an environment with trl")
    parser.add_argument("--output", type=Path, required=True, help="the .json that is written")
    return parser.parse_args()


def run() -> int:
    args = parse_args()
    try:
        result = check(args)
        args.output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, value in result.items():
        print(f"{name}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(run())
