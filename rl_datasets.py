"""Prompts, and the data sets `arithmetic`, `gsm8k`, `math` and `creative`."""

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import NotRequired, TypedDict, get_type_hints

from jinja2 import TemplateError

from data import word_problems
from evaluator import last_boxed, to_number
from grpo import jsonl


class Example(TypedDict):
    """A problem, with every other column of its row for evaluators that take `examples`."""

    question: str
    answer: str  # the gold answer
    solution: str  # worked steps, without the line of the answer
    level: NotRequired[int | None]
    subject: NotRequired[str | None]
    id: NotRequired[str]  # data set, split and index, such as "gsm8k/train/0"
    file_and_row: NotRequired[str]  # where it comes from, for messages
    row: NotRequired[dict]  # every column as the data set has it, for reward functions
    prompt: NotRequired[str]  # with special tokens: tokenize it with add_special_tokens=False


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


# What a chat template writes for today's date. A run that is resumed or repeated on another day has
# the same prompts.
TEMPLATE_DATE = date(2025, 1, 1)


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
            text = f"{self.prefix}{question}{self.suffix}"
            start = bos_text(tokenizer)
            if text.startswith(" "):
                start = start.removesuffix(" ")
            return start + text
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
    """The special tokens, such as BOS, that the tokenizer itself puts before a text.

    Some tokenizers mark the first word of a text with a space, but not if special tokens stand
    before it; then a space follows here. Others put an EOS after a text. It is left out, since a
    prompt goes on.
    """
    encoding = tokenizer("a", return_special_tokens_mask=True)
    is_special = [*encoding["special_tokens_mask"], 0]  # an empty vocabulary gives no token at all
    num_special_tokens = is_special.index(0)
    special_ids = encoding["input_ids"][:num_special_tokens]
    special_tokens = "".join(tokenizer.convert_ids_to_tokens(special_ids))
    expected_ids = special_ids + tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in (special_tokens, f"{special_tokens} "):
        if tokenizer(f"{start}a", add_special_tokens=False)["input_ids"] == expected_ids:
            return start
    return special_tokens


