"""Prompts, and the data sets `gsm8k`, `math`, `arithmetic`, `creative` and those of your own.

An example is a dict of `id` (data set, split and index, such as "gsm8k/train/0"), `question`,
`answer` (always text), `solution` (the worked steps without the answer's line, maybe empty),
`prompt` (with special tokens: tokenize it with none added) and `row` (every column as the data set
has it, for reward functions). `level` and `subject`, where there are any, divide the accuracies.
"""

import glob
import json
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jinja2 import TemplateError

import utils

# --- Prompts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """A format of prompt and completion, in which {question}, {solution}, {answer} are filled in.

    No other brace has a meaning, so that LaTeX survives.
    """

    name: str
    plain: str  # the prompt of a model without a chat template, or of a format without a chat
    completion: str  # a worked solution, without EOS
    chat: tuple[tuple[str, str], ...] = ()  # (role, text) of each message; empty: always plain
    stop_strings: tuple[str, ...] = ()  # sampling ends after any of these, which stay in the text

    def messages(self, question: str) -> list[dict]:
        """The chat as an OpenAI-compatible endpoint takes it; empty for a plain format."""
        return [
            {"role": role, "content": fill(text, question=question)} for role, text in self.chat
        ]

    def render(self, tokenizer, question: str) -> str:
        """The text of the prompt with its special tokens."""
        if self.chat and tokenizer.chat_template:
            return render_chat(tokenizer, self.messages(question))
        # Some tokenizers have a BOS and do not put it before a text.
        has_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        bos = tokenizer.bos_token if has_bos else ""
        return bos + fill(self.plain, question=question)

    def format_solution(self, solution: str, answer: str) -> str:
        return fill(self.completion, solution=solution, answer=answer)


def fill(text: str, **values: str) -> str:
    return re.sub(r"\{(question|solution|answer)\}", lambda name: values[name[1]], text)


def render_chat(tokenizer, messages: list[dict]) -> str:
    """A chat, rendered by the tokenizer's template.

    Where that takes no system role, the system's text opens the user's turn.
    """
    # Some templates write today's date, and a run that is resumed tomorrow has the same prompts.
    fixed_date = "{% macro strftime_now(format) %}01 Jan 2025{% endmacro +%}"
    render = partial(
        tokenizer.apply_chat_template,
        chat_template=fixed_date + tokenizer.get_chat_template(),
        tokenize=False,
        add_generation_prompt=True,
    )
    texts = [message["content"] for message in messages]
    try:
        rendered = render(messages)
    except TemplateError:
        rendered = ""
    if texts[0].strip() in rendered:
        return rendered
    return render([{"role": "user", "content": "\n\n".join(texts)}])


def render_prompts(prompt: Prompt, tokenizer, examples: list[dict]) -> list[str]:
    return [prompt.render(tokenizer, example["question"]) for example in examples]


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
    "<answer> the answer </answer>.\nUser: {question}\nAssistant: <think>"
)

STORY_PROMPT = (
    "Continue this opening line into a short story of one paragraph. "
    "Do not repeat the line, and write nothing but the story.\n\n{question}"
)

PROMPTS = {
    "reasoning_answer": Prompt(
        name="reasoning_answer",
        chat=(("system", SYSTEM_PROMPT), ("user", "{question}")),
        plain=SYSTEM_PROMPT + "\n\n{question}\n",
        completion="<reasoning>\n{solution}\n</reasoning>\n<answer>\n{answer}\n</answer>",
    ),
    "r1_zero": Prompt(  # for a base model, with the prompt of DeepSeek-R1-Zero (arXiv:2501.12948)
        name="r1_zero",
        plain=R1_ZERO_PROMPT,
        completion="\n{solution}\n</think> <answer>{answer}</answer>",
        stop_strings=("</answer>",),
    ),
    "question_only": Prompt(
        name="question_only",
        plain="{question}\n",
        completion="{solution}\nThe answer is \\boxed{{answer}}.",
    ),
    "story": Prompt(
        name="story",
        chat=(("user", STORY_PROMPT),),
        plain="{question}",  # the model continues the opening line
        completion="{solution}",
        stop_strings=("\n",),  # the end of the paragraph
    ),
}

# --- An example from a row ------------------------------------------------------------------------


def text_of(row: dict, column: str) -> str:
    """A column as text, also if it is a number. Raises ValueError if there is none."""
    value = row.get(column)
    if value is None or isinstance(value, list | dict):
        raise ValueError(f"no text in column {column!r} (columns: {', '.join(row)})")
    return str(value)


def gsm8k_example(row: dict) -> dict:
    """From a question, and an answer that ends in `#### N` or is N alone."""
    solution, _, answer = text_of(row, "answer").rpartition("####")
    answer = answer.strip()
    if re.fullmatch(r"\D*\d{1,3}(,\d{3})+(\.\d+)?\D*", answer):  # 1,000, but not (1, 2)
        answer = answer.replace(",", "")
    # <<48/2=24>> is meant for a calculator; 1 << 3 is not.
    solution = re.sub(r"<<(?!\s)[^<>]*=[^<>]*(?<!\s)>>", "", solution).strip()
    return {"question": text_of(row, "question"), "answer": answer, "solution": solution}


def arithmetic_example(row: dict) -> dict:
    return gsm8k_example(row) | {"level": row.get("level")}


def math_example(row: dict) -> dict:
    """From a problem, and an answer or a solution with a box around it."""
    solution = str(row.get("solution") or "").strip()
    answer = last_boxed(solution)
    if not answer or row.get("answer") is not None:
        answer = text_of(row, "answer")
    level = re.search(r"\d+", str(row.get("level")))  # the hub has "Level 5" and "Level ?"
    return {
        "question": text_of(row, "problem"),
        "answer": answer.strip(),
        "solution": solution,
        "level": int(level[0]) if level else None,
        "subject": row.get("subject", row.get("type")),  # the original data set calls it type
    }


TAIL = 10_000  # characters at the end of a text in which a \boxed{} is looked for
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")


def last_boxed(text: str) -> str | None:
    r"""What the last balanced \boxed{...} holds; `\boxed 5` ends at the next $."""
    text = text[-TAIL:]
    for box in reversed(list(BOX.finditer(text))):
        start = box.end()
        if text[start : start + 1] != "{":
            content, dollar, _ = text[start:].partition("$")
            if dollar:
                return content.strip()
            continue
        depth = 0
        for brace in re.finditer(r"\\[\\{}]|[{}]", text[start:]):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)  # an escaped brace is no brace
            if depth == 0:
                return text[start + 1 : start + brace.start()].strip()
    return None


def story_example(row: dict) -> dict:
    """From an opening line, and maybe an answer for a reward that compares with one."""
    answer = str(row.get("answer") or "")
    return {"question": text_of(row, "opening").strip(), "answer": answer, "solution": ""}


# --- Where rows come from -------------------------------------------------------------------------


def find_files(folder: str | Path, split: str) -> list[Path]:
    """SPLIT.jsonl, SPLIT.parquet, or all shards, such as SPLIT-00000-of-00002.parquet.

    A single data file of another name is the test split. The list is empty where the folder lacks
    the split. Raises ValueError for a path that is no folder, a missing shard or mixed versions.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"--dataset_path {folder} is not a folder with .jsonl or .parquet files")
    data_files = sorted(path for path in folder.iterdir() if path.suffix in (".jsonl", ".parquet"))
    files = [path for path in data_files if re.fullmatch(rf"{split}(-\d.*)?", path.stem)]
    if split == "test" and len(data_files) == 1:
        if not data_files[0].stem.startswith(("train", "validation", "test-")):
            return data_files
    stems = [path.stem for path in files]
    shards = [f"{split}-{i:05}-of-{len(files):05}" for i in range(len(files))]
    if stems != [split] and not all(map(str.startswith, stems, shards)):
        raise ValueError(f"{folder}: not one file or all shards of {split} ({', '.join(stems)})")
    return files


