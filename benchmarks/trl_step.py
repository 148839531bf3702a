"""TRL's side of the benchmark `step` in benchmark.py: GRPO steps, each one timed.

It imports nothing of this project, so that TRL can have an environment of its own. Settings come as
JSON on the standard input; the last line on the standard output is the result. TRL is set up for
the same update and, where there is a choice, for speed: no gradient checkpointing, no checkpoints
and no reports. Its other settings are its defaults.
"""

import importlib.metadata
import json
import sys
import tempfile
import time
from types import SimpleNamespace

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completions, answer, **_):
    """1 where the gold answer occurs in the text, else 0. This rule takes next to no time."""
    return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]


class Clock(TrainerCallback):
    """Notes when each step ended, and the mean completion length that TRL logs."""

    def __init__(self):
        self.ends = []
        self.mean_lengths = []

    def on_step_end(self, args, state, control, **_):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def on_log(self, args, state, control, logs, **_):
        if "completions/mean_length" in logs:
            self.mean_lengths.append(logs["completions/mean_length"])


def train(settings: SimpleNamespace, folder: str) -> Clock:
    is_cpu = settings.device == "cpu"
    config = GRPOConfig(
        output_dir=folder,
        max_steps=settings.iterations + 1,
        per_device_train_batch_size=settings.num_completions,
        num_generations=settings.group_size,
        max_completion_length=settings.max_completion_length,
        temperature=1.0,
        beta=settings.beta,
        num_iterations=1,
        loss_type="grpo",
        learning_rate=1e-6,
        gradient_checkpointing=False,
        bf16=not is_cpu,
        use_cpu=is_cpu,
        dataloader_pin_memory=not is_cpu,
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
    )
    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            settings.model_name, dtype=torch.float32, attn_implementation="sdpa"
        ),
        processing_class=AutoTokenizer.from_pretrained(settings.model_name, padding_side="left"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(settings.examples),
        callbacks=[clock],
    )
    trainer.train()
    return clock


def main():
    settings = SimpleNamespace(**json.load(sys.stdin))
    with tempfile.TemporaryDirectory() as folder:
        clock = train(settings, folder)
    # The first step only warms up.
    steps = zip(clock.ends, clock.ends[1:], strict=False)
    result = {
        "seconds": [end - start for start, end in steps],
        "mean_lengths": clock.mean_lengths[1:],
        "version": importlib.metadata.version("trl"),
    }
    print(f"\n{json.dumps(result)}")


if __name__ == "__main__":
    main()
