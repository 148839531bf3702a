"""TRL's side of checks.py: the loss of GRPOTrainer for a batch, and its gradient.

    ~/trl/bin/python trl_loss.py MODEL BATCH.safetensors GRADIENT.safetensors BETA CLIPRANGE

It imports nothing of this project. The last line on the standard output is the result as JSON.
"""

import importlib.metadata
import json
import sys
import tempfile

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def main(model_name, batch_path, gradient_path, beta, cliprange):
    batch = load_file(batch_path)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=len(batch["advantages"]),
            num_generations=len(batch["advantages"]),
            temperature=1.0,
            beta=float(beta),
            epsilon=float(cliprange),
            loss_type="grpo",
            use_bias_correction_kl=False,  # TRL's default multiplies the KL by the ratio
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to="none",
        )
        model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
        trainer = GRPOTrainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(model_name, padding_side="left"),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "no problem is asked here"}]),
        )
        trainer.current_gradient_accumulation_steps = 1
        model.train()
        loss = trainer._compute_loss(model, batch)
    loss.backward()
    save_file({name: weight.grad for name, weight in model.named_parameters()}, gradient_path)
    print(f"\n{json.dumps({'loss': loss.item(), 'version': importlib.metadata.version('trl')})}")


if __name__ == "__main__":
    main(*sys.argv[1:])
