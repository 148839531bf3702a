"""Expert iteration: sample, keep what is right, fine-tune on it, repeat (arXiv:2203.14465).

    python experiments/expert_iteration.py --model_name tiny/1m --dataset_name arithmetic

Each of the --n_ei_steps iterations draws --num_questions questions (D_b in the handout of CS336),
and samples --group_size completions of each (G). It keeps the strictly correct ones, and trains on
them for --epochs epochs (E) with sft.fine_tune. In the logs, which have a row for each iteration,
`entropy` is that at the trained tokens, and `sample_entropy` estimates that at all sampled tokens.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import FineTuningConfig, LossConfig, RunConfig, again, parse, setting


@dataclass(frozen=True)
class ExpertIterationConfig(FineTuningConfig):
    """Train a language model by expert iteration."""

    n_ei_steps: int = setting(5, "Expert iterations.", title="iterations", may_change=True)
    num_questions: int = setting(512, "Questions of each expert iteration (D_b).")
    epochs: int = setting(
        1,
        "Passes over the completions that an expert iteration keeps (E). What does not fill a last"
        " batch of --train_batch_size is left out, unless it is the only one.",
    )
    eval_ei_steps: int = setting(
        1, "Evaluate and save every N expert iterations and after the last.", may_change=True
    )
    group_size: int = again(LossConfig, "group_size")
    warmup_steps: int = setting(0, "Updates of warm-up in each expert iteration.", zero=True)
    output_dir: Path = again(RunConfig, "output_dir", Path("output/expert_iteration"))


if __name__ == "__main__":
    parse(ExpertIterationConfig)  # --help and mistakes are answered before the slow imports

from tqdm import tqdm

import sft
from grpo import distributed
from grpo.metrics import average
from grpo.run import Run, run_to_the_end
from main import get_optimizer


def setup(config: ExpertIterationConfig) -> Run:
    if distributed.world_size() > 1:
        raise ValueError("expert iteration runs as one process: start it with python")
    run = Run.load(config)
    run.train_loader.next_batch(0)  # draws nothing, but raises if there is no training split
    run.optimizer = get_optimizer(run.model)
    run.num_iterations = config.n_ei_steps
    return run


def train(config: ExpertIterationConfig, run: Run) -> None:
    """Sample, keep the strictly correct, fine-tune on them, and so on, config.n_ei_steps times."""
    for iteration in run.iterations(config.eval_ei_steps, config.eval_ei_steps):
        questions = run.train_loader.next_batch(config.num_questions)
        with run.timer("sample"):
            completions = run.sample(questions, config.group_size, temperature=1.0)
        with run.timer("reward"):
            run.reward(completions)
        run.write_transcript("rollouts", [completion.record() for completion in completions])

        num_right = 0
        solutions = []
        logps = []
        for completion in completions:
            logps += completion.sampled_logps
            is_right = completion.details["correct_strict"]
            num_right += is_right
            if is_right and completion.finished:  # one that was cut has no end
                completion.advantage = 1.0
                solutions.append(completion)
        print(f"expert iteration {iteration}: {len(solutions)} of {len(completions)} are kept")

        updates = []
        if solutions:
            num_updates = max(1, config.epochs * len(solutions) // config.train_batch_size)
            fine_tuning = sft.fine_tune(
                run.model,
                solutions,
                config,
                num_updates=num_updates,
                seed=config.seed + iteration,
                optimizer=run.optimizer,
            )
            with run.timer("loss_and_update"):
                updates = list(tqdm(fine_tuning, "updates", num_updates, leave=False, delay=10))
            run.sampler.refresh(run.model)
        row = {"skipped_updates": 0} | average(updates)
        for of_a_single_update in ("examples", "tokens"):
            row.pop(of_a_single_update, None)
        row |= {
            "updates": len(updates),
            "kept": len(solutions),
            "accuracy": num_right / len(completions),
            # The mean of -log p over sampled tokens estimates their mean entropy.
            "sample_entropy": -sum(logps) / len(logps),
        }
        run.log_update(row, num_tokens=len(logps))


def main(argv: list[str] | None = None) -> int:
    return run_to_the_end(parse(ExpertIterationConfig, argv), setup, train)


if __name__ == "__main__":
    sys.exit(main())
