"""Prompts and data: how a question becomes a prompt, and the data sets `arithmetic`, `gsm8k`, `math` and `creative`.

An example is a plain dict: id, question, answer (gold), solution (worked steps, without the answer line), prompt
(rendered: tokenize it with add_special_tokens=False), and where the data has them level and subject.
"""

import random
from abc import ABC, abstractmethod
from pathlib import Path

from jinja2 import TemplateError

from data import word_problems
from data.rows import gsm8k_example, math_example, read_folder, read_hub, text_of

SYSTEM_PROMPT = """\
Solve the problem. Respond in this form:
<reasoning>
your steps
</reasoning>
<answer>
only the final answer
</answer>"""

R1_ZERO_PROMPT = """\
A conversation between User and Assistant. The User asks a question. The Assistant first reasons, then gives the User \
the final answer, in this form: <think> the reasoning </think> <answer> the answer </answer>.
User: """


class Prompt(ABC):
    """A form of prompt and answer. Questions are joined to it, never formatted into it, so that braces survive."""

    name: str
    before, after = "", ""  # what stands around the question in plain text
    stop_strings: tuple[
        str, ...
    ] = ()  # generation ends after any of these, which stays in the text; always at EOS

    def render(self, tokenizer, question: str) -> str:
        """The text of the prompt, with its special tokens: a chat where form and tokenizer have one, else plain."""
        messages = self.messages(question)
        if messages is None or not tokenizer.chat_template:
            return f"{opening(tokenizer)}{self.before}{question}{self.after}"
        return render_chat(tokenizer, messages)

    @abstractmethod
    def format_solution(self, solution: str, answer: str) -> str:
        """The completion, without EOS, that gives this solution and answer in this form."""

    def messages(self, question: str) -> list[dict] | None:
        """The chat before its template, which an OpenAI-compatible endpoint takes; None for a form of plain text."""
        return None


class ReasoningAnswer(Prompt):
    """A chat whose system prompt asks for the tags; plain text where the tokenizer has no chat template."""

    name = "reasoning_answer"
    before, after = f"{SYSTEM_PROMPT}\n\n", "\n"

    def messages(self, question: str) -> list[dict]:
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]

    def format_solution(self, solution: str, answer: str) -> str:
        return f"<reasoning>\n{solution}\n</reasoning>\n<answer>\n{answer}\n</answer>"


class R1Zero(Prompt):
    """Plain text for a base model, after the prompt of DeepSeek-R1-Zero (arXiv 2501.12948, table 1)."""

    name = "r1_zero"
    before, after = R1_ZERO_PROMPT, "\nAssistant: <think>"
    stop_strings = ("</answer>",)

    def format_solution(self, solution: str, answer: str) -> str:
        return f"\n{solution}\n</think> <answer>{answer}</answer>"


class QuestionOnly(Prompt):
    """The bare question; the answer is boxed."""

    name, after = "question_only", "\n"

    def format_solution(self, solution: str, answer: str) -> str:
        return f"{solution}\nThe answer is \\boxed{{{answer}}}."


class Story(Prompt):
    """A chat that asks for a one-paragraph story; without a chat template the opening line alone, to be continued."""

    name = "story"
    task = (
        "Continue this opening line into a short story of one paragraph. Do not repeat the line, and write nothing but"
        " the story."
    )
    stop_strings = ("\n",)  # the end of the paragraph

    def messages(self, question: str) -> list[dict]:
        return [{"role": "user", "content": f"{self.task}\n\n{question}"}]

    def format_solution(self, solution: str, answer: str) -> str:
        return solution


def opening(tokenizer) -> str:
    """What the tokenizer itself puts before a text: its BOS, or nothing; never the EOS that some put behind it."""
    ids = tokenizer("")["input_ids"]
    return tokenizer.bos_token if ids and ids[0] == tokenizer.bos_token_id else ""


def render_chat(tokenizer, messages: list[dict]) -> str:
    """A chat by its template; where that takes no system role, its text opens the user's turn. Raises ValueError."""
    system = messages[0]["content"]
    folded = [{"role": "user", "content": "\n\n".join(message["content"] for message in messages)}]
    for chat in (messages, folded):
        try:
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
        else:
            if system.strip() in text:
                return text
            reason = "it leaves out the system's text"
    raise ValueError(
        f"the tokenizer's chat template fails ({reason}): take --prompt r1_zero or question_only"
    )


