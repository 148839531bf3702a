"""Every setting of the scripts, once: its default, its help, its bounds, and whether it may change.

A script's settings are a frozen dataclass. A field is a flag of the same name on the command line.
To add a flag, add a field. This file imports neither torch nor anything of the project, so that
--help answers at once.
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
from types import NoneType
from typing import Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

Settings = TypeVar("Settings")


def setting(
    default: Any,
    help: str,
    *,
    title: str | None = None,
    zero: bool = False,
    at_most: float = math.inf,
    may_change: bool = False,
) -> Any:
    """A field of a settings class, and so a flag.

    Args:
        default: None means that the help text says what happens without the flag.
        help: what the flag does, its unit, and its default where that depends on other flags.
        title: of the group in --help that begins with this flag.
        zero: whether a number may be 0; every number must otherwise be more than 0.
        at_most: the greatest value that a number may have.
        may_change: whether a resumed run may have another value. None of these settings changes
            what is learnt, though another device or sampler draws other completions.
    """
    metadata = dict(help=help, title=title, zero=zero, at_most=at_most, may_change=may_change)
    return field(default=default, metadata=metadata)


def again(settings_class: type, name: str, default: Any = None) -> Any:
    """A setting of another class once more, maybe with another default."""
    original = settings_class.__dataclass_fields__[name]
    return field(default=default or original.default, metadata=original.metadata)


# --- Settings that scripts share ------------------------------------------------------------------


@dataclass(frozen=True)
class RunConfig:
    """The model, the data, the evaluations and the output of a training script."""

    model_name: str = setting(
        "Qwen/Qwen2-0.5B-Instruct",
        "The model to start from: its name on the hub, or a directory with safetensors weights and"
        " a tokenizer.",
        title="model",
    )
    lora_rank: int | None = setting(
        None,
        "Freeze the weights, and train adapters of this rank beside the linear maps of the layers"
        " (LoRA, arXiv:2106.09685). It takes much less memory, and about ten times the"
        " --learning_rate. (default: train the weights themselves)",
    )
    gradient_checkpointing: bool = setting(
        False,
        "Compute activations again in the backward pass instead of storing them. It takes less"
        " memory and about a third more time.",
        may_change=True,
    )
    dataset_name: str = setting(
        "gsm8k",
        "The problems.\n"
        "gsm8k: grade-school word problems, from the hub\n"
        "math: competition problems (MATH), from the hub\n"
        "arithmetic: word problems that are in this repository\n"
        "creative: opening lines of stories, for which a judge gives the reward\n"
        "FILE.py:NAME: a function of your own, which gives the rows of a split (README.md)",
        title="data",
    )
    dataset_path: str | None = setting(
        None,
        "Folder with the splits train, test and maybe validation, as .jsonl or .parquet files."
        " README.md says what a row must hold. (default: the data set's own source)",
    )
    prompt: str | None = setting(
        None,
        "The format of prompts, which also decides how answers are read: reasoning_answer, r1_zero,"
        " question_only or story. (default: the data set's own)",
    )
    max_prompt_length: int = setting(
        512,
        "Maximum length of a prompt in tokens. Examples with longer prompts are left out, and their"
        " number is printed.",
    )
    evaluator: str | None = setting(
        None,
        "What computes the rewards. (default: the data set's own)\n"
        "gsm8k: answers that are numbers, in <reasoning>...</reasoning><answer>...</answer>\n"
        "math: answers in LaTeX, in a box or in tags\n"
        "creative: stories, by a judge\n"
        "FILE.py:NAME: a reward function of your own (README.md)\n"
        "gsm8k,FILE.py:NAME: the sum of several of these",
    )
    max_completion_length: int = setting(
        512,
        "Maximum length of a completion in tokens. A longer one is cut off.",
        title="sampling",
    )
    max_concurrent_sequences: int = setting(
        512,
        "Maximum number of completions that are sampled at a time. A smaller number takes less"
        " memory, and more time, and changes no sample.",
        may_change=True,
    )
    sampling_dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "Precision of the weights that sample, which are copied after each update unless it is"
        " float32. auto is bfloat16 on a GPU that has it, otherwise float32.",
    )
    sampler: Literal["torch", "vllm"] = setting(
        "torch",
        "What samples completions. With torch, the project's own sampler, a completion depends on"
        " the seed alone, and --resume repeats a run bit for bit. vllm has to be installed"
        " (docs/gpus.md), pays for long completions, and repeats nothing bit for bit.",
        may_change=True,
    )
    learning_rate: float = setting(5e-6, "Peak learning rate of AdamW.", title="optimisation")
    warmup_steps: int = setting(
        10,
        "Number of updates in which the learning rate rises to its peak in a straight line.",
        zero=True,
    )
    micro_batch_tokens: int = setting(
        16384,
        "Maximum number of tokens, padding included, in a forward and backward pass. A smaller"
        " number takes less memory, and does not change the gradient.",
        may_change=True,
    )
    eval_split: Literal["validation", "test"] | None = setting(
        None,
        "The split that is evaluated: validation to choose flags and the best checkpoint, test for"
        " the accuracy that is reported. Of gsm8k, validation is the last 500 training problems."
        " (default: test; for arithmetic, validation)",
        title="evaluation",
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
    output_dir: Path = setting(
        Path("output/grpo"),
        "Folder for logs, transcripts and checkpoints. It must not hold another run.",
        title="output",
        may_change=True,
    )
    resume: bool = setting(
        False,
        "Continue the run in --output_dir from its newest checkpoint, with the flags that it was"
        " started with. One that has ended goes on if it is given more iterations.",
        may_change=True,
    )
    report_to: Literal["none", "tensorboard", "wandb"] = setting(
        "none",
        "A tracker that gets all logs as well; its package must be installed.",
        may_change=True,
    )
    seed: int = setting(
        0,
        "Seed of the random numbers that order the data and sample completions.",
        title="machine",
        zero=True,
        at_most=2**32 - 1,
    )
    device: str = setting(
        "auto",
        "Where to compute: cpu, cuda, one GPU of several such as cuda:1, or auto, which is cuda"
        " where there is a GPU.",
        may_change=True,
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
            raise ValueError(
                f"--eval_temperature 0 makes the {self.eval_samples} samples of --eval_samples all"
                " the same; raise it, or leave one of the two out"
            )
        if self.report_to != "none" and find_spec(self.report_to) is None:
            raise ValueError(f"--report_to {self.report_to}: it is not installed here")


@dataclass(frozen=True)
class LossConfig:
    """What main.compute_loss needs to know, the way in which completions were sampled included."""

    group_size: int = setting(8, "Number of completions per prompt.", title="sampling")
    temperature: float = setting(
        1.0, "Temperature of sampling, and of the log-probabilities in the loss."
    )
    max_completion_length: int = again(RunConfig, "max_completion_length")
    loss_type: str = setting(
        "grpo_clip",
        "The loss of a token: a function of losses.py. The ratio is the token's probability under"
        " the policy, divided by its probability before the iteration's first update.\n"
        "grpo_clip: minus the ratio times the advantage, with PPO's clip (GRPO)\n"
        "grpo_no_clip: the same without the clip\n"
        "reinforce_with_baseline: minus the log-probability times the advantage\n"
        "no_baseline: minus the log-probability times the reward (REINFORCE)\n"
        "gspo: like grpo_clip, with one ratio for a whole completion (arXiv:2507.18071)\n"
        "cispo: like reinforce_with_baseline, weighted by the capped ratio (arXiv:2506.13585)\n"
        "FILE.py:NAME: a function of your own",
        title="loss",
    )
    length_normalization: Literal["masked_mean", "masked_normalize", "token_mean"] = setting(
        "masked_mean",
        "How the losses of tokens are averaged.\n"
        "masked_mean: over each completion's tokens, then over completions (GRPO)\n"
        "masked_normalize: the same, but divided by --max_completion_length instead of each"
        " completion's length (Dr. GRPO, arXiv:2503.20783)\n"
        "token_mean: over all tokens of the update (DAPO, arXiv:2503.14476)",
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


# --- The settings of each script ------------------------------------------------------------------


@dataclass(frozen=True)
class GRPOConfig(LossConfig, RunConfig):
    """Train a language model with GRPO."""

    num_train_iters: int = setting(
        1000,
        "Number of iterations. Each samples one rollout batch and trains on it.",
        title="iterations",
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
    judge_model: str | None = setting(
        None,
        "The judge: its name at the endpoint, or without one its hub name or directory. (default:"
        " the frozen model of the run itself)",
        title="judge (of the data set creative)",
    )
    judge_base_url: str | None = setting(
        None,
        "The address of an OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1. Its key is"
        " read from the environment variable OPENAI_API_KEY.",
        may_change=True,
    )

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
class FineTuningConfig(RunConfig):
    """What supervised fine-tuning and expert iteration share."""

    learning_rate: float = again(RunConfig, "learning_rate", 1e-5)
    train_batch_size: int = setting(32, "Examples in each update.", title="fine-tuning")


@dataclass(frozen=True)
class SFTConfig(FineTuningConfig):
    """Fine-tune a model on worked solutions, and evaluate it as main.py does."""

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
    length_normalization: str = again(LossConfig, "length_normalization")
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
    output_dir: Path = again(RunConfig, "output_dir", Path("output/sft"))

    def check(self) -> None:
        super().check()
        if self.train_file is None:
            raise ValueError("--train_file is missing: name a file of solutions to train on")


@dataclass(frozen=True)
class ExpertIterationConfig(FineTuningConfig):
    """Train a language model by expert iteration."""

    n_ei_steps: int = setting(5, "Number of expert iterations.", may_change=True)
    num_questions: int = setting(512, "Questions of each expert iteration (D_b).")
    group_size: int = setting(8, "Completions of each question (G).")
    temperature: float = setting(1.0, "Temperature of sampling.")
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
    warmup_steps: int = setting(0, "Updates of warm-up in each expert iteration.", zero=True)
    output_dir: Path = again(RunConfig, "output_dir", Path("output/expert_iteration"))


@dataclass(frozen=True)
class GoldConfig:
    """Collect verified solutions for supervised fine-tuning."""

    dataset_name: str = again(RunConfig, "dataset_name")
    dataset_path: str | None = again(RunConfig, "dataset_path")
    evaluator: str | None = again(RunConfig, "evaluator")
    prompt: str | None = again(RunConfig, "prompt")

    from_reference: bool = setting(
        False, "Source 1: take the data set's own solutions.", title="gold solutions"
    )
    api_model: str | None = setting(
        None,
        "Source 2: ask the model of this name at an OpenAI-compatible endpoint, whose key is read"
        " from the environment variable OPENAI_API_KEY.",
    )
    base_url: str | None = setting(
        None,
        "Address of the endpoint, such as http://127.0.0.1:8000/v1. (default: OpenAI's own)",
    )
    solutions: Path | None = setting(
        None,
        "Source 3: take completions that were written elsewhere, from a .jsonl file whose rows have"
        " the id of a problem and a completion in the format of --prompt.",
    )
    num_problems: int | None = setting(
        None,
        "Number of training problems, drawn at random by --seed; a smaller draw is always part of a"
        " larger one. (default: all)",
    )
    num_attempts: int = setting(
        1, "How often a problem is asked at most; the first correct reply is the last one."
    )
    temperature: float | None = setting(
        None, "Temperature of sampling. (default: the endpoint's own)", zero=True
    )
    max_completion_length: int = setting(
        512,
        "Maximum number of tokens in a reply, reasoning included; 0 leaves the limit to the"
        " endpoint.",
        zero=True,
    )
    concurrency: int = setting(16, "Requests at a time.")
    output: Path = setting(
        Path("gold.jsonl"),
        "File that rows are appended to; start again with the same file to continue.",
    )
    seed: int = again(RunConfig, "seed")


# --- From the command line ------------------------------------------------------------------------


def parse(config_type: type[Settings], argv: Sequence[str] | None = None) -> Settings:
    """The settings of a script from its command line; a mistake ends it with one line and code 2.

    `@experiments/recipes/dapo.args` stands for the flags in that file; a flag after it overrides
    them. With --resume, a flag that is not given has the value of the run in --output_dir.
    """
    parser = ArgumentParser(config_type)
    try:
        if issubclass(config_type, RunConfig):
            parser.set_defaults(**settings_of_resumed_run(config_type, parser, argv))
        config = config_type(**vars(parser.parse_args(argv)))
        check_bounds(config)
        if isinstance(config, RunConfig):
            config = config.complete()
            config.check()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return config


def settings_of_resumed_run(
    config_type: type, parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> dict[str, Any]:
    """The settings in the args.json of the run that a command line resumes; {} if it resumes none.

    Raises ValueError or OSError for an args.json that cannot be read.
    """
    given, _ = parser.parse_known_args(argv)
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
        is_zero_allowed = setting.metadata["zero"]
        is_large_enough = value > 0 or (is_zero_allowed and value == 0)
        if not (is_large_enough and math.isfinite(value)):
            least = "at least 0" if is_zero_allowed else "more than 0"
            raise ValueError(f"--{setting.name} must be {least} and finite, not {value}")
        if value > setting.metadata["at_most"]:
            raise ValueError(f"--{setting.name} must be at most {setting.metadata['at_most']}")


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
            description=config_type.__doc__,
            usage="%(prog)s [@experiments/recipes/NAME.args] [--flag value ...]",
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            fromfile_prefix_chars="@",
        )
        types = get_type_hints(config_type)
        groups = {}
        title = ""
        for setting in fields(config_type):
            title = setting.metadata["title"] or title
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            add_flag(groups[title], setting, types[setting.name])

    def convert_arg_line_to_args(self, arg_line):
        return shlex.split(arg_line, comments=True)

    def error(self, message):
        if os.environ.get("RANK", "0") != "0":  # of torchrun's processes only the first one prints
            self.exit(2)
        self.exit(2, f"error: {message} (--help lists every flag)\n")


def path_of(text: str) -> Path:
    return Path(text).expanduser()  # the shell leaves ~ in --output_dir=~/run as it is


METAVARS = {int: "N", float: "X", str: "NAME", path_of: "PATH"}


def add_flag(group: Any, setting: Field, type_: Any) -> None:
    """Add the flag of one field to a group of flags."""
    flag = f"--{setting.name}"
    help = setting.metadata["help"]
    if type_ is bool:
        action = argparse.BooleanOptionalAction
        group.add_argument(flag, action=action, default=setting.default, help=help)
        return
    if setting.default is not None:  # otherwise the help text says what happens without the flag
        first_line, newline, choices = help.partition("\n")
        help = f"{first_line} (default: {setting.default}){newline}{choices}"
    choices = None
    for member in get_args(type_):
        if get_origin(member) is Literal:  # Literal[...] | None
            type_ = member
        elif member is not NoneType and get_origin(type_) is not Literal:  # int | None
            type_ = member
    if get_origin(type_) is Literal:
        choices = get_args(type_)
        type_ = str
    if type_ is Path:
        type_ = path_of
    metavar = None if choices else METAVARS[type_]
    group.add_argument(
        flag, type=type_, choices=choices, metavar=metavar, default=setting.default, help=help
    )
