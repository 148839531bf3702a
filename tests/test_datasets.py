"""Prompts word for word, what is read from rows and files, the order, and the word problems."""

import hashlib
import json
import math
import pickle
import re
import sys
from collections import Counter
from fractions import Fraction

import datasets
import pandas
import pytest
import torch
from conftest import ARITHMETIC, ROOT, as_flags, run_script, small_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import rl_datasets
from grpo import jsonl
from rl_datasets import DATASETS, PROMPTS, SYSTEM_PROMPT, get_dataloaders
from tiny.make_word_problems import FAMILIES, NAMES, THINGS, Family, easier_pieces, generate

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AWKWARD = r"Is {x} in {0} 100% of %s, \frac{1}{2}, {answer} or {{question}}?"


def tokenizer_with(chat_template):
    """One token for each character."""
    tokenizer = small_tokenizer()
    tokenizer.chat_template = chat_template
    return tokenizer


def gsm8k_rows(n):
    return [
        {"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"}
        for i in range(n)
    ]


@pytest.fixture
def folder(tmp_path):
    """GSM8K's columns with 10 training and 5 test problems."""
    jsonl.write(tmp_path / "train.jsonl", gsm8k_rows(10))
    jsonl.write(tmp_path / "test.jsonl", gsm8k_rows(5))
    return tmp_path


def load(folder, name="gsm8k", **options):
    """(train_loader, eval_loader) of a folder, with bare questions as prompts."""
    defaults = {"eval_split": "test", "prompt": "question_only", "dataset_path": folder}
    return get_dataloaders(name, small_tokenizer(), **(defaults | options))


def ids(examples):
    return [example["id"] for example in examples]


# --- Prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", ["How many?", AWKWARD])
def test_prompts_word_for_word(question):
    chat = {name: prompt.render(tokenizer_with(CHAT_TEMPLATE), question)
            for name, prompt in PROMPTS.items()}  # fmt: skip
    assert chat["reasoning_answer"] == (
        "<|im_start|>system\nSolve the problem. Respond in this form:\n"
        "<reasoning>\nyour steps\n</reasoning>\n"
        "<answer>\nonly the final answer\n</answer><|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat["story"] == (
        "<|im_start|>user\nContinue this opening line into a short story of one paragraph. Do not "
        f"repeat the line, and write nothing but the story.\n\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    plain = {name: prompt.render(small_tokenizer(), question) for name, prompt in PROMPTS.items()}
    assert plain == {
        "reasoning_answer": f"{SYSTEM_PROMPT}\n\n{question}\n",
        "r1_zero": "A conversation between User and Assistant. The User asks a question. The "
        "Assistant first reasons, then gives the User the final answer, in this form: <think> the "
        "reasoning </think> <answer> the answer </answer>.\nUser: "
        f"{question}\nAssistant: <think>",
        "question_only": f"{question}\n",
        "story": question,
    }
    assert (chat["r1_zero"], chat["question_only"]) == (plain["r1_zero"], plain["question_only"])
    stops = {name: prompt.stop_strings for name, prompt in PROMPTS.items() if prompt.stop_strings}
    assert stops == {"r1_zero": ("</answer>",), "story": ("\n",)}
    assert all(prompt.name == name for name, prompt in PROMPTS.items())


def test_a_worked_solution_in_each_format():
    solutions = {
        name: prompt.format_solution("{1} + {answer}", "2") for name, prompt in PROMPTS.items()
    }
    assert solutions == {
        "reasoning_answer": "<reasoning>\n{1} + {answer}\n</reasoning>\n<answer>\n2\n</answer>",
        "r1_zero": "\n{1} + {answer}\n</think> <answer>2</answer>",
        "question_only": "{1} + {answer}\nThe answer is \\boxed{2}.",
        "story": "{1} + {answer}",
    }


def test_a_plain_prompt_has_the_bos_that_its_tokenizer_adds():
    """SmolLM2 has a BOS that it never puts before a text."""
    tokenizer = small_tokenizer()
    tokenizer.bos_token = "<end>"
    assert PROMPTS["question_only"].render(tokenizer, "2?") == "2?\n"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", tokenizer.bos_token_id)]
    )
    assert PROMPTS["question_only"].render(tokenizer, "2?") == "<end>2?\n"