def read_folder(folder: str | Path, split: str) -> list[dict]:
    """The rows of a split. A folder without training data has no training rows.

    Raises ValueError where another split is not there, or a file cannot be read.
    """
    rows = []
    for path in find_files(folder, split):
        try:
            rows += read_parquet(path) if path.suffix == ".parquet" else read_jsonl(path)
        except (ValueError, OSError) as error:
            raise ValueError(f"{path}: {first_line(error)}") from error
    if not rows and split != "train":
        raise ValueError(f"{folder} has no rows in {split}.jsonl or {split}.parquet")
    return rows


def read_parquet(path: Path) -> list[dict]:
    """Of two columns with one name, load_dataset makes an error."""
    import datasets  # half a second, which JSON lines need not wait

    # A path is no pattern of names, and streaming leaves no copy in a cache.
    path = glob.escape(str(path))
    return list(datasets.load_dataset("parquet", data_files=path, split="train", streaming=True))


def read_jsonl(path: Path) -> list[dict]:
    """Without load_dataset("json"), which silently makes a date of the text "2024-01-01"."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=unique_columns)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number}: not a JSON object")
        rows.append(row)
    return rows


def unique_columns(pairs: list[tuple]) -> dict:
    """A JSON object. Of a key that occurs twice, json would silently keep the last value."""
    columns = dict(pairs)
    if len(columns) < len(pairs):
        raise ValueError(f"a key occurs twice in {', '.join(name for name, _ in pairs)}")
    return columns


def load_hub(name: str, config: str, split: str) -> list[dict]:
    """The rows of a data set of the Hugging Face hub. Raises OSError if that cannot be reached."""
    import datasets

    try:
        return list(datasets.load_dataset(name, config, split=split))
    except (ValueError, OSError) as error:
        raise OSError(
            f"cannot load {name} from the hub ({first_line(error)}); give a local folder by"
            " --dataset_path"
        ) from error


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def gsm8k_rows(split: str) -> list[dict]:
    """The official train and test splits, 7,473 and 1,319 problems."""
    return load_hub("openai/gsm8k", "main", split)


MATH_SUBJECTS = (
    "algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra"
    " precalculus"
)


def math_rows(split: str) -> list[dict]:
    """MATH's 7,500 training problems, and MATH-500, which is 500 of its 5,000 test problems."""
    if split != "train":
        return load_hub("HuggingFaceH4/MATH-500", "default", split)
    rows = []
    for subject in MATH_SUBJECTS.split():
        rows += load_hub("EleutherAI/hendrycks_math", subject, split)
    return rows


