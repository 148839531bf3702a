"""Prompts and loaders: exact texts, the order of examples, and one clear line for bad data."""

import json
import math
import re

import datasets
import pytest
from conftest import ROOT, small_tokenizer
from grading.extraction import last_boxed
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import rl_datasets
from evaluator import get_evaluator
from grpo import jsonl
from rl_datasets import (
    DATASETS,
    PROMPTS,
    DataLoader,
    GSM8kLoader,
    get_dataloaders,
    gsm8k_example,
    math_example,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AWKWARD = r"Is {x} in {0} 100% of %s, \frac{1}{2} or {{y}}?"


def chat_tokenizer(chat_template=CHAT_TEMPLATE):
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
    """GSM8K's schema with 10 training and 5 test problems."""
    jsonl.write(tmp_path / "train.jsonl", gsm8k_rows(10))
    jsonl.write(tmp_path / "test.jsonl", gsm8k_rows(5))
    return tmp_path


def load(folder, name="gsm8k", **options):
    """(train_loader, eval_loader) of a folder, with bare questions as prompts."""
    defaults = {"eval_split": "test", "prompt": "question_only", "dataset_path": folder}
    return get_dataloaders(name, small_tokenizer(), **(defaults | options))


def ids(examples):
    return [example["id"] for example in examples]


def error_of(folder, name="gsm8k"):
    """The one line that says what is wrong with the test data of a folder."""
    with pytest.raises(ValueError) as error:
        DATASETS[name].read("test", folder)
    message = str(error.value)
    assert "\n" not in message
    return message


# --- Prompts --------------------------------------------------------------------------------------


def test_prompts_word_for_word():
    question = "How many?"
    reasoning_answer = PROMPTS["reasoning_answer"]
    assert reasoning_answer.render(chat_tokenizer(), question) == (
        "<|im_start|>system\nSolve the problem. Respond in this form:\n"
        "<reasoning>\nyour steps\n</reasoning>\n"
        "<answer>\nonly the final answer\n</answer><|im_end|>\n"
        "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    )
    plain_text = f"{rl_datasets.SYSTEM_PROMPT}\n\nHow many?\n"
    assert reasoning_answer.render(small_tokenizer(), question) == plain_text
    assert PROMPTS["r1_zero"].render(chat_tokenizer(), question) == (
        "A conversation between User and Assistant. The User asks a question. The Assistant first "
        "reasons, then gives the User the final answer, in this form: <think> the reasoning "
        "</think> <answer> the answer </answer>.\nUser: How many?\nAssistant: <think>"
    )
    assert PROMPTS["question_only"].render(chat_tokenizer(), question) == "How many?\n"


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("chat_template", [None, CHAT_TEMPLATE])
def test_a_question_with_braces_survives(name, chat_template):
    assert PROMPTS[name].name == name
    assert AWKWARD in PROMPTS[name].render(chat_tokenizer(chat_template), AWKWARD)


@pytest.mark.parametrize(
    ("name", "completion"),
    [
        ("reasoning_answer", "<reasoning>\n{1} + 1 = 2\n</reasoning>\n<answer>\n2\n</answer>"),
        ("r1_zero", "\n{1} + 1 = 2\n</think> <answer>2</answer>"),
        ("question_only", "{1} + 1 = 2\nThe answer is \\boxed{2}."),
    ],
)
def test_format_solution(name, completion):
    assert PROMPTS[name].format_solution("{1} + 1 = 2", "2") == completion


@pytest.mark.parametrize("with_eos", [False, True])
@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_has_the_bos_that_its_tokenizer_adds(name, with_eos):
    """Plain prompts had no BOS. A chat template brings its own, and an EOS would end the prompt."""
    prompt = PROMPTS[name]
    tokenizer = small_tokenizer()
    tokenizer.bos_token = "<end>"
    template = "<end> $A <eos>" if with_eos else "<end> $A"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template,
        pair=f"{template} $B",
        special_tokens=[("<end>", tokenizer.bos_token_id), ("<eos>", 1)],
    )
    expected_ids = tokenizer(f"{prompt.prefix}2 and 3{prompt.suffix}")["input_ids"]
    if with_eos:
        expected_ids.pop()
    rendered = prompt.render(tokenizer, "2 and 3")
    assert tokenizer(rendered, add_special_tokens=False)["input_ids"] == expected_ids
    tokenizer.chat_template = "<end>{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert prompt.render(tokenizer, "2 and 3").count("<end>") == 1


@pytest.mark.parametrize("question", ["2 and 3", " 2 and 3", "\n2 and 3"])
@pytest.mark.parametrize("name", ["r1_zero", "question_only"])
@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_prompt_begins_as_its_tokenizer_begins_a_text(scheme, name, question):
    """Of two special tokens both were lost, and so was the space before the first word."""
    prompt = PROMPTS[name]
    tokens = ["<unk>", "[gMASK]", "<sop>", "</s>", "▁", *map(chr, range(33, 127))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["[gMASK]", "<sop>"],
    )
    bpe = tokenizer.backend_tokenizer
    bpe.post_processor = TemplateProcessing(
        single="[gMASK] <sop> $A </s>", special_tokens=[("[gMASK]", 1), ("<sop>", 2), ("</s>", 3)]
    )
    own_ids = tokenizer(f"{prompt.prefix}{question}{prompt.suffix}")["input_ids"]
    rendered = prompt.render(tokenizer, question)
    assert [*tokenizer(rendered, add_special_tokens=False)["input_ids"], 3] == own_ids


@pytest.mark.parametrize("refusing", ["{{ raise_exception('no system role') }}", "{# dropped #}"])
def test_a_chat_template_without_a_system_role(refusing):
    """One such template ended in a traceback, and the other left the instruction out."""
    tokenizer = small_tokenizer()
    turn = "{% if m['role'] == 'system' %}" + refusing + "{% else %}[{{ m['content'] }}]{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}" + turn + "{% endfor %}"
    prompt = PROMPTS["reasoning_answer"]
    system_message, user_message = prompt.messages("2 + 3?")
    expected = f"[{system_message['content']}\n\n{user_message['content']}]"
    assert prompt.render(tokenizer, "2 + 3?") == expected
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(ValueError, match=r"chat template .*never"):
        prompt.render(tokenizer, "2 + 3?")


def test_every_message_is_in_the_prompt():
    """A template that leaves out the user's turn gave every question the same prompt."""
    one_turn = "{{ messages[0].content }}"
    rendered = PROMPTS["reasoning_answer"].render(chat_tokenizer(one_turn), "2 + 3?")
    assert rendered == f"{rl_datasets.SYSTEM_PROMPT}\n\n2 + 3?"
    system_alone = "{% if messages[0].role == 'system' %}" + one_turn + "{% endif %}"
    with pytest.raises(ValueError, match="leaves out a message"):
        PROMPTS["reasoning_answer"].render(chat_tokenizer(system_alone), "2 + 3?")


def test_a_prompt_does_not_depend_on_the_day():
    """A run that was resumed after midnight went on with other prompts."""
    template = (
        "\n{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
        "{% set form = '%H:%M' %}{{ strftime_now(form) }}{{ strftime_now(' (%S) ') }}"
    )
    rendered = PROMPTS["story"].render(chat_tokenizer(template + CHAT_TEMPLATE), "It rained.")
    assert rendered.startswith("\n01 Jan 202500:00 (00) <|im_start|>user")


# --- Rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "solution"),
    [
        ("2*3 = <<2*3=6>>6 eggs.\n6+1 = $<<6+1=7>>7.\n#### 7", "7", "2*3 = 6 eggs.\n6+1 = $7."),
        ("So it is 1,000,000.\n#### 1,000,000", "1000000", "So it is 1,000,000."),
        ("#### 5 is not the answer\n####  -3.5 ", "-3.5", "#### 5 is not the answer"),
        ("#### 4", "4", ""),
    ],
)
def test_gsm8k_answer_and_solution(text, answer, solution):
    example = gsm8k_example({"question": "q", "answer": text})
    assert example == {"question": "q", "answer": answer, "solution": solution}