@pytest.mark.parametrize("system", ["{{ raise_exception('no system role') }}", "{# dropped #}"])
def test_a_chat_template_without_a_system_role(system):
    turn = "{% if m['role'] == 'system' %}" + system + "{% else %}[{{ m['content'] }}]{% endif %}"
    tokenizer = tokenizer_with("{% for m in messages %}" + turn + "{% endfor %}")
    rendered = PROMPTS["reasoning_answer"].render(tokenizer, "2 + 3?")
    assert rendered == f"[{SYSTEM_PROMPT}\n\n2 + 3?]"


def test_a_prompt_does_not_depend_on_the_day():
    """A run that was resumed after midnight went on with other prompts."""
    template = "\n{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    rendered = PROMPTS["story"].render(tokenizer_with(template + CHAT_TEMPLATE), "It rained.")
    assert rendered.startswith("\n01 Jan 2025<|im_start|>user")


# --- From rows to examples ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "solution"),
    [
        ("2*3 = <<2*3=6>>6 eggs.\n6+1 = $<<6+1=7>>7.\n#### 7", "7", "2*3 = 6 eggs.\n6+1 = $7."),
        ("1 << 3 is 8, 16 >> 1\n#### 1,000,000.5", "1000000.5", "1 << 3 is 8, 16 >> 1"),
        ("#### 5 is not the answer\n####  -$3,500 ", "-$3500", "#### 5 is not the answer"),
        ("see <<note>>\n#### (1,000, 2,000)", "(1,000, 2,000)", "see <<note>>"),
        ("1,5", "1,5", ""),
        ("2024-01-01", "2024-01-01", ""),
        (7, "7", ""),
        (2.5, "2.5", ""),
    ],
)
def test_gsm8k_answer_and_solution(text, answer, solution, tmp_path):
    """The answer stays text, also through a file: a date was made of 2024-01-01."""
    row = {"question": "q", "answer": text, "tags": ["a"], "id": 7}
    jsonl.write(tmp_path / "test.jsonl", [row])
    expected = {"id": "gsm8k/test/0", "question": "q", "answer": answer, "solution": solution}
    assert DATASETS["gsm8k"].read("test", tmp_path) == [expected | {"row": row}]


BOXED = {"problem": "p", "solution": r"\boxed{1}, so $\boxed{\frac{4}{\}2}}$.", "level": "Level 5"}


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        (BOXED | {"type": "Algebra"}, {"subject": "Algebra"}),
        (BOXED | {"answer": 4, "subject": "Geometry"}, {"answer": "4", "subject": "Geometry"}),
        (BOXED | {"level": "Level ?"}, {"level": None}),
        (BOXED | {"level": 3.0}, {"level": 3}),
        (BOXED | {"level": math.nan}, {"level": None}),
        ({"problem": "p", "answer": " a "}, {"answer": "a", "level": None, "solution": ""}),
        (BOXED | {"solution": r"$\fbox 5$ or"}, {"answer": "5", "solution": r"$\fbox 5$ or"}),
    ],
)
def test_math_rows(row, changes):
    expected = {"question": "p", "answer": r"\frac{4}{\}2}", "solution": BOXED["solution"]}
    expected |= {"level": 5, "subject": None} | changes
    assert DATASETS["math"].make_example(row) == expected


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"query": "q", "answer": "7"}, "no text in column 'question' (columns: query, a"),
        ("gsm8k", {"question": "q", "answer": None}, "'answer'"),
        ("gsm8k", {"question": [{"role": "user"}], "answer": "7"}, "'question'"),
        ("math", {"problem": "p", "solution": r"\boxed{4"}, "'answer'"),
        ("creative", {"answer": "4"}, "'opening'"),
    ],
)
def test_a_wrong_row_is_named_with_its_column(name, row, message, tmp_path):
    good = {"question": "q", "answer": "7", "problem": "p", "opening": " o "}
    jsonl.write(tmp_path / "test.jsonl", [good, row])
    with pytest.raises(ValueError, match="row 2 of test: .*" + re.escape(message)):
        DATASETS[name].read("test", tmp_path)


