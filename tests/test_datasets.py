"""Prompts word for word, what is read from rows and files, the order, and the word problems."""

import hashlib
import json
import sys

import datasets
import pytest
import torch
from conftest import ARITHMETIC, small_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import rl_datasets
from grpo import jsonl
from rl_datasets import DATASETS, PROMPTS, SYSTEM_PROMPT, get_dataloaders
from tiny.make_word_problems import generate

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
    """GSM8K's columns with 10 training and 100 test problems."""
    jsonl.write(tmp_path / "train.jsonl", gsm8k_rows(10))
    jsonl.write(tmp_path / "test.jsonl", gsm8k_rows(100))
    return tmp_path


def load(folder, name="gsm8k", **options):
    """(train_loader, eval_loader) of a folder, with bare questions as prompts."""
    defaults = {"eval_split": "test", "prompt": "question_only", "dataset_path": folder}
    return get_dataloaders(name, small_tokenizer(), **(defaults | options))


def ids(examples):
    return [example["id"] for example in examples]


# --- Prompts --------------------------------------------------------------------------------------


def test_prompts_word_for_word():
    question = r"Is {x} in {0} 100% of %s, \frac{1}{2}, {answer} or {{question}}?"
    tokenizer = tokenizer_with(CHAT_TEMPLATE)
    chat = {name: prompt.render(tokenizer, question) for name, prompt in PROMPTS.items()}
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
        "r1_zero_handout": "A conversation between User and Assistant. The User asks a question, "
        "and the Assistant solves it. The Assistant first thinks about the reasoning process in "
        "the mind and then provides the User with the answer. The reasoning process is enclosed "
        "within <think> </think> and answer is enclosed within <answer> </answer> tags, "
        "respectively, i.e., <think> reasoning process here </think> <answer> answer here "
        f"</answer>.\nUser: {question}\nAssistant: <think>",
        "question_only": f"{question}\n",
        "story": question,
    }
    assert (chat["r1_zero"], chat["question_only"]) == (plain["r1_zero"], plain["question_only"])
    stops = {name: prompt.stop_strings for name, prompt in PROMPTS.items() if prompt.stop_strings}
    end = ("</answer>",)
    assert stops == {"r1_zero": end, "r1_zero_handout": end, "story": ("\n",)}
    solved = {
        name: prompt.format_solution("{1} + {answer}", "2") for name, prompt in PROMPTS.items()
    }
    assert solved == {
        "reasoning_answer": "<reasoning>\n{1} + {answer}\n</reasoning>\n<answer>\n2\n</answer>",
        "r1_zero": "\n{1} + {answer}\n</think> <answer>2</answer>",
        "r1_zero_handout": "\n{1} + {answer}\n</think> <answer>2</answer>",
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
    prompt = PROMPTS["question_only"]
    assert prompt.render(tokenizer, "2?") == "<end>2?\n"
    options = {"prompt": prompt, "max_prompt_length": 9, "seed": 0}
    loader = rl_datasets.DataLoader([{"question": "2?"}], tokenizer, **options)
    assert loader.longest_prompt == 4, "it is there once"


@pytest.mark.parametrize("system", ["{{ raise_exception('no system role') }}", "{# dropped #}"])
def test_a_chat_template_without_a_system_role(system):
    turn = "{% if m['role'] == 'system' %}" + system + "{% else %}[{{ m['content'] }}]{% endif %}"
    tokenizer = tokenizer_with("{% for m in messages %}" + turn + "{% endfor %}")
    rendered = PROMPTS["reasoning_answer"].render(tokenizer, "2 + 3?")
    assert rendered == f"[{SYSTEM_PROMPT}\n\n2 + 3?]"


def test_a_chat_template_writes_the_same_date_tomorrow():
    tokenizer = tokenizer_with("{{ strftime_now('%d %b %Y') }} {{ messages[-1]['content'] }}")
    assert PROMPTS["reasoning_answer"].render(tokenizer, "2?").startswith("01 Jan 2025")


# --- Examples -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "solution"),
    [
        ("2*3 = <<2*3=6>>6 eggs.\n6+1 = $<<6+1=7>>7.\n#### 7", "7", "2*3 = 6 eggs.\n6+1 = $7."),
        ("1 << 3 is 8\n#### 1,000,000.5", "1000000.5", "1 << 3 is 8"),
        ("#### 5 is not the answer\n####  -$3,500 ", "-$3500", "#### 5 is not the answer"),
        ("see <<note>>\n#### (1,000, 2,000)", "(1,000, 2,000)", "see <<note>>"),
        ("a pair\n#### (1,200)", "(1,200)", "a pair"),
        ("1,5", "1,5", ""),
        ("2024-01-01", "2024-01-01", ""),
        (2.5, "2.5", ""),
    ],
)
def test_gsm8k_answer_and_solution(text, answer, solution, tmp_path):
    """The answer stays text, also through a file: a date was made of 2024-01-01."""
    row = {"question": "q", "answer": text, "id": 7}
    jsonl.write(tmp_path / "test.jsonl", [row])
    expected = {"id": "gsm8k/test/0", "question": "q", "answer": answer, "solution": solution}
    assert DATASETS["gsm8k"].read("test", tmp_path) == [expected | {"row": row}]


