"""Mistakes in the settings that are found before anything slow begins.

Bounds of single numbers are checked in config.py. Each function here raises ValueError with one
line for the user.
"""

from collections.abc import Collection
from dataclasses import fields
from importlib.util import find_spec

import torch

import distributed
import llms
from config import DataConfig, FineTuningConfig, GRPOConfig, JudgeConfig, OutputConfig
from evaluator import CreativeWritingEvaluator, find_evaluator
from rl_datasets import DATASETS, PROMPTS


def check(config: GRPOConfig | FineTuningConfig) -> None:
    """Find mistakes before a model is loaded or the hub is asked."""
    check_names(config)
    check_device(config.device)
    check_sampler(config)
    check_evaluation_size(config)
    if isinstance(config, GRPOConfig):
        check_batches(config)
        check_clip(config)
    check_tracker(config.report_to)
    DATASETS[config.dataset_name].check_split(config.eval_split, config.dataset_path)
    llms.check_model_name("--model_name", config.model_name)
    check_evaluator(config)


def check_names(config: DataConfig) -> None:
    """The data set and the prompt format must be known."""
    check_name("--dataset_name", config.dataset_name, DATASETS)
    check_name("--prompt", config.prompt, PROMPTS)


def check_name(flag: str, name: str | None, known_names: Collection[str]) -> None:
    """A name must be known. None stands for a default, and is fine."""
    if name is not None and name not in known_names:
        raise ValueError(f"{flag} {name} is not known; use one of {', '.join(known_names)}")


def check_device(device: str) -> None:
    """The device must be usable."""
    try:
        torch.empty(0, device=device)
    # There is no such device, or torch was built without support for it.
    except (RuntimeError, AssertionError, NotImplementedError):
        usable_devices = "cpu or cuda" if torch.cuda.is_available() else "cpu"
        raise ValueError(f"--device {device} cannot be used here; use {usable_devices}") from None


def check_sampler(config: GRPOConfig | FineTuningConfig) -> None:
    """The sampler must be installed, and able to work with the settings."""
    if config.sampler != "vllm":
        return
    if not is_installed("vllm"):
        raise ValueError(
            "--sampler vllm: vLLM is not installed here; pip install -r requirements-vllm.txt, best"
            " into an environment of its own (docs/gpus.md)"
        )
    if config.sampling_dtype != "auto":
        raise ValueError(
            f"--sampler vllm samples in bfloat16 on a GPU that has it, otherwise in float32; leave"
            f" --sampling_dtype {config.sampling_dtype} out"
        )
    if config.device.startswith("cuda:"):
        raise ValueError(
            f"--sampler vllm takes the first GPU that it sees: instead of --device {config.device},"
            f" set CUDA_VISIBLE_DEVICES={config.device.removeprefix('cuda:')}"
        )


def is_installed(package: str) -> bool:
    spec = find_spec(package)
    # Python finds a mere folder of that name too, but then there is no file to import.
    return spec is not None and spec.origin is not None


def check_evaluation_size(config: OutputConfig) -> None:
    """Each process must have a problem to evaluate."""
    num_processes = distributed.world_size()
    if config.eval_size is not None and config.eval_size < num_processes:
        raise ValueError(
            f"--eval_size {config.eval_size} is less than one problem for each of the"
            f" {num_processes} processes; raise it"
        )


def check_batches(config: GRPOConfig) -> None:
    """Batch and group sizes must fit each other, the loss, and the number of processes."""
    num_processes = distributed.world_size()
    rollout_size = config.rollout_batch_size
    train_size = config.train_batch_size
    smallest_batch = config.group_size * num_processes  # each process needs equally many groups
    smallest_batch_text = f"--group_size {config.group_size}"
    if num_processes > 1:
        smallest_batch_text += f" times {num_processes} processes"
    if rollout_size % smallest_batch != 0:
        size_below = rollout_size - rollout_size % smallest_batch
        fitting_sizes = [size_below, size_below + smallest_batch]
        advice = " or ".join(str(size) for size in fitting_sizes if size > 0)
        raise ValueError(
            f"--rollout_batch_size {rollout_size} is not a multiple of {smallest_batch_text};"
            f" use {advice}"
        )
    if rollout_size % train_size != 0 or train_size % smallest_batch != 0:
        candidates = range(smallest_batch, rollout_size + 1, smallest_batch)
        advice = ", ".join(str(size) for size in candidates if rollout_size % size == 0)
        raise ValueError(
            f"--train_batch_size {train_size} must divide --rollout_batch_size {rollout_size}, and"
            f" be a multiple of {smallest_batch_text}; use one of {advice}"
        )
    if config.group_size == 1 and config.loss_type != "no_baseline":
        raise ValueError(
            "--group_size 1 has no group to compare with: every advantage would be 0; use"
            " --loss_type no_baseline, or a group_size of at least 2"
        )
    if config.group_size == 1 and config.dynamic_sampling:
        raise ValueError(
            "--dynamic_sampling replaces groups of equal rewards, and every group of --group_size 1"
            " is one; leave it out, or use a group_size of at least 2"
        )
    if config.loss_type == "gspo" and config.length_normalization != "masked_mean":
        raise ValueError(
            "--loss_type gspo has one ratio per sequence and needs --length_normalization"
            f" masked_mean, not {config.length_normalization}"
        )


def check_clip(config: GRPOConfig) -> None:
    """A loss without a clip must be given no range for one."""
    is_given = config.cliprange != GRPOConfig.cliprange or config.cliprange_high is not None
    if is_given and config.loss_type in ("grpo_no_clip", "reinforce_with_baseline", "no_baseline"):
        raise ValueError(
            f"--loss_type {config.loss_type} has no clip; leave --cliprange and --cliprange_high"
            " out, or use another loss"
        )


def check_tracker(package: str) -> None:
    """The tracker's package must be installed."""
    if package == "none":
        return
    if not is_installed(package):
        raise ValueError(f"--report_to {package}: not installed here; pip install {package}")


def check_evaluator(config: GRPOConfig | FineTuningConfig) -> None:
    """The evaluator must be known, and able to work with the settings."""
    dataset = DATASETS[config.dataset_name]
    evaluator_name = config.evaluator or dataset.default_evaluator
    make_evaluator = find_evaluator(evaluator_name)
    has_judge = isinstance(make_evaluator, type) and issubclass(
        make_evaluator, CreativeWritingEvaluator
    )
    if isinstance(config, JudgeConfig) and not has_judge:
        given_flags = [
            f"--{setting.name}"
            for setting in fields(JudgeConfig)
            if getattr(config, setting.name) != setting.default
        ]
        if given_flags:
            raise ValueError(
                f"{', '.join(given_flags)}: the evaluator {evaluator_name} asks no judge; leave"
                " this out, or use --dataset_name creative"
            )
    if isinstance(make_evaluator, type):
        make_evaluator.check_flags(config, config.prompt or dataset.default_prompt)


def check_lengths(model, longest_prompt: int, max_completion_length: int) -> None:
    """A prompt and its completion must fit into the model's positions.

    Args:
        longest_prompt: the number of tokens of the longest prompt.
    """
    num_positions = llms.max_positions(model)
    if num_positions is None:
        return
    if longest_prompt + max_completion_length > num_positions:
        raise ValueError(
            f"--max_completion_length {max_completion_length}: this model can be used with"
            f" {num_positions:,} positions, of which the longest prompt takes {longest_prompt};"
            " lower it, or take shorter prompts"
        )