BOXED_ROW = {
    "problem": "p",
    "solution": r"It is $\boxed{4}$.",
    "level": "Level 5",
    "type": "Algebra",
}


def test_math_example_from_the_box_of_the_solution():
    assert math_example(BOXED_ROW) == {
        "question": "p",
        "answer": "4",
        "solution": r"It is $\boxed{4}$.",
        "level": 5,
        "subject": "Algebra",
    }


def test_math_example_from_the_column_of_the_answer():
    """It comes before the box of the solution."""
    assert math_example(BOXED_ROW | {"answer": "four"})["answer"] == "four"
    assert math_example({"problem": "p", "answer": " 4 ", "subject": "Geometry"}) == {
        "question": "p",
        "answer": "4",
        "solution": "",
        "level": None,
        "subject": "Geometry",
    }


@pytest.mark.parametrize(
    ("level", "number"),
    [(3, 3), (3.0, 3), ("3", 3), ("Level 3", 3), ("Level ?", None), (math.nan, None)],
)
def test_math_levels(level, number):
    """5.0, which pandas writes where another row has no level, was taken for no level."""
    assert math_example(BOXED_ROW | {"level": level})["level"] == number


# --- Files ----------------------------------------------------------------------------------------


def test_jsonl_folder(folder):
    train_loader, test_loader = load(folder)
    assert (len(train_loader), len(test_loader)) == (10, 5)
    row = {
        "id": "gsm8k/test/3",
        "question": "What is 3 + 1?",
        "answer": "4",
        "solution": "3 + 1 = 4",
        "file_and_row": f"{folder / 'test.jsonl'}, row 4",
        "row": {"question": "What is 3 + 1?", "answer": "3 + 1 = 4\n#### 4"},
    }
    assert list(test_loader)[3] == row | {"prompt": "What is 3 + 1?\n"}
    assert GSM8kLoader.read("test", folder)[3] == row, "this needs no tokenizer"


