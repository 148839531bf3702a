"""Prompts, and the data sets: built-in ones, and those of your own.

An example is a dict of `id` (data set, split and index, such as "gsm8k/train/0"), `question`,
`answer` (always text), `solution` (the worked steps without the answer's line, maybe empty),
`prompt` (with special tokens: tokenize it with none added) and `row` (every column as the data set
has it, for reward functions).
"""

import glob
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import datasets
from jinja2 import TemplateError

import utils
from grpo import jsonl

# --- Prompts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """A format of prompt and completion; {question}, {solution} and {answer} are filled in."""

    name: str
    plain: str  # the prompt of a model without a chat template, or of a format without a chat
    completion: str  # a worked solution, without EOS
    chat: tuple[tuple[str, str], ...] = ()  # (role, text) of each message; empty: always plain
    stop_strings: tuple[str, ...] = ()  # sampling ends after any of these, which stay in the text

    def messages(self, question: str) -> list[dict]:
        """The chat as an OpenAI-compatible endpoint takes it; empty for a plain format."""
        return [
            {"role": role, "content": text.replace("{question}", question)}
            for role, text in self.chat
        ]

    def render(self, tokenizer, question: str) -> str:
        """The text of the prompt with its special tokens."""
        if self.chat and tokenizer.chat_template:
            return render_chat(tokenizer, self.messages(question))
        # Some tokenizers have a BOS and do not put it before a text.
        has_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        bos = tokenizer.bos_token if has_bos else ""
        return bos + self.plain.replace("{question}", question)

    def format_solution(self, solution: str, answer: str) -> str:
        return self.completion.replace("{answer}", answer).replace("{solution}", solution)


def render_chat(tokenizer, messages: list[dict]) -> str:
    """A chat, rendered by the tokenizer's template.

    Where that takes no system role, the system's text opens the user's turn.
    """
    # Some templates write today's date, and a run that is resumed tomorrow has the same prompts.
    fixed_date = "{% macro strftime_now(format) %}01 Jan 2025{% endmacro +%}"
    options = {
        "chat_template": fixed_date + tokenizer.get_chat_template(),
        "tokenize": False,
        "add_generation_prompt": True,
    }
    try:
        rendered = tokenizer.apply_chat_template(messages, **options)
    except TemplateError:
        rendered = ""
    texts = [message["content"] for message in messages]
    if texts[0] in rendered:
        return rendered
    user_turn = {"role": "user", "content": "\n\n".join(texts)}
    return tokenizer.apply_chat_template([user_turn], **options)


SYSTEM_PROMPT = """\
Solve the problem. Respond in this form:
<reasoning>
your steps
</reasoning>
<answer>
only the final answer
</answer>"""

# For a base model: a shorter wording of R1-Zero's prompt (arXiv:2501.12948).
R1_ZERO = Prompt(
    "r1_zero",
    plain="A conversation between User and Assistant. The User asks a question. The Assistant "
    "first reasons, then gives the User the final answer, in this form: <think> the reasoning "
    "</think> <answer> the answer </answer>.\nUser: {question}\nAssistant: <think>",
    completion="\n{solution}\n</think> <answer>{answer}</answer>",
    stop_strings=("</answer>",),
)

PROMPTS = {
    "reasoning_answer": Prompt(
        "reasoning_answer",
        chat=(("system", SYSTEM_PROMPT), ("user", "{question}")),
        plain=SYSTEM_PROMPT + "\n\n{question}\n",
        completion="<reasoning>\n{solution}\n</reasoning>\n<answer>\n{answer}\n</answer>",
    ),
    "r1_zero": R1_ZERO,
    "r1_zero_handout": replace(  # the same format, in the words of CS336's r1_zero.prompt
        R1_ZERO,
        plain="A conversation between User and Assistant. The User asks a question, and the "
        "Assistant solves it. The Assistant first thinks about the reasoning process in the mind "
        "and then provides the User with the answer. The reasoning process is enclosed within "
        "<think> </think> and answer is enclosed within <answer> </answer> tags, respectively, "
        "i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
        "User: {question}\nAssistant: <think>",
    ),
    "question_only": Prompt(
        "question_only",
        plain="{question}\n",
        completion="{solution}\nThe answer is \\boxed{{answer}}.",
    ),
}

# --- Examples from rows ---------------------------------------------------------------------------


def text_of(row: dict, column: str) -> str:
    """A column as text, also if it is a number. Raises ValueError if there is none."""
    value = row.get(column)
    if value is None or isinstance(value, list | dict):
        raise ValueError(f"there is no text in column {column!r} of {row!r:.200}")
    return str(value)


def gsm8k_example(row: dict) -> dict:
    """From a question, and an answer that ends in `#### N` or is N alone."""
    solution, _, answer = text_of(row, "answer").rpartition("####")
    answer = answer.strip()
    if re.fullmatch(r"[^\d(\[]*\d{1,3}(,\d{3})+(\.\d+)?\D*", answer):  # 1,000, but not (1,200)
        answer = answer.replace(",", "")
    solution = re.sub(r"<<[^<>]*=[^<>]*>>", "", solution).strip()  # meant for a calculator
    return {"question": text_of(row, "question"), "answer": answer, "solution": solution}


