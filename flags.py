"""main.py's flags, in groups that sft.py and expert iteration share, and a line for whatever is wrong with one."""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

import distributed
import llms
import utils
from data.rows import find_files
from evaluator import EVALUATORS
from judges import judges
from logs.read import read_args
from rl_datasets import DATASETS, PROMPTS, default_eval_split

LOSS_TYPES = (
    "grpo_clip",
    "grpo_no_clip",
    "reinforce_with_baseline",
    "no_baseline",
    "gspo",
    "cispo",
)


class _DefaultsOnce(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a flag's default, unless its help says what happens without it."""

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


class ArgumentParser(argparse.ArgumentParser):
    """Flags whose --help shows the defaults, and whose errors are one line with exit code 2."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=_DefaultsOnce, allow_abbrev=False, **kwargs)

    def error(self, message):
        once = os.environ.get("RANK", "0") == "0"  # torchrun starts this in every process
        self.exit(2, f"error: {message} (--help lists every flag)\n" if once else None)


def parse(parser: ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags as given; with --resume the others are those of the run in --output_dir."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--resume", action="store_true")
    first.add_argument("--output_dir", type=Path, default=parser.get_default("output_dir"))
    given, _ = first.parse_known_args(argv)
    try:
        saved = read_args(given.output_dir / "args.json") if given.resume else None
    except (ValueError, OSError) as error:
        parser.error(str(error))
    known = vars(parser.parse_args([])).keys() - {"resume", "output_dir"}
    parser.set_defaults(**{name: value for name, value in (saved or {}).items() if name in known})
    args = parser.parse_args(argv)
    if "eval_split" in args and args.eval_split is None:
        args.eval_split = default_eval_split(args.dataset_name, args.dataset_path)
    if (
        args.eval_temperature is None
    ):  # several samples of one greedy answer would be that answer several times
        args.eval_temperature = (
            0.0 if args.eval_samples == 1 else vars(args).get("temperature", 1.0)
        )
    return args


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """main.py's flags."""
    parser = ArgumentParser(description="Train a language model with GRPO.")
    add_model_and_data(parser)
    add = add_sampling(
        parser,
        ("--rollout_batch_size", 256, "sequences sampled per iteration: prompts x group_size"),
    )
    resampling = "rounds in which new prompts replace groups of equal rewards, as in DAPO; 0: none"
    add("--dynamic_sampling", type=int, default=0, help=resampling)

    add = parser.add_argument_group("loss").add_argument
    forms = "clipped ratio x advantage, unclipped, log-prob x advantage, log-prob x reward; one clipped ratio for a"
    forms += " sequence, capped ratio as a weight of log-prob x advantage (docs/family.md: which paper is which)"
    add("--loss_type", default="grpo_clip", choices=LOSS_TYPES, help=forms)
    add(
        "--beta",
        type=float,
        default=0.04,
        help="weight of the KL to the reference; 0: no reference is kept",
    )
    add(
        "--cliprange",
        type=float,
        default=0.2,
        help="the ratio is clipped to [1 - cliprange, 1 + cliprange]",
    )
    add(
        "--cliprange_high",
        type=float,
        help="another upper range, as in DAPO; cispo's cap (default: cliprange)",
    )
    add_length_normalization(add)
    add(
        "--use_std_normalization",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="advantage / group std",
    )
    add("--advantage_eps", type=float, default=1e-6, help="added to the std")
    add(
        "--mask_truncated_completions",
        action="store_true",
        help="no loss on completions cut at the maximum length",
    )
    add(
        "--importance_cap",
        type=float,
        help="weight tokens by min(p_old / p_sampler, cap) (default: off)",
    )

    add = add_optimisation(parser)
    add("--num_train_iters", type=int, default=1000, help="rollout batches")
    add(
        "--epochs_per_rollout_batch",
        type=int,
        default=1,
        help="passes over each rollout batch; more is off-policy",
    )
    add(
        "--train_batch_size",
        type=int,
        help="sequences per optimiser step (default: rollout_batch_size)",
    )
    add("--learning_rate", type=float, default=1e-6, help="its peak, at the end of the warm-up")
    schedules = ("constant", "linear", "cosine")
    add(
        "--lr_schedule",
        default="constant",
        choices=schedules,
        help="after the warm-up, to 0 at num_train_iters",
    )
    add("--adam_beta1", type=float, default=0.9, help="decay of the mean gradient")
    add("--adam_beta2", type=float, default=0.95, help="decay of the mean squared gradient")

    judges.add_flags(parser)

    add = add_evaluation_and_output(parser, "output/grpo", "iterations")
    add("--eval_only", action="store_true", help="evaluate the model and stop")

    add = add_runtime(parser)
    add(
        "--max_kl",
        type=float,
        default=3.0,
        help="nats; a mean KL above it 3 times in a row ends the run as diverged",
    )
    args = parse(parser, argv)
    if args.train_batch_size is None:
        args.train_batch_size = args.rollout_batch_size
    return args


# --- Groups of flags. Each function returns the group's add_argument, for what a script adds to it


def add_model_and_data(parser):
    add = parser.add_argument_group("model").add_argument
    add(
        "--model_name",
        default="Qwen/Qwen2-0.5B-Instruct",
        help="hub name or directory with safetensors weights",
    )
    add(
        "--gradient_checkpointing",
        action="store_true",
        help="recompute activations: less memory, a third slower",
    )
    add = add_data(parser)
    add(
        "--max_prompt_length",
        type=int,
        default=512,
        help="tokens; longer prompts are dropped and counted",
    )
    return add


def add_data(parser):
    add = parser.add_argument_group("data").add_argument
    add("--dataset_name", default="gsm8k", help=f"one of: {', '.join(DATASETS)}")
    add("--dataset_path", help="folder with train, test and maybe validation as .jsonl or .parquet")
    add("--evaluator", help=f"reward: one of {', '.join(EVALUATORS)} (default: the data set's own)")
    add(
        "--prompt",
        help=f"form of prompt and answer: one of {', '.join(PROMPTS)} (default: the data set's own)",
    )
    return add


def add_sampling(parser, batch: tuple[str, int, str] | None = None):
    """batch: flag, default and help of how much is sampled at each step; None: nothing is, but for evaluations."""
    add = parser.add_argument_group("sampling").add_argument
    if batch:
        add(batch[0], type=int, default=batch[1], help=batch[2])
        add("--group_size", type=int, default=8, help="completions per prompt")
        add(
            "--temperature",
            type=float,
            default=1.0,
            help="of sampling, and of the log-probs in main.py's loss",
        )
    add("--max_completion_length", type=int, default=512, help="tokens")
    add(
        "--max_concurrent_sequences",
        type=int,
        default=512,
        help="sampled at a time: bounds the memory of the cache",
    )
    add(
        "--sampling_dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="auto: bfloat16 on CUDA",
    )
    return add


def add_length_normalization(add):
    forms = (
        "per-token loss: mean over each sequence, sum / max_completion_length, mean over all tokens"
    )
    add(
        "--length_normalization",
        default="masked_mean",
        choices=utils.LENGTH_NORMALIZATIONS,
        help=forms,
    )


def add_optimisation(parser):
    add = parser.add_argument_group("optimisation").add_argument
    add(
        "--micro_batch_tokens",
        type=int,
        default=16384,
        help="padded tokens per pass: memory only, not the gradient",
    )
    add("--warmup_steps", type=int, default=10, help="optimiser steps of linear warm-up")
    add("--weight_decay", type=float, default=0.0, help="of AdamW")
    add("--max_grad_norm", type=float, default=1.0, help="gradients are scaled down to this norm")
    return add


def add_evaluation_and_output(parser, output_dir: str, unit: str | None = None):
    """unit: of --eval_UNIT and --save_UNIT, what the script counts; None: it evaluates and saves after each step."""
    add = parser.add_argument_group("evaluation and output").add_argument
    if unit:
        add(
            f"--eval_{unit}",
            type=int,
            default=100,
            help=f"evaluate every so many {unit}, and first and last",
        )
        add(
            f"--save_{unit}",
            type=int,
            default=100,
            help=f"checkpoint every so many {unit}, and last",
        )
    choose = "what is evaluated: tune and keep the best on validation, report on test (default: test; for"
    choose += " arithmetic validation)"
    add("--eval_split", choices=("validation", "test"), help=choose)
    add(
        "--eval_size",
        type=int,
        help="so many of its problems, a fixed random subset (default: all)",
    )
    add(
        "--eval_temperature",
        type=float,
        help="0 is greedy (default: 0, or --temperature for several samples)",
    )
    add("--eval_samples", type=int, default=1, help="completions per problem; several give pass@k")
    add(
        "--keep_checkpoints",
        type=int,
        default=3,
        help="the newest so many are kept, and the most accurate one",
    )
    add("--resume", action="store_true", help="continue the run in output_dir, with its own flags")
    add(
        "--output_dir",
        type=Path,
        default=Path(output_dir),
        help="logs, transcripts, checkpoints; must hold no run",
    )
    add(
        "--report_to",
        choices=("tensorboard", "wandb"),
        help="also send what is logged there, where it is installed",
    )
    return add


def add_runtime(parser):
    add = parser.add_argument_group("runtime").add_argument
    add("--seed", type=int, default=0, help="of data order and sampling")
    add(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda, cuda:1 ...",
    )
    return add


# --- Checks ---------------------------------------------------------------------------------------

ZERO_IS_FINE = (
    "seed",
    "beta",
    "warmup_steps",
    "weight_decay",
    "advantage_eps",
    "eval_temperature",
    "dynamic_sampling",
    *judges.ZERO_IS_FINE,
)
BELOW = {"adam_beta1": 1, "adam_beta2": 1, "seed": 2**32}


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for what is wrong with the flags of a training script, before anything is loaded or asked for.

    Of several processes the first one says it.
    """
    try:
        check_numbers(args)
        check_names(args)
        if "rollout_batch_size" in args:
            check_batches(args)
        package = args.report_to and find_spec(args.report_to)
        if args.report_to and not (package and package.origin):  # a folder of that name is none
            raise ValueError(
                f"--report_to {args.report_to}: not installed here; pip install {args.report_to}"
            )
        if args.dataset_path:
            find_files(args.dataset_path, args.eval_split)
        else:
            DATASETS[args.dataset_name].check_split(args.eval_split)
        llms.check_model_name("--model_name", args.model_name)
        data = DATASETS[args.dataset_name]
        evaluator = EVALUATORS[args.evaluator or data.default_evaluator]
        evaluator.check_flags(args, args.prompt or data.default_prompt)
    except ValueError:
        if not distributed.is_main():
            sys.exit(2)
        raise


def check_numbers(args: argparse.Namespace, zero_is_fine: Sequence[str] = ZERO_IS_FINE) -> None:
    """Raise ValueError for a number out of range."""
    for name, value in vars(args).items():
        if type(value) not in (int, float):
            continue
        if not (0 < value < math.inf or value == 0 and name in zero_is_fine):
            raise ValueError(
                f"--{name} must be {'at least' if name in zero_is_fine else 'more than'} 0, not {value}"
            )
        if name in BELOW and value >= BELOW[name]:
            raise ValueError(f"--{name} must be below {BELOW[name]}, not {value}")
    if "eval_size" in args and args.eval_size and args.eval_size < distributed.world_size():
        raise ValueError(f"--eval_size {args.eval_size} is less than one problem for each process")


def check_lengths(args: argparse.Namespace, model, *loaders) -> None:
    """Raise ValueError where a prompt and its completion can be longer than what the model was made for."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    longest = max(loader.longest_prompt for loader in loaders)
    if longest + args.max_completion_length > positions:
        raise ValueError(
            f"--max_completion_length {args.max_completion_length}: the model has {positions:,} positions, of which the"
            f" longest prompt takes {longest}; lower it, or lower --max_prompt_length"
        )


def check_names(args: argparse.Namespace) -> None:
    """Raise ValueError for a name that is not known, with those that are, or a device that cannot be used."""
    for flag, what, known in (
        ("dataset_name", "data set", DATASETS),
        ("evaluator", "evaluator", EVALUATORS),
        ("prompt", "prompt", PROMPTS),
    ):
        name = getattr(args, flag)
        if name is not None and name not in known:
            raise ValueError(f"unknown {what} {name!r}; known: {', '.join(known)}")
    try:
        torch.empty(0, device=args.device)
    except (
        RuntimeError,
        AssertionError,
        NotImplementedError,
    ):  # no such device, or torch was built without it
        usable = "cpu or cuda" if torch.cuda.is_available() else "cpu"
        raise ValueError(f"--device {args.device} cannot be used here; use {usable}") from None


def check_batches(args: argparse.Namespace) -> None:
    """Raise ValueError for batch sizes that do not divide each other, with some that do, or that a loss cannot use."""
    rollouts, batch, several = (
        args.rollout_batch_size,
        args.train_batch_size,
        distributed.world_size(),
    )
    group = args.group_size * several  # a group for each process
    times = f" times {several} processes" if several > 1 else ""
    if rollouts % group:
        raise ValueError(
            f"--rollout_batch_size {rollouts} is not a multiple of --group_size {args.group_size}{times};"
            f" {' or '.join(str(n * group) for n in (rollouts // group, rollouts // group + 1) if n)} would be"
        )
    if batch > rollouts or rollouts % batch or batch % group:
        fitting = [str(n) for n in range(group, rollouts + 1, group) if rollouts % n == 0]
        raise ValueError(
            f"--train_batch_size {batch} must divide --rollout_batch_size {rollouts} into whole groups of"
            f" {args.group_size}{times}: one of {', '.join(fitting)}"
        )
    if args.group_size == 1 and args.loss_type != "no_baseline":
        raise ValueError(
            "--group_size 1 has no group to compare with: every advantage would be 0; use"
            " --loss_type no_baseline, or a group_size of at least 2"
        )
    if args.loss_type == "gspo" and args.length_normalization != "masked_mean":
        raise ValueError(
            "--loss_type gspo has one ratio per sequence and needs --length_normalization masked_mean"
        )