@pytest.mark.parametrize("name", ["gsm8k", "math", "creative"])
def test_an_example_has_every_further_column_of_its_row(name, tmp_path):
    """They were dropped, so that no reward could depend on them."""
    row = {"opening": "A line.", "problem": "p", "question": "q", "answer": "So: 2 #### 2"}
    row |= {"tags": ["a", "b"], "difficulty": 3, "id": 7, "prompt": ["theirs"]}
    if name != "math":
        row |= {"level": {"not": "a level"}, "subject": ["none"]}
    jsonl.write(tmp_path / "test.jsonl", [row])
    _, (example,) = load(tmp_path, name)
    assert example["tags"] == ["a", "b"]
    assert example["difficulty"] == 3
    assert example["id"] == f"{name}/test/0"
    assert example["prompt"] == f"{example['question']}\n"
    assert (
        example["answer"] == {"gsm8k": "2", "math": row["answer"], "creative": row["answer"]}[name]
    )
    # The logs divide accuracies by these two, so that they must be what a loader has made of them.
    if name != "math":
        assert not example.keys() & {"level", "subject"}


@pytest.mark.parametrize(
    "names", [["test.parquet"], ["test-00000-of-00002.parquet", "test-00001-of-00002-3f.parquet"]]
)
def test_parquet_gives_the_same_examples_as_jsonl(folder, names):
    _, jsonl_loader = load(folder)
    (folder / "test.jsonl").unlink()
    rows_per_file = math.ceil(5 / len(names))
    for i, name in enumerate(names):
        rows = gsm8k_rows(5)[i * rows_per_file : (i + 1) * rows_per_file]
        datasets.Dataset.from_list(rows).to_parquet(folder / name)
    _, parquet_loader = load(folder)
    for example in [*jsonl_loader, *parquet_loader]:
        del example["file_and_row"]
    assert parquet_loader.examples == jsonl_loader.examples


@pytest.mark.parametrize("name", ["run[12]", "a::b", "two words", "file:x"])
def test_a_path_is_neither_a_pattern_nor_an_address(name, tmp_path):
    """The folder run[12] was read as the folder run1 beside it."""
    for folder_name in (name, "run1"):
        folder = tmp_path / folder_name
        jsonl.write(folder / "train.jsonl", [{"question": folder_name, "answer": "#### 1"}])
        rows = [{"question": folder_name, "answer": "#### 2"}]
        with open(folder / "test.parquet", "wb") as file:
            datasets.Dataset.from_list(rows).to_parquet(file)
    for loader in load(tmp_path / name):
        assert [example["question"] for example in loader] == [name]


