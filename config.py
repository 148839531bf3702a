"""Every setting of the scripts, once: its default, its help, its bounds, and whether it may change.

A script's settings are a frozen dataclass, made of groups that scripts share. A field is a flag of
the same name on the command line. A function asks for the group that it needs: one that takes a
LossConfig can be given the whole GRPOConfig, which is one.

This file imports neither torch nor anything of the project, so that --help answers at once.
"""

import argparse
import json
import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, replace
from inspect import get_annotations
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

Settings = TypeVar("Settings")


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    zero: bool = False,
    at_most: float = math.inf,
    may_change: bool = False,
) -> Any:
    """A field of a settings class, and so a flag.

    Args:
        default: None means that the help text says what happens without the flag.
        help: what the flag does, its unit, and its default where that depends on other flags.
        choices: the values that it takes, where its type does not name them.
        zero: whether a number may be 0; every number must otherwise be more than 0.
        at_most: the greatest value that a number may have.
        may_change: whether a resumed run may have another value. None of these settings changes
            what is learnt, though another device or sampler draws other completions.
    """
    metadata = dict(help=help, choices=choices, zero=zero, at_most=at_most, may_change=may_change)
    return field(default=default, metadata=metadata)


def with_default(group: type, name: str, default: Any) -> Any:
    """A field of a group of settings once more, with another default."""
    return field(default=default, metadata=group.__dataclass_fields__[name].metadata)


# --- Groups of settings that scripts share --------------------------------------------------------


@dataclass(frozen=True)
class ModelConfig:
    title: ClassVar[str] = "model"

    model_name: str = setting(
        "Qwen/Qwen2-0.5B-Instruct",
        "The model to start from: its name on the hub, or a directory with safetensors weights and"
        " a tokenizer.",
    )
    max_prompt_length: int = setting(
        512,
        "Maximum length of a prompt in tokens. Examples with longer prompts are left out, and their"
        " number is printed.",
    )
    attn_implementation: str = setting(
        "sdpa",
        "The attention of the loss, by its name in transformers. flash_attention_2, which needs the"
        " package flash-attn, makes the GPU wait for Python in every layer, so it pays for long"
        " completions only.",
    )
    gradient_checkpointing: bool = setting(
        False,
        "Compute activations again in the backward pass instead of storing them. It takes less"
        " memory and about a third more time.",
        may_change=True,
    )
    lora_rank: int | None = setting(
        None,
        "Freeze the weights, and train adapters of this rank beside the linear maps of the layers"
        " (LoRA, arXiv:2106.09685). It takes much less memory, and about ten times the"
        " --learning_rate. (default: train the weights themselves)",
    )


@dataclass(frozen=True)
class DataConfig:
    title: ClassVar[str] = "data"

    dataset_name: str = setting(
        "gsm8k",
        "The data set.\n"
        "gsm8k: Grade-school word problems from the hub (GSM8K).\n"
        "math: Competition problems from the hub (MATH).\n"
        "arithmetic: Word problems that come with the code, with no download.\n"
        "creative: Opening lines of stories, for which a judge gives the reward.\n"
        "FILE.py:NAME: A function of your own, which gives the rows of a split (README.md).",
    )
    dataset_path: str | None = setting(
        None,
        "Folder with the splits train, test and maybe validation, as .jsonl or .parquet files."
        " README.md says what a row must hold. (default: the data set's own source)",
    )
    evaluator: str | None = setting(
        None,
        "What computes the rewards. (default: the data set's own)\n"
        "gsm8k: Answers that are numbers, in the format <reasoning>...</reasoning><answer>..."
        "</answer>.\n"
        "math: Answers in LaTeX, in a box or in tags.\n"
        "creative: Stories, by a judge.\n"
        "FILE.py:NAME: A reward function of your own in a file, or several (README.md).",
    )
    prompt: str | None = setting(
        None,
        "The format of prompts, which also decides how answers are read: reasoning_answer, r1_zero,"
        " question_only or story. (default: the data set's own)",
    )


