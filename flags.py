"""The flags of main.py, in groups, and the checks of their values.

Other scripts, such as sft.py, use some of the groups too. `parse` turns a command line into flags.
`check` finds mistakes in them before anything slow begins.
"""

import argparse
import math
import os
import sys
from collections.abc import Collection, Sequence
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


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows each flag's default, and keeps the line breaks of a help text.

    The breaks let each choice of a flag stand on a line of its own. Where the default is None, the
    help text itself says what happens without the flag.
    """

    def _get_help_string(self, action):
        if action.default is None:
            return action.help
        return super()._get_help_string(action)

    def _split_lines(self, text, width):
        lines = []
        for line in text.splitlines():
            lines += super()._split_lines(line, width)
        return lines


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose --help shows the defaults, and whose errors are one line with exit code 2."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message):
        """Exit with code 2. torchrun starts many processes, of which only the first one prints."""
        if os.environ.get("RANK", "0") == "0":
            self.exit(2, f"error: {message} (--help lists every flag)\n")
        self.exit(2)


def parse(parser: ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags of a training script, with the defaults that depend on other flags filled in.

    With --resume, every flag that argv does not name gets its value from the run in --output_dir.
    """
    parser.set_defaults(**_flags_of_resumed_run(parser, argv))
    args = parser.parse_args(argv)
    if args.eval_split is None:
        args.eval_split = default_eval_split(args.dataset_name, args.dataset_path)
    if args.eval_temperature is None:
        # Only a single sample is greedy: several greedy samples would all be the same answer.
        is_greedy = args.eval_samples == 1
        args.eval_temperature = 0.0 if is_greedy else getattr(args, "temperature", 1.0)
    return args


