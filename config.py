"""Every setting of the scripts, once: its default, its help, its bounds, and whether it may change.

A script's settings are a frozen dataclass, and each of its fields is a flag of the same name. To
add a flag, add a field. This file imports neither torch nor anything of the project, so that --help
answers at once.
"""

import argparse
import json
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

Settings = TypeVar("Settings")

TITLES = (  # of the groups in --help, in their order
    "model",
    "data",
    "iterations",
    "sampling",
    "loss",
    "optimisation",
    "evaluation",
    "output",
    "machine",
)


def setting(
    default: Any,
    help: str,
    *,
    title: str = "",
    choices: tuple[str, ...] | None = None,
    zero: bool = False,
    may_change: bool = False,
) -> Any:
    """A field of a settings class, and so a flag.

    Args:
        default: None means that the help text says what happens without the flag.
        title: of the group in --help that begins with this flag.
        choices: the values that it may have.
        zero: whether a number may be 0; every number must otherwise be more than 0.
        may_change: whether a resumed run may have another value. None of these settings changes
            what is learnt, though another device or sampler draws other completions.
    """
    metadata = dict(help=help, title=title, choices=choices, zero=zero, may_change=may_change)
    return field(default=default, metadata=metadata)


def again(settings_class: type, name: str, default: Any = None) -> Any:
    """A setting of another class once more, maybe with another default."""
    original = settings_class.__dataclass_fields__[name]
    if default is None:
        default = original.default
    return field(default=default, metadata=original.metadata)


# --- Settings that scripts share ------------------------------------------------------------------