@dataclass(frozen=True)
class CompletionConfig:
    title: ClassVar[str] = "sampling"

    max_completion_length: int = setting(
        512, "Maximum length of a completion in tokens. A longer one is cut off."
    )
    max_concurrent_sequences: int = setting(
        512,
        "Maximum number of completions that are sampled at a time. A smaller number takes less"
        " memory, and more time, and changes no sample.",
        may_change=True,
    )
    sampling_dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "Precision of the model that samples.\n"
        "auto: bfloat16 on a GPU that has it, otherwise float32.\n"
        "float32: samples with the trained weights themselves.\n"
        "bfloat16: samples with a copy in bfloat16, renewed after each update.",
    )
    sampler: Literal["torch", "vllm"] = setting(
        "torch",
        "What samples completions, in training and in evaluations alike.\n"
        "torch: this project's own sampler. A completion depends on the seed alone, and --resume"
        " repeats a run bit for bit.\n"
        "vllm: vLLM in this process, which has to be installed (docs/gpus.md) and pays for long"
        " completions. Its weights are renewed after each update, and sampling_logp_gap says how"
        " far its log-probs are from the policy's. A completion depends on those sampled beside it,"
        " and --resume does not repeat a run bit for bit.",
        may_change=True,
    )


@dataclass(frozen=True)
class SamplingConfig(CompletionConfig):
    group_size: int = setting(8, "Number of completions per prompt.")
    temperature: float = setting(
        1.0, "Temperature of sampling, and of the log-probabilities in main.py's loss."
    )


@dataclass(frozen=True)
class AveragingConfig:
    title: ClassVar[str] = "loss"

    length_normalization: str = setting(
        "masked_mean",
        "How the losses of tokens are averaged.\n"
        "masked_mean: Over each completion's tokens, then over completions (GRPO).\n"
        "masked_normalize: The same, but divided by --max_completion_length in the place of each"
        " completion's length (Dr. GRPO, arXiv:2503.20783).\n"
        "token_mean: Over all tokens of the update (DAPO, arXiv:2503.14476).",
        choices=("masked_mean", "masked_normalize", "token_mean"),
    )


@dataclass(frozen=True)
class LossConfig(AveragingConfig, SamplingConfig):
    """What main.compute_loss needs to know, the way in which completions were sampled included."""

    title: ClassVar[str] = "loss"

    loss_type: str = setting(
        "grpo_clip",
        "The loss of a token, a function of losses.py. The ratio is the token's probability under"
        " the policy, divided by its probability before the iteration's first update.\n"
        "grpo_clip: Minus the ratio times the advantage, with PPO's clip (GRPO).\n"
        "grpo_no_clip: The same without the clip.\n"
        "reinforce_with_baseline: Minus the log-probability times the advantage.\n"
        "no_baseline: Minus the log-probability times the reward (REINFORCE).\n"
        "gspo: Like grpo_clip, with one ratio for a whole completion (arXiv:2507.18071).\n"
        "cispo: Like reinforce_with_baseline, weighted by the capped ratio (arXiv:2506.13585).",
    )
    beta: float = setting(
        0.04,
        "Weight of the KL to the reference model in the loss. With 0 there is no reference model.",
        zero=True,
    )
    cliprange: float = setting(
        0.2, "The ratio is clipped to the range from 1 - X to 1 + X, in losses with a clip."
    )
    cliprange_high: float | None = setting(
        None,
        "From above, the ratio is clipped at 1 + X, as in DAPO. In cispo the ratio is a weight and"
        " is capped at 1 + X. (default: --cliprange)",
    )
    use_std_normalization: bool = setting(
        True,
        "Divide advantages by the standard deviation of their group's rewards. Dr. GRPO"
        " (arXiv:2503.20783) does not.",
    )
    mask_truncated_completions: bool = setting(
        False,
        "Compute no loss on completions that were cut off at --max_completion_length.",
    )
    importance_cap: float | None = setting(
        None,
        "Corrects for a sampler whose probabilities differ a little from those of the policy that"
        " it copies: each token's policy term is weighted by p_policy / p_sampler, capped at this"
        " number. (default: no correction)",
    )


