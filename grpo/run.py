"""The life of a run: load, start or resume, evaluate, log, save, end.

A run that was ended, by whatever, goes on with --resume as if it had never stopped. A checkpoint is
written between two iterations, with the random numbers and the place in the data from which the
next one starts. `config` are the settings of the script, main.py or another one.
"""

import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import llms
import utils
from config import RunConfig
from evaluator import RewardEvaluator, get_evaluator, try_functions
from grpo import checkpoints, distributed, jsonl, metrics, report, weights
from grpo.rollout import Completion
from grpo.sampler import TorchSampler
from grpo.timer import StageTimer
from rl_datasets import DataLoader, default_eval_split, find_data_set, get_dataloaders
from utils import RunEnds

MAX_SKIPPED = 3  # iterations in a row without a finite gradient, which end a run
# What the console shows of a line of a log.
SHOWN = {
    "loss": ".4f",
    "reward": ".3f",
    "accuracy": ".1%",
    "accuracy_flexible": ".1%",
    "kl": ".4f",
    "response_length": ".1f",
    "grad_norm": ".3f",
}


@dataclass
class Run:
    """What a script trains with, and how far it has come."""

    config: RunConfig
    model: PreTrainedModel  # the policy, sharded where there are several processes
    tokenizer: PreTrainedTokenizerBase
    train_loader: DataLoader
    eval_loader: DataLoader
    evaluator: RewardEvaluator
    sampler: Any  # a TorchSampler, or with --sampler vllm a VLLMSampler
    base_model: PreTrainedModel | None  # the frozen reference, where there is one
    timer: StageTimer

    # Set by the script's `setup`.
    optimizer: torch.optim.Optimizer | None = None  # None for --eval_only, which saves nothing
    num_iterations: int = 0  # of the whole run
    solutions: list[Completion] = field(default_factory=list)  # to train on, where none are sampled

    # How far it has come.
    iteration: int = 0  # the last one, which the logs and the names of files call a step
    total_tokens: int = 0  # that were sampled, or where nothing is sampled, trained on
    saved: int | None = None  # the iteration of the newest checkpoint
    skipped_in_a_row: int = 0  # iterations that have skipped an update, up to now
    resume_point: dict = field(default_factory=dict)  # by `keep_resume_point`
    start: float = field(default_factory=time.perf_counter)  # minus what it took before a resume

    @classmethod
    def load(cls, config: RunConfig, with_reference: bool = False) -> "Run":
        """Model, data and rewards. Raises ValueError or OSError for what the user gave wrong."""
        utils.share_freed_memory()
        utils.seed_everything(config.seed)
        data_set = find_data_set(config.dataset_name)
        evaluator_names = config.evaluator or data_set.default_evaluator
        # Mistakes in the data or in a reward function are reported before a model is loaded.
        examples = data_set.read(config.eval_split, config.dataset_path)
        if examples:
            try_functions(evaluator_names, [examples[0], examples[-1]])
        model, tokenizer = llms.get_llm_tokenizer(
            config.model_name,
            config.device,
            train_dtype=config.train_dtype,
            gradient_checkpointing=config.gradient_checkpointing,
        )
        train_loader, eval_loader = get_dataloaders(
            config.dataset_name,
            tokenizer,
            prompt=config.prompt,
            dataset_path=config.dataset_path,
            max_prompt_length=config.max_prompt_length,
            seed=config.seed,
            eval_split=config.eval_split,
            eval_size=config.eval_size,
        )
        for split, loader in (("training", train_loader), (config.eval_split, eval_loader)):
            dropped = f", {loader.dropped} dropped as too long" if loader.dropped else ""
            print(f"{config.dataset_name}: {len(loader):,} {split} problems{dropped}")
        longest_prompt = max(train_loader.longest_prompt, eval_loader.longest_prompt)
        llms.check_positions(model, longest_prompt, config.max_completion_length)
        if config.sampler == "vllm":
            from grpo import vllm

            max_length = longest_prompt + config.max_completion_length
            sampler = vllm.VLLMSampler(model, tokenizer, config, max_length)
            sampler.check(model, [example["prompt"] for example in eval_loader.examples[:4]])
        else:
            sampler = TorchSampler(model, tokenizer, config)
        if config.lora_rank is not None:
            weights.add_adapters(model, config.lora_rank, config.seed)
        base_model = weights.get_base_model(model) if with_reference else None
        evaluator = get_evaluator(
            evaluator_names,
            own=data_set.default_evaluator,
            golds=[example["answer"] for example in train_loader.examples + examples],
            prompt=train_loader.prompt.name,
            config=config,
            frozen=lambda: (base_model or weights.get_base_model(model), tokenizer),
        )
        evaluator.check_gold(train_loader.examples + eval_loader.examples)
        if model.device.type == "cpu":
            utils.keep_freed_memory()  # loading has freed what it no longer needs
        return cls(
            config=config,
            model=weights.shard(model),
            tokenizer=tokenizer,
            train_loader=train_loader,
            eval_loader=eval_loader,
            evaluator=evaluator,
            sampler=sampler,
            base_model=base_model,
            timer=StageTimer(model.device),
        )

    # --- What an iteration does -------------------------------------------------------------------

    def iterations(self, evaluate_every: int, save_every: int) -> Iterator[int]:
        """The numbers of the iterations that are left; the caller makes and logs each of them.

        The model is evaluated before the first iteration, once every so many, and after the last
        one. It is saved in the same way, but not before the first. SIGINT and SIGTERM stop the run
        after an iteration.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, ask_to_stop)
        self.pause(evaluate_every, save_every)
        for iteration in tqdm(
            range(self.iteration + 1, self.num_iterations + 1),
            initial=self.iteration,
            total=self.num_iterations,
            unit="iteration",
            disable=None if distributed.is_main() else True,  # None: only on a terminal
        ):
            self.iteration = iteration
            yield iteration
            self.pause(evaluate_every, save_every)

    def pause(self, evaluate_every: int, save_every: int) -> None:
        """All: what comes between two iterations: an evaluation, a checkpoint, or the end."""
        self.keep_resume_point()
        is_last = self.iteration == self.num_iterations
        if (is_last or self.iteration % evaluate_every == 0) and not self.is_evaluated():
            self.evaluate()
        if self.iteration > 0 and (is_last or self.iteration % save_every == 0):
            checkpoints.save(self)
        signals = distributed.gather(list(_signals))  # that have come to any process
        if signals and not is_last:
            checkpoints.save(self)
            name = signal.Signals(signals[0]).name
            raise RunEnds(
                f"stopped by {name} after iteration {self.iteration}; --resume continues",
                exit_code=128 + signals[0],  # as a shell reports it: 130 for Ctrl-C
            )

    def keep_resume_point(self) -> None:
        """Keep what a checkpoint needs to go on from here, but for weights and optimiser.

        Until the next iteration moves the weights, it can be saved as if it had not begun.
        """
        self.resume_point = {
            "iteration": self.iteration,
            "skipped_in_a_row": self.skipped_in_a_row,
            "train_loader": self.train_loader.state_dict(),
            "rng": distributed.get_rng_state(),
        }

    def is_evaluated(self) -> bool:
        """All: whether the log has an evaluation of this step, as after a resume."""
        rows = jsonl.read_log(self.config.output_dir / "eval_log.jsonl")
        return distributed.from_main(self.iteration in [row["step"] for row in rows])

    def sample(
        self, examples: list[dict], num_samples: int, temperature: float
    ) -> list[Completion]:
        """num_samples consecutive completions of each example's prompt."""
        with tqdm(
            total=len(examples) * num_samples,
            desc="sampling",
            delay=10,
            leave=False,
            disable=None if distributed.is_main() else True,
        ) as bar:
            completions = self.sampler.sample(
                [example["prompt"] for example in examples],
                num_samples=num_samples,
                max_completion_length=self.config.max_completion_length,
                temperature=temperature,
                stop_strings=self.train_loader.prompt.stop_strings,
                progress=bar.update,
            )
        for i, completion in enumerate(completions):
            completion.example = examples[i // num_samples]
        return completions

    def reward(self, completions: list[Completion]) -> dict[str, float]:
        """All: give each completion its reward and what else the evaluator says of it.

        Returns the fraction of all processes' completions whose reward is missing. Where a process
        fails, the state from before this iteration is saved, and the run ends.
        """
        failures = []
        try:
            if completions:  # a process may have none
                totals, details = self.evaluator.score(
                    [completion.example for completion in completions],
                    [completion.text for completion in completions],
                    completion_ids=[completion.ids for completion in completions],
                )
                for i, completion in enumerate(completions):
                    completion.reward = totals[i]
                    completion.details = details[i]
        except RunEnds as error:
            failures = [str(error)]
        except Exception as error:  # the user's function may raise anything
            traceback.print_exc()
            failures = [f"the reward has failed with {error!r}"]
        failures = distributed.gather(failures)
        if failures:
            hint = ""
            if self.resume_point:  # not before training, nor with --eval_only
                checkpoints.save(self)
                hint = "; --resume continues from before that"
            distributed.barrier()  # a process that ends would take the others with it
            raise RunEnds(f"error: {failures[0]}{hint}")
        rewards = distributed.gather([completion.reward for completion in completions])
        return {"missing_rewards": sum(map(math.isnan, rewards)) / max(1, len(rewards))}

    def evaluate(self) -> None:
        """All: complete and reward every problem of the evaluation, and log what comes of it.

        It has random numbers of its own, so training goes on as if there had been none.
        """
        start = time.perf_counter()
        config = self.config
        examples = distributed.share(list(self.eval_loader))
        with utils.isolated_seed(distributed.process_seed(config.seed)):
            completions = self.sample(examples, config.eval_samples, config.eval_temperature)
            reward_metrics = self.reward(completions)
        records = distributed.gather([completion.record() for completion in completions])
        self.write_transcript("eval", records)
        row = metrics.evaluation_metrics(records, config.eval_samples) | reward_metrics
        row["time/total"] = time.perf_counter() - start
        self.write("eval", row)
        if distributed.is_main():
            for finding in report.findings(config.output_dir):
                tqdm.write(f"looks wrong: {finding}")

    def showing_tokens(self, completions: list[Completion]) -> AbstractContextManager:
        """Around an iteration's updates: in every tenth, record what they do to single tokens."""
        if find_spec("grpo.token_colours") is None:
            return nullcontext()
        from grpo import token_colours

        return token_colours.shown(self, completions)

    # --- Logs -------------------------------------------------------------------------------------

    def log_iteration(self, row: dict[str, float], completions: list[Completion]) -> None:
        """All: log an iteration of GRPO, of which each process has its own completions.

        `row` has the metrics of the updates and of the rewards, the same in every process.
        """
        records = [
            completion.record() | {"advantage": completion.advantage} for completion in completions
        ]
        records = distributed.gather(records)
        row = {"epoch": self.train_loader.state_dict()["epoch"]} | row
        row |= metrics.iteration_metrics(records, self.config.group_size)
        row["sampled_tokens"] = sum(record["length"] for record in records)
        self.write_transcript("rollouts", records)
        self.log_update(row, row["sampled_tokens"])
        if self.config.sampler == "vllm":
            from grpo import vllm

            vllm.end_if_other_logps(row.get("sampling_logp_gap", 0.0))  # 0: nothing was learnt

    def log_update(self, row: dict[str, float], num_tokens: int) -> None:
        """All: log an iteration, and end a run that has skipped its updates too often."""
        self.total_tokens += num_tokens
        self.write("train", row | self.timer.flush())
        self.skipped_in_a_row += 1
        if not row["skipped_updates"]:
            self.skipped_in_a_row = 0
        if self.skipped_in_a_row == MAX_SKIPPED:
            raise RunEnds(
                f"in {MAX_SKIPPED} iterations in a row an update was skipped, because its loss or"
                " gradient was not finite: the run has diverged; lower --learning_rate"
            )

    def write_transcript(self, folder: str, records: list[dict]) -> None:
        """Write rollouts/step_000010.jsonl or eval/step_000100.jsonl, whole or not at all."""
        if distributed.is_main():
            name = f"step_{self.iteration:06d}.jsonl"
            jsonl.write(self.config.output_dir / folder / name, records)

    def write(self, log: str, row: dict[str, float]) -> None:
        """Write a line of train_log.jsonl or eval_log.jsonl, and print its main numbers."""
        if not distributed.is_main():
            return
        row = {"step": self.iteration} | row
        row["total_tokens"] = self.total_tokens
        row["elapsed"] = time.perf_counter() - self.start
        jsonl.append(self.config.output_dir / f"{log}_log.jsonl", row)
        if self.config.report_to != "none":
            from grpo import tracker

            tracker.send(self.config, log, row)

        title = f"step {self.iteration}/{self.num_iterations}"
        if log == "train" and self.iteration % 10 == 0 and not sys.stderr.isatty():
            # The progress bar says it on a terminal.
            seconds = row["elapsed"] / self.iteration * (self.num_iterations - self.iteration)
            title += f" ({timedelta(seconds=round(seconds))} left)"
        if log == "eval":
            split = self.config.eval_split
            title = f"evaluation at step {self.iteration} (n = {row['n']}, {split})"
        columns = [f"{name} {row[name]:{form}}" for name, form in SHOWN.items() if name in row]
        tqdm.write(" | ".join([title, *columns, f"{row['time/total']:.2f} s"]))


# --- From the command line to the exit code -------------------------------------------------------

_signals = []  # those that have asked this process to stop


def run_to_the_end(config: RunConfig, setup: Callable, train: Callable) -> int:
    """The life of a script: `setup(config)` gives the Run, and `train(config, run)` trains.

    Returns:
        the exit code. 0: the run is done. 1: it cannot go on. 2: something that the user gave is
        wrong. 130, 143: a signal stopped it. A bug has its traceback.
    """
    _signals.clear()
    lock = None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        distributed.init(config.device)
        config = resolve(config)
        lock = checkpoints.lock_directory(config)
        run = setup(config)
        if config.resume:
            checkpoints.resume(run)
        if distributed.is_main():
            checkpoints.write_args(run)
    except (ValueError, OSError, RunEnds) as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(10)  # the first process says the same, and torchrun then ends this one
        print(f"error: {str(error).removeprefix('error: ')}", file=sys.stderr)
        if lock is not None:
            lock.release()
        return 2
    exit_code = 0
    try:
        train(config, run)
        models = llms.finished_checkpoints(config.output_dir)
        model = f"the model is {models[max(models)]}; " if models else ""
        print(f"done: {model}plot it with python plotter.py --log_dir {config.output_dir}")
    except RunEnds as end:
        if distributed.is_main():
            print(end, file=sys.stderr)
        exit_code = end.exit_code
    lock.release()
    for number, handler in handlers.items():  # a notebook goes on
        signal.signal(number, handler)
    return distributed.finish(exit_code)


def resolve(config: RunConfig) -> RunConfig:
    """All: the settings with the defaults that depend on the machine or the data set filled in.

    They are those of the first process: --resume reads args.json, which other nodes may not see.
    """
    eval_split = config.eval_split or default_eval_split(config.dataset_name, config.dataset_path)
    device = llms.resolve_device(config.device)
    if config.train_dtype == "bfloat16" and not utils.has_bfloat16_products(device):
        raise ValueError("--train_dtype bfloat16: there are no bfloat16 products on this processor")
    default_tokens = 1024 if torch.device(device).type == "cpu" else 16384
    resolved = dict(
        model_name=llms.find_model(config.model_name),
        device=device,
        eval_split=eval_split,
        micro_batch_tokens=config.micro_batch_tokens or default_tokens,
    )
    return distributed.from_main(replace(config, **resolved))


def ask_to_stop(number: int, frame=None) -> None:
    """Note the signal, for the end of this iteration; a second one ends the process at once."""
    _signals.append(number)
    if distributed.is_main():
        print("stopping after this iteration", file=sys.stderr, flush=True)
    if distributed.world_size() == 1:  # torchrun hands on a SIGTERM that processes have got already
        signal.signal(number, signal.SIG_DFL)
