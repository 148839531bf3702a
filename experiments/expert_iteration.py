"""Expert iteration: sample, keep what is right, fine-tune on it, repeat (arXiv:2203.14465).

    python experiments/expert_iteration.py --model_name tiny/1m --dataset_name arithmetic

Each of the --n_ei_steps steps draws --num_questions questions (D_b in the handout of CS336), and
samples --group_size completions of each (G). It keeps the strictly correct ones, and trains on them
for --epochs epochs (E) with sft.fine_tune. `entropy` is that at the trained tokens, and
`sample_entropy` estimates that at all sampled tokens.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import ExpertIterationConfig, parse  # noqa: E402

if __name__ == "__main__":
    parse(ExpertIterationConfig)  # --help and mistakes are answered before the slow imports

import sft  # noqa: E402
from grpo import distributed, weights  # noqa: E402
from grpo.run import Run, run_to_the_end  # noqa: E402
from main import get_optimizer  # noqa: E402


def setup(config: ExpertIterationConfig) -> Run:
    if distributed.world_size() > 1:
        raise ValueError("expert iteration runs as one process: start it with python")
    run = Run.load(config)
    run.train_loader.next_batch(0)  # draws nothing, but raises if there is no training split
    run.optimizer = get_optimizer(run.model)
    run.num_iterations = config.n_ei_steps
    return run


def train(config: ExpertIterationConfig, run: Run) -> None:
    """config.n_ei_steps times: sample, keep the strictly correct, fine-tune on them, evaluate."""
    for ei_step in run.iterations(config.eval_ei_steps, config.eval_ei_steps):
        questions = run.train_loader.next_batch(config.num_questions)
        with run.timer("sample"):
            completions = run.sample(questions, config.group_size, config.temperature)
        with run.timer("reward"):
            run.reward(completions)
        records = [completion.record() for completion in completions]
        run.write_transcript("rollouts", ei_step, records)

        num_right = 0
        solutions = []
        logps = []
        for completion in completions:
            logps += completion.sampled_logps
            is_right = completion.details["correct_strict"]
            num_right += is_right
            if is_right and completion.finished:  # one that was cut has no end
                example = completion.example
                encoded = sft.encode(run.tokenizer, example["prompt"], completion.text, example)
                solutions.append(encoded)
        print(f"expert iteration {ei_step}: {len(solutions)} of {len(completions)} are kept")
        sampled = {
            "ei_step": ei_step,
            "kept": len(solutions),
            "accuracy": num_right / len(completions),
            # The mean of -log p over sampled tokens estimates their mean entropy.
            "sample_entropy": -sum(logps) / len(logps),
        }
        run.total_tokens += len(logps)
        if not solutions:
            continue
        num_updates = max(1, config.epochs * len(solutions) // config.train_batch_size)
        updates = sft.fine_tune(
            run.model,
            solutions,
            config,
            num_updates=num_updates,
            seed=config.seed + ei_step,
            optimizer=run.optimizer,
        )
        for _ in range(num_updates):
            with run.timer("loss_and_update"):
                row = next(updates)
            del row["tokens"]  # those that are sampled are counted
            run.log_update(row | sampled, num_tokens=0)
        weights.refresh_sampler(run.sampler, run.model)


def main(argv: list[str] | None = None) -> int:
    return run_to_the_end(parse(ExpertIterationConfig, argv), setup, train)


if __name__ == "__main__":
    sys.exit(main())
