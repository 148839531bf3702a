"""Prompts, and the data sets `arithmetic`, `gsm8k`, `math` and `creative`.

An example is a plain dict with these keys:

    id         data set, split and row, such as "gsm8k/train/0"
    question   the text of the problem
    answer     the gold answer
    solution   worked steps, without the line of the answer
    prompt     the question in a prompt format, special tokens included: tokenize it with
               add_special_tokens=False
    level, subject   of the problem, if the data set has them

An example has every other column of its row too, for evaluators that take `examples`. Where a row
has a column of one of the names above, the example has what is said here.
"""

import random
from abc import ABC, abstractmethod
from pathlib import Path

from jinja2 import TemplateError

from data import word_problems
from data.rows import (
    gsm8k_example,
    math_example,
    read_folder,
    read_hub,
    text_of,
    with_other_columns,
)

SYSTEM_PROMPT = """\
Solve the problem. Respond in this form:
<reasoning>
your steps
</reasoning>
<answer>
only the final answer
</answer>"""

R1_ZERO_PROMPT = (
    "A conversation between User and Assistant. The User asks a question. The Assistant first "
    "reasons, then gives the User the final answer, in this form: <think> the reasoning </think> "
    "<answer> the answer </answer>.\nUser: "
)


class Prompt(ABC):
    """A format of prompt and completion.

    A question is joined to the prompt's text. str.format is not used, because it would give the
    braces of LaTeX a meaning.
    """

    name: str
    # In plain text, prefix and suffix stand directly before and after the question.
    prefix = ""
    suffix = ""
    # Sampling ends at the EOS, and after any of these strings, which stays in the completion.
    stop_strings: tuple[str, ...] = ()

    def render(self, tokenizer, question: str) -> str:
        """The text of the prompt, with its special tokens.

        It is a chat if the prompt format has messages and the tokenizer has a chat template, and
        plain text otherwise.
        """
        messages = self.messages(question)
        if messages is None or not tokenizer.chat_template:
            return f"{bos_text(tokenizer)}{self.prefix}{question}{self.suffix}"
        return render_chat(tokenizer, messages)

    @abstractmethod
    def format_solution(self, solution: str, answer: str) -> str:
        """The completion, without EOS, that gives this solution and answer in this format."""

    def messages(self, question: str) -> list[dict] | None:
        """The chat before any template, as an OpenAI-compatible endpoint takes it.

        None for a format of plain text.
        """
        return None


class ReasoningAnswer(Prompt):
    """A chat whose system prompt asks for tags; plain text without a chat template."""

    name = "reasoning_answer"
    prefix = f"{SYSTEM_PROMPT}\n\n"
    suffix = "\n"

    def messages(self, question: str) -> list[dict]:
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]

    def format_solution(self, solution: str, answer: str) -> str:
        return f"<reasoning>\n{solution}\n</reasoning>\n<answer>\n{answer}\n</answer>"


class R1Zero(Prompt):
    """Plain text for a base model, with the prompt of DeepSeek-R1-Zero (arXiv:2501.12948)."""

    name = "r1_zero"
    prefix = R1_ZERO_PROMPT
    suffix = "\nAssistant: <think>"
    stop_strings = ("</answer>",)

    def format_solution(self, solution: str, answer: str) -> str:
        return f"\n{solution}\n</think> <answer>{answer}</answer>"


class QuestionOnly(Prompt):
    """The bare question; the answer is boxed."""

    name = "question_only"
    suffix = "\n"

    def format_solution(self, solution: str, answer: str) -> str:
        return f"{solution}\nThe answer is \\boxed{{{answer}}}."


class Story(Prompt):
    """A chat that asks for a story of one paragraph.

    Without a chat template the prompt is the opening line alone, which the model continues.
    """

    name = "story"
    task = (
        "Continue this opening line into a short story of one paragraph. "
        "Do not repeat the line, and write nothing but the story."
    )
    stop_strings = ("\n",)  # the end of the paragraph

    def messages(self, question: str) -> list[dict]:
        return [{"role": "user", "content": f"{self.task}\n\n{question}"}]

    def format_solution(self, solution: str, answer: str) -> str:
        return solution


def bos_text(tokenizer) -> str:
    """The BOS token as text if the tokenizer itself puts it before a text, and otherwise nothing.

    Some tokenizers also put an EOS after a text. It is left out here, since a prompt goes on.
    """
    ids = tokenizer("")["input_ids"]
    starts_with_bos = bool(ids) and ids[0] == tokenizer.bos_token_id
    return tokenizer.bos_token if starts_with_bos else ""


def render_chat(tokenizer, messages: list[dict]) -> str:
    """A chat, rendered by the tokenizer's template.

    If the template takes no system role, the system's text opens the user's turn.

    Raises:
        ValueError: The template fails with a system message and also without one, or it leaves out
            the system's text.
    """
    first_text = messages[0]["content"]  # the system's, if there is a system message
    all_text = "\n\n".join(message["content"] for message in messages)
    single_turn = [{"role": "user", "content": all_text}]
    for chat in (messages, single_turn):
        try:
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
        else:
            if first_text.strip() in text:
                return text
            reason = "it leaves out the system's text"
    raise ValueError(
        f"the tokenizer's chat template fails ({reason}): use --prompt r1_zero or question_only"
    )


