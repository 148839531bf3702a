"""Expert iteration: sample, keep what is right, fine-tune on it, repeat (arXiv:2203.14465).

    python experiments/expert_iteration.py --model_name tiny/1m --dataset_name arithmetic

Each of the --n_ei_steps steps draws --num_questions questions (D_b in the handout of CS336), and
samples --group_size completions of each (G). It keeps the strictly correct ones, trains on them
for --epochs epochs (E) with sft.fine_tune, and once every --eval_ei_steps it evaluates and saves.
Logs and checkpoints have the same format as in the other scripts. The entropy at the trained tokens
and the tokens sampled so far are logged, so that plotter.py can lay them beside those of SFT and
GRPO. `sample_entropy` estimates the entropy at all sampled tokens, which GRPO logs as `entropy`.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import ExpertIterationConfig, parse  # noqa: E402

if __name__ == "__main__":
    parse(ExpertIterationConfig)  # --help and mistakes are answered before the slow imports

import llms  # noqa: E402
import sft  # noqa: E402
from main import get_optimizer  # noqa: E402
from training import completions, write_logs  # noqa: E402
from training.loop import iterations  # noqa: E402
from training.records import make_records  # noqa: E402
from training.run import Run, run_to_the_end  # noqa: E402
from training.setup import load  # noqa: E402
from utils import repeat_each  # noqa: E402


def setup(config: ExpertIterationConfig) -> Run:
    """Model, data and evaluator, from the flags.

    Raises ValueError or OSError for a wrong flag, or for a file that is wrong or missing.
    """
    run = load(config)
    run.train_loader.next_batch(0)  # draws nothing, but raises if there is no training split
    example = run.train_loader.examples[0]
    completions.strict_verdicts(completions.reward(run.evaluator, [example], [""]))
    run.optimizer = get_optimizer(run.model, config)
    run.num_iterations = config.n_ei_steps
    return run


def train(config: ExpertIterationConfig, run: Run) -> None:
    """config.n_ei_steps times: sample, keep the strictly correct, fine-tune on them, evaluate."""
    for ei_step in iterations(config, run, config.eval_ei_steps, config.eval_ei_steps):
        questions = run.train_loader.next_batch(config.num_questions)
        rollout = completions.sample(config, run, questions, config.group_size, config.temperature)
        examples = repeat_each(questions, config.group_size)
        rewards = completions.reward(run.evaluator, examples, rollout.texts)
        is_correct = completions.strict_verdicts(rewards)
        correct_examples = []
        for row, example in enumerate(examples):
            if is_correct[row] and rollout.finished[row]:  # a completion that was cut has no end
                completion = rollout.texts[row]
                correct_examples.append({"prompt": example["prompt"], "completion": completion})
        print(
            f"expert iteration {ei_step} of {run.num_iterations}: {len(correct_examples)} of"
            f" {len(examples)} completions are right and kept"
        )
        records = make_records(run.evaluator, examples, rollout, rewards)
        write_logs.write_transcript(config, "rollouts", ei_step, records)

        accuracy = sum(is_correct) / len(examples)
        # The mean of -log p over sampled tokens is an unbiased estimate of their mean entropy.
        logps_of_tokens = rollout.sampled_logps[rollout.completion_mask.bool()]
        sample_entropy = -logps_of_tokens.mean().item()
        log = []
        if correct_examples:
            log = fine_tune_on_correct(config, run, correct_examples, ei_step)
        for step, row in enumerate(log, run.step + 1):
            row["step"] = step
        run.finish_iteration(num_tokens=int(rollout.lengths.sum()), num_steps=len(log))
        for row in log:
            row["ei_step"] = ei_step
            row["kept"] = len(correct_examples)
            row["accuracy"] = accuracy  # of the sampled completions
            row["sample_entropy"] = sample_entropy
            row["total_tokens"] = run.total_tokens
            write_logs.append(config, "train_log.jsonl", row)
        llms.refresh_sampler(run.sampler, run.model)


def fine_tune_on_correct(
    config: ExpertIterationConfig, run: Run, examples: list[dict], ei_step: int
) -> list[dict]:
    """Supervised fine-tuning on the kept completions of one expert iteration; returns its log."""
    log = []
    for row in sft.fine_tune(
        run.model,
        run.tokenizer,
        examples,
        config,
        num_updates=max(1, config.epochs * len(examples) // config.train_batch_size),
        seed=config.seed + ei_step,
        optimizer=run.optimizer,
    ):
        del row["tokens"]  # those that are sampled are logged
        log.append(row | {"elapsed": time.perf_counter() - run.start})
    return log


def main(argv: list[str] | None = None) -> int:
    return run_to_the_end(parse(ExpertIterationConfig, argv), setup, train, several_processes=False)


if __name__ == "__main__":
    sys.exit(main())