@dataclass(frozen=True)
class RunConfig:
    """The model, the data, the evaluations and the output of a training script."""

    model_name: str = setting(
        "Qwen/Qwen2-0.5B-Instruct",
        "A model on the hub, or a directory with its weights (safetensors) and its tokenizer.",
        title="model",
    )
    lora_rank: int | None = setting(
        None,
        "Train adapters of this rank instead of the weights (LoRA, arXiv:2106.09685). Uses much"
        " less memory; set --learning_rate about ten times higher. (default: no adapters)",
    )
    gradient_checkpointing: bool = setting(
        False,
        "Compute activations again in the backward pass: less memory, at least a third more time.",
        may_change=True,
    )
    dataset_name: str = setting(
        "gsm8k",
        "The problems.\n"
        "gsm8k: grade-school word problems, from the hub\n"
        "math: competition problems (MATH), from the hub\n"
        "arithmetic: word problems in this repository\n"
        "creative: opening lines of stories, which a judge rewards\n"
        "FILE.py:NAME: a function of your own that gives rows (README.md)",
        title="data",
    )
    dataset_path: str | None = setting(
        None,
        "Folder with train, test and maybe validation as .jsonl or .parquet files, in the columns"
        " of --dataset_name (README.md). (default: the data set's own source)",
    )
    prompt: str | None = setting(
        None,
        "The format of prompts and answers: reasoning_answer, r1_zero, r1_zero_handout (the words"
        " of CS336's handout), question_only or story."
        " (default: the data set's own)",
    )
    max_prompt_length: int = setting(512, "Tokens; problems with longer prompts are left out.")
    evaluator: str | None = setting(
        None,
        "What computes the rewards. (default: the data set's own)\n"
        "gsm8k: answers that are numbers, in <reasoning>...</reasoning><answer>...</answer>\n"
        "math: answers in LaTeX, in a box or in tags\n"
        "creative: stories, by a judge (main.py only)\n"
        "FILE.py:NAME: a reward function of your own (README.md)\n"
        "gsm8k,FILE.py:NAME: the sum of several of these",
    )
    max_completion_length: int = setting(
        512, "Tokens after which a completion is cut off.", title="sampling"
    )
    max_concurrent_sequences: int = setting(
        512,
        "Completions that are sampled at a time: fewer take less memory and more time, and"
        " change no sample of the torch sampler.",
        may_change=True,
    )
    sampling_dtype: str = setting(
        "auto",
        "Precision of the torch sampler's weights; auto is that of --train_dtype.",
        choices=("auto", "float32", "bfloat16"),
    )
    sampler: str = setting(
        "torch",
        "torch: the project's own, which on a CPU repeats a run bit for bit. vllm: for long"
        " completions, if it is installed (group vllm of pyproject.toml); it repeats nothing bit"
        " for bit.",
        choices=("torch", "vllm"),
        may_change=True,
    )
    learning_rate: float = setting(5e-6, "Peak learning rate of AdamW.", title="optimisation")
    warmup_steps: int = setting(
        10,
        "Updates in which the learning rate rises linearly to its peak. In main.py it then stays"
        " there, elsewhere it falls along half a cosine.",
        zero=True,
    )
    train_dtype: str | None = setting(
        None,
        "Precision of the products in the loss. With bfloat16, weights, log-probs, loss and the sum"
        " of the gradients stay float32, but for weights that adapters freeze."
        " (default: bfloat16 on a GPU that has it, float32 on a CPU)",
        choices=("float32", "bfloat16"),
    )
    micro_batch_tokens: int | None = setting(
        None,
        "Tokens of completions in a forward and backward pass, padding included; prompts that are"
        " shared come on top. Fewer take less memory, and do not change the gradient."
        " (default: 16384 on a GPU, 1024 on a CPU)",
        may_change=True,
    )
    eval_split: str | None = setting(
        None,
        "The split to evaluate: choose flags and checkpoints on validation, and report test. The"
        " validation split of gsm8k is the last 500 training problems. A run without `validation`"
        " trains on them, so give it to every run that builds on another. (default: test; of"
        " arithmetic without --dataset_path, validation)",
        title="evaluation",
        choices=("validation", "test"),
    )
    eval_size: int | None = setting(
        None, "Problems to evaluate, always the same ones of the split. (default: all)"
    )
    eval_samples: int = setting(
        1, "Completions of each problem in an evaluation; with several, pass@k is logged."
    )
    eval_temperature: float | None = setting(
        None,
        "Temperature in evaluations; 0 is greedy. (default: 0; with several --eval_samples,"
        " --temperature, or 1 without such a flag)",
        zero=True,
    )
    output_dir: Path = setting(
        Path("output/grpo"),
        "Folder for logs, transcripts and checkpoints, of this run alone.",
        title="output",
        may_change=True,
    )
    resume: bool = setting(
        False,
        "Continue the run in --output_dir from its newest checkpoint, with the flags it had."
        " A finished run of main.py goes on if --num_train_iters is larger.",
        may_change=True,
    )
    report_to: str = setting(
        "none",
        "A tracker, if it is installed (group tracking of pyproject.toml), that gets the logs too.",
        choices=("none", "tensorboard", "wandb"),
        may_change=True,
    )
    seed: int = setting(
        0, "Seed of the order of the data and of the samples.", title="machine", zero=True
    )
    device: str = setting(
        "auto", "cpu, cuda, one GPU such as cuda:1, or auto: cuda if there is one.", may_change=True
    )

    def complete(self) -> Self:
        """The same settings, with the defaults that depend on other settings filled in."""
        if self.eval_temperature is not None:
            return self
        # Several greedy samples would all be the same answer.
        temperature = 0.0 if self.eval_samples == 1 else getattr(self, "temperature", 1.0)
        return replace(self, eval_temperature=temperature)

    def check(self) -> None:
        """Raise ValueError for settings that contradict each other."""
        if self.eval_samples > 1 and self.eval_temperature == 0:
            raise ValueError("--eval_temperature 0 makes all samples of --eval_samples the same")
        # The copy for a candidate lacks some of the project's own files too.
        if self.sampler == "vllm" and not (find_spec("vllm") and find_spec("grpo.vllm")):
            raise ValueError("--sampler vllm: it is not installed here")
        tracker = self.report_to
        if tracker != "none" and not (find_spec(tracker) and find_spec("grpo.tracker")):
            raise ValueError(f"--report_to {tracker}: it is not installed here")


