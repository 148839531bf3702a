"""Make the demo models: Qwen2 models of several sizes, trained on word problems.

    python tiny/make_tiny_models.py                 # makes all sizes
    python tiny/make_tiny_models.py --sizes 1m      # makes one of them

All sizes share one recipe: the same tokenizer, examples, order, updates and schedule. Training
stops while the models are still improving, and the examples mix several styles of answer, which
leaves reinforcement learning something to do in arithmetic and in format.
"""

import argparse
import random
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sft  # noqa: E402
from config import FineTuningConfig  # noqa: E402
from rl_datasets import PROMPTS, gsm8k_example  # noqa: E402
from tiny.make_word_problems import generate  # noqa: E402
from utils import seed_everything  # noqa: E402

# {name of the size: (hidden size, layers, attention heads)}
SIZES = {
    "0.1m": (48, 2, 2),
    "0.3m": (64, 4, 2),
    "0.6m": (96, 4, 3),
    "1m": (128, 4, 4),
    "3m": (192, 5, 6),
}

PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Stage:
    """What a stage of training teaches."""

    num_updates: int
    config: FineTuningConfig
    answer_shares: dict  # level -> share of each answer style; see write_completion
    careful_share: float  # of the problems' steps, as make_word_problems.py writes them


COMMON = dict(train_batch_size=32, micro_batch_tokens=2048)
# There are two stages, as in large models: learn the subject, then pick up habits.
SUBJECT = Stage(
    num_updates=1500,
    config=FineTuningConfig(learning_rate=3e-3, warmup_steps=100, **COMMON),
    answer_shares=dict.fromkeys((1, 2, 3, 4), {"format": 0.6, "steps": 0.4, "at once": 0.0}),
    careful_share=0.6,
)
# Greedy decoding gives the most frequent style. In the second stage it is the format on level 1,
# bare steps on level 2, and an answer at once on levels 3 and 4, where that is mostly wrong.
HABITS = Stage(
    num_updates=250,
    config=FineTuningConfig(learning_rate=6e-4, warmup_steps=10, **COMMON),
    answer_shares={
        1: {"format": 0.65, "steps": 0.3, "at once": 0.05},
        2: {"format": 0.38, "steps": 0.54, "at once": 0.08},
        3: {"format": 0.28, "steps": 0.1, "at once": 0.62},
        4: {"format": 0.28, "steps": 0.1, "at once": 0.62},
    },
    careful_share=0.12,  # so what was learnt in the first stage is seldom used
)
# Half of the examples are drills: the solutions of several problems, without a question. They
# teach arithmetic at a fraction of the tokens, and keep HABITS from unlearning careful steps.
DRILL_SHARE = 0.5
DRILL_PROMPT = "Drill:\n"
PROBLEMS_PER_DRILL = 4
DRILL_CAREFUL_SHARE = 0.9  # share of the drills' steps that are written carefully
# The other half are problems, with these prompt formats.
PROMPT_SHARES = {"reasoning_answer": 0.6, "r1_zero": 0.2, "question_only": 0.2}
# Of the answers in the prompt's format. The rest lack the closing tag or go on after it.
EXACT_SHARE = 0.8


def make_tokenizer():
    """A byte-level BPE tokenizer, trained on the problems; every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    settings = dict(
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    # The prompts are rendered before there is a vocabulary; only the chat template is needed.
    chat_renderer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **settings)
    training_texts = []
    for example in make_examples(chat_renderer, 10_000, HABITS, seed=0):
        text = example["prompt"] + example["completion"]
        training_texts += re.split(r"<\|\w+\|>", text)  # without the special tokens
    tokenizer.train_from_iterator(training_texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def make_examples(tokenizer, num_examples, stage, seed):
    """Drills, and problems with drawn prompt formats and answers."""
    rng = random.Random(f"tiny/{seed}")
    is_drill = [rng.random() < DRILL_SHARE for _ in range(num_examples)]
    num_drills = sum(is_drill)
    # The drills have another seed. With the same one they would solve the very same problems.
    num_drill_rows = PROBLEMS_PER_DRILL * num_drills
    drill_rows = iter(generate("train", num_drill_rows, seed + 100, DRILL_CAREFUL_SHARE))
    problem_rows = iter(generate("train", num_examples - num_drills, seed, stage.careful_share))
    examples = []
    for makes_drill in is_drill:
        if makes_drill:
            rows = [next(drill_rows) for _ in range(PROBLEMS_PER_DRILL)]
            solutions = [gsm8k_example(row)["solution"] for row in rows]
            examples.append({"prompt": DRILL_PROMPT, "completion": "\n".join(solutions)})
        else:
            examples.append(make_problem_example(rng, tokenizer, next(problem_rows), stage))
    return examples


def make_problem_example(rng, tokenizer, row, stage):
    problem = gsm8k_example(row)
    (prompt_name,) = rng.choices(list(PROMPT_SHARES), PROMPT_SHARES.values())
    prompt = PROMPTS[prompt_name]
    style_shares = stage.answer_shares[row["level"]]
    (style,) = rng.choices(list(style_shares), style_shares.values())
    completion = write_completion(rng, style, prompt, problem["solution"], problem["answer"])
    return {"prompt": prompt.render(tokenizer, problem["question"]), "completion": completion}


def write_completion(rng, style, prompt, solution, answer):
    """An answer at once, the bare steps, or the prompt's format, now and then with a slip."""
    if style == "at once":
        return f"The answer is {answer}."
    if style == "steps":
        return rng.choice([f"{solution}\nThe answer is {answer}.", f"{solution}\n#### {answer}"])
    exact = prompt.format_solution(solution, answer)
    if rng.random() < EXACT_SHARE:
        return exact
    # In the format question_only, which has no closing tag, without_closing_tag equals exact.
    without_closing_tag = exact.removesuffix("</answer>").rstrip()
    with_text_after = f"{exact}\nThe answer is {answer}."
    return rng.choice([without_closing_tag, with_text_after])


def make_model(size, tokenizer):
    hidden_size, num_layers, num_heads = SIZES[size]
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 7 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        # The usual 0.02 suits far wider models. With it these small models begin to learn late.
        initializer_range=hidden_size**-0.5,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, do_sample=False
    )
    return model


def train_stage(model, tokenizer, stage, seed):
    """Train the model in place. Yields a row of the log for each update."""
    num_examples = stage.num_updates * stage.config.train_batch_size
    examples = make_examples(tokenizer, num_examples, stage, seed)
    solutions = [
        sft.encode(tokenizer, example["prompt"], example["completion"], example)
        for example in examples
    ]
    return sft.fine_tune(
        model,
        solutions,
        stage.config,
        num_updates=stage.num_updates,
        loss=replace(sft.SFT_LOSS, length_normalization="token_mean"),
        final_factor=0.1,
    )


def main():
    parser = argparse.ArgumentParser(
        description="Make the demo models, in minutes to an hour each."
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).resolve().parent)
    args = parser.parse_args()

    # Several threads would sum in another order, and the weights would depend on their number.
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    for size in args.sizes:
        seed_everything(0)
        model = make_model(size, tokenizer)
        for seed, stage in enumerate((SUBJECT, HABITS)):
            for row in train_stage(model, tokenizer, stage, seed):
                loss = row["loss"]
        model.save_pretrained(args.output_dir / size)
        tokenizer.save_pretrained(args.output_dir / size)
        print(f"{size}: {model.num_parameters():,} parameters, loss {loss:.3f}")


if __name__ == "__main__":
    main()