@dataclass(frozen=True)
class OptimiserConfig:
    title: ClassVar[str] = "optimisation"

    micro_batch_tokens: int = setting(
        16384,
        "Maximum number of tokens, padding included, in a forward and backward pass. A smaller"
        " number takes less memory, and does not change the gradient.",
        may_change=True,
    )
    warmup_steps: int = setting(
        10,
        "Number of updates in which the learning rate rises to its peak in a straight line.",
        zero=True,
    )
    weight_decay: float = setting(0.0, "Weight decay of AdamW.", zero=True)
    max_grad_norm: float = setting(
        1.0, "Gradients with a greater norm are scaled down to this norm."
    )


@dataclass(frozen=True)
class JudgeConfig:
    title: ClassVar[str] = "judge (of the data set creative)"

    judge_type: Literal["policy", "local", "openai"] = setting(
        "policy",
        "Who judges.\n"
        "policy: the frozen reference of the run.\n"
        "local: a Hugging Face model in this process.\n"
        "openai: a model behind an OpenAI-compatible endpoint.",
    )
    judge_model: str | None = setting(
        None, "The judge's name at the endpoint (openai), or its hub name or directory (local)."
    )
    judge_base_url: str | None = setting(
        None,
        "The endpoint's address, such as http://127.0.0.1:8000/v1. Its key is read from the"
        " environment variable OPENAI_API_KEY. (default: OpenAI's own)",
        may_change=True,
    )
    judge_concurrency: int = setting(
        16,
        "How many requests to the endpoint may wait for their reply at a time.",
        may_change=True,
    )
    max_judge_failures: float = setting(
        0.5,
        "Share of the stories of a batch that may lack a score; more of them end the run.",
        zero=True,
        at_most=1,
        may_change=True,
    )


@dataclass(frozen=True)
class OutputConfig:
    title: ClassVar[str] = "evaluation and output"

    output_dir: Path = setting(
        Path("output/grpo"),
        "Folder for logs, transcripts and checkpoints. It must not hold another run.",
        may_change=True,
    )
    resume: bool = setting(
        False,
        "Continue the run in --output_dir from its newest checkpoint, with the flags that it was"
        " started with. One that has ended goes on if --num_train_iters is raised.",
        may_change=True,
    )
    eval_split: Literal["validation", "test"] | None = setting(
        None,
        "The split that is evaluated. (default: test; for arithmetic, validation)\n"
        "validation: problems on which flags and the best checkpoint may be chosen. gsm8k holds out"
        " its last 500 training problems.\n"
        "test: problems for the accuracy that is reported in the end.",
    )
    eval_size: int | None = setting(
        None,
        "Number of problems to evaluate, a fixed random subset of the split. (default: all)",
    )
    eval_samples: int = setting(
        1, "Completions of each problem in an evaluation. With several, pass@k is logged."
    )
    eval_temperature: float | None = setting(
        None,
        "Temperature of sampling in evaluations; 0 is greedy. (default: 0, or --temperature if"
        " there are several samples)",
        zero=True,
    )
    keep_checkpoints: int = setting(
        3,
        "Number of newest checkpoints to keep. The most accurate one is kept too, even if it is"
        " older.",
        may_change=True,
    )
    report_to: Literal["none", "tensorboard", "wandb"] = setting(
        "none",
        "A tracker that gets all logs as well; its package must be installed.\n"
        "tensorboard: event files for TensorBoard, in the folder tensorboard of --output_dir.\n"
        "wandb: a run in the project grpo-lite of Weights & Biases.",
        may_change=True,
    )

    def complete(self) -> Self:
        """The same settings, with the defaults that depend on other settings filled in."""
        if self.eval_temperature is not None:
            return self
        # Only a single sample is greedy: several greedy samples would all be the same answer.
        is_greedy = self.eval_samples == 1
        temperature = 0.0 if is_greedy else getattr(self, "temperature", 1.0)
        return replace(self, eval_temperature=temperature)

    def check(self) -> None:
        """Raise ValueError for settings that contradict each other."""
        if self.eval_samples > 1 and self.eval_temperature == 0:
            raise ValueError(
                f"--eval_temperature 0 makes the {self.eval_samples} samples of --eval_samples all"
                " the same; raise it, or leave one of the two out"
            )