def math_example(row: dict) -> dict:
    """From a problem, and an answer or a solution with a box around it."""
    solution = str(row.get("solution") or "").strip()
    if row.get("answer") is None:
        row = row | {"answer": last_boxed(solution)}
    return {
        "question": text_of(row, "problem"),
        "answer": text_of(row, "answer").strip(),
        "solution": solution,
    }


BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")


def last_boxed(text: str) -> str | None:
    r"""What the last balanced \boxed{...} holds; `\boxed 5` ends at the next $."""
    text = text[-10_000:]  # a text of boxes alone would take long
    for box in reversed(list(BOX.finditer(text))):
        rest = text[box.end() :]
        if not rest.startswith("{"):
            content, dollar, _ = rest.partition("$")
            if dollar:
                return content.strip()
            continue
        depth = 0
        for brace in re.finditer(r"\\[\\{}]|[{}]", rest):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)  # an escaped brace is no brace
            if depth == 0:
                return rest[1 : brace.start()].strip()
    return None


# --- Where rows come from -------------------------------------------------------------------------


def find_files(folder: str | Path, split: str) -> list[Path]:
    """SPLIT.jsonl or SPLIT.parquet, or its shards, such as SPLIT-00000-of-00002.parquet.

    A single data file of another name is the test split.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"--dataset_path {folder} is not a folder with .jsonl or .parquet files")
    files = sorted(path for path in Path(folder).iterdir() if path.suffix in (".jsonl", ".parquet"))
    one_file = [path for path in files if path.stem == split]
    shards = [path for path in files if path.stem.startswith(f"{split}-")]
    for path in shards:
        num_shards = path.stem.partition("-of-")[2]
        if num_shards.isdecimal() and int(num_shards) != len(shards):
            raise ValueError(f"{folder} does not have all shards of {split}")
    is_alone = len(files) == 1 and not files[0].stem.startswith(("train", "validation"))
    if split == "test" and is_alone:
        return files
    return one_file[:1] or shards


def read_folder(folder: str | Path, split: str) -> list[dict]:
    """The rows of a split. A folder without training data has no training rows."""
    rows = []
    for path in find_files(folder, split):
        if path.suffix == ".jsonl":  # load_dataset would make a date of the text "2024-01-01"
            rows += jsonl.read(path)
        else:
            table = datasets.load_dataset(
                "parquet", data_files=glob.escape(str(path)), split="train", streaming=True
            )
            if table.features.get("answer") == datasets.Value("float32"):
                # As a number, 0.1 would be 0.10000000149011612.
                table = table.cast_column("answer", datasets.Value("string"))
            rows += table
    if not rows and split != "train":
        raise ValueError(f"{folder} has no rows in {split}.jsonl or {split}.parquet")
    return rows


def gsm8k_rows(split: str) -> Iterable[dict]:
    """The official train and test splits, 7,473 and 1,319 problems."""
    return datasets.load_dataset("openai/gsm8k", "main", split=split)


def math_rows(split: str) -> Iterable[dict]:
    """MATH's 7,500 training problems, and MATH-500, which is 500 of its 5,000 test problems."""
    if split != "train":
        return datasets.load_dataset("HuggingFaceH4/MATH-500", split=split)
    name = "EleutherAI/hendrycks_math"
    subjects = datasets.get_dataset_config_names(name)
    return chain.from_iterable(datasets.load_dataset(name, s, split=split) for s in subjects)


# --- Data sets ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSet:
    name: str
    make_example: Callable[[dict], dict]
    read_rows: Callable[[str], Iterable[dict]]  # the rows of a split, where no folder is given
    default_evaluator: str = "gsm8k"
    default_prompt: str = "reasoning_answer"

    def read(self, split: str, dataset_path: str | None = None) -> list[dict]:
        """The examples of a split in a fixed order, without prompts, so no tokenizer is needed."""
        if split == "validation" and self.name == "gsm8k":
            if dataset_path is None or not find_files(dataset_path, split):
                return self.read("train", dataset_path)[-NUM_HELD_OUT:]
        if dataset_path is None:
            with utils.isolated_seed(0):  # a function of the user's may draw, seed or raise
                try:
                    rows = list(self.read_rows(split))
                except Exception as error:
                    if self.name in DATASETS:
                        raise
                    raise ValueError(f"--dataset_name: {self.name} fails with {error!r}") from error
        elif self.name in DATASETS:
            rows = read_folder(dataset_path, split)
        else:
            raise ValueError(
                "--dataset_name FILE.py:NAME has rows of its own, not --dataset_path's"
            )
        return [
            {"id": f"{self.name}/{split}/{i}"} | self.make_example(row) | {"row": row}
            for i, row in enumerate(rows)
        ]


NUM_HELD_OUT = 500  # problems at the end of GSM8K's training split, which are its validation split
DATA = Path(__file__).parent / "data"
DATASETS = {
    # Generated word problems: 10,000, 2,000 and 2,000.
    "arithmetic": DataSet("arithmetic", gsm8k_example, partial(read_folder, DATA / "arithmetic")),
    "gsm8k": DataSet("gsm8k", gsm8k_example, gsm8k_rows),
    "math": DataSet("math", math_example, math_rows, "math", "r1_zero"),
}


