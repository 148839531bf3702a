"""TRL's side of the benchmark `step` in benchmark.py: GRPO steps, each one timed.

`python trl_step.py SETTINGS.json` runs in an environment of its own, made by `pip install torch trl
accelerate datasets`, and imports nothing of this project. TRL is set up for the same update and,
where there is a choice, for speed: no gradient checkpointing, no checkpoints and no reports. The
other settings are its defaults.
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
    """1 where the answer tags contain the gold answer, else 0. This rule takes next to no time."""
    rewards = []
    for text, gold in zip(completions, answer, strict=True):
        match = re.search(r"<answer>\s*(.*?)\s*</answer>", text, re.DOTALL)
        is_correct = match is not None and match[1] == gold
        rewards.append(float(is_correct))
    return rewards


class Clock(TrainerCallback):
    """Notes when each step ended, and the mean completion length that TRL logs."""

    def __init__(self):
        self.ends = []
        self.lengths = []

    def on_step_end(self, args, state, control, **_):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def on_log(self, args, state, control, logs, **_):
        if "completions/mean_length" in logs:
            self.lengths.append(logs["completions/mean_length"])


def main():
    settings = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    args = SimpleNamespace(**settings)  # benchmark.py's flags, and what its run_trl adds to them
    is_cpu = args.device == "cpu"
    config = GRPOConfig(
        output_dir=args.output + ".trl",
        max_steps=args.iterations + 1,
        per_device_train_batch_size=args.completions_per_batch,
        num_generations=args.group_size,
        max_completion_length=args.max_completion_length,
        temperature=1.0,
        beta=args.beta,
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
            args.model_name, dtype=torch.float32, attn_implementation="sdpa"
        ),
        processing_class=AutoTokenizer.from_pretrained(args.model_name, padding_side="left"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(args.examples),
        callbacks=[clock],
    )
    trainer.train()
    # The first step only warms up.
    steps = zip(clock.ends, clock.ends[1:], strict=False)
    result = {
        "seconds": [end - start for start, end in steps],
        "response_length": clock.lengths[1:],
        "version": importlib.metadata.version("trl"),
    }
    Path(args.output).write_text(json.dumps(result), "utf-8")


if __name__ == "__main__":
    main()
