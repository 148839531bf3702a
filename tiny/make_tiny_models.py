"""Make the demo models: a tokenizer and Qwen2-architecture models of several sizes, trained on word problems.

All sizes share one recipe: the same tokenizer, examples, order, updates and schedule rule. Training stops while the
models are still improving, and the examples mix several forms of answer, so that a model starts imperfect both in
arithmetic and in format: reinforcement learning has something to do.

    python tiny/make_tiny_models.py                 # all sizes
    python tiny/make_tiny_models.py --sizes 1m      # one of them
    python main.py --eval_only --model_name tiny/1m --dataset_name arithmetic --eval_split test  # measured
"""

import argparse
import json
import random
import re
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sft  # noqa: E402
from data.word_problems import generate  # noqa: E402
from rl_datasets import PROMPTS, gsm8k_example  # noqa: E402
from utils import seed_everything  # noqa: E402

# hidden size, layers, attention heads; the MLP is 3.5 times as wide as the hidden size
SIZES = {"0.1m": (48, 2, 2), "0.3m": (64, 4, 2), "1m": (128, 4, 4), "3m": (192, 5, 6)}

VOCAB_SIZE = 512
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Two stages, as large models have: learn the subject, then pick up habits. Each is (settings of sft.fine_tune; by level
# how many answers have the prompt's form, show their steps without the form, or stand at once, without steps; how many
# of the problems' steps are careful). Greedy decoding follows the majority, which habits change with the level: the
# form on level 1, bare steps on level 2, an answer at once, which is mostly wrong, on levels 3 and 4. Careful steps are
# a skill that is learnt well and then seldom used.
COMMON = dict(train_batch_size=32, micro_batch_tokens=2048, length_normalization="token_mean")
SUBJECT = (
    dict(
        num_updates=1500, learning_rate=3e-3, final_learning_rate=3e-4, warmup_steps=100, **COMMON
    ),
    dict.fromkeys((1, 2, 3, 4), (0.6, 0.4, 0.0)),
    0.6,
)
HABITS = (
    dict(num_updates=250, learning_rate=6e-4, final_learning_rate=6e-5, warmup_steps=10, **COMMON),
    {1: (0.65, 0.3, 0.05), 2: (0.38, 0.54, 0.08), 3: (0.28, 0.1, 0.62), 4: (0.28, 0.1, 0.62)},
    0.12,
)
# Half of the examples are drills: the solutions of several problems without a question, which teach arithmetic at a
# fraction of the tokens; without them the habits would unlearn careful steps. The others are problems, with these
# prompts:
DRILL_SHARE, DRILL_PROMPT, DRILL_PROBLEMS, DRILL_CAREFUL = 0.5, "Drill:\n", 4, 0.9
PROMPT_SHARES = {"reasoning_answer": 0.6, "r1_zero": 0.2, "question_only": 0.2}
# Of those in the prompt's form, how many have it exactly; the rest have a slip.
EXACT_SHARE = 0.8


def make_tokenizer():
    """A byte-level BPE tokenizer, trained on the problems' own text, that gives every digit a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    template = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE
    )
    texts = (
        e["prompt"] + e["completion"] for e in make_examples(template, 10_000, *HABITS[1:], seed=0)
    )
    special = re.compile("|".join(re.escape(token) for token in (PAD, START, END)))
    tokenizer.train_from_iterator(
        (piece for text in texts for piece in special.split(text)), trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def make_examples(tokenizer, n, answer_shares, careful, seed):
    """`n` training examples: drills, and problems with a prompt and an answer form drawn from the mixture."""
    rng = random.Random(f"tiny/{seed}")
    is_drill = [rng.random() < DRILL_SHARE for _ in range(n)]
    drills = iter(generate("train", DRILL_PROBLEMS * sum(is_drill), seed + 100, DRILL_CAREFUL))
    rows = iter(generate("train", n - sum(is_drill), seed, careful))
    examples = []
    for drill in is_drill:
        if drill:
            solutions = [
                gsm8k_example(next(drills), "drill")["solution"] for _ in range(DRILL_PROBLEMS)
            ]
            examples.append({"prompt": DRILL_PROMPT, "completion": "\n".join(solutions)})
            continue
        row = next(rows)
        problem = gsm8k_example(row, "problem")
        prompt = PROMPTS[rng.choices(list(PROMPT_SHARES), PROMPT_SHARES.values())[0]]
        kind = rng.choices(("form", "steps", "at once"), answer_shares[row["level"]])[0]
        completion = write_completion(rng, kind, prompt, problem["solution"], problem["answer"])
        examples.append(
            {"prompt": prompt.render(tokenizer, problem["question"]), "completion": completion}
        )
    return examples


def write_completion(rng, kind, prompt, solution, answer):
    """The solution in the prompt's form, now and then with a slip, or its bare steps, or the answer at once."""
    if kind == "at once":
        return f"The answer is {answer}."
    if kind == "steps":
        return rng.choice([f"{solution}\nThe answer is {answer}.", f"{solution}\n#### {answer}"])
    exact = prompt.format_solution(solution, answer)
    if rng.random() < EXACT_SHARE:
        return exact
    never_closed, goes_on = (
        exact.removesuffix("</answer>").rstrip(),
        f"{exact}\nThe answer is {answer}.",
    )
    return rng.choice([never_closed, goes_on])


def make_model(size, tokenizer):
    hidden, layers, heads = SIZES[size]
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=hidden**-0.5,  # the usual 0.02 is for models far wider, and learns late
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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--seed", type=int, default=0, help="of weights, examples and their order")
    args = parser.parse_args()

    torch.set_num_threads(
        1
    )  # more threads add in another order, and the weights would depend on the machine's cores
    tokenizer = make_tokenizer()
    stages = []
    for number, (recipe, *shares) in enumerate((SUBJECT, HABITS)):
        n = recipe["num_updates"] * recipe["train_batch_size"]
        stages.append((recipe, make_examples(tokenizer, n, *shares, args.seed + number)))
    for size in args.sizes:
        start = time.perf_counter()
        seed_everything(args.seed)
        model = make_model(size, tokenizer)
        log = []
        for recipe, examples in stages:
            log += sft.fine_tune(model, tokenizer, examples, seed=args.seed, **recipe)
        seconds = time.perf_counter() - start
        model.save_pretrained(args.output_dir / size)
        tokenizer.save_pretrained(args.output_dir / size)
        losses = json.dumps(
            [round(row["loss"], 5) for row in log[:20]]
        )  # what making it again should give
        (args.output_dir / size / "losses.json").write_text(f"{losses}\n", encoding="utf-8")
        print(f"{size}: {model.num_parameters():,} parameters, {seconds:.0f} s")


if __name__ == "__main__":
    main()