@dataclass(frozen=True)
class RuntimeConfig:
    title: ClassVar[str] = "runtime"

    seed: int = setting(
        0,
        "Seed of the random numbers that order the data and sample completions.",
        zero=True,
        at_most=2**32 - 1,
    )
    device: str = setting(
        "auto",
        "Where to compute: cpu, cuda, one GPU of several such as cuda:1, or auto, which is cuda"
        " where there is a GPU.",
        may_change=True,
    )


# --- The settings of each script ------------------------------------------------------------------


@dataclass(frozen=True)
class GRPOConfig(
    ModelConfig, DataConfig, LossConfig, OptimiserConfig, JudgeConfig, OutputConfig, RuntimeConfig
):
    """Train a language model with GRPO."""

    title: ClassVar[str] = "training with GRPO"

    num_train_iters: int = setting(
        1000,
        "Number of iterations. Each samples one rollout batch and trains on it.",
        may_change=True,
    )
    rollout_batch_size: int = setting(
        256, "Completions sampled in each iteration: the number of prompts times --group_size."
    )
    epochs_per_rollout_batch: int = setting(
        1,
        "Passes over each rollout batch. In an iteration, all updates but the first one are"
        " off-policy.",
    )
    train_batch_size: int | None = setting(
        None,
        "Completions in each update. (default: --rollout_batch_size, so that there is one update in"
        " each iteration)",
    )
    learning_rate: float = setting(
        5e-6,
        "Learning rate of AdamW at its peak, which it reaches at the end of the warm-up.",
    )
    eval_iterations: int = setting(
        100,
        "Evaluate once every N iterations; also before the first and after the last.",
        may_change=True,
    )
    save_iterations: int = setting(
        100,
        "Write a checkpoint once every N iterations; also after the last.",
        may_change=True,
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
                "--group_size 1 has no group to compare with: every advantage would be 0; use"
                " --loss_type no_baseline, or a group_size of at least 2"
            )


@dataclass(frozen=True)
class FineTuningConfig(ModelConfig, DataConfig, OptimiserConfig, OutputConfig, RuntimeConfig):
    """What supervised fine-tuning and expert iteration share."""

    title: ClassVar[str] = "fine-tuning"

    train_batch_size: int = setting(32, "Examples in each update.")
    learning_rate: float = setting(
        1e-5,
        "Learning rate of AdamW at its peak, at the end of the warm-up; it then falls to 0 as a"
        " cosine.",
    )


@dataclass(frozen=True)
class SFTConfig(FineTuningConfig, AveragingConfig, CompletionConfig):
    """Fine-tune a model on worked solutions, and evaluate it as main.py does."""

    title: ClassVar[str] = "fine-tuning"

    train_file: str | None = setting(
        None,
        "The .jsonl that generate_gold.py writes, with question, completion and answer.",
    )
    num_examples: int | None = setting(
        None,
        "Number of examples that are trained on, drawn by --seed; a smaller set is inside a larger"
        " one. (default: all)",
    )
    filter_correct: bool = setting(
        False,
        "Leave out examples that the evaluator does not find strictly correct. Those that the file"
        " itself marks as incorrect are always left out.",
    )
    epochs: float = setting(1.0, "Passes over the examples.")
    num_updates: int | None = setting(
        None, "Number of updates. (default: as many as --epochs takes)"
    )
    eval_updates: int = setting(
        100,
        "Evaluate once every N updates; also before the first and after the last.",
        may_change=True,
    )
    save_updates: int = setting(
        100,
        "Write a checkpoint once every N updates; also after the last.",
        may_change=True,
    )
    output_dir: Path = with_default(OutputConfig, "output_dir", Path("output/sft"))

    def check(self) -> None:
        super().check()
        if self.train_file is None:
            raise ValueError("--train_file is missing: name a file of solutions to train on")