PROMPTS = {prompt.name: prompt for prompt in (ReasoningAnswer(), R1Zero(), QuestionOnly(), Story())}


class DataLoader(ABC):
    """One split of a data set, with its prompts rendered. A subclass says where the examples come from, in `load`.

    split: "train", "validation" or "test". size: keep a fixed subset, the same for every seed, tokenizer and prompt.
    Prompts of more than `max_prompt_length` tokens are left out and counted in `dropped`; ValueError where all are.
    """

    name: str
    default_evaluator: str
    default_prompt: str
    splits: tuple[str, ...] = ("train", "test")  # what it has without --dataset_path

    def __init__(
        self,
        split,
        tokenizer,
        prompt,
        *,
        dataset_path=None,
        max_prompt_length=512,
        seed=0,
        size=None,
    ):
        self.split, self.prompt, self.seed = split, prompt, seed
        self.source = dataset_path or self.name
        examples = self.read(split, dataset_path)
        if size is not None:
            examples = _fixed_subset(examples, size)
        for example in examples:
            example["prompt"] = prompt.render(tokenizer, example["question"])
        self.examples, self.longest_prompt = _drop_long(examples, tokenizer, max_prompt_length)
        self.dropped = len(examples) - len(self.examples)
        if self.dropped and not self.examples:
            raise ValueError(
                f"all {self.dropped} prompts of {self.source} ({split}) are longer than {max_prompt_length} tokens; "
                "raise --max_prompt_length"
            )
        self.load_state_dict({"epoch": 0, "position": 0})

    @classmethod
    @abstractmethod
    def load(cls, split: str, dataset_path: str | None) -> list[dict]:
        """Example dicts without id and prompt, in a fixed order; empty where there is no such training split."""

    @classmethod
    def check_split(cls, split: str) -> None:
        """Raise ValueError where the data set itself has no such split."""
        if split not in cls.splits:
            raise ValueError(
                f"--eval_split {split}: {cls.name} has no such split; a folder can (--dataset_path)"
            )

    @classmethod
    def read(cls, split: str, dataset_path: str | None = None) -> list[dict]:
        """Every example of the split, without its prompt: this needs no tokenizer. Raises ValueError."""
        if not dataset_path:
            cls.check_split(split)
        return [
            {"id": f"{cls.name}/{split}/{i}", **row}
            for i, row in enumerate(cls.load(split, dataset_path))
        ]

    def next_batch(self, n: int) -> list[dict]:
        """The next `n` examples of an endless stream: each epoch is a shuffle by (seed, epoch) of all examples.

        No example comes twice within an epoch; a batch may reach over the end of one (or several) into the next.
        """
        if not self.examples:
            raise ValueError(
                f"{self.source} has no {self.split} split, only test data: it can only be evaluated"
            )
        batch = []
        while len(batch) < n:
            if self.position == len(self.examples):
                self.load_state_dict({"epoch": self.epoch + 1, "position": 0})
            indices = self.order[self.position : self.position + n - len(batch)]
            batch += [self.examples[i] for i in indices]
            self.position += len(indices)
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        if self.position > len(self.examples):
            raise ValueError(
                f"cannot resume at example {self.position} of {self.source}: it has {len(self.examples)}"
            )
        self.order = list(range(len(self.examples)))
        random.Random(f"{self.seed}/{self.epoch}").shuffle(self.order)

    def __len__(self):
        return len(self.examples)

    def __iter__(self):
        return iter(self.examples)


class ArithmeticLoader(DataLoader):
    """Generated word problems; the splits share no operands, and the solutions write every step directly."""

    name, default_evaluator, default_prompt = "arithmetic", "gsm8k", "reasoning_answer"
    splits, sizes = word_problems.SPLITS, {"train": 10_000, "validation": 2_000, "test": 2_000}

    @classmethod
    def load(cls, split: str, dataset_path: str | None) -> list[dict]:
        if dataset_path:
            raise ValueError("the data set 'arithmetic' is generated; leave --dataset_path out")
        rows = word_problems.generate(split, cls.sizes[split])
        return [
            gsm8k_example(row, f"arithmetic, row {i}") | {"level": row["level"]}
            for i, row in enumerate(rows, 1)
        ]


