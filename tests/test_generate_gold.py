"""Gold solutions: what is kept of each source, and going on where a run stopped."""

import random

import pytest
from conftest import as_flags, run_script
from fake_openai_server import NO_TEXT, FakeOpenAIServer, choice, status

from generate_gold import main
from grpo import jsonl
from rl_datasets import PROMPTS


def FORMAT(solution, answer):
    return PROMPTS["reasoning_answer"].format_solution(solution, str(answer))


@pytest.fixture
def gold(tmp_path, monkeypatch):
    """Runs the script, and gives its exit code and the rows of its file.

    The data: six problems, `What is N + 1?` with the id gsm8k/train/N; the last has no solution.
    """
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    rows = [{"question": f"What is {n} + 1?", "answer": f"So:\n#### {n + 1}"} for n in range(5)]
    rows.append({"question": "What is 5 + 1?", "answer": "#### 6"})
    jsonl.write(tmp_path / "data" / "train.jsonl", rows)
    jsonl.write(tmp_path / "data" / "test.jsonl", rows[:1])
    output = tmp_path / "gold.jsonl"
    files = dict(dataset_name="gsm8k", dataset_path=tmp_path / "data", output=output)

    def run(**flags):
        code = main(as_flags(**files | flags))
        return code, jsonl.read(output) if output.exists() else []

    return run


def number_in(request):
    return int(request["messages"][-1]["content"].split()[2])


def right_reply(request):
    return choice(FORMAT("It is.", number_in(request) + 1))


def wrong_reply(request):
    return choice(FORMAT("It is.", number_in(request)))


def test_the_solutions_of_the_data_set(gold, capsys):
    """Every field of a row."""
    code, rows = gold(from_reference="")
    assert code == 0
    assert capsys.readouterr().out.endswith(": 5 correct, 0 incorrect, 1 still open\n")
    rows = {row["id"]: row for row in rows}
    assert rows["gsm8k/train/3"] == {
        "id": "gsm8k/train/3",
        "question": "What is 3 + 1?",
        "completion": "<reasoning>\nSo:\n</reasoning>\n<answer>\n4\n</answer>",
        "answer": "4",
        "correct": True,
        "source": "reference",
        "prompt_name": "reasoning_answer",
    }


def test_answers_in_words_are_graded_as_in_training(gold, tmp_path, capsys):
    """Those that gsm8k's own evaluator can't read are math's to grade."""
    jsonl.write(tmp_path / "data" / "train.jsonl", [{"question": "Where?", "answer": "#### Paris"}])
    solution = {"id": "gsm8k/train/0", "completion": FORMAT("In France.", "Paris")}
    jsonl.write(tmp_path / "paris.jsonl", [solution])
    (tmp_path / "my_gold_reward.py").write_text("def zero(completions):\n    return [0.0]\n")
    flags = {"solutions": tmp_path / "paris.jsonl"}
    assert gold(**flags, evaluator=f"{tmp_path}/my_gold_reward.py:zero")[1][0]["correct"]
    assert gold(**flags, evaluator="gsm8k")[0] == 2
    assert "'Paris' is no number: use --evaluator math" in capsys.readouterr().err


def test_a_smaller_draw_is_part_of_a_larger_one(gold):
    """By the seed, and whatever is done already is not done again."""
    order = list(range(6))
    random.Random("gold/2").shuffle(order)
    for num_problems in (4, 6):
        _, rows = gold(from_reference="", num_problems=num_problems, seed=2)
        expected = [f"gsm8k/train/{n}" for n in order[:num_problems] if n != 5]
        assert [row["id"] for row in rows] == expected