BOXED = {"problem": "p", "solution": r"\boxed{1}, so $\boxed{\frac{4}{\}2}}$."}


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        (BOXED, {}),
        (BOXED | {"answer": 4}, {"answer": "4"}),
        ({"problem": "p", "answer": " a "}, {"answer": "a", "solution": ""}),
        (BOXED | {"solution": r"$\fbox 5$ or"}, {"answer": "5", "solution": r"$\fbox 5$ or"}),
    ],
)
def test_math_rows(row, changes):
    expected = {"question": "p", "answer": r"\frac{4}{\}2}", "solution": BOXED["solution"]}
    assert DATASETS["math"].make_example(row) == expected | changes


def test_a_wrong_row_is_shown_with_its_column():
    for name, row, column in (
        ("gsm8k", {"query": "q", "answer": "7"}, "question"),
        ("gsm8k", {"question": "q", "answer": None}, "answer"),
        ("gsm8k", {"question": [{"role": "user"}], "answer": "7"}, "question"),
        ("math", {"problem": "p", "solution": r"\boxed{4"}, "answer"),
    ):
        with pytest.raises(ValueError, match=f"no text in column '{column}' of {{'"):
            DATASETS[name].make_example(row)


def test_real_math_500_and_gsm8k(data_folder):
    qwen2 = PreTrainedTokenizerFast.from_pretrained(data_folder / "models" / "qwen2")
    options = {"eval_split": "test", "max_prompt_length": 1024}
    path = data_folder / "data" / "math"
    train_loader, loader = get_dataloaders("math", qwen2, dataset_path=path, **options)
    assert (len(train_loader), len(loader), loader.dropped) == (0, 500, 0)
    assert loader.prompt.name == "r1_zero"
    for example in loader:
        assert rl_datasets.last_boxed(example["solution"]) == example["answer"]
    with pytest.raises(ValueError, match="no problem to train on"):
        train_loader.next_batch(0)
    path = data_folder / "data" / "gsm8k"
    loaders = get_dataloaders("gsm8k", qwen2, dataset_path=path, **options)
    assert [len(loader) for loader in loaders] == [7473, 1319]


# --- Where rows come from -------------------------------------------------------------------------


def test_the_files_of_a_split(tmp_path):
    """Training problems were once evaluated as the test split."""
    for names, split, chosen in (
        ("test.jsonl test.parquet test-a.jsonl tests.jsonl", "test", "test.jsonl"),
        ("test-0-of-2.jsonl test-1-of-2.jsonl", "test", "test-0-of-2.jsonl test-1-of-2.jsonl"),
        ("math500.jsonl", "test", "math500.jsonl"),
        ("math500.jsonl", "train", ""),
        ("train.jsonl", "test", ""),
        ("a.jsonl b.jsonl", "test", ""),
    ):
        folder = tmp_path / f"{names} {split}"
        folder.mkdir()
        for name in names.split():
            (folder / name).touch()
        assert [path.name for path in rl_datasets.find_files(folder, split)] == chosen.split()


def test_a_float32_answer_is_the_number_that_was_written(tmp_path):
    """It once became 0.10000000149011612, which no completion equals."""
    rows = {"question": ["What is 1 / 10?"], "answer": [0.1]}
    features = datasets.Features(
        question=datasets.Value("string"), answer=datasets.Value("float32")
    )
    datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "test.parquet")
    (example,) = DATASETS["gsm8k"].read("test", str(tmp_path))
    assert example["answer"] == "0.1"


