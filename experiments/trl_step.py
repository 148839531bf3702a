"""TRL's side of the benchmark `step` in benchmark.py: GRPO steps, each one timed.

It imports nothing of this project, so that TRL can have an environment of its own. Settings come as
JSON on the standard input; the last line on the standard output is the result. TRL's other settings
are its defaults, but for gradient checkpointing, checkpoints and reports, which are off.
"""

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def gold_in_text(completions, answer, **columns):
    """1 where the gold answer occurs in the text, else 0."""
    return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]


class Clock(TrainerCallback):
    """Notes the time and the CPU time at the end of each step."""

    def __init__(self):
        self.times = []

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append((time.perf_counter(), time.process_time()))


settings = json.load(sys.stdin)
has_gpu = torch.cuda.is_available()
name = settings["model_name"]
clock = Clock()
with tempfile.TemporaryDirectory() as folder:
    config = GRPOConfig(
        output_dir=folder,
        **settings["config"],
        loss_type="grpo",
        gradient_checkpointing=False,
        bf16=has_gpu,
        use_cpu=not has_gpu,
        dataloader_pin_memory=has_gpu,
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, attn_implementation="sdpa"
        ),
        processing_class=AutoTokenizer.from_pretrained(name, padding_side="left"),
        reward_funcs=gold_in_text,
        args=config,
        train_dataset=Dataset.from_list(settings["examples"]),
        callbacks=[clock],
    )
    trainer.train()
key = "completions/mean_length"
lengths = [row[key] for row in trainer.state.log_history if key in row]
print(f"\n{json.dumps({'times': clock.times, 'lengths': lengths[1:]})}")