def test_completions_that_were_written_elsewhere(gold, tmp_path, capsys):
    """By id, of several the first correct one; problems without one stay open."""
    written = [
        ("gsm8k/train/0", FORMAT("a", 7)),
        ("gsm8k/train/0", FORMAT("b", 1) + "\n"),
        ("gsm8k/train/0", FORMAT("c", 1)),
        ("gsm8k/train/1", "It is 2."),
        ("gsm8k/train/1", " "),
        ("gsm8k/train/2", " "),
        ("gsm8k/test/3", FORMAT("d", 4)),
    ]
    path = tmp_path / "written.jsonl"
    jsonl.write(path, [{"id": id_, "completion": text} for id_, text in written])
    code, rows = gold(solutions=path)
    assert code == 0
    results = {row["id"][-1]: (row["completion"], row["correct"]) for row in rows}
    assert results == {"0": (FORMAT("b", 1), True), "1": ("It is 2.", False)}
    assert {row["source"] for row in rows} == {str(path)}
    jsonl.write(path, [{"id": "gsm8k/test/3", "completion": FORMAT("d", 4)}])
    assert gold(solutions=path, output=tmp_path / "none.jsonl")[0] == 2
    assert f"{path}: it solves none of the problems" in capsys.readouterr().err


def test_an_endpoint_is_asked(gold):
    """Reasoning is left out."""

    def behave(request):
        number = number_in(request)
        is_right = number != 2
        return choice(f"<think>hm</think>\n{FORMAT('It is.', number + is_right)}\n")

    with FakeOpenAIServer(behave) as server:
        flags = dict(temperature=0.5, max_completion_length=99)
        code, rows = gold(api_model="m", base_url=server.base_url, **flags)
    assert code == 0
    assert len(rows) == 6
    for row in rows:
        is_right = row["id"] != "gsm8k/train/2"
        number = int(row["id"][-1])
        assert row["completion"] == FORMAT("It is.", number + is_right)
        assert (row["correct"], row["source"]) == (is_right, "m")
    request = server.requests[0]
    question = f"What is {number_in(request)} + 1?"
    assert request["messages"] == PROMPTS["reasoning_answer"].messages(question)
    assert (request["max_tokens"], request["temperature"]) == (99, 0.5)


def test_an_empty_reply_is_asked_for_again(gold, capsys):
    with FakeOpenAIServer([*NO_TEXT]) as server:
        flags = dict(api_model="m", base_url=server.base_url, max_completion_length=0)
        assert gold(**flags) == (1, [])
        capsys.readouterr()
        assert gold(**flags) == (1, [])
        assert len(server.requests) == len(NO_TEXT) == 12
        assert "max_tokens" not in server.requests[0]
        *lines, last_line = capsys.readouterr().out.splitlines()
        assert all(line.startswith("no reply about gsm8k/train/") for line in lines)
        assert last_line.endswith("0 correct, 0 incorrect, 6 still open")
        server.behaviour = right_reply
        assert gold(**flags, num_problems=2)[0] == 0
        server.behaviour = NO_TEXT[:1]
        assert gold(**flags)[0] == 1  # nothing more came
        server.behaviour = right_reply
        code, rows = gold(**flags)
    assert code == 0
    assert [row["correct"] for row in rows] == [True] * 6


def test_a_second_start_asks_about_nothing_that_has_a_row(gold, tmp_path, capsys):
    """Also after a kill in the middle of a line, or after the endpoint has refused the key."""
    with FakeOpenAIServer(wrong_reply) as server:
        flags = dict(api_model="m", base_url=server.base_url)
        code, rows = gold(**flags, num_problems=2)
        assert code == 1  # nothing that sft.py could use
        assert [row["correct"] for row in rows] == [False] * 2
        with open(tmp_path / "gold.jsonl", "a") as file:
            file.write('{"id": "gsm8k/train/0", "que')
        server.behaviour = [status(401, "bad key")]
        assert gold(**flags) == (1, rows)
        assert "bad key" in capsys.readouterr().err.splitlines()[-1]
        server.behaviour = right_reply
        code, rows = gold(**flags)
        assert code == 0
        assert [row["correct"] for row in rows] == [False] * 2 + [True] * 4
        num_requests = len(server.requests)
        assert gold(**flags)[0] == 0
        assert len(server.requests) == num_requests


def test_the_command_line(tmp_path):
    output = tmp_path / "new folder" / "gold.jsonl"
    flags = ["--from_reference", "--dataset_name", "arithmetic", "--num_problems", "20"]
    process = run_script("generate_gold.py", *flags, "--output", output)
    assert process.returncode == 0, process.stderr
    assert process.stdout == f"{output}: 20 correct, 0 incorrect, 0 still open\n"
    assert len(jsonl.read(output)) == 20