# --- Data sets ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSet:
    name: str
    make_example: Callable[[dict], dict]
    read_rows: Callable[[str], Iterable[dict]]  # the rows of a split, where no folder is given
    default_evaluator: str = "gsm8k"
    default_prompt: str = "reasoning_answer"

    def read(self, split: str, dataset_path: str | None = None) -> list[dict]:
        """The examples of a split in a fixed order, without prompts, so no tokenizer is needed.

        Raises ValueError where there is no such split or a row is wrong, and OSError where the hub
        cannot be reached.
        """
        if split == "validation" and self.name == "gsm8k":
            if dataset_path is None or not find_files(dataset_path, split):
                return self.read("train", dataset_path)[-NUM_HELD_OUT:]
        if dataset_path is None:
            with utils.isolated_seed(0):  # a function of the user's may draw or seed
                rows = list(self.read_rows(split))
        elif self.name in DATASETS:
            rows = read_folder(dataset_path, split)
        else:
            raise ValueError(f"{self.name} has its own rows; leave --dataset_path out")
        examples = []
        for i, row in enumerate(rows):
            try:
                example = self.make_example(row)
            except ValueError as error:
                source = dataset_path or self.name
                raise ValueError(f"{source}, row {i + 1} of {split}: {error}") from error
            examples.append({"id": f"{self.name}/{split}/{i}"} | example | {"row": row})
        return examples


NUM_HELD_OUT = 500  # problems at the end of GSM8K's training split, which are its validation split
DATA = Path(__file__).parent / "data"
DATASETS = {
    # Word problems that tiny/make_word_problems.py has generated: 10,000, 2,000 and 2,000.
    "arithmetic": DataSet(
        "arithmetic", arithmetic_example, partial(read_folder, DATA / "arithmetic")
    ),
    "gsm8k": DataSet("gsm8k", gsm8k_example, gsm8k_rows),
    "math": DataSet("math", math_example, math_rows, "math", "r1_zero"),
    # Opening lines of stories, 80 for training and 20 for testing, without a gold answer.
    "creative": DataSet(
        "creative", story_example, partial(read_folder, DATA / "opening_lines"), "creative", "story"
    ),
}