@dataclass(frozen=True)
class ExpertIterationConfig(FineTuningConfig, SamplingConfig):
    """Train a language model by expert iteration."""

    title: ClassVar[str] = "expert iteration"

    n_ei_steps: int = setting(5, "Number of expert iterations.", may_change=True)
    num_questions: int = setting(512, "Questions of each expert iteration (D_b).")
    epochs: int = setting(
        1,
        "Passes over the completions that an expert iteration keeps (E). What does not fill a last"
        " batch of --train_batch_size is left out, unless it is the only one.",
    )
    eval_ei_steps: int = setting(
        1,
        "Evaluate and save once every N expert iterations, and after the last.",
        may_change=True,
    )
    warmup_steps: int = with_default(OptimiserConfig, "warmup_steps", 0)
    output_dir: Path = with_default(OutputConfig, "output_dir", Path("output/expert_iteration"))


@dataclass(frozen=True)
class GoldConfig(DataConfig, RuntimeConfig):
    """Collect verified solutions for supervised fine-tuning."""

    title: ClassVar[str] = "gold solutions"

    from_reference: bool = setting(False, "Source 1: take the data set's own solutions.")
    model_name: str | None = setting(
        None,
        "Source 2: sample from this local model, a hub name or a directory with safetensors"
        " weights.",
    )
    api_model: str | None = setting(
        None,
        "Source 3: ask the model of this name at an OpenAI-compatible endpoint, whose key is read"
        " from the environment variable OPENAI_API_KEY.",
    )
    base_url: str | None = setting(
        None,
        "Address of the endpoint, such as http://127.0.0.1:8000/v1. (default: OpenAI's own)",
    )
    num_problems: int | None = setting(
        None,
        "Number of training problems, drawn at random by --seed; a smaller draw is always part of a"
        " larger one. (default: all)",
    )
    num_attempts: int = setting(
        1,
        "Maximum number of samples for each problem; sampling stops at the first correct one.",
    )
    temperature: float | None = setting(
        None,
        "Temperature of sampling. (default: the endpoint's own; 1 for a local model)",
        zero=True,
    )
    max_completion_length: int = setting(
        512,
        "Maximum number of tokens in a completion; 0 leaves the limit to the endpoint.",
        zero=True,
    )
    concurrency: int = setting(
        16, "Requests at a time to an endpoint, or prompts in a batch of a local model."
    )
    timeout: float = setting(
        120.0,
        "Seconds without a sign of life from the endpoint, after which a request is repeated.",
    )
    output: Path = setting(
        Path("gold.jsonl"),
        "File that rows are appended to; start again with the same file and source to continue.",
    )


# --- From the command line ------------------------------------------------------------------------


def parse(config_type: type[Settings], argv: Sequence[str] | None = None) -> Settings:
    """The settings of a script from its command line; a mistake ends it with one line and code 2.

    `@recipes/dapo.args` stands for the flags in that file; a flag after it overrides them. With
    --resume, a flag that is not given has the value of the run in --output_dir.
    """
    parser = ArgumentParser(config_type)
    try:
        parser.set_defaults(**settings_of_resumed_run(config_type, argv))
        config = config_type(**vars(parser.parse_args(argv)))
        check_bounds(config)
        if isinstance(config, OutputConfig):
            config = config.complete()
            config.check()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return config


def settings_of_resumed_run(config_type: type, argv: Sequence[str] | None) -> dict[str, Any]:
    """The settings in the args.json of the run that a command line resumes; {} if it resumes none.

    Raises ValueError or OSError for an args.json that cannot be read.
    """
    if not issubclass(config_type, OutputConfig):
        return {}
    given, _ = ArgumentParser(config_type, add_help=False).parse_known_args(argv)
    if not given.resume:
        return {}
    saved = read_args(given.output_dir / "args.json")
    names = {setting.name for setting in fields(config_type)} - {"resume", "output_dir"}
    return {name: saved[name] for name in names & saved.keys()}


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
    """Raise ValueError for a number that is out of its range."""
    for setting in fields(config):
        value = getattr(config, setting.name)
        if type(value) not in (int, float):  # not isinstance: a bool is an int
            continue
        at_most = setting.metadata["at_most"]
        least = "at least 0" if setting.metadata["zero"] else "more than 0"
        is_large_enough = value >= 0 if setting.metadata["zero"] else value > 0
        if not (is_large_enough and math.isfinite(value)):
            raise ValueError(f"--{setting.name} must be {least} and finite, not {value}")
        if value > at_most:
            raise ValueError(f"--{setting.name} must be at most {at_most}, not {value}")