PROMPTS = {
    "reasoning_answer": ReasoningAnswer(),
    "r1_zero": R1Zero(),
    "question_only": QuestionOnly(),
    "story": Story(),
}


class DataLoader(ABC):
    """One split of a data set, with its prompts rendered.

    A subclass says in `load` where the examples come from.

    Attributes:
        examples: the examples whose prompts are short enough, in the data set's order.
        dropped: how many prompts were longer than max_prompt_length, and are left out.
        longest_prompt: number of tokens of the longest prompt in `examples`.
        source: the folder or the name of the data set, for messages.
    """

    name: str
    default_evaluator: str
    default_prompt: str
    splits: tuple[str, ...] = ("train", "test")  # the splits that exist without --dataset_path

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
        """
        Args:
            split: "train", "validation" or "test".
            prompt: the Prompt that renders the questions.
            dataset_path: a folder with splits, instead of the data set's own source.
            max_prompt_length: in tokens; examples with longer prompts are left out.
            seed: of the order in which next_batch gives the examples.
            size: keep a subset of this many examples, which is the same for every seed, tokenizer
                and prompt. None keeps all.

        Raises:
            ValueError: There is no such split, a row is wrong, or every prompt is too long.
            OSError: The hub cannot be reached.
        """
        self.split = split
        self.prompt = prompt
        self.seed = seed
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
                f"all {self.dropped} prompts of {self.source} ({split}) are longer than "
                f"{max_prompt_length} tokens; raise --max_prompt_length"
            )
        self.load_state_dict({"epoch": 0, "position": 0})

    @classmethod
    @abstractmethod
    def load(cls, split: str, dataset_path: str | None) -> list[dict]:
        """Examples without id and prompt, in a fixed order.

        The list is empty for the training split of a folder that holds only test data.
        """

    @classmethod
    def check_split(cls, split: str) -> None:
        """Raise ValueError if the data set itself, without a folder, has no such split."""
        if split not in cls.splits:
            raise ValueError(
                f"--eval_split {split}: {cls.name} has no such split; "
                "to use one, give a folder that contains it by --dataset_path"
            )

    @classmethod
    def read(cls, split: str, dataset_path: str | None = None) -> list[dict]:
        """Every example of the split, with its id.

        The prompts are not rendered, so no tokenizer is needed.

        Raises:
            ValueError: There is no such split, or a row is wrong.
            OSError: The hub cannot be reached.
        """
        if not dataset_path:
            cls.check_split(split)
        examples = cls.load(split, dataset_path)
        return [example | {"id": f"{cls.name}/{split}/{i}"} for i, example in enumerate(examples)]

    def next_batch(self, num_examples: int) -> list[dict]:
        """The next examples of an endless stream; every epoch is a shuffle of all examples.

        The shuffle depends on the seed and the epoch alone. No example comes twice within an epoch.
        A batch may reach over the end of an epoch, or of several, into the next.

        Raises:
            ValueError: This is the training split of a folder that holds only test data.
        """
        if not self.examples:
            raise ValueError(
                f"{self.source} has no {self.split} split, only test data: it can only be evaluated"
            )
        batch = []
        while len(batch) < num_examples:
            if self.position == len(self.examples):
                self.load_state_dict({"epoch": self.epoch + 1, "position": 0})
            num_missing = num_examples - len(batch)
            indices = self.order[self.position : self.position + num_missing]
            batch += [self.examples[i] for i in indices]
            self.position += len(indices)
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where the stream of next_batch stands, for a checkpoint."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the stream where state_dict says.

        Raises:
            ValueError: The position is past the last example.
        """
        self.epoch = state["epoch"]
        self.position = state["position"]
        if self.position > len(self.examples):
            raise ValueError(
                f"cannot resume at example {self.position} of {self.source}: "
                f"it has {len(self.examples)}"
            )
        self.order = list(range(len(self.examples)))
        random.Random(f"{self.seed}/{self.epoch}").shuffle(self.order)

    def __len__(self):
        return len(self.examples)

    def __iter__(self):
        return iter(self.examples)


class ArithmeticLoader(DataLoader):
    """Generated word problems.

    Their solutions give the result of every step at once (`33 * 4 = 132`), without easier steps
    between. Two problems of the same family in different splits never have the same numbers.
    """

    name = "arithmetic"
    default_evaluator = "gsm8k"
    default_prompt = "reasoning_answer"
    splits = word_problems.SPLITS
    sizes = {"train": 10_000, "validation": 2_000, "test": 2_000}

    @classmethod
    def load(cls, split: str, dataset_path: str | None) -> list[dict]:
        if dataset_path:
            raise ValueError("the data set 'arithmetic' is generated; leave --dataset_path out")
        rows = word_problems.generate(split, cls.sizes[split])
        examples = []
        for number, row in enumerate(rows, start=1):
            example = gsm8k_example(row, f"arithmetic, row {number}")
            example["level"] = row["level"]
            examples.append(example)
        return examples


class GSM8kLoader(DataLoader):
    """The official train and test splits, 7,473 and 1,319 problems."""

    name = "gsm8k"
    default_evaluator = "gsm8k"
    default_prompt = "reasoning_answer"

    @classmethod
    def load(cls, split: str, dataset_path: str | None) -> list[dict]:
        if dataset_path:
            rows = read_folder(dataset_path, split)
        else:
            rows = read_hub("openai/gsm8k", ["main"], split)
        return [with_other_columns(gsm8k_example(row, location), row) for location, row in rows]


class MathLoader(DataLoader):
    """Competition problems (MATH).

    The hub has its 7,500 training problems, and MATH-500, which is 500 of its 5,000 test problems.
    """

    name = "math"
    default_evaluator = "math"
    default_prompt = "r1_zero"
    subjects = [
        "algebra",
        "counting_and_probability",
        "geometry",
        "intermediate_algebra",
        "number_theory",
        "prealgebra",
        "precalculus",
    ]

    @classmethod
    def load(cls, split: str, dataset_path: str | None) -> list[dict]:
        if dataset_path:
            rows = read_folder(dataset_path, split)
        elif split == "train":
            rows = read_hub("EleutherAI/hendrycks_math", cls.subjects, split)
        else:
            rows = read_hub("HuggingFaceH4/MATH-500", ["default"], split)
        return [with_other_columns(math_example(row, location), row) for location, row in rows]


class CreativeLoader(DataLoader):
    """Opening lines of stories, without a gold answer. A row needs only the column `opening`.

    The repository carries 80 lines for training and 20 for testing.
    """

    name = "creative"
    default_evaluator = "creative"
    default_prompt = "story"

    @classmethod
    def load(cls, split: str, dataset_path: str | None) -> list[dict]:
        folder = dataset_path or Path(__file__).parent / "data" / "opening_lines"
        examples = []
        for location, row in read_folder(folder, split):
            opening_line = text_of(row, "opening", location).strip()
            example = {"question": opening_line, "answer": "", "solution": ""}
            examples.append(with_other_columns(example, row))
        return examples


DATASETS = {
    "arithmetic": ArithmeticLoader,
    "gsm8k": GSM8kLoader,
    "math": MathLoader,
    "creative": CreativeLoader,
}


def get_dataloaders(
    name: str,
    tokenizer,
    *,
    eval_split: str,
    prompt: str | None = None,
    dataset_path: str | None = None,
    max_prompt_length: int = 512,
    seed: int = 0,
    eval_size: int | None = None,
) -> tuple[DataLoader, DataLoader]:
    """The loaders of the training split and of the split that is evaluated.

    Args:
        name: a name in DATASETS.
        eval_split: "validation" or "test".
        prompt: a name in PROMPTS; by default the data set's own.
        dataset_path: a folder with splits as .jsonl or .parquet, instead of the hub.
        max_prompt_length: in tokens; examples with longer prompts are left out.
        seed: of the order of the training examples.
        eval_size: evaluate a fixed subset of this many examples; None evaluates all.

    Raises:
        ValueError: A name is unknown, there is no such split, a row is wrong, or every prompt is
            too long.
        OSError: The hub cannot be reached.
    """
    if name not in DATASETS:
        raise ValueError(f"{name} is no data set; use one of {', '.join(DATASETS)}")
    loader_class = DATASETS[name]
    prompt_name = prompt or loader_class.default_prompt
    if prompt_name not in PROMPTS:
        raise ValueError(f"{prompt_name} is no prompt format; use one of {', '.join(PROMPTS)}")
    options = {
        "prompt": PROMPTS[prompt_name],
        "dataset_path": dataset_path,
        "max_prompt_length": max_prompt_length,
        "seed": seed,
    }
    train_loader = loader_class("train", tokenizer, **options)
    eval_loader = loader_class(eval_split, tokenizer, size=eval_size, **options)
    return train_loader, eval_loader


def default_eval_split(name: str, dataset_path: str | None) -> str:
    """The validation split if the data set itself has one, and otherwise the test split.

    Without a validation split, the best checkpoint is chosen by its accuracy on the test problems,
    and this same accuracy is reported.
    """
    has_validation = name in DATASETS and "validation" in DATASETS[name].splits
    return "validation" if has_validation and not dataset_path else "test"


def _fixed_subset(examples, size):
    """`size` examples in their order; a larger subset holds the smaller one."""
    indices = list(range(len(examples)))
    random.Random("evaluation subset").shuffle(indices)
    return [examples[i] for i in sorted(indices[:size])]


def _drop_long(examples, tokenizer, max_length):
    """The examples with short enough prompts, and the length of the longest of them in tokens."""
    if not examples:
        return [], 0
    prompts = [example["prompt"] for example in examples]
    token_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    short_examples = []
    longest = 0
    for example, ids in zip(examples, token_ids, strict=True):
        if len(ids) <= max_length:
            short_examples.append(example)
            longest = max(longest, len(ids))
    return short_examples, longest