@pytest.mark.parametrize(
    "names",
    [
        ["test-00000-of-00002.jsonl"],
        ["test-00001-of-00002.jsonl"],
        ["math500-00000-of-00002.jsonl"],
        ["test-00000-of-00001.jsonl", "test-00000-of-00002.jsonl", "test-00001-of-00002.jsonl"],
        ["test-00000-of-00001-3f.jsonl", "test-00000-of-00001-4e.jsonl"],
        ["test.jsonl", "test-00000-of-00001.jsonl"],
        ["test.jsonl", "test.parquet"],
        ["test.jsonl", "test.JSONL"],
        ["test.jsonl", "test.json"],
        ["Train.jsonl"],
    ],
)
def test_a_split_is_one_whole_version(names, tmp_path):
    """A missing shard was not noticed, and two versions of a split were mixed."""
    for name in names:
        jsonl.write(tmp_path / name, gsm8k_rows(2))
    assert f"found: {', '.join(sorted(names))}" in error_of(tmp_path)


def test_a_suffix_may_be_in_capitals(folder):
    """Such a file was passed over: only test data seemed to be there."""
    (folder / "train.jsonl").rename(folder / "train.JSONL")
    assert len(load(folder)[0]) == 10


def test_a_gold_answer_that_cannot_be_read_is_named_with_its_file_and_row(tmp_path):
    """The row was counted through all shards."""
    jsonl.write(tmp_path / "test-00000-of-00002.jsonl", gsm8k_rows(3))
    wrong_row = {"question": "q", "answer": "#### seven"}
    jsonl.write(tmp_path / "test-00001-of-00002.jsonl", [*gsm8k_rows(1), wrong_row])
    _, loader = load(tmp_path)
    with pytest.raises(ValueError, match=r"test-00001-of-00002\.jsonl, row 2: .*'seven'"):
        get_evaluator("gsm8k").check_gold(loader.examples)


def test_what_the_pages_say_of_rows(tmp_path):
    readme = (ROOT / "README.md").read_text()
    rows = re.search(r"```json\n(.*?)```", readme, re.DOTALL)[1]
    (tmp_path / "test.jsonl").write_text(rows)
    examples = DATASETS["gsm8k"].read("test", tmp_path)
    assert [example["answer"] for example in examples] == ["5", "4.5"]
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert rl_datasets.EXAMPLE_IN_WORDS in " ".join(contributing.split())


GOOD = json.dumps(gsm8k_rows(1)[0]).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + b"\n\n" + GOOD + b'\n{"question": "q"', "line 4: not valid JSON (Expecting"),
        (GOOD + b'\n{"question": "\xff"}', "line 2: not valid JSON ('utf-8' codec can't decode"),
        (GOOD.decode().encode("utf-16"), "invalid start byte; save the file as UTF-8)"),
        (b"[" * 100_000, "line 1: not valid JSON ("),
        (GOOD + b"\n[1, 2]\n", "line 2: not a JSON object"),
        (b'{"question": "q", "text": "t"}', "row 1: no column 'answer' (columns: question, text)"),
        (b'{"question": 7, "answer": "#### 7"}', "row 1: column 'question' must be text, not 7"),
        (b'{"question": " ", "answer": "#### 7"}', "row 1: column 'question' must be text, not "),
        (GOOD + b'\n{"question": "q", "answer": "7"}', "row 2: column 'answer' has no final"),
        (b'{"question": "q", "answer": "7\\n#### "}', "row 1: column 'answer' has no final"),
        (GOOD + b"\n" + GOOD.replace(b"0", b"\\ud83d", 1), "row 2: 'question' has half of a char"),
        (b"", "is empty"),
        (b"\n \n", "is empty"),
    ],
)
def test_a_broken_file_is_named_with_its_line(folder, content, message):
    (folder / "test.jsonl").write_bytes(content)
    error = error_of(folder)
    assert "test.jsonl" in error
    assert message in error


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"problem": "p"}, "answer"),
        ({"problem": "p", "solution": "s"}, "answer"),
        ({"problem": "p", "solution": r"\boxed{}"}, "answer"),
        ({"problem": "p", "answer": 4}, "answer"),
        ({"answer": "4"}, "problem"),
        ({"problem": "p", "answer": "4", "subject": ["Algebra", "Geometry"]}, "subject"),
        ({"problem": "p", "answer": "4", "subject": 3}, "subject"),
        ({"problem": "p", "answer": "4", "level": 5.5}, "level"),
        ({"problem": "p", "answer": "4", "level": [5]}, "level"),
    ],
)
def test_math_rows_that_are_refused(row, column, tmp_path):
    """Subjects of several types ended the first evaluation."""
    jsonl.write(tmp_path / "test.jsonl", [BOXED_ROW, row])
    assert re.search(f"test.jsonl, row 2: .*'{column}'", error_of(tmp_path, "math"))