def may_change(config_type: type) -> set[str]:
    """The names of the settings that may have another value in a resumed run."""
    return {setting.name for setting in fields(config_type) if setting.metadata["may_change"]}


class ArgumentParser(argparse.ArgumentParser):
    """Flags for the fields of a settings class, in its groups, or for those that are added here.

    An error is one line with exit code 2. A line of an @file is read as a shell would read it.
    """

    def __init__(self, config_type: type | None = None, **options):
        if config_type is not None:
            options.setdefault("description", config_type.__doc__)
            options.setdefault("usage", "%(prog)s [@recipes/NAME.args] [--flag value ...]")
        super().__init__(
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            fromfile_prefix_chars="@",
            **options,
        )
        # The shell leaves ~ in --output_dir=~/run and in an @file as it is.
        self.register("type", str, os.path.expanduser)
        self.register("type", Path, lambda text: Path(os.path.expanduser(text)))
        self._negative_number_matcher = re.compile(r"-\.?\d")  # Python 3.11's has no -1e-4
        if config_type is not None:
            self._add_settings(config_type)

    def _add_settings(self, config_type: type) -> None:
        title_of = {}  # a setting that a script declares once more stays in its first group
        groups = {}
        for class_ in reversed(config_type.__mro__[:-1]):
            for name in get_annotations(class_):
                title_of.setdefault(name, class_.title)
        for class_ in config_type.__mro__[:-1]:
            if class_.title not in groups:
                groups[class_.title] = self.add_argument_group(class_.title)
        types = get_type_hints(config_type)
        for setting in fields(config_type):
            add_flag(groups[title_of[setting.name]], setting, types[setting.name])

    def convert_arg_line_to_args(self, arg_line):
        return shlex.split(arg_line, comments=True)

    def error(self, message):
        """Exit with code 2. Of the processes that torchrun starts, only the first one prints."""
        is_only_process = os.environ.get("WORLD_SIZE") in (None, "", "1")
        if is_only_process or os.environ.get("RANK", "0") == "0":
            self.exit(2, f"error: {message} (--help lists every flag)\n")
        self.exit(2)


METAVARS = {int: "N", float: "X", str: "NAME", Path: "PATH"}


def add_flag(group: Any, setting: Field, type_: Any) -> None:
    """Add the flag of one field to a group of flags."""
    flag = f"--{setting.name}"
    options = {"default": setting.default, "help": setting.metadata["help"]}
    if type_ is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        return
    choices = setting.metadata["choices"]
    if get_origin(type_) in (Union, UnionType):  # a type or None
        type_ = next(member for member in get_args(type_) if member is not NoneType)
    if get_origin(type_) is Literal:
        choices = get_args(type_)
        type_ = str
    metavar = None if choices else METAVARS[type_]
    group.add_argument(flag, type=type_, choices=choices, metavar=metavar, **options)


class HelpFormatter(argparse.HelpFormatter):
    """Shows each flag's default, and keeps the line breaks of a help text.

    The breaks let each choice of a flag stand on a line of its own. Where the default is None, the
    help text itself says what happens without the flag.
    """

    def _get_help_string(self, action):
        is_switch = action.nargs == 0 and action.default is False
        if action.default in (None, argparse.SUPPRESS) or is_switch:
            return action.help
        first_line, newline, choices = action.help.partition("\n")
        return f"{first_line} (default: %(default)s){newline}{choices}"

    def _split_lines(self, text, width):
        lines = []
        for line in text.splitlines():
            lines += super()._split_lines(line, width)
        return lines