def _flags_of_resumed_run(parser: ArgumentParser, argv: Sequence[str] | None) -> dict:
    """The flags in the args.json of the run that argv resumes; {} if it resumes none."""
    resume_parser = ArgumentParser(add_help=False)
    resume_parser.add_argument("--resume", action="store_true")
    resume_parser.add_argument("--output_dir", type=Path, default=parser.get_default("output_dir"))
    resume_args, _ = resume_parser.parse_known_args(argv)
    if not resume_args.resume:
        return {}
    try:
        saved_flags = read_args(resume_args.output_dir / "args.json")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    # Parsing an empty command line gives the names of all flags.
    flag_names = vars(parser.parse_args([])).keys() - {"resume", "output_dir"}
    return {name: saved_flags[name] for name in flag_names & saved_flags.keys()}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of main.py."""
    parser = ArgumentParser(description="Train a language model with GRPO.")
    add_model_and_data(parser)

    batch_help = "Completions sampled in each iteration: the number of prompts times --group_size."
    add_sampling_flag = add_sampling(parser, ("--rollout_batch_size", 256, batch_help))
    add_sampling_flag(
        "--dynamic_sampling",
        type=int,
        default=0,
        help="Prompts whose completions all got the same reward teach nothing. They are replaced by"
        " new prompts, at most this many times in each iteration (DAPO, arXiv:2503.14476).",
    )

    add_loss(parser)

    add_optimisation_flag = add_optimisation(parser)
    add_optimisation_flag(
        "--num_train_iters",
        type=int,
        default=1000,
        help="Number of iterations. Each samples one rollout batch and trains on it.",
    )
    add_optimisation_flag(
        "--epochs_per_rollout_batch",
        type=int,
        default=1,
        help="Passes over each rollout batch. In an iteration, all updates but the first one are"
        " off-policy.",
    )
    add_optimisation_flag(
        "--train_batch_size",
        type=int,
        help="Completions in each update. (default: --rollout_batch_size, so that there is one"
        " update in each iteration)",
    )
    add_optimisation_flag(
        "--learning_rate",
        type=float,
        default=1e-6,
        help="Learning rate of AdamW at its peak, which it reaches at the end of the warm-up.",
    )
    add_optimisation_flag(
        "--lr_schedule",
        default="constant",
        choices=("constant", "linear", "cosine"),
        help="How the learning rate goes on after the warm-up. (default: %(default)s)\n"
        "constant: it stays at its peak.\n"
        "linear: it falls to 0 at --num_train_iters in a straight line.\n"
        "cosine: it falls to 0 at --num_train_iters along half a period of a cosine.",
    )
    add_optimisation_flag(
        "--adam_beta1",
        type=float,
        default=0.9,
        help="Decay of AdamW's running mean of the gradient: the share of the old mean that an"
        " update keeps.",
    )
    add_optimisation_flag(
        "--adam_beta2",
        type=float,
        default=0.95,
        help="The same for AdamW's running mean of the squared gradient.",
    )

    judges.add_flags(parser)

    add_evaluation_flag = add_evaluation_and_output(parser, "output/grpo", "iterations")
    add_evaluation_flag(
        "--eval_only",
        action="store_true",
        help="Evaluate the model and stop, without training.",
    )
    add_evaluation_flag(
        "--show_tokens",
        type=int,
        default=1,
        help="Number of groups in each iteration whose transcript also says how the updates changed"
        " the log-probability of each token: the groups with the largest standard deviation of"
        " their rewards, the first ones where it is equal. At most 8 completions of a group are"
        " shown. 0 turns it off.",
    )

    add_runtime_flag = add_runtime(parser)
    add_runtime_flag(
        "--max_kl",
        type=float,
        default=3.0,
        help="Limit in nats per token. A run whose mean KL to the reference is above it in three"
        " iterations in a row ends as diverged.",
    )

    args = parse(parser, argv)
    if args.train_batch_size is None:
        args.train_batch_size = args.rollout_batch_size
    return args


# --- Groups of flags ------------------------------------------------------------------------------
# The functions that several scripts call return the `add_argument` of the last group they made, so
# that a script can add flags to this group.


def add_model_and_data(parser):
    add = parser.add_argument_group("model").add_argument
    add(
        "--model_name",
        default="Qwen/Qwen2-0.5B-Instruct",
        help="The model to start from: its name on the hub, or a directory with safetensors"
        " weights and a tokenizer.",
    )
    add(
        "--gradient_checkpointing",
        action="store_true",
        help="Compute activations again in the backward pass instead of storing them. It takes"
        " less memory and about a third more time.",
    )
    add = add_data(parser)
    add(
        "--max_prompt_length",
        type=int,
        default=512,
        help="Maximum length of a prompt in tokens. Examples with longer prompts are left out, and"
        " their number is printed.",
    )
    return add


def add_data(parser):
    add = parser.add_argument_group("data").add_argument
    add(
        "--dataset_name",
        default="gsm8k",
        help=f"The data set: one of {', '.join(DATASETS)}.",
    )
    add(
        "--dataset_path",
        help="Folder with the splits train, test and maybe validation, as .jsonl or .parquet"
        " files. (default: the data set's own source)",
    )
    add(
        "--evaluator",
        help=f"What computes the rewards: one of {', '.join(EVALUATORS)}."
        " (default: the data set's own)",
    )
    add(
        "--prompt",
        help=f"Prompt format, which also decides how answers are read: one of {', '.join(PROMPTS)}."
        " (default: the data set's own)",
    )
    return add


def add_sampling(parser, batch_flag: tuple[str, int, str] | None = None):
    """Flags of sampling. Returns the `add_argument` of their group.

    batch_flag: name, default and help of the flag that says how much is sampled to train on; None
    for a script that samples only to evaluate.
    """
    add = parser.add_argument_group("sampling").add_argument
    if batch_flag:
        name, default, batch_help = batch_flag
        add(name, type=int, default=default, help=batch_help)
        add("--group_size", type=int, default=8, help="Number of completions per prompt.")
        add(
            "--temperature",
            type=float,
            default=1.0,
            help="Temperature of sampling, and of the log-probabilities in main.py's loss.",
        )
    add(
        "--max_completion_length",
        type=int,
        default=512,
        help="Maximum length of a completion in tokens. A longer one is cut off.",
    )
    add(
        "--max_concurrent_sequences",
        type=int,
        default=512,
        help="Maximum number of completions that are sampled at a time. A smaller number takes less"
        " memory, and more time, and changes no sample. Out of memory, one process halves it for"
        " the rest of the run. --resume goes on with the lower number, unless another one is"
        " given.",
    )
    add(
        "--sampling_dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="Precision of the model that samples. (default: %(default)s)\n"
        "auto: bfloat16 on a GPU that has it, otherwise float32.\n"
        "float32: samples with the trained weights themselves.\n"
        "bfloat16: samples with a copy in bfloat16, renewed after each update.",
    )
    return add


def add_loss(parser):
    add = parser.add_argument_group("loss").add_argument
    add(
        "--loss_type",
        default="grpo_clip",
        choices=LOSS_TYPES,
        help="The loss of a token. In the choices below, `ratio` is the token's probability under"
        " the policy, divided by its probability before the iteration's first update."
        " docs/family.md compares the papers. (default: %(default)s)\n"
        "grpo_clip: minus the ratio times the advantage, with PPO's clip (GRPO,"
        " arXiv:2402.03300).\n"
        "grpo_no_clip: the same without the clip (an ablation).\n"
        "reinforce_with_baseline: minus the log-probability times the advantage (REINFORCE,"
        " Williams 1992, with the group's mean reward as baseline).\n"
        "no_baseline: minus the log-probability times the reward (REINFORCE).\n"
        "gspo: like grpo_clip, with one ratio for a whole completion, which is the geometric mean"
        " of its tokens' ratios (GSPO, arXiv:2507.18071).\n"
        "cispo: like reinforce_with_baseline, weighted by the ratio, which is capped and taken as"
        " a constant (CISPO, arXiv:2506.13585).",
    )
    add(
        "--beta",
        type=float,
        default=0.04,
        help="Weight of the KL to the reference model in the loss. With 0 there is no reference"
        " model.",
    )
    add(
        "--cliprange",
        type=float,
        default=0.2,
        help="The ratio is clipped to the range from 1 - CLIPRANGE to 1 + CLIPRANGE.",
    )
    add(
        "--cliprange_high",
        type=float,
        help="From above, the ratio is clipped at 1 + CLIPRANGE_HIGH instead of 1 + CLIPRANGE, as"
        " in DAPO. In cispo the ratio is a weight and is capped at 1 + CLIPRANGE_HIGH."
        " (default: --cliprange)",
    )
    add_length_normalization(add)
    add(
        "--use_std_normalization",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Divide advantages by the standard deviation of their group's rewards. Dr. GRPO"
        " (arXiv:2503.20783) does not.",
    )
    add(
        "--advantage_eps",
        type=float,
        default=1e-6,
        help="Small number that is added to the standard deviation of a group's rewards before"
        " advantages are divided by it.",
    )
    add(
        "--mask_truncated_completions",
        action="store_true",
        help="Compute no loss on completions that were cut off at --max_completion_length.",
    )
    add(
        "--importance_cap",
        type=float,
        help="Corrects for a sampler whose probabilities differ a little from those of the policy"
        " that it copies: each token's loss is weighted by p_policy / p_sampler, capped at this"
        " number. (default: no correction)",
    )


def add_length_normalization(add):
    """The flag that says how losses of tokens become the loss of an update."""
    add(
        "--length_normalization",
        default="masked_mean",
        choices=utils.LENGTH_NORMALIZATIONS,
        help="How the losses of tokens are averaged. (default: %(default)s)\n"
        "masked_mean: over the tokens of each completion, then over completions (GRPO,"
        " arXiv:2402.03300).\n"
        "masked_normalize: summed over each completion and divided by --max_completion_length,"
        " then averaged over completions (Dr. GRPO, arXiv:2503.20783).\n"
        "token_mean: over all tokens of the update (DAPO, arXiv:2503.14476).",
    )


def add_optimisation(parser):
    add = parser.add_argument_group("optimisation").add_argument
    add(
        "--micro_batch_tokens",
        type=int,
        default=16384,
        help="Maximum number of tokens, padding included, in a forward and backward pass. A smaller"
        " number takes less memory, and does not change the gradient. Out of memory, one process"
        " halves it for the rest of the run. --resume goes on with the lower number, unless another"
        " one is given.",
    )
    add(
        "--warmup_steps",
        type=int,
        default=10,
        help="Number of updates in which the learning rate rises to its peak in a straight line.",
    )
    add("--weight_decay", type=float, default=0.0, help="Weight decay of AdamW.")
    add(
        "--max_grad_norm",
        type=float,
        default=1.0,
        help="Gradients with a greater norm are scaled down to this norm.",
    )
    return add


def add_evaluation_and_output(parser, output_dir: str, unit: str | None = None):
    """Flags of evaluations, checkpoints and logs.

    unit: what the script counts, for the flags --eval_UNIT and --save_UNIT; None for a script that
    evaluates and saves after each of its steps.
    """
    add = parser.add_argument_group("evaluation and output").add_argument
    if unit:
        add(
            f"--eval_{unit}",
            type=int,
            default=100,
            help=f"Evaluate once every N {unit}, where N is this number; also before the first and"
            " after the last.",
        )
        add(
            f"--save_{unit}",
            type=int,
            default=100,
            help=f"Write a checkpoint once every N {unit}, where N is this number; also after the"
            " last.",
        )
    add(
        "--eval_split",
        choices=("validation", "test"),
        help="The split that is evaluated. (default: test; for arithmetic, validation)\n"
        "validation: problems on which flags and the best checkpoint may be chosen.\n"
        "test: problems for the accuracy that is reported in the end.",
    )
    add(
        "--eval_size",
        type=int,
        help="Number of problems to evaluate, a fixed random subset of the split. (default: all)",
    )
    add(
        "--eval_temperature",
        type=float,
        help="Temperature of sampling in evaluations; 0 is greedy. (default: 0, or --temperature"
        " if there are several samples)",
    )
    add(
        "--eval_samples",
        type=int,
        default=1,
        help="Completions of each problem in an evaluation. With several, pass@k is logged.",
    )
    add(
        "--keep_checkpoints",
        type=int,
        default=3,
        help="Number of newest checkpoints to keep. The most accurate one is kept too, even if it"
        " is older.",
    )
    add(
        "--resume",
        action="store_true",
        help="Continue the run in --output_dir from its newest checkpoint, with the flags that it"
        " was started with.",
    )
    add(
        "--output_dir",
        type=Path,
        default=Path(output_dir),
        help="Folder for logs, transcripts and checkpoints. It must not hold another run.",
    )
    add(
        "--report_to",
        choices=("tensorboard", "wandb"),
        help="A tracker that gets all logs as well; its package must be installed."
        " (default: none)\n"
        "tensorboard: event files for TensorBoard, in the folder tensorboard of --output_dir.\n"
        "wandb: a run in the project grpo-lite of Weights & Biases.",
    )
    return add


def add_runtime(parser):
    add = parser.add_argument_group("runtime").add_argument
    add(
        "--seed",
        type=int,
        default=0,
        help="Seed of the random numbers that order the data and sample completions.",
    )
    add(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="Where to compute: cpu, cuda, or one GPU of several such as cuda:1.",
    )
    return add


# --- Checks ---------------------------------------------------------------------------------------

# Flags whose number may be 0. All other numbers must be greater than 0.
ZERO_IS_FINE = (
    "seed",
    "beta",
    "warmup_steps",
    "weight_decay",
    "advantage_eps",
    "eval_temperature",
    "dynamic_sampling",
    "show_tokens",
    *judges.ZERO_IS_FINE,
)
# {flag: bound}; the value must be below the bound.
UPPER_BOUNDS = {"adam_beta1": 1, "adam_beta2": 1, "seed": 2**32}


def check(args: argparse.Namespace) -> None:
    """Find mistakes in the flags of a training script before a model is loaded or the hub is asked.

    Raises:
        ValueError: in the first process, with one line for the user. The other processes exit with
        code 2.
    """
    try:
        check_numbers(args)
        check_names(args)
        if "rollout_batch_size" in args:  # only main.py has it
            check_batches(args)
        check_tracker(args)
        check_data(args)
        llms.check_model_name("--model_name", args.model_name)
        check_evaluator(args)
    except ValueError:
        if not distributed.is_main():
            sys.exit(2)
        raise


def check_numbers(args: argparse.Namespace, zero_is_fine: Sequence[str] = ZERO_IS_FINE) -> None:
    """Raise ValueError for a number that is out of its range."""
    for name, value in vars(args).items():
        if type(value) not in (int, float):  # not isinstance: a bool is an int
            continue
        if name in zero_is_fine and not 0 <= value < math.inf:
            raise ValueError(f"--{name} must be at least 0, not {value}")
        if name not in zero_is_fine and not 0 < value < math.inf:
            raise ValueError(f"--{name} must be more than 0, not {value}")
        if name in UPPER_BOUNDS and value >= UPPER_BOUNDS[name]:
            raise ValueError(f"--{name} must be below {UPPER_BOUNDS[name]}, not {value}")
    eval_size = getattr(args, "eval_size", None)
    num_processes = distributed.world_size()
    if eval_size is not None and eval_size < num_processes:
        raise ValueError(
            f"--eval_size {eval_size} is less than one problem for each of the {num_processes}"
            " processes; raise it"
        )
    if getattr(args, "eval_samples", 1) > 1 and args.eval_temperature == 0:
        raise ValueError(
            f"--eval_temperature 0 makes the {args.eval_samples} samples of --eval_samples all the"
            " same; raise it, or leave one of the two out"
        )


def check_names(args: argparse.Namespace) -> None:
    """Raise ValueError for an unknown data set, evaluator or prompt, or an unusable device."""
    check_name("--dataset_name", args.dataset_name, DATASETS)
    check_name("--evaluator", args.evaluator, EVALUATORS)
    check_name("--prompt", args.prompt, PROMPTS)
    try:
        torch.empty(0, device=args.device)
    # There is no such device, or torch was built without support for it.
    except (RuntimeError, AssertionError, NotImplementedError):
        usable_devices = "cpu or cuda" if torch.cuda.is_available() else "cpu"
        raise ValueError(
            f"--device {args.device} cannot be used here; use {usable_devices}"
        ) from None


def check_name(flag: str, name: str | None, known_names: Collection[str]) -> None:
    """Raise ValueError for a name that is not known. None stands for a default, and is fine."""
    if name is not None and name not in known_names:
        raise ValueError(f"{flag} {name} is not known; use one of {', '.join(known_names)}")


def check_batches(args: argparse.Namespace) -> None:
    """Raise ValueError for batch and group sizes that do not fit each other, or the loss."""
    num_processes = distributed.world_size()
    rollout_size = args.rollout_batch_size
    train_size = args.train_batch_size
    smallest_batch = args.group_size * num_processes  # each process needs equally many groups
    smallest_batch_text = f"--group_size {args.group_size}"
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
    if args.group_size == 1 and args.loss_type != "no_baseline":
        raise ValueError(
            "--group_size 1 has no group to compare with: every advantage would be 0; use"
            " --loss_type no_baseline, or a group_size of at least 2"
        )
    if args.group_size == 1 and args.dynamic_sampling:
        raise ValueError(
            "--dynamic_sampling replaces groups of equal rewards, and every group of --group_size 1"
            " is one; leave it out, or use a group_size of at least 2"
        )
    if args.loss_type == "gspo" and args.length_normalization != "masked_mean":
        raise ValueError(
            "--loss_type gspo has one ratio per sequence and needs --length_normalization"
            f" masked_mean, not {args.length_normalization}"
        )


def check_tracker(args: argparse.Namespace) -> None:
    """Raise ValueError for a tracker that is not installed."""
    if args.report_to is None:
        return
    package = find_spec(args.report_to)
    # Python finds a mere folder of that name too, but then there is no file to import.
    is_installed = package is not None and package.origin is not None
    if not is_installed:
        raise ValueError(
            f"--report_to {args.report_to}: not installed here; pip install {args.report_to}"
        )


def check_data(args: argparse.Namespace) -> None:
    """Raise ValueError where the split to evaluate on is missing."""
    if args.dataset_path:
        find_files(args.dataset_path, args.eval_split)
    else:
        DATASETS[args.dataset_name].check_split(args.eval_split)


def check_evaluator(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that the evaluator cannot work with."""
    dataset = DATASETS[args.dataset_name]
    evaluator_name = args.evaluator or dataset.default_evaluator
    prompt_name = args.prompt or dataset.default_prompt
    EVALUATORS[evaluator_name].check_flags(args, prompt_name)


def check_lengths(model, longest_prompt: int, max_completion_length: int) -> None:
    """Raise ValueError where a prompt and its completion can exceed the model's positions.

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