class GSM8kLoader(DataLoader):
    """The official train and test splits, 7,473 and 1,319 problems."""

    name, default_evaluator, default_prompt = "gsm8k", "gsm8k", "reasoning_answer"

    @classmethod
    def load(cls, split: str, dataset_path: str | None) -> list[dict]:
        rows = (
            read_folder(dataset_path, split)
            if dataset_path
            else read_hub("openai/gsm8k", ["main"], split)
        )
        return [gsm8k_example(row, where) for where, row in rows]


class MathLoader(DataLoader):
    """From the hub: the 7,500 official training problems of MATH, and MATH-500 (500 of its 5,000 test problems)."""

    name, default_evaluator, default_prompt = "math", "math", "r1_zero"
    subjects = "algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra precalculus"

    @classmethod
    def load(cls, split: str, dataset_path: str | None) -> list[dict]:
        if dataset_path:
            rows = read_folder(dataset_path, split)
        elif split == "train":
            rows = read_hub("EleutherAI/hendrycks_math", cls.subjects.split(), split)
        else:
            rows = read_hub("HuggingFaceH4/MATH-500", ["default"], split)
        return [math_example(row, where) for where, row in rows]


class CreativeLoader(DataLoader):
    """Opening lines of stories, 80 and 20 of our own; a row needs only `opening`. There is no gold answer."""

    name, default_evaluator, default_prompt = "creative", "creative", "story"

    @classmethod
    def load(cls, split: str, dataset_path: str | None) -> list[dict]:
        rows = read_folder(dataset_path or Path(__file__).parent / "data" / "opening_lines", split)
        return [
            {"question": text_of(row, "opening", where).strip(), "answer": "", "solution": ""}
            for where, row in rows
        ]


DATASETS = {
    loader.name: loader for loader in (ArithmeticLoader, GSM8kLoader, MathLoader, CreativeLoader)
}


def get_dataloaders(
    name: str,
    tokenizer,
    *,
    prompt: str | None = None,
    dataset_path: str | None = None,
    max_prompt_length: int = 512,
    seed: int = 0,
    eval_split: str | None = None,
    eval_size: int | None = None,
) -> tuple[DataLoader, DataLoader]:
    """(train_loader, eval_loader). Raises ValueError, and OSError where the hub cannot be reached.

    prompt: a name in PROMPTS, by default the data set's own, as is eval_split, "validation" or "test". eval_size: how
    many of its examples, a fixed subset. dataset_path: a folder with splits as .jsonl or .parquet, instead of the hub.
    """
    prompt = prompt or DATASETS[name].default_prompt
    same = {"dataset_path": dataset_path, "max_prompt_length": max_prompt_length, "seed": seed}
    train_loader = DATASETS[name]("train", tokenizer, PROMPTS[prompt], **same)
    split = eval_split or default_eval_split(name, dataset_path)
    return train_loader, DATASETS[name](split, tokenizer, PROMPTS[prompt], size=eval_size, **same)


def default_eval_split(name: str, dataset_path: str | None) -> str:
    """Validation, where the data set itself has it, else test: its best checkpoint is then chosen on test."""
    return (
        "validation"
        if name in DATASETS and "validation" in DATASETS[name].splits and not dataset_path
        else "test"
    )


def _fixed_subset(examples, size):
    indices = list(range(len(examples)))
    random.Random("evaluation subset").shuffle(indices)
    return [examples[i] for i in sorted(indices[:size])]


def _drop_long(examples, tokenizer, max_length):
    """The examples whose prompts are short enough, and the tokens of the longest of these."""
    prompts = [example["prompt"] for example in examples]
    lengths = (
        [len(ids) for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"]]
        if prompts
        else []
    )
    kept = [
        example for example, length in zip(examples, lengths, strict=True) if length <= max_length
    ]
    return kept, max((length for length in lengths if length <= max_length), default=0)
