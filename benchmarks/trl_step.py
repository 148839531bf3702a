"""GRPO steps in TRL, timed one by one: the peer of benchmark.py's `step`. Imports nothing of this project.

`python trl_step.py SETTINGS.json` runs in an environment of its own: pip install torch trl accelerate datasets. TRL is
set up for the same update and, where there is a choice, for speed: no gradient checkpointing, no checkpoints, no
reports; the rest is its default.
"""

import importlib.metadata
import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completions, answer, **_):
    """1 where the answer tags hold the gold answer: as cheap as a rule can be."""
    found = [re.search(r"<answer>\s*(.*?)\s*</answer>", text, re.DOTALL) for text in completions]
    return [
        float(match is not None and match[1] == gold)
        for match, gold in zip(found, answer, strict=True)
    ]


class Clock(TrainerCallback):
    """Notes when each step ended, and the mean completion length that TRL logs."""

    def __init__(self):
        self.ends, self.lengths = [], []

    def on_step_end(self, args, state, control, **_):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def on_log(self, args, state, control, logs, **_):
        if "completions/mean_length" in logs:
            self.lengths.append(logs["completions/mean_length"])


def main():
    args = SimpleNamespace(
        **json.loads(Path(sys.argv[1]).read_text("utf-8"))
    )  # benchmark.py's flags, and what to do
    on_cpu, clock = args.device == "cpu", Clock()
    config = GRPOConfig(
        output_dir=args.output + ".trl",
        max_steps=args.iterations + 1,
        per_device_train_batch_size=args.sequences,
        num_generations=args.group_size,
        max_completion_length=args.max_completion_length,
        temperature=1.0,
        beta=args.beta,
        num_iterations=1,
        loss_type="grpo",
        learning_rate=1e-6,
        gradient_checkpointing=False,
        bf16=not on_cpu,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
    )
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            args.model_name, dtype=torch.float32, attn_implementation="sdpa"
        ),
        processing_class=AutoTokenizer.from_pretrained(args.model_name, padding_side="left"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(args.examples),
        callbacks=[clock],
    ).train()
    result = {
        "seconds": [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)],
        "response_length": clock.lengths[1:],
        "version": importlib.metadata.version("trl"),
    }
    Path(args.output).write_text(json.dumps(result), "utf-8")


if __name__ == "__main__":
    main()