@dataclass(frozen=True)
class LossConfig:
    """The settings of advantages, masks and loss, and those of sampling that they need."""

    group_size: int = setting(8, "Number of completions per prompt.", title="sampling")
    temperature: float = setting(1.0, "Temperature of sampling, and of log-probs in the loss.")
    max_completion_length: int = again(RunConfig, "max_completion_length")
    beta: float = setting(
        0.04,
        "Weight of the KL to the reference model, which 0 leaves out.",
        title="loss",
        zero=True,
    )
    use_std_normalization: bool = setting(
        True, "Divide advantages by their group's standard deviation (default); Dr. GRPO does not."
    )
    mask_truncated_completions: bool = setting(
        False, "Compute no loss on completions that were cut off."
    )
    # What main.py reads of the settings below, in a copy without them.
    loss_type = "grpo_clip"
    length_normalization = "masked_mean"

    # --- Not in the copy for a candidate ----------------------------------------------------------

    loss_type: str = setting(
        "grpo_clip",
        "The loss of a token. The ratio is its probability now, divided by that before the"
        " iteration's first update.\n"
        "grpo_clip: minus ratio times advantage, with PPO's clip (GRPO)\n"
        "grpo_no_clip: the same without the clip\n"
        "reinforce_with_baseline: minus log-probability times advantage\n"
        "no_baseline: minus log-probability times reward (REINFORCE)\n"
        "gspo: grpo_clip with one ratio for a whole completion (arXiv:2507.18071)\n"
        "cispo: reinforce_with_baseline times the capped ratio (arXiv:2506.13585)\n"
        "FILE.py:NAME: a function of your own (README.md)",
    )
    length_normalization: str = setting(
        "masked_mean",
        "The average of the losses of tokens.\n"
        "masked_mean: over each completion's tokens, then over completions (GRPO)\n"
        "masked_normalize: the same, divided by --max_completion_length instead of each length (Dr."
        " GRPO, arXiv:2503.20783)\n"
        "token_mean: over all tokens of the update (DAPO, arXiv:2503.14476)",
        choices=("masked_mean", "masked_normalize", "token_mean"),
    )
    cliprange: float = setting(0.2, "The ratio is clipped to the range from 1 - X to 1 + X.")
    cliprange_high: float | None = setting(
        None,
        "Another upper limit 1 + X, as in DAPO; in cispo 1 + X caps the ratio. (default:"
        " --cliprange)",
    )
    importance_cap: float | None = setting(
        None,
        "Weight each token by p_policy / p_sampler, at most by this: it corrects for a sampler of"
        " lower precision. (default: no correction)",
    )


# --- The settings of main.py ----------------------------------------------------------------------


@dataclass(frozen=True)
class GRPOConfig(LossConfig, RunConfig):
    """Train a language model with GRPO."""

    num_train_iters: int = setting(
        1000,
        "Iterations. Each samples one rollout batch and trains on it.",
        title="iterations",
        may_change=True,
    )
    rollout_batch_size: int = setting(
        256, "Completions of an iteration: prompts times --group_size."
    )
    epochs_per_rollout_batch: int = setting(
        1,
        "Passes over each rollout batch; updates after an iteration's first are off-policy.",
    )
    train_batch_size: int | None = setting(
        None, "Completions of an update. (default: --rollout_batch_size, so one update a pass)"
    )
    eval_iterations: int = setting(
        100, "Evaluate every N iterations, before the first and after the last.", may_change=True
    )
    save_iterations: int = setting(
        100, "Write a checkpoint every N iterations and after the last.", may_change=True
    )
    eval_only: bool = setting(False, "Evaluate the model and stop, without training.")

    def complete(self) -> Self:
        train_batch_size = self.train_batch_size or self.rollout_batch_size
        return replace(super().complete(), train_batch_size=train_batch_size)

    def check(self) -> None:
        super().check()
        rollout_size = self.rollout_batch_size
        train_size = self.train_batch_size
        num_processes = int(os.environ.get("WORLD_SIZE") or 1)  # by torchrun
        smallest_batch = self.group_size * num_processes
        if rollout_size % smallest_batch or train_size % smallest_batch:
            raise ValueError(
                f"--rollout_batch_size {rollout_size} and --train_batch_size {train_size} must be"
                f" multiples of --group_size {self.group_size} times {num_processes} processes"
            )
        if rollout_size % train_size:
            raise ValueError(
                f"--train_batch_size {train_size} must divide --rollout_batch_size {rollout_size}"
            )
        if self.group_size == 1 and self.loss_type != "no_baseline":
            raise ValueError(
                "--group_size 1: every advantage would be 0, so a loss without a baseline is needed"
            )

    # --- Not in the copy for a candidate ----------------------------------------------------------

    judge_model: str | None = setting(
        None,
        "With --judge_base_url the model's name there; otherwise a model on the hub or a directory."
        " (default: the run's own model as it was before training)",
        title="judge (of the data set creative)",
    )
    judge_base_url: str | None = setting(
        None,
        "An OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1, whose key is in the"
        " environment variable OPENAI_API_KEY. (default: the judge runs in this process)",
        may_change=True,
    )


# --- From the command line ------------------------------------------------------------------------