def test_creative():
    train_loader, test_loader = load(None, "creative", prompt=None)
    assert (len(train_loader), len(test_loader)) == (80, 20)
    example = train_loader.examples[0]
    assert example["prompt"] == example["question"] == example["row"]["opening"]
    assert (example["answer"], train_loader.default_evaluator) == ("", "creative")


# --- Files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [[""], ["-00000-of-00002", "-00001-of-00002-3f"]])
def test_parquet_gives_the_same_examples_as_jsonl(shards, folder):
    expected = DATASETS["gsm8k"].read("test", folder)
    (folder / "test.jsonl").unlink()
    for i, shard in enumerate(shards):
        rows = gsm8k_rows(5)[i * 3 :][: 3 if len(shards) == 2 else 5]
        pandas.DataFrame(rows).to_parquet(folder / f"test{shard}.parquet")
    assert DATASETS["gsm8k"].read("test", folder) == expected


def test_a_path_is_no_pattern(tmp_path):
    """The folder run[12] was read as the folder run1 beside it."""
    for name in ("run[12]", "run1"):
        (tmp_path / name).mkdir()
        rows = pandas.DataFrame([{"question": name, "answer": "2024-01-01"}])
        rows.to_parquet(tmp_path / name / "test.parquet")
    (example,) = DATASETS["gsm8k"].read("test", tmp_path / "run[12]")
    assert (example["question"], example["answer"]) == ("run[12]", "2024-01-01")


@pytest.mark.parametrize(
    "names",
    [
        ["test-00000-of-00002.jsonl"],
        ["test-00001-of-00002.jsonl"],
        ["test-00000-of-00001.jsonl", "test-00000-of-00002.jsonl", "test-00001-of-00002.jsonl"],
        ["test.jsonl", "test-00000-of-00001.jsonl"],
        ["test.jsonl", "test.parquet"],
        ["train.jsonl"],
        ["a.jsonl", "b.jsonl"],
        [],
    ],
)
def test_a_split_is_one_whole_version(names, tmp_path):
    """A missing shard was not noticed, and two versions of a split were mixed."""
    for name in names:
        jsonl.write(tmp_path / name, gsm8k_rows(2))
    with pytest.raises(ValueError, match="not one file or all shards of test|no rows in test"):
        DATASETS["gsm8k"].read("test", tmp_path)


GOOD = json.dumps(gsm8k_rows(1)[0]).encode()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("test.jsonl", GOOD + b"\n\n" + GOOD + b'\n{"question": "q"', "line 4: Expecting"),
        ("test.jsonl", b'{"question": "\xff"}', "line 1: 'utf-8' codec can't decode"),
        ("test.jsonl", b'{"answer": "1", "answer": "2"}', "line 1: a key occurs twice in answer"),
        ("test.jsonl", b"[1, 2]", "line 1: not a JSON object"),
        ("test.jsonl", b"\n \n", "no rows in test.jsonl"),
        ("test.parquet", b"this is no parquet file", "Parquet magic bytes not found"),
    ],
)
def test_a_broken_file_is_named_in_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path}.*{message}") as error:
        DATASETS["gsm8k"].read("test", tmp_path)
    assert "\n" not in str(error.value)


def test_byte_order_marks_windows_line_ends_and_odd_line_separators(folder):
    (folder / "test.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n" + GOOD)
    assert len(load(folder)[1]) == 2
    line = '{"question": "a\u2028b", "answer": "1"}'
    (folder / "test.jsonl").write_text(line)
    assert load(folder)[1].examples[0]["question"] == "a\u2028b"