def render_chat(tokenizer, messages: list[dict]) -> str:
    """A chat, rendered by the tokenizer's template.

    If the template takes no system role, the system's text opens the user's turn.

    Raises:
        ValueError: With a system message and also without one, the template fails or leaves out a
            message's text.
    """
    template = fixed_date_template(tokenizer)
    texts = [message["content"] for message in messages]
    single_turn = [{"role": "user", "content": "\n\n".join(texts)}]
    for chat in (messages, single_turn):
        try:
            rendered = tokenizer.apply_chat_template(
                chat, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
        else:
            if all(text.strip() in rendered for text in texts):
                return rendered
            reason = "it leaves out a message, or changes its text"
    raise ValueError(
        f"the chat template of {tokenizer.name_or_path} fails ({reason}): use another model, or"
        " --prompt r1_zero or question_only"
    )


def fixed_date_template(tokenizer) -> str:
    """The tokenizer's chat template, with TEMPLATE_DATE in place of today's date.

    A macro of the template takes the place of the function that would give the time.
    """
    template = tokenizer.get_chat_template()
    if "strftime_now" not in template:
        return template
    filters = ""
    for directive in sorted(set(re.findall(r"%-?[A-Za-z]", template))):  # such as %d or %Y
        filters += f" | replace({directive!r}, {TEMPLATE_DATE.strftime(directive)!r})"
    macro = "{% macro strftime_now(format) %}{{ format" + filters + " }}{% endmacro +%}"
    return macro + template


def render_prompts(prompt: Prompt, tokenizer, examples: list[dict]) -> list[str]:
    """The prompt of each example. Raises ValueError for a special token in a question."""
    check_special_tokens(tokenizer, examples, "question")
    return [prompt.render(tokenizer, example["question"]) for example in examples]


def check_special_tokens(tokenizer, examples: list[dict], column: str) -> None:
    """Raise ValueError, with its place, for a text that would end a turn, or begin another."""
    tokens = [
        re.escape(token.content)
        for token in tokenizer.added_tokens_decoder.values()
        if token.special and len(token.content) > 1  # some tokenizers pad with a space
    ]
    if not tokens:
        return
    special_token = re.compile("|".join(tokens))
    for example in examples:
        found = special_token.search(example[column])
        if found:
            place = example.get("file_and_row") or example.get("id")
            raise ValueError(
                f"{place}: the {column} holds {found[0]}, a special token of the model; change it"
            )


PROMPTS = {
    "reasoning_answer": ReasoningAnswer(),
    "r1_zero": R1Zero(),
    "question_only": QuestionOnly(),
    "story": Story(),
}


# --- Rows -----------------------------------------------------------------------------------------


def find_files(folder: str | Path, split: str) -> list[Path]:
    """The data files of a split in a folder.

    They are named `split`.jsonl or `split`.parquet, or `split`-00000-of-00002.parquet and so on. A
    folder with a single data file of another name holds only test data: that file is the test
    split, and the training split has no files.

    Raises:
        ValueError: There is no such folder or split, a shard is missing, or versions are mixed.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f"--dataset_path {folder} is not a folder; "
            "it should hold train and test .jsonl or .parquet"
        )
    paths = sorted(folder.iterdir())
    data_files = [path for path in paths if path.suffix.lower() in (".jsonl", ".parquet")]
    # A file that cannot be read here, such as train.json, is not passed over.
    name_of_split = rf"{split}(-\d+-of-.+)?\.(jsonl?|parquet|csv)(\.gz)?"
    files = [path for path in paths if re.fullmatch(name_of_split, path.name, re.IGNORECASE)]
    if files:
        stems = [path.stem for path in files]
        shards = [f"{split}-{i:05}-of-{len(files):05}" for i in range(len(files))]
        has_all_shards = all(map(str.startswith, stems, shards))  # some names end in a checksum
        if set(files) <= set(data_files) and (stems == [split] or has_all_shards):
            return files
    elif split == "train":
        return []
    elif split == "test" and len(data_files) == 1:
        stem = data_files[0].stem.lower()
        is_other_split = stem.startswith(("train", "validation"))
        is_shard = "-of-" in stem
        if not is_other_split and not is_shard:
            return data_files
    file_names = [path.name for path in paths]
    raise ValueError(
        f"{folder} needs {split}.jsonl with one JSON object a line, or {split}.parquet, or all "
        f"shards of one version (found: {', '.join(file_names[:10]) or 'nothing'})"
    )


def read_folder(folder: str | Path, split: str) -> dict[Path, list[dict]]:
    """The rows of a split in a folder, by file.

    Raises:
        ValueError: find_files fails, or a file is empty or cannot be read.
    """
    rows_by_file = {}
    for path in find_files(folder, split):
        read = read_parquet if path.suffix.lower() == ".parquet" else jsonl.read
        rows = read(path)
        if not rows:
            raise ValueError(f"{path} is empty")
        rows_by_file[path] = rows
    return rows_by_file


def read_parquet(path: Path) -> list[dict]:
    """The rows of a parquet file. Raises ValueError if it cannot be read."""
    import pyarrow.parquet  # these imports take a second, which other data sets need not wait

    try:
        return pyarrow.parquet.ParquetFile(path).read().to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: cannot be read as parquet ({reason})") from error


def read_hub(name: str, configs: list[str], split: str) -> dict[str, Iterable[dict]]:
    """The rows of a data set of the Hugging Face hub, by configuration.

    Raises:
        OSError: The hub cannot be reached, or has no such data set.
    """
    import datasets

    try:
        return {
            f"{name} {config} {split}": datasets.load_dataset(name, config, split=split)
            for config in configs
        }
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise OSError(
            f"cannot load {name} from the hub ({reason}); give a local folder by --dataset_path"
        ) from error


def make_examples(rows_by_source: dict, make_example: Callable[[dict], dict]) -> list[Example]:
    """The example of each row, with the other columns of the row.

    Raises:
        ValueError: A row is wrong. The message names it.
    """
    examples = []
    for source, rows in rows_by_source.items():
        for number, row in enumerate(rows, start=1):
            location = f"{source}, row {number}"
            try:
                example = make_example(row)
            except ValueError as error:
                raise ValueError(f"{location}: {error}; see README.md, Your own data") from error
            check_example(example, location)
            other_columns = {name: row[name] for name in row if name not in COLUMN_TYPES}
            examples.append(other_columns | example | {"file_and_row": location, "row": row})
    return examples


COLUMN_TYPES = get_type_hints(Example)
EXAMPLE_IN_WORDS = (
    "question, answer and solution must be text, level a whole number or None, and subject text"
    " or None"
)


def check_example(example: Example, location: str) -> None:
    """Raise ValueError if a column is missing, has another type, or cannot be encoded."""
    if not isinstance(example, dict):
        raise ValueError(f"{location} cannot be {example!r}: it is a dict, and {EXAMPLE_IN_WORDS}")
    for column, column_type in COLUMN_TYPES.items():
        if column not in example and column in Example.__optional_keys__:
            continue
        if column not in example:
            raise ValueError(f"{location}: {column!r} is missing; {EXAMPLE_IN_WORDS}")
        value = example[column]
        if not isinstance(value, column_type):
            raise ValueError(f"{location}: {column!r} cannot be {value!r}; {EXAMPLE_IN_WORDS}")
        if isinstance(value, str) and not can_be_encoded(value):
            raise ValueError(f"{location}: {column!r} has half of a character in {value!r}")


def can_be_encoded(text: str) -> bool:
    """False if it holds half of a surrogate pair, such as an emoji that was cut."""
    return re.search("[\ud800-\udfff]", text) is None


def text_of(row: dict, column: str) -> str:
    """The text in a column of a row. Raises ValueError if there is none."""
    if column not in row:
        raise ValueError(f"no column {column!r} (columns: {', '.join(row)})")
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"column {column!r} must be text, not {value!r}")
    return value


def gsm8k_example(row: dict) -> Example:
    """The example in a row of GSM8K's columns. Raises ValueError if one is wrong."""
    solution, separator, answer = text_of(row, "answer").rpartition("####")
    answer = answer.strip()
    if not separator or not answer:
        raise ValueError("column 'answer' has no final line '#### <answer>'")
    if to_number(answer) is not None:
        answer = answer.replace(",", "")  # they separate groups of three digits
    # <<48/2=24>> is meant for a calculator; 1 << 3 is not.
    solution = re.sub(r"<<(?!\s)[^<>]*=[^<>]*(?<!\s)>>", "", solution).strip()
    return {"question": text_of(row, "question"), "answer": answer, "solution": solution}


def math_example(row: dict) -> Example:
    """The example in a row of MATH's columns. Raises ValueError if one is wrong."""
    solution = ""
    answer = None
    if "solution" in row:
        solution = text_of(row, "solution").strip()
        answer = last_boxed(solution)
    if "answer" in row or not answer:
        answer = text_of(row, "answer")
    # The hub has "Level 5" and "Level ?", and pandas writes 5.0 where other rows have no level.
    level_text = str(row.get("level"))
    level = re.fullmatch(r"(?:Level )?(\d+)(?:\.0)?", level_text)
    if level is None and level_text not in ("None", "nan", "Level ?"):
        raise ValueError(f"column 'level' must be a whole number, not {row['level']!r}")
    return {
        "question": text_of(row, "problem"),
        "answer": answer.strip(),
        "solution": solution,
        "level": int(level[1]) if level else None,
        "subject": row.get("subject", row.get("type")),  # the original data set calls it type
    }


def story_example(row: dict) -> Example:
    """The example in a row with an opening line. Raises ValueError if it has none."""
    return {
        "question": text_of(row, "opening").strip(),
        "answer": row.get("answer") or "",  # for a reward that compares with one
        "solution": "",
    }


# --- Loaders --------------------------------------------------------------------------------------


class DataLoader(ABC):
    """One split of a data set, with its prompts rendered.

    A subclass says in `load` where the examples come from.

    Attributes:
        examples: those whose prompts are short enough, in the data set's order.
        dropped: how many prompts were longer than max_prompt_length, and are left out.
        longest_prompt: number of tokens of the longest prompt in `examples`.
        source: the folder or the name of the data set, for messages.
    """

    name: str
    default_evaluator: str
    default_prompt: str
    splits: tuple[str, ...] = ("train", "test")  # the splits that exist without --dataset_path

    def __init__(self, split, tokenizer, *, prompt, dataset_path, max_prompt_length, seed, size):
        """get_dataloaders says what these are. `prompt` is the Prompt, `size` the eval_size."""
        self.split = split
        self.prompt = prompt
        self.seed = seed
        self.source = dataset_path or self.name
        examples = self.read(split, dataset_path)
        if size is not None:
            if size > len(examples):
                print(f"note: --eval_size {size}: the split {split} has only {len(examples):,}")
            examples = _fixed_subset(examples, size)
        prompts = render_prompts(prompt, tokenizer, examples)
        lengths = []
        if prompts:  # the tokenizer refuses an empty list
            token_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
            lengths = [len(ids) for ids in token_ids]
        self.examples = []
        self.longest_prompt = 0
        for example, prompt_text, length in zip(examples, prompts, lengths, strict=True):
            if length <= max_prompt_length:
                self.examples.append(example | {"prompt": prompt_text})
                self.longest_prompt = max(self.longest_prompt, length)
        self.dropped = len(examples) - len(self.examples)
        if self.dropped and not self.examples:
            raise ValueError(
                f"all {self.dropped} prompts of {self.source} ({split}) are longer than "
                f"{max_prompt_length} tokens; raise --max_prompt_length"
            )
        self.load_state_dict({"epoch": 0, "position": 0})

    @classmethod
    @abstractmethod
    def load(cls, split: str, dataset_path: str | None) -> list[Example]:
        """Examples without id and prompt, in a fixed order.

        The list is empty for the training split of a folder that holds only test data.
        """

    @classmethod
    def check_split(cls, split: str, dataset_path: str | None = None) -> None:
        """Raise ValueError if there is no such split. No data is read for it."""
        if dataset_path is not None:
            find_files(dataset_path, split)
        elif split not in cls.splits:
            raise ValueError(
                f"--eval_split {split}: {cls.name} has no such split; "
                "to use one, give a folder that contains it by --dataset_path"
            )

    @classmethod
    def read(cls, split: str, dataset_path: str | None = None) -> list[Example]:
        """Every example of the split. Their prompts are missing, so no tokenizer is needed.

        Raises:
            ValueError: There is no such split, it is empty, or a row is wrong.
            OSError: The hub cannot be reached.
        """
        cls.check_split(split, dataset_path)
        examples = []
        for i, example in enumerate(cls.load(split, dataset_path)):
            example_id = f"{cls.name}/{split}/{i}"
            check_example(example, example_id)
            examples.append(example | {"id": example_id})
        if not examples and split != "train":
            raise ValueError(f"{dataset_path or cls.name} has no {split} examples")
        return examples

    def next_batch(self, num_examples: int) -> list[Example]:
        """The next examples of an endless stream; every epoch is a shuffle of all examples.

        The shuffle depends on the seed and the epoch alone. A batch may reach over the end of an
        epoch, or of several, into the next.

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
            batch.append(self.examples[self.order[self.position]])
            self.position += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where the stream of next_batch stands, for a checkpoint."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the stream where state_dict says."""
        self.epoch = state["epoch"]
        self.position = state["position"]
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
    def check_split(cls, split: str, dataset_path: str | None = None) -> None:
        if dataset_path is not None:
            raise ValueError("the data set 'arithmetic' is generated; leave --dataset_path out")
        super().check_split(split)

    @classmethod
    def load(cls, split: str, dataset_path: str | None) -> list[Example]:
        rows = word_problems.generate(split, cls.sizes[split])
        return [gsm8k_example(row) | {"level": row["level"]} for row in rows]


class GSM8kLoader(DataLoader):
    """The official train and test splits, 7,473 and 1,319 problems."""

    name = "gsm8k"
    default_evaluator = "gsm8k"
    default_prompt = "reasoning_answer"

    @classmethod
    def load(cls, split: str, dataset_path: str | None) -> list[Example]:
        if dataset_path is not None:
            rows = read_folder(dataset_path, split)
        else:
            rows = read_hub("openai/gsm8k", ["main"], split)
        return make_examples(rows, gsm8k_example)


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
    def load(cls, split: str, dataset_path: str | None) -> list[Example]:
        if dataset_path is not None:
            rows = read_folder(dataset_path, split)
        elif split == "train":
            rows = read_hub("EleutherAI/hendrycks_math", cls.subjects, split)
        else:
            rows = read_hub("HuggingFaceH4/MATH-500", ["default"], split)
        return make_examples(rows, math_example)


class CreativeLoader(DataLoader):
    """Opening lines of stories, 80 for training and 20 for testing, without a gold answer."""

    name = "creative"
    default_evaluator = "creative"
    default_prompt = "story"

    @classmethod
    def load(cls, split: str, dataset_path: str | None) -> list[Example]:
        if dataset_path is None:
            dataset_path = Path(__file__).parent / "data" / "opening_lines"
        return make_examples(read_folder(dataset_path, split), story_example)


DATASETS = {
    "arithmetic": ArithmeticLoader,
    "gsm8k": GSM8kLoader,
    "math": MathLoader,
    "creative": CreativeLoader,
}


def check_names(dataset_name: str, prompt: str | None) -> None:
    """Raise ValueError for a data set or a prompt format that is not known."""
    if dataset_name not in DATASETS:
        raise ValueError(f"--dataset_name {dataset_name}: choose from {', '.join(DATASETS)}")
    if prompt is not None and prompt not in PROMPTS:
        raise ValueError(f"--prompt {prompt}: choose from {', '.join(PROMPTS)}")


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
        dataset_path: a folder with splits as .jsonl or .parquet, instead of the data set's own.
        max_prompt_length: in tokens; examples with longer prompts are left out.
        seed: of the order of the training examples.
        eval_size: evaluate a subset of this many examples, which is the same for every seed,
            tokenizer and prompt; None evaluates all.

    Raises:
        ValueError: There is no such split, it is empty, a row is wrong, or every prompt is too
            long.
        OSError: The hub cannot be reached.
    """
    check_names(name, prompt)
    loader_class = DATASETS[name]
    prompt_name = prompt or loader_class.default_prompt
    options = {
        "prompt": PROMPTS[prompt_name],
        "dataset_path": dataset_path,
        "max_prompt_length": max_prompt_length,
        "seed": seed,
    }
    train_loader = loader_class("train", tokenizer, size=None, **options)
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