def parse(config_type: type[Settings], argv: Sequence[str] | None = None) -> Settings:
    """The settings of a script from its command line; a mistake ends it with one line and code 2.

    `@FILE` stands for the flags in that file; a flag after it overrides them. With --resume, a flag
    that is not given has the value of the run in --output_dir.
    """
    parser = ArgumentParser(config_type)
    try:
        given, _ = parser.parse_known_args(argv)
        if getattr(given, "resume", False):
            saved = read_args(given.output_dir / "args.json")
            names = {field.name for field in fields(config_type)} - {"resume", "output_dir"}
            parser.set_defaults(**{name: saved[name] for name in names & saved.keys()})
        config = config_type(**vars(parser.parse_args(argv)))
        check_bounds(config)
        if isinstance(config, RunConfig):
            config = config.complete()
            config.check()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return config


def read_args(path: Path) -> dict[str, Any]:
    """The settings in a run's args.json and its number of parameters; {} if there is no such file.

    Raises ValueError, with the path in it, for a file that holds something else.
    """
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_text("utf-8"))
        return record["args"] | {"parameters": record.get("parameters")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the args.json of a run ({error!r})") from error


def check_bounds(config: Any) -> None:
    """Raise ValueError for an empty text, or a number that is negative, not finite or a wrong 0."""
    for setting in fields(config):
        value = getattr(config, setting.name)
        if isinstance(value, str) and not value.strip():  # as of a variable that is not set
            raise ValueError(f"--{setting.name} is empty")
        if type(value) not in (int, float):  # not isinstance: a bool is an int
            continue
        is_large_enough = value > 0 or (value == 0 and setting.metadata["zero"])
        if not (is_large_enough and math.isfinite(value)):
            least = "at least 0" if setting.metadata["zero"] else "more than 0"
            raise ValueError(f"--{setting.name} must be {least} and finite, not {value}")


def may_change(config_type: type) -> set[str]:
    """The names of the settings that may have another value in a resumed run."""
    return {setting.name for setting in fields(config_type) if setting.metadata["may_change"]}


class HelpFormatter(argparse.HelpFormatter):
    """Keeps the line breaks of a help text, so that each choice stands on a line of its own."""

    def _split_lines(self, text, width):
        lines = []
        for line in text.splitlines():
            lines += super()._split_lines(line, width)
        return lines


class ArgumentParser(argparse.ArgumentParser):
    """Flags for the fields of a settings class; an error is one line with exit code 2.

    A line of an @file is read as a shell would read it.
    """

    def __init__(self, config_type: type):
        super().__init__(
            description=f"{config_type.__doc__} @FILE stands for the flags in a file.",
            usage="%(prog)s [@FILE] [--flag value ...]",
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            fromfile_prefix_chars="@",
        )
        groups = {title: self.add_argument_group(title) for title in TITLES}
        title = ""
        for setting in fields(config_type):
            title = setting.metadata["title"] or title
            add_flag(groups[title], setting)

    def convert_arg_line_to_args(self, arg_line):
        return shlex.split(arg_line, comments=True)

    def error(self, message):
        if os.environ.get("RANK", "0") != "0":  # of torchrun's processes only the first one prints
            self.exit(2)
        self.exit(2, f"error: {message} (--help lists every flag)\n")


def path_of(text: str) -> Path:
    return Path(text).expanduser()  # the shell leaves ~ in --output_dir=~/run as it is


METAVARS = {int: "N", float: "X", str: "NAME", path_of: "PATH"}


def add_flag(group: Any, setting: Field) -> None:
    """Add the flag of one field to a group of flags."""
    flag = f"--{setting.name}"
    default = setting.default
    help = setting.metadata["help"]
    choices = setting.metadata["choices"]
    if setting.type is bool:
        action = argparse.BooleanOptionalAction
        group.add_argument(flag, action=action, default=default, help=help)
        return
    if default is not None:  # otherwise the help text says what happens without the flag
        first_line, newline, lines = help.partition("\n")
        help = f"{first_line} (default: {default}){newline}{lines}"
    type_ = next(iter(get_args(setting.type)), setting.type)  # of "int | None" it is int
    if type_ is Path:
        type_ = path_of
    metavar = None if choices else METAVARS[type_]
    group.add_argument(
        flag, type=type_, choices=choices, metavar=metavar, default=default, help=help
    )


# --- Not in the copy for a candidate --------------------------------------------------------------


@dataclass(frozen=True)
class FineTuningConfig(RunConfig):
    """What supervised fine-tuning and expert iteration share."""

    learning_rate: float = again(RunConfig, "learning_rate", 1e-5)
    train_batch_size: int = setting(32, "Examples of an update.", title="optimisation")


TITLES += ("judge (of the data set creative)",)