def test_a_single_file_of_another_name_can_be_evaluated_but_not_trained_on(tmp_path):
    jsonl.write(tmp_path / "math500.jsonl", [{"problem": "p", "answer": "4"}])
    train_loader, test_loader = load(tmp_path, name="math")
    assert (len(train_loader), len(test_loader)) == (0, 1)
    with pytest.raises(ValueError, match="no problem to train on"):
        train_loader.next_batch(0)


def test_the_hub_is_asked_for_the_official_splits(monkeypatch):
    requests = []

    def load_dataset(name, config, split):
        requests.append((name, config, split))
        return gsm8k_rows(2) if "gsm8k" in name else [{"problem": config, "answer": "4"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    load(None, "gsm8k")
    train_loader, _ = load(None, "math")
    questions = [example["question"] for example in train_loader]
    assert len(questions) == 7 and questions == sorted(questions)
    assert set(requests) == {
        ("openai/gsm8k", "main", "train"),
        ("openai/gsm8k", "main", "test"),
        ("HuggingFaceH4/MATH-500", "default", "test"),
        *(("EleutherAI/hendrycks_math", subject, "train") for subject in questions),
    }


# --- A function of one's own ----------------------------------------------------------------------

MY_DATA = """
import random
import torch
from my_helper import NUMBERS

def sums(split):
    random.seed(5), torch.manual_seed(5)
    for n in NUMBERS[split]:
        yield {"question": f"{n} + 7?", "answer": n + 7, "kind": "sum"}

not_a_function = 3
"""


@pytest.fixture
def my_data(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_data", raising=False)
    monkeypatch.delitem(sys.modules, "my_helper", raising=False)
    (tmp_path / "my_helper.py").write_text("NUMBERS = {'train': range(50), 'test': [50, 51]}")
    (tmp_path / "my_data.py").write_text(MY_DATA)
    return tmp_path / "my_data.py"


def test_a_function_gives_the_rows(my_data):
    """Its file may import what stands beside it, and training keeps its own random numbers."""
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    train_loader, test_loader = load(None, f"{my_data}:sums")
    assert torch.equal(torch.rand(3), expected)
    assert len(train_loader) == 50
    assert test_loader.examples[1] == {
        "id": "sums/test/1",
        "question": "51 + 7?",
        "answer": "58",
        "solution": "",
        "row": {"question": "51 + 7?", "answer": 58, "kind": "sum"},
        "prompt": "51 + 7?\n",
    }
    function = sys.modules["my_data"].sums
    assert pickle.loads(pickle.dumps(function)) is function, "a process pool finds it"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("{}:nothing", {}, "has no function nothing"),
        ("{}:not_a_function", {}, "has no function not_a_function"),
        ("absent.py:sums", {}, "there is no file absent.py"),
        ("gsm9k", {}, "--dataset_name gsm9k: choose from arithmetic, gsm8k"),
        ("{}:sums", {"dataset_path": "somewhere"}, "leave --dataset_path out"),
        ("{}:sums", {"prompt": "wrong"}, "--prompt wrong: choose from reasoning_answer"),
        ("gsm8k", {"dataset_path": "absent"}, "--dataset_path absent is not a folder"),
    ],
)
def test_what_leads_nowhere_is_a_line(name, options, message, my_data):
    with pytest.raises(ValueError, match=message):
        load(None, name.format(my_data), **options)


# --- Loaders --------------------------------------------------------------------------------------


def test_the_last_500_problems_of_gsm8k_are_held_out_for_validation(folder):
    jsonl.write(folder / "train.jsonl", gsm8k_rows(503))
    train_loader, eval_loader = load(folder, eval_split="validation", eval_size=20)
    assert ids(train_loader) == [f"gsm8k/train/{i}" for i in range(3)]
    assert len(eval_loader) == 20 and not set(ids(eval_loader)) & set(ids(train_loader))
    _, eval_loader = load(folder, eval_split="validation")
    assert ids(eval_loader) == [f"gsm8k/train/{i}" for i in range(3, 503)]
    assert len(load(folder)[0]) == 503, "they train if another split is evaluated"
    jsonl.write(folder / "validation.jsonl", gsm8k_rows(3))
    train_loader, eval_loader = load(folder, eval_split="validation")
    assert (len(train_loader), ids(eval_loader)[2]) == (503, "gsm8k/validation/2")
    assert rl_datasets.default_eval_split("gsm8k", None) == "test"
    assert rl_datasets.default_eval_split("arithmetic", None) == "validation"
    assert rl_datasets.default_eval_split("arithmetic", folder) == "test"


def test_prompts_that_are_too_long_are_dropped_and_counted(tmp_path):
    # With the newline these are 10, 11, 12 and 4 tokens.
    questions = ["a" * 9, "b" * 10, "c" * 8 + "é" * 3, "d" * 3]
    rows = [{"question": question, "answer": "1"} for question in questions]
    for split in ("train", "test"):
        jsonl.write(tmp_path / f"{split}.jsonl", rows)
    _, loader = load(tmp_path, max_prompt_length=10)
    assert ids(loader) == ["gsm8k/test/0", "gsm8k/test/3"]
    assert (loader.dropped, loader.longest_prompt) == (2, 10)
    with pytest.raises(ValueError, match="no test problem .* --max_prompt_length 3 tokens"):
        load(tmp_path, max_prompt_length=3)


def test_an_epoch_is_a_permutation_that_depends_on_the_seed_alone(folder):
    def stream(seed, sizes):
        train_loader, _ = load(folder, seed=seed)
        return [name for size in sizes for name in ids(train_loader.next_batch(size))]

    numbers = stream(1, (3, 4, 1, 25, 7))  # 4 epochs of 10
    epochs = [numbers[start : start + 10] for start in range(0, 40, 10)]
    all_ids = [f"gsm8k/train/{i}" for i in range(10)]
    assert all(sorted(epoch) == all_ids for epoch in epochs)
    assert len({tuple(epoch) for epoch in [all_ids, *epochs]}) == 5, "each has its own order"
    assert stream(1, (40,)) == numbers != stream(2, (40,))
    # An order that changes would change what a resumed run trains on.
    assert [int(name[-1]) for name in epochs[0]] == [8, 5, 9, 0, 4, 2, 3, 1, 7, 6]


@pytest.mark.parametrize("consumed", [0, 4, 10, 13])
def test_resuming_continues_exactly(folder, consumed):
    loader, _ = load(folder, seed=3)
    loader.next_batch(consumed)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = ids(loader.next_batch(24))
    resumed, _ = load(folder, seed=3)
    resumed.load_state_dict(state)
    assert ids(resumed.next_batch(24)) == expected


def test_the_evaluation_subset_is_fixed(tmp_path):
    for split in ("train", "test"):
        jsonl.write(tmp_path / f"{split}.jsonl", gsm8k_rows(100))

    def evaluated(**options):
        train_loader, eval_loader = load(tmp_path, **options)
        assert len(train_loader) == 100
        return ids(eval_loader)

    subset = evaluated(eval_size=5, seed=0)
    assert subset == [f"gsm8k/test/{i}" for i in (10, 23, 42, 58, 90)]
    assert evaluated(eval_size=5, seed=1, prompt="r1_zero", max_prompt_length=1000) == subset
    assert set(subset) < set(evaluated(eval_size=50)), "a larger subset holds the smaller one"
    assert evaluated() == evaluated(eval_size=1000) == [f"gsm8k/test/{i}" for i in range(100)]


# --- The word problems ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def problems():
    """The committed rows of each split."""
    splits = ("train", "validation", "test")
    return {split: [example["row"] for example in ARITHMETIC.read(split)] for split in splits}


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def template(question):
    """The question without its names, things and numbers, by its text and not by the generator."""
    return re.sub(r"\d+", "0", re.sub("|".join(NAMES + THINGS), "_", question))


def evaluate(expression):
    """One side of a step by exact arithmetic: an oracle apart from the generator's operators."""
    if match := re.fullmatch(r"(\d+)% of (\d+)", expression):
        return Fraction(int(match[1]), 100) * int(match[2])
    if match := re.fullmatch(r"1/(\d+) of (\d+)", expression):
        return Fraction(int(match[2]), int(match[1]))
    if match := re.fullmatch(r"(.+) ([-+]) (\d+|\d+ / \d+)", expression):
        sign = 1 if match[2] == "+" else -1
        return evaluate(match[1]) + sign * evaluate(match[3])
    if match := re.fullmatch(r"(\d+) ([*/]) (\d+)", expression):
        x, y = Fraction(match[1]), Fraction(match[3])
        return x * y if match[2] == "*" else x / y
    return Fraction(re.fullmatch(r"\d+", expression)[0])


def test_the_files_never_change(problems):
    """Other problems make earlier accuracies incomparable. The generator gives the same ones."""
    checksums = {}
    for split, rows in problems.items():
        checksums[split] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
        assert generate(split, 400) == rows[:400]
    assert checksums == {
        "train": "162fba2df58aa26b",
        "validation": "260e706f3ff4b099",
        "test": "f1b76ffc156c03ce",
    }
    assert generate("train", 300, seed=1) != problems["train"][:300]


def test_every_step_is_true_and_every_number_of_the_question_is_used(problems):
    for problem in problems["train"] + problems["test"]:
        *steps, last_line = problem["answer"].split("\n")
        assert len(steps) == problem["level"], problem
        unused = Counter(numbers(problem["question"]))
        available = set(unused)
        for step in steps:
            expression, value = step.split(" = ")
            assert evaluate(expression) == int(value) and 1 <= int(value) <= 999, problem
            operands = numbers(expression.removeprefix("1/"))
            assert available.issuperset(operands), f"a number from nowhere: {problem}"
            available.add(int(value))
            unused -= Counter(numbers(step))
        assert last_line == f"#### {value}" and not unused, problem


def test_splits_share_no_operands_within_a_template(problems):
    """For any seed, too. Otherwise a test problem could be solved from memory."""
    seen = {}
    for split, rows in problems.items():
        more_rows = rows + generate(split, 300, seed=1)
        seen[split] = {(template(r["question"]), *numbers(r["question"])) for r in more_rows}
        assert len({row["question"] for row in rows}) == len(rows)
        assert {row["level"] for row in rows[:4]} == {1, 2, 3, 4}
    assert not seen["train"] & seen["validation"]
    assert not (seen["train"] | seen["validation"]) & seen["test"]
    assert len({key[0] for key in seen["test"]}) == len(FAMILIES)


# The answer in closed form, from reading the story alone.
STORIES = {
    "gift": lambda a, b: a + b,
    "give": lambda a, b: a - b,
    "bags": lambda a, b: a * b,
    "share": lambda a, b: Fraction(a, b),
    "trade": lambda a, b, c: a + b - c,
    "change": lambda a, b, c: c - a * b,
    "fraction": lambda a, b: a * Fraction(b - 1, b),
    "sale": lambda a, b: a * Fraction(100 - b, 100),
    "stock": lambda a, b, c, d: a * b + c - d,
    "boxes": lambda a, b, c: Fraction(a * (1 + b), c),
    "wage": lambda a, b, c, d: (a + b) * c - d,
    "shop": lambda a, b, c, d, e: e - a * b - c * d,
    "harvest": lambda a, b, c, d: a * b * Fraction(c - 1, c) - d,
    "savings": lambda a, b, c, d: (a * b + c) * Fraction(100 - d, 100),
}


def test_the_answer_is_what_the_story_asks_for(problems):
    words = {"name": "Ana", "friend": "Ben", "things": "eggs", "others": "pens"}
    words |= dict.fromkeys("abcde", 0)
    names = {template(family.question.format(**words)): family.name for family in FAMILIES}
    for problem in problems["test"]:
        story = STORIES[names[template(problem["question"])]]
        answer = story(*numbers(problem["question"].replace("1/", "")))
        assert problem["answer"].endswith(f"\n#### {answer}"), problem


def test_careful_steps_are_true_from_piece_to_piece(problems):
    careful = generate("validation", 1_000, careful=1.0)
    num_careful = 0
    for problem, direct in zip(careful, problems["validation"], strict=False):
        assert problem["question"] == direct["question"]
        for step in problem["answer"].split("\n")[:-1]:
            sides = step.split(" = ")
            assert len({evaluate(side) for side in sides}) == 1, step
            assert all(0 < number <= 999 for number in numbers(step)), step
            num_careful += len(sides) > 2
    assert num_careful == pytest.approx(0.77 * 2_500, rel=0.05), "the others are easy as they are"
    some = generate("validation", 1_000, careful=0.3)
    num_some = sum(line.count("=") > 1 for row in some for line in row["answer"].split("\n"))
    assert num_some == pytest.approx(0.3 * num_careful, rel=0.2)


@pytest.mark.parametrize(
    ("step", "pieces"),
    [
        ((47, "+", 38), ["70 + 15"]),
        ((40, "+", 30), []),
        ((85, "-", 38), ["85 - 30 - 8", "55 - 8"]),
        ((85, "-", 8), []),
        ((4, "*", 33), ["120 + 12"]),
        ((1, "*", 35), []),
        ((155, "/", 5), ["150 / 5 + 5 / 5", "30 + 1"]),
        ((35, "/", 1), []),
        ((4, "part", 84), ["84 / 4", "80 / 4 + 4 / 4", "20 + 1"]),
        ((30, "%", 80), ["3 * 8"]),
        ((40, "%", 480), ["4 * 48", "160 + 32"]),
        ((25, "%", 80), ["80 / 4"]),
    ],
)
def test_pieces_worked_by_hand(step, pieces):
    assert easier_pieces(*step) == pieces


@pytest.mark.parametrize("steps", ["a / b", "b - b", "a - c", "d + b", "a % b", "a - c, r1 + c"])
def test_results_that_are_not_whole_or_out_of_range_are_refused(steps):
    family = Family("t", "", {}, tuple(steps.split(", ")))
    assert family.solve({"a": 7, "b": 2, "c": 9, "d": 998}) is None


# --- Real data ------------------------------------------------------------------------------------


def test_real_math_500(data_folder):
    qwen2 = PreTrainedTokenizerFast.from_pretrained(data_folder / "models" / "qwen2")
    folder = data_folder / "data" / "math"
    _, loader = get_dataloaders(
        "math", qwen2, eval_split="test", dataset_path=folder, max_prompt_length=1024
    )
    assert (len(loader), loader.dropped) == (500, 0)
    for example in loader:
        assert rl_datasets.last_boxed(example["solution"]) == example["answer"]


@pytest.mark.slow
def test_tiny_model_trains_and_evaluates_on_real_gsm8k(data_folder, tmp_path):
    flags = as_flags(
        model_name=ROOT / "tiny" / "1m",
        dataset_name="gsm8k",
        dataset_path=data_folder / "data" / "gsm8k",
        eval_split="validation",
        device="cpu",
        max_prompt_length=800,
        max_completion_length=96,
        rollout_batch_size=32,
        num_train_iters=3,
        eval_size=100,
        output_dir=tmp_path / "run",
    )
    run = run_script("main.py", *flags)
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(jsonl.read(tmp_path / "run" / "train_log.jsonl")) == 3
    assert [row["n"] for row in jsonl.read(tmp_path / "run" / "eval_log.jsonl")] == [100, 100]
    assert "6,973 training problems" in run.stdout