def find_data_set(name: str) -> DataSet:
    """The data set of this name, or of the function in FILE.py:NAME.

    NAME(split) gives the rows: dicts of a question, an answer and any other columns. Raises
    ValueError for a name that leads nowhere.
    """
    if name in DATASETS:
        return DATASETS[name]
    path, colon, function_name = name.rpartition(":")
    if not colon:
        names = ", ".join(DATASETS)
        raise ValueError(f"--dataset_name {name}: choose from {names}, or give FILE.py:NAME")
    function = getattr(utils.import_file(path), function_name, None)
    if not callable(function):
        raise ValueError(f"--dataset_name {name}: {path} has no function {function_name}")
    return DataSet(function_name, gsm8k_example, function)


def find_prompt(name: str) -> Prompt:
    if name not in PROMPTS:
        raise ValueError(f"--prompt {name}: choose from {', '.join(PROMPTS)}")
    return PROMPTS[name]


def default_eval_split(name: str, dataset_path: str | None) -> str:
    """The validation split of `arithmetic`, and otherwise the test split.

    On that, the best checkpoint is chosen by its accuracy on the test problems, and this same
    accuracy is reported: choose on --eval_split validation.
    """
    is_arithmetic = find_data_set(name).name == "arithmetic"
    return "validation" if is_arithmetic and dataset_path is None else "test"


# --- Loaders --------------------------------------------------------------------------------------


class DataLoader:
    """Examples with their prompts, and an endless shuffled stream of them.

    Attributes:
        examples: those whose prompts have at most max_prompt_length tokens, in the data's order.
        dropped: how many have longer prompts, and are left out.
        longest_prompt: number of tokens of the longest prompt in `examples`.
    """

    def __init__(self, examples, tokenizer, *, data_set, prompt, max_prompt_length, seed):
        self.default_evaluator = data_set.default_evaluator
        self.prompt = prompt
        self.seed = seed
        self.examples = []
        self.longest_prompt = 0
        prompts = render_prompts(prompt, tokenizer, examples)
        token_ids = []
        if prompts:  # the tokenizer refuses an empty list
            token_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
        for example, prompt_text, ids in zip(examples, prompts, token_ids, strict=True):
            if len(ids) <= max_prompt_length:
                self.examples.append(example | {"prompt": prompt_text})
                self.longest_prompt = max(self.longest_prompt, len(ids))
        self.dropped = len(examples) - len(self.examples)
        self.load_state_dict({"epoch": 0, "position": 0})

    def next_batch(self, num_examples: int) -> list[dict]:
        """The next examples of the stream; every epoch is a shuffle of all examples.

        The shuffle depends on the seed and the epoch alone. A batch may reach over the end of an
        epoch, or of several, into the next. Raises ValueError if there are no examples.
        """
        if not self.examples:
            raise ValueError(f"there is no problem to train on ({self.dropped} prompts too long)")
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
    """The loaders of the training split and of eval_split; config.py says what the others are.

    Raises ValueError where a name is not known, there is no such split, a row is wrong, or nothing
    is left to evaluate, and OSError where the hub cannot be reached.
    """
    data_set = find_data_set(name)
    options = {
        "data_set": data_set,
        "prompt": find_prompt(prompt or data_set.default_prompt),
        "max_prompt_length": max_prompt_length,
        "seed": seed,
    }
    eval_examples = data_set.read(eval_split, dataset_path)
    eval_ids = {example["id"] for example in eval_examples}  # those held out leave training
    train_examples = data_set.read("train", dataset_path)
    train_examples = [example for example in train_examples if example["id"] not in eval_ids]
    train_loader = DataLoader(train_examples, tokenizer, **options)
    eval_loader = DataLoader(fixed_subset(eval_examples, eval_size), tokenizer, **options)
    if not eval_loader.examples:
        raise ValueError(
            f"{dataset_path or name} has no {eval_split} problem whose prompt has at most"
            f" --max_prompt_length {max_prompt_length} tokens"
        )
    return train_loader, eval_loader


def fixed_subset(examples: list[dict], size: int | None) -> list[dict]:
    """`size` examples in their order, always the same; a larger subset holds the smaller one."""
    indices = list(range(len(examples)))
    random.Random("evaluation subset").shuffle(indices)
    return [examples[i] for i in sorted(indices[:size])]
