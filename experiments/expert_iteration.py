"""Expert iteration (arXiv:2203.14465, CS336 assignment 5): sample, keep what is right, fine-tune on it, repeat.

    python experiments/expert_iteration.py --model_name tiny/1m --dataset_name arithmetic --num_questions 256

Each of --n_ei_steps steps draws D_b questions and G completions of each, keeps the strictly right ones, trains on them
for E epochs with sft.train, and evaluates. The logs are those of any run; the entropy at the trained tokens and the
sampled tokens so far are columns, so that plotter.py overlays them with SFT and GRPO.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flags  # noqa: E402
import llms  # noqa: E402
import main as grpo  # noqa: E402
import runs  # noqa: E402
import sft  # noqa: E402
import utils  # noqa: E402
from evaluator import get_evaluator  # noqa: E402
from rl_datasets import get_dataloaders  # noqa: E402


def parse_args(argv=None):
    parser = utils.ArgumentParser(description="Expert iteration.")
    add = parser.add_argument
    add("--model_name", default="Qwen/Qwen2-0.5B-Instruct", help="hub name or directory with safetensors weights")
    add("--dataset_name", default="gsm8k")
    add("--dataset_path", help="folder with train and test as .jsonl or .parquet, instead of the hub")
    add("--evaluator", help="default: the data set's own")
    add("--prompt", help="form of prompt and answer (default: the data set's own)")
    add("--max_prompt_length", type=int, default=512, help="tokens")
    add("--max_completion_length", type=int, default=512, help="tokens")
    add("--n_ei_steps", type=int, default=5, help="expert iterations")
    add("--num_questions", type=int, default=512, help="D_b, questions per step")
    add("--group_size", type=int, default=8, help="G, completions per question")
    add("--temperature", type=float, default=1.0, help="of sampling")
    add("--epochs", type=int, default=1, help="E, passes over the kept completions of a step")
    add("--train_batch_size", type=int, default=32, help="examples per optimiser step")
    add("--micro_batch_tokens", type=int, default=16384, help="padded tokens per pass")
    add("--learning_rate", type=float, default=1e-5, help="peak of each step's fine-tuning")
    add("--eval_size", type=int, help="test problems, a fixed random subset (default: all)")
    add("--output_dir", type=Path, default=Path("output/expert_iteration"))
    add("--max_concurrent_sequences", type=int, default=512, help="sampled at a time")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    # What the rooms below read beside: greedy evaluation, one sample a problem, no resumption.
    vars(args).update(eval_temperature=0.0, eval_samples=1, eval_only=True, resume=False)
    return args


def setup(args):
    """Model, data and evaluator, from the flags. Raises ValueError or OSError for what a user got wrong."""
    flags.check_numbers(args)
    flags.check_names(args)
    runs.check_output_dir(args)
    utils.seed_everything(args.seed)
    model, tokenizer = llms.get_llm_tokenizer(args.model_name, args.device)
    shared = {
        name: getattr(args, name) for name in ("prompt", "dataset_path", "max_prompt_length", "seed", "eval_size")
    }
    train_loader, test_loader = get_dataloaders(args.dataset_name, tokenizer, **shared)
    flags.check_lengths(args, model, train_loader, test_loader)
    name = args.evaluator or train_loader.default_evaluator
    return SimpleNamespace(
        model=model, sampler=llms.get_sampler(model), tokenizer=tokenizer, train_loader=train_loader,
        test_loader=test_loader, evaluator=get_evaluator(name, prompt=train_loader.prompt.name),
        interrupts=runs.Interrupts(), optimizer=sft.get_optimizer(model), step=0, total_tokens=0,
        start=time.perf_counter(),
    )  # fmt: skip


def expert_iteration(args, run):
    """n_ei_steps times: sample, keep the strictly correct, fine-tune on them, evaluate."""
    run.updates = 0
    save_evaluation(args, run)
    for ei_step in range(1, args.n_ei_steps + 1):
        questions = run.train_loader.next_batch(args.num_questions)
        rollout = grpo.sample(args, run, questions, args.group_size, args.temperature)
        repeated = [question for question in questions for _ in range(args.group_size)]
        rewards = grpo.reward(run.evaluator, repeated, rollout)
        run.total_tokens += int(rollout.lengths.sum())
        kept = [
            {"prompt": example["prompt"], "completion": text}
            for example, text, detail in zip(repeated, rollout.texts, rewards.details, strict=True)
            if detail["correct_strict"]
        ]
        records = runs.completion_records(run.evaluator, repeated, rollout, rewards)
        utils.write_jsonl(args.output_dir / "rollouts" / f"step_{ei_step:06d}.jsonl", records)
        print(f"expert iteration {ei_step}: {len(kept)} of {len(repeated)} completions are right and kept")
        if kept:
            num_updates = max(1, args.epochs * len(kept) // args.train_batch_size)
            log = sft.train(
                run.model, run.tokenizer, kept, num_updates=num_updates, train_batch_size=args.train_batch_size,
                micro_batch_tokens=args.micro_batch_tokens, learning_rate=args.learning_rate, warmup_steps=0,
                log_entropy=True, seed=args.seed + ei_step, optimizer=run.optimizer,
            )  # fmt: skip
            for row in log:
                run.updates += 1
                extra = {"step": run.updates, "ei_step": ei_step, "kept": len(kept), "total_tokens": run.total_tokens}
                utils.append_jsonl(args.output_dir / "train_log.jsonl", row | extra)
        llms.refresh_sampler(run.sampler, run.model)
        save_evaluation(args, run)
    run.model.save_pretrained(args.output_dir / "model")
    run.tokenizer.save_pretrained(args.output_dir / "model")


def save_evaluation(args, run):
    run.step = run.updates
    runs.save_evaluation(args, run, *grpo.evaluate(args, run))


def main(argv=None):
    return runs.run_to_the_end(parse_args(argv), setup, expert_iteration)


if __name__ == "__main__":
    sys.exit(main())
