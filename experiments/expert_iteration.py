"""Expert iteration (arXiv:2203.14465, CS336 assignment 5): sample, keep what is right, fine-tune on it, repeat.

    python experiments/expert_iteration.py --model_name tiny/1m --dataset_name arithmetic --num_questions 256

Each of --n_ei_steps steps draws D_b questions and G completions of each, keeps the strictly right ones, trains on them
for E epochs with sft.fine_tune, evaluates and saves. The logs and checkpoints are those of any run; the entropy at the
trained tokens and the sampled tokens so far are columns, so that plotter.py overlays them with SFT and GRPO.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flags  # noqa: E402
import llms  # noqa: E402
import main as grpo  # noqa: E402
import sft  # noqa: E402
from training import write_logs  # noqa: E402
from training.run import Run, run_to_the_end, save_checkpoint  # noqa: E402


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = flags.ArgumentParser(description="Expert iteration.")
    flags.add_model_and_data(parser)
    flags.add_sampling(parser, ("--num_questions", 512, "D_b, questions per step"))
    add = flags.add_optimisation(parser)
    add("--n_ei_steps", type=int, default=5, help="expert iterations")
    add("--epochs", type=int, default=1, help="E, passes over the kept completions of a step")
    add("--train_batch_size", type=int, default=32, help="examples per optimiser step")
    add(
        "--learning_rate",
        type=float,
        default=1e-5,
        help="peak of each step's fine-tuning, followed by a cosine to 0",
    )
    flags.add_evaluation_and_output(parser, "output/expert_iteration")
    flags.add_runtime(parser)
    parser.set_defaults(warmup_steps=0)
    return flags.parse(parser, argv)


def setup(args: argparse.Namespace) -> Run:
    """Model, data and evaluator, from the flags. Raises ValueError or OSError for what a user got wrong."""
    run = grpo.load(args)
    run.optimizer = sft.get_optimizer(run.model, args.weight_decay)
    return run


def train(args: argparse.Namespace, run: Run) -> None:
    """n_ei_steps times: sample, keep the strictly correct, fine-tune on them, evaluate."""
    llms.refresh_sampler(run.sampler, run.model)  # a resumed policy is not the one that was loaded
    if run.evaluated_step != run.step:
        grpo.evaluate(args, run)
    while run.ei_step < args.n_ei_steps:
        ei_step = run.ei_step + 1
        questions = run.train_loader.next_batch(args.num_questions)
        rollout = grpo.sample(args, run, questions, args.group_size, args.temperature)
        repeated = [question for question in questions for _ in range(args.group_size)]
        rewards = grpo.reward(run.evaluator, repeated, rollout)
        kept = [
            {"prompt": example["prompt"], "completion": text}
            for example, text, detail in zip(repeated, rollout.texts, rewards.details, strict=True)
            if detail["correct_strict"]
        ]
        print(
            f"expert iteration {ei_step}: {len(kept)} of {len(repeated)} completions are right and kept"
        )

        run.interrupts.hold()  # once the weights move, a step is finished before the run may stop
        run.total_tokens += int(rollout.lengths.sum())
        records = write_logs.completion_records(run.evaluator, repeated, rollout, rewards)
        write_logs.transcript(args, "rollouts", ei_step, records)
        if kept:
            log = sft.fine_tune(
                run.model,
                run.tokenizer,
                kept,
                num_updates=max(1, args.epochs * len(kept) // args.train_batch_size),
                train_batch_size=args.train_batch_size,
                micro_batch_tokens=args.micro_batch_tokens,
                learning_rate=args.learning_rate,
                warmup_steps=args.warmup_steps,
                max_grad_norm=args.max_grad_norm,
                log_entropy=True,
                seed=args.seed + ei_step,
                optimizer=run.optimizer,
                start_time=run.start,
            )
            for row in log:
                run.step += 1
                extra = {
                    "step": run.step,
                    "ei_step": ei_step,
                    "kept": len(kept),
                    "total_tokens": run.total_tokens,
                }
                write_logs.append(args, "train_log.jsonl", row | extra)
        run.ei_step = ei_step
        run.mark()
        llms.refresh_sampler(run.sampler, run.model)
        run.interrupts.release()
        if kept:  # else the model is the one that was evaluated before
            grpo.evaluate(args, run)
        save_checkpoint(args, run)


def main(argv: list[str] | None = None) -> int:
    return run_to_the_end(parse_args(argv), setup, train, several=False)


if __name__ == "__main__":
    sys.exit(main())