def test_blank_lines_and_windows_line_ends_are_accepted(folder):
    (folder / "test.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n" + GOOD)
    assert len(load(folder)[1]) == 2


def test_a_broken_parquet_file_is_named_with_its_row(folder):
    (folder / "test.jsonl").unlink()
    (folder / "test.parquet").write_bytes(b"this is no parquet file")
    assert "test.parquet: cannot be read as parquet" in error_of(folder)
    rows = [*gsm8k_rows(1), {"question": "q", "answer": None}]
    datasets.Dataset.from_list(rows).to_parquet(folder / "test.parquet")
    assert "test.parquet, row 2: column 'answer' must be text, not None" in error_of(folder)


def test_a_folder_that_is_no_folder_or_holds_no_test_data(folder):
    assert "needs test.jsonl" in error_of(""), "an empty variable is not the hub's data"
    for path in (folder / "nowhere", folder / "train.jsonl"):
        assert f"--dataset_path {path} is not a folder" in error_of(path)
    (folder / "test.jsonl").rename(folder / "test.json")
    assert re.search(r"needs test\.jsonl .*\(found: test.json, train.jsonl\)", error_of(folder))
    for path in folder.iterdir():
        path.unlink()
    assert "found: nothing" in error_of(folder)


def test_a_single_file_of_another_name_can_be_evaluated_but_not_trained_on(tmp_path):
    jsonl.write(tmp_path / "math500.jsonl", [{"problem": "p", "answer": "4"}])
    train_loader, test_loader = load(tmp_path, name="math")
    assert [example["answer"] for example in test_loader] == ["4"]
    assert len(train_loader) == 0
    with pytest.raises(
        ValueError, match="has no train split, only test data: it can only be evaluated"
    ):
        train_loader.next_batch(1)
    with pytest.raises(ValueError, match="needs validation.jsonl"):
        load(tmp_path, name="math", eval_split="validation")
    (tmp_path / "math500.jsonl").rename(tmp_path / "validation.jsonl")
    assert "needs test.jsonl" in error_of(tmp_path, "math")


def test_a_folder_can_hold_a_validation_split(folder):
    jsonl.write(folder / "validation.jsonl", gsm8k_rows(3))
    _, test_loader = load(folder)
    assert len(test_loader) == 5
    _, validation_loader = load(folder, eval_split="validation")
    assert ids(validation_loader) == [f"gsm8k/validation/{i}" for i in range(3)]


def test_the_hub_is_asked_for_the_official_splits(monkeypatch):
    requests = []

    def load_dataset(name, config, split):
        requests.append((name, config, split))
        return gsm8k_rows(2) if "gsm8k" in name else [{"problem": "p", "solution": r"\boxed{4}"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    train_loader, _ = load(folder=None, name="gsm8k")
    assert requests == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert ids(train_loader) == ["gsm8k/train/0", "gsm8k/train/1"]

    requests.clear()
    train_loader, test_loader = load(folder=None, name="math")
    *train_requests, test_request = requests
    assert {name for name, _, _ in train_requests} == {"EleutherAI/hendrycks_math"}
    subjects = {config for _, config, _ in train_requests}
    assert len(train_loader) == len(subjects) == 7
    assert test_request == ("HuggingFaceH4/MATH-500", "default", "test")
    assert len(test_loader) == 1


def test_without_the_hub_one_line_names_dataset_path(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nand more lines")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        OSError, match="cannot load openai/gsm8k from the hub .*--dataset_path"
    ) as error:
        load(folder=None, name="gsm8k")
    assert "\n" not in str(error.value)


# --- Loaders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([{"question": "q", "answer": 8, "solution": ""}], "own/test/0: 'answer' cannot be 8; "),
        ([{"question": "q", "answer": "8"}], "own/test/0: 'solution' is missing; "),
        (["q"], "own/test/0 cannot be 'q': it is a dict, and question"),
        ([], "own has no test examples"),
    ],
)
def test_what_a_loader_of_ones_own_returns_is_checked(examples, message):
    """An int for an answer ended in a traceback, and no examples in a mean of nothing."""

    class OwnLoader(DataLoader):
        name = "own"

        @classmethod
        def load(cls, split, dataset_path):
            return examples

    with pytest.raises(ValueError, match=f"^{message}"):
        OwnLoader.read("test")