def test_a_missing_shard_is_noticed(tmp_path):
    (tmp_path / "test-00000-of-00002.parquet").touch()
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(ValueError, match="does not have all shards of test"):
        rl_datasets.find_files(tmp_path, "test")


def test_the_last_box_of_a_long_solution():
    text = r"\boxed{1}" + " and so on" * 2_000 + r"\boxed{2}"
    assert rl_datasets.last_boxed(text) == "2"


def test_the_hub_is_asked_for_the_official_splits(monkeypatch):
    requests = []

    def load_dataset(*name, split):
        requests.append((*name, split))
        return gsm8k_rows(2) if "gsm8k" in name[0] else [{"problem": name[-1], "answer": "4"}]

    subjects = ["algebra", "geometry", "precalculus"]
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: subjects)
    load(None, "gsm8k")
    assert [example["question"] for example in load(None, "math")[0]] == subjects
    assert set(requests) == {
        ("openai/gsm8k", "main", "train"),
        ("openai/gsm8k", "main", "test"),
        ("HuggingFaceH4/MATH-500", "test"),
        *(("EleutherAI/hendrycks_math", subject, "train") for subject in subjects),
    }


def test_a_function_gives_the_rows(tmp_path, monkeypatch):
    """Training keeps its own random numbers."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_data.py").write_text(
        "import torch\n"
        "torch.manual_seed(5)\n"
        "def sums(split):\n"
        "    torch.manual_seed(5)\n"
        "    for n in range(50) if split == 'train' else [50, 51]:\n"
        "        yield {'question': f'{n} + 7?', 'answer': n + 7, 'kind': 'sum'}\n"
    )
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    train_loader, test_loader = load(None, f"{tmp_path / 'my_data.py'}:sums")
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


# --- Loaders --------------------------------------------------------------------------------------


def test_the_last_500_problems_of_gsm8k_are_held_out_for_validation(folder):
    jsonl.write(folder / "train.jsonl", gsm8k_rows(503))
    train_loader, eval_loader = load(folder, eval_split="validation", eval_size=20)
    assert ids(train_loader) == [f"gsm8k/train/{i}" for i in range(3)]
    assert len(eval_loader) == 20 and not set(ids(eval_loader)) & set(ids(train_loader))
    assert train_loader.held_out == {row["question"] for row in gsm8k_rows(503)[3:]}
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
    jsonl.write(tmp_path / "test.jsonl", rows)
    _, loader = load(tmp_path, max_prompt_length=10)
    assert ids(loader) == ["gsm8k/test/0", "gsm8k/test/3"]
    assert (loader.dropped, loader.longest_prompt) == (2, 10)
    with pytest.raises(ValueError, match="--max_prompt_length 3 leaves no test problem"):
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
    for consumed in (0, 4, 10, 13):  # a run that is resumed there
        loader, _ = load(folder, seed=1)
        loader.next_batch(consumed)
        resumed, _ = load(folder, seed=1)
        resumed.load_state_dict(loader.state_dict())
        assert ids(resumed.next_batch(24)) == numbers[consumed : consumed + 24]


def test_the_evaluation_subset_is_fixed(folder):
    def evaluated(**options):
        return ids(load(folder, **options)[1])

    subset = evaluated(eval_size=5, seed=0)
    assert subset == [f"gsm8k/test/{i}" for i in (10, 23, 42, 58, 90)]
    assert evaluated(eval_size=5, seed=1, prompt="r1_zero", max_prompt_length=1000) == subset
    assert set(subset) < set(evaluated(eval_size=50)), "a larger subset holds the smaller one"
    assert evaluated() == evaluated(eval_size=1000) == [f"gsm8k/test/{i}" for i in range(100)]


# --- The word problems ----------------------------------------------------------------------------


def checksum(rows):
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def test_the_files_never_change():
    """Other problems make earlier accuracies incomparable. The generator gives the same ones."""
    for split, expected in (
        ("train", "162fba2df58aa26b"),
        ("validation", "260e706f3ff4b099"),
        ("test", "f1b76ffc156c03ce"),
    ):
        rows = [example["row"] for example in ARITHMETIC.read(split)]
        assert checksum(rows) == expected
        assert generate(split, 400) == rows[:400]
    assert checksum(generate("train", 400, seed=1, careful=0.3)) == "dc972ff3c62e2c64"