def find_data_set(name: str) -> DataSet:
    """The data set of this name, or of the function in FILE.py:NAME.

    NAME(split) gives the rows: dicts of a question, an answer and any other columns.
    """
    if name in DATASETS:
        return DATASETS[name]
    if ":" not in name:
        names = ", ".join(DATASETS)
        raise ValueError(f"--dataset_name {name}: choose from {names}, or give FILE.py:NAME")
    function_name = name.rpartition(":")[2]
    if function_name in DATASETS:
        raise ValueError(f"--dataset_name {name}: {function_name} is built in; rename the function")
    function = utils.import_from_file(name, "--dataset_name")
    return DataSet(function_name, gsm8k_example, function)


def find_prompt(name: str) -> Prompt:
    if name not in PROMPTS:
        raise ValueError(f"--prompt {name}: choose from {', '.join(PROMPTS)}")
    return PROMPTS[name]


def default_eval_split(name: str, dataset_path: str | None) -> str:
    """Validation for `arithmetic`, so that test problems choose no checkpoint; otherwise test."""
    return "validation" if name == "arithmetic" and dataset_path is None else "test"


# --- Loaders --------------------------------------------------------------------------------------


class DataLoader:
    """Examples with their prompts, in the data's order, and an endless shuffled stream of them."""

    def __init__(
        self, examples, tokenizer, *, prompt, max_prompt_length, seed, held_out=frozenset()
    ):
        self.prompt = prompt
        self.seed = seed
        self.held_out = held_out  # questions of the training split that are not trained on
        self.examples = []
        self.longest_prompt = 0  # in tokens
        prompts = [prompt.render(tokenizer, example["question"]) for example in examples]
        token_ids = []
        if prompts:  # the tokenizer refuses an empty list, and is much faster with all of them
            token_ids = tokenizer(prompts, add_special_tokens=False, verbose=False)["input_ids"]
        for example, text, ids in zip(examples, prompts, token_ids, strict=True):
            if len(ids) <= max_prompt_length:
                self.examples.append(example | {"prompt": text})
                self.longest_prompt = max(self.longest_prompt, len(ids))
        self.dropped = len(examples) - len(self.examples)  # whose prompts are too long
        self.load_state_dict({"epoch": 0, "position": 0})

    def next_batch(self, num_examples: int) -> list[dict]:
        """The next examples of the stream; seed and epoch alone decide the order of an epoch."""
        if not self.examples:
            raise ValueError(
                f"there is no problem to train on: {self.dropped} prompts are too long,"
                f" {len(self.held_out)} are held out for validation; is there a train.jsonl?"
            )
        batch = []
        while len(batch) < num_examples:
            if self.position == len(self.examples):
                self.load_state_dict({"epoch": self.epoch + 1, "position": 0})
            batch.append(self.examples[self.order[self.position]])
            self.position += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where the stream is, for a checkpoint."""
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
    """The loaders of the training split and of eval_split; config.py says what the others are."""
    data_set = find_data_set(name)
    options = {
        "prompt": find_prompt(prompt or data_set.default_prompt),
        "max_prompt_length": max_prompt_length,
        "seed": seed,
    }
    eval_examples = data_set.read(eval_split, dataset_path)
    if not eval_examples:
        raise ValueError(f"--dataset_name {name} has no {eval_split} problem")
    eval_ids = {example["id"] for example in eval_examples}  # those held out leave training
    train_examples = data_set.read("train", dataset_path)
    held_out = {example["question"] for example in train_examples if example["id"] in eval_ids}
    train_examples = [example for example in train_examples if example["id"] not in eval_ids]
    # Always the same subset; a larger one holds the smaller.
    indices = list(range(len(eval_examples)))
    random.Random("evaluation subset").shuffle(indices)
    eval_examples = [eval_examples[i] for i in sorted(indices[:eval_size])]
    train_loader = DataLoader(train_examples, tokenizer, **options, held_out=held_out)
    eval_loader = DataLoader(eval_examples, tokenizer, **options)
    if not eval_loader.examples:
        raise ValueError(f"--max_prompt_length {max_prompt_length} leaves no {eval_split} problem")
    return train_loader, eval_loader


# --- Not in the copy for a candidate --------------------------------------------------------------
# Stories: opening lines, 80 for training and 20 for testing, without a gold answer.

STORY_PROMPT = (
    "Continue this opening line into a short story of one paragraph. "
    "Do not repeat the line, and write nothing but the story.\n\n{question}"
)

PROMPTS["story"] = Prompt(
    "story",
    chat=(("user", STORY_PROMPT),),
    plain="{question}",  # the model continues the opening line
    completion="{solution}",
    stop_strings=("\n",),  # the end of the paragraph
)


def story_example(row: dict) -> dict:
    return {"question": text_of(row, "opening").strip(), "answer": "", "solution": ""}


DATASETS["creative"] = DataSet(
    "creative", story_example, partial(read_folder, DATA / "opening_lines"), "creative", "story"
)