def test_a_data_set_has_its_own_prompt_by_default(folder):
    _, loader = load(folder, prompt=None)
    assert loader.examples[0]["prompt"] == f"{rl_datasets.SYSTEM_PROMPT}\n\nWhat is 0 + 1?\n"


def test_prompts_that_are_too_long_are_dropped_and_counted(tmp_path):
    # With the newline these are 10, 11, 12 and 4 tokens.
    questions = ["a" * 9, "b" * 10, "c" * 8 + "é" * 3, "d" * 3]
    rows = [{"question": question, "answer": "#### 1"} for question in questions]
    for split in ("train", "test"):
        jsonl.write(tmp_path / f"{split}.jsonl", rows)
    _, loader = load(tmp_path, max_prompt_length=10)
    assert ids(loader) == ["gsm8k/test/0", "gsm8k/test/3"]
    assert loader.dropped == 2
    with pytest.raises(
        ValueError, match="all 4 prompts of .* are longer than 3 tokens; raise --max_prompt_length"
    ):
        load(tmp_path, max_prompt_length=3)


def test_an_epoch_is_a_permutation_and_batches_run_on_into_the_next(folder):
    train_loader, _ = load(folder)
    stream = []
    for batch_size in (3, 4, 1, 25, 7):  # 4 epochs of 10
        stream += ids(train_loader.next_batch(batch_size))
    epochs = [stream[start : start + 10] for start in range(0, 40, 10)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(ids(train_loader))
    assert len({tuple(epoch) for epoch in epochs}) == 4, "each epoch has an order of its own"
    assert epochs[0] != ids(train_loader), "the first epoch is shuffled too"


def test_the_order_depends_on_the_seed_and_not_on_the_batch_sizes(folder):
    train_loader, _ = load(folder, seed=1)
    one_large_batch = ids(train_loader.next_batch(24))

    train_loader, _ = load(folder, seed=1)
    small_batches = []
    for _ in range(8):
        small_batches += ids(train_loader.next_batch(3))
    assert small_batches == one_large_batch

    train_loader, _ = load(folder, seed=2)
    assert ids(train_loader.next_batch(24)) != one_large_batch


@pytest.mark.parametrize("consumed", [0, 4, 10, 13])
def test_resuming_continues_exactly(folder, consumed):
    loader, _ = load(folder, seed=3)
    loader.next_batch(consumed)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = [ids(loader.next_batch(6)) for _ in range(4)]
    resumed, _ = load(folder, seed=3)
    resumed.load_state_dict(state)
    assert [ids(resumed.next_batch(6)) for _ in range(4)] == expected


def test_the_evaluation_subset_is_fixed(tmp_path, capsys):
    for split in ("train", "test"):
        jsonl.write(tmp_path / f"{split}.jsonl", gsm8k_rows(100))

    def evaluated(**options):
        _, eval_loader = load(tmp_path, **options)
        return ids(eval_loader)

    subset = evaluated(eval_size=20, seed=0)
    assert len(set(subset)) == 20
    assert evaluated(eval_size=20, seed=1) == subset, "the training seed does not change it"
    assert evaluated(eval_size=20, prompt="r1_zero", max_prompt_length=1000) == subset
    assert set(subset) < set(evaluated(eval_size=50)), "a larger subset holds the smaller one"
    all_ids = evaluated()
    assert subset == [name for name in all_ids if name in subset], "in the order of the file"
    assert subset != all_ids[:20], "not the first ones: a file may be sorted"
    assert "note" not in capsys.readouterr().out
    assert evaluated(eval_size=1000) == all_ids
    assert "note: --eval_size 1000: the split test has only 100\n" in capsys.readouterr().out
    train_loader, _ = load(tmp_path, eval_size=20)
    assert len(train_loader) == 100, "no training example is left out"


def test_arithmetic():
    train_loader, eval_loader = get_dataloaders(
        "arithmetic", small_tokenizer(), eval_split="validation"
    )
    _, test_loader = get_dataloaders("arithmetic", small_tokenizer(), eval_split="test")
    assert len(train_loader) == DATASETS["arithmetic"].sizes["train"]
    assert len(eval_loader) == DATASETS["arithmetic"].sizes["validation"]
    assert len(test_loader) == 2_000
    assert eval_loader.examples[0]["id"] == "arithmetic/validation/0"
    assert test_loader.examples[0]["id"] == "arithmetic/test/0"
    assert {example["level"] for example in eval_loader} == {1, 2, 3, 4}
    for example in [*eval_loader, *test_loader]:
        solution = example["solution"]
        assert solution.endswith(f" = {example['answer']}")
        num_lines = solution.count("\n") + 1
        assert num_lines == example["level"]
        assert solution.count(" = ") == num_lines, "every step is written directly"
    with pytest.raises(ValueError, match="is generated; leave --dataset_path out"):
        get_dataloaders(
            "arithmetic", small_tokenizer(), eval_split="test", dataset_path="somewhere"
        )


def test_only_a_data_set_with_a_validation_split_is_evaluated_on_it_by_default():
    assert rl_datasets.default_eval_split("arithmetic", None) == "validation"
    assert rl_datasets.default_eval_split("gsm8k", None) == "test"
    assert rl_datasets.default_eval_split("arithmetic", "a_folder") == "test"


# --- Real data ------------------------------------------------------------------------------------


@pytest.fixture
def qwen2(data_folder):
    return PreTrainedTokenizerFast.from_pretrained(data_folder / "models" / "qwen2")


@pytest.mark.slow
def test_real_gsm8k(qwen2, data_folder):
    folder = data_folder / "data" / "gsm8k"
    train_loader, test_loader = get_dataloaders(
        "gsm8k", qwen2, eval_split="test", dataset_path=folder
    )
    assert (len(train_loader), len(test_loader)) == (7473, 1319)
    assert train_loader.dropped == test_loader.dropped == 0
    for example in [*train_loader, *test_loader]:
        assert re.fullmatch(r"-?\d+(\.\d+)?", example["answer"]), example
        assert "<<" not in example["solution"] and "####" not in example["solution"]
    assert train_loader.examples[0]["answer"] == "72"
    prompt = test_loader.examples[0]["prompt"]
    assert prompt.startswith(
        f"<|im_start|>system\n{rl_datasets.SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\nJanet"
    )
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_real_math_500(qwen2, data_folder):
    folder = data_folder / "data" / "math"
    _, test_loader = get_dataloaders(
        "math", qwen2, eval_split="test", dataset_path=folder, max_prompt_length=1024
    )
    assert len(test_loader) == 500 and test_loader.dropped == 0
    assert {example["level"] for example in test_loader} == {1, 2, 3, 4, 5}
    assert len({example["subject"] for example in test_loader}) == 7
    for example in test_loader:
        assert last_boxed(example["solution"]) == example["answer"]
        assert example["question"] in example["prompt"]


def test_a_comma_is_dropped_only_between_thousands():
    """1,5 was read as 15, and the pair (1, 2) as (1 2)."""
    answers = {"1,000": "1000", "$12,345,678.5": "$12345678.5"}
    answers |= {gold: gold for gold in ("1,5", "1,2,3", "(1, 2)", "(1,000, 2,000)")}
    for gold, answer in answers.items():
        row = {"question": "q", "answer": f"3*4 = <<3*4=12>>12, 1 << 3 is 8, 16 >> 1\n#### {gold}"}
        example = gsm8k_example(row)
        assert example["answer"] == answer
        assert example["solution"] == "3*4 = 12, 1 << 3 is 8, 16 >> 1"


def test_a_special_token_in_a_question_is_refused(tmp_path):
    """It ended the user's turn, and the rest of the question was another turn."""
    rows = [{"question": "1?", "answer": "#### 1"}, {"question": "<eos>2?", "answer": "#### 2"}]
    jsonl.write(tmp_path / "test.jsonl", rows)
    with pytest.raises(ValueError, match="test.jsonl, row 2: the question holds <eos>, a special"):
        load(tmp_path, "gsm8k")


def test_a_key_that_stands_twice_is_refused(tmp_path):
    """The first of its values was passed over."""
    line = '{"question": "q", "answer": "#### 1", "answer": "#### 2"}'
    (tmp_path / "test.jsonl").write_text(line)
    with pytest.raises(ValueError, match="line 1: .*the key 'answer' stands twice"):
        load(tmp_path, "gsm8k")
