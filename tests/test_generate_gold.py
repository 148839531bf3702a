"""Gold solutions: what is kept of each source, and going on where a run stopped."""

import random

import pytest
from conftest import as_flags, closed_port, run_script
from fake_openai_server import NO_TEXT, FakeOpenAIServer, choice, ok, status

import generate_gold
from generate_gold import in_format, main
from grpo import jsonl
from rl_datasets import PROMPTS

pytestmark = pytest.mark.usefixtures("no_waiting")


def FORMAT(solution, answer):
    return PROMPTS["reasoning_answer"].format_solution(solution, str(answer))


@pytest.fixture
def data(tmp_path):
    """Six problems, `What is N + 1?` with the id gsm8k/train/N; the last has no solution."""
    folder = tmp_path / "data"
    rows = [{"question": f"What is {n} + 1?", "answer": f"So:\n#### {n + 1}"} for n in range(5)]
    rows.append({"question": "What is 5 + 1?", "answer": "#### 6"})
    jsonl.write(folder / "train.jsonl", rows)
    jsonl.write(folder / "test.jsonl", rows)
    return folder


@pytest.fixture
def gold(data, tmp_path):
    """Runs the script, and gives its exit code and the rows of its file."""

    def run(**flags):
        output = tmp_path / "gold.jsonl"
        files = dict(dataset_name="gsm8k", dataset_path=data, output=output)
        code = main(as_flags(**files | flags))
        return code, jsonl.read(output) if output.exists() else []

    return run


def number_in(request):
    return int(request["messages"][-1]["content"].split()[2])


def right_reply(request):
    return ok(FORMAT("It is.", number_in(request) + 1))


def wrong_reply(request):
    return ok(FORMAT("It is.", number_in(request)))


# --- The data set's own, and those written elsewhere ----------------------------------------------


def test_the_solutions_of_the_data_set(gold, tmp_path, capsys):
    """Every field of a row. An empty solution is no solution; a second start changes nothing."""
    code, rows = gold(from_reference="")
    assert code == 0
    assert "5 correct, 1 incorrect, 0 still open" in capsys.readouterr().out
    rows = {row["id"]: row for row in rows}
    assert rows["gsm8k/train/3"] == {
        "id": "gsm8k/train/3",
        "question": "What is 3 + 1?",
        "completion": "<reasoning>\nSo:\n</reasoning>\n<answer>\n4\n</answer>",
        "answer": "4",
        "correct": True,
        "source": "reference",
        "attempt": 1,
        "prompt_name": "reasoning_answer",
    }
    assert not rows["gsm8k/train/5"]["correct"]
    before = (tmp_path / "gold.jsonl").read_bytes()
    assert gold(from_reference="")[0] == 0
    assert (tmp_path / "gold.jsonl").read_bytes() == before


def test_a_smaller_draw_is_part_of_a_larger_one(gold):
    """By the seed, and whatever is done already is not done again."""
    _, three = gold(from_reference="", num_problems=3, seed=2)
    _, five = gold(from_reference="", num_problems=5, seed=2)
    order = list(range(6))
    random.Random("gold/2").shuffle(order)
    assert [row["id"] for row in three] == [f"gsm8k/train/{n}" for n in order[:3]]
    assert five[:3] == three
    assert [row["id"] for row in five] == [f"gsm8k/train/{n}" for n in order[:5]]


def test_completions_that_were_written_elsewhere(gold, tmp_path):
    """By id, of several the first correct one; problems without one stay open."""
    written = [
        ("gsm8k/train/0", FORMAT("a", 7)),
        ("gsm8k/train/0", FORMAT("b", 1) + "\n"),
        ("gsm8k/train/0", FORMAT("c", 1)),
        ("gsm8k/train/1", "It is 2."),
        ("gsm8k/train/2", " "),
        ("gsm8k/test/3", FORMAT("d", 4)),
        ("gsm8k/train/4", "<|im_start|>" + FORMAT("e", 5)),
    ]
    path = tmp_path / "written.jsonl"
    jsonl.write(path, [{"id": id_, "completion": text} for id_, text in written])
    code, rows = gold(solutions=path)
    assert code == 0
    results = {row["id"][-1]: (row["completion"], row["correct"], row["attempt"]) for row in rows}
    assert results == {
        "0": (FORMAT("b", 1), True, 2),
        "1": ("It is 2.", False, 1),
        "4": (written[-1][1], False, 1),
    }
    assert {row["source"] for row in rows} == {str(path)}


# --- An endpoint ----------------------------------------------------------------------------------


def test_an_endpoint_is_asked_until_a_reply_is_correct(gold):
    def behave(request):
        is_first = server.requests.count(request) == 1
        return wrong_reply(request) if is_first or number_in(request) == 2 else right_reply(request)

    with FakeOpenAIServer(behave) as server:
        code, rows = gold(api_model="m", base_url=server.base_url, num_attempts=2, temperature=0.5)
    assert code == 0
    assert len(server.requests) == 12
    for row in rows:
        is_right = row["id"] != "gsm8k/train/2"
        assert (row["correct"], row["attempt"], row["source"]) == (is_right, 2, "m")
    assert server.requests[0]["messages"] == PROMPTS["reasoning_answer"].messages(
        f"What is {number_in(server.requests[0])} + 1?"
    )
    assert server.requests[0]["temperature"] == 0.5
    assert server.requests[0]["max_tokens"] == 512


@pytest.mark.parametrize("reply", NO_TEXT.values(), ids=NO_TEXT)
def test_an_empty_reply_is_asked_for_again(reply, gold, capsys):
    with FakeOpenAIServer([reply]) as server:
        flags = dict(api_model="m", base_url=server.base_url)
        code, rows = gold(**flags, num_attempts=2)
        assert (code, rows) == (1, [])
        assert len(server.requests) == 6
        output = capsys.readouterr().out.splitlines()
        assert output[0].startswith("no reply: ")
        assert output[1].endswith("0 correct, 0 incorrect, 6 still open")
        server.behaviour = right_reply
        assert gold(**flags, num_problems=2)[0] == 0
        server.behaviour = [reply]
        assert gold(**flags)[0] == 1
        server.behaviour = right_reply
        code, rows = gold(**flags)
    assert code == 0
    assert [row["correct"] for row in rows] == [True] * 6


def test_a_second_start_asks_about_nothing_that_has_a_row(gold, tmp_path):
    """Also after a kill in the middle of a line."""
    with FakeOpenAIServer(lambda request: wrong_reply(request)) as server:
        flags = dict(api_model="m", base_url=server.base_url)
        code, rows = gold(**flags, num_problems=2)
        assert code == 1  # nothing that sft.py could use
        assert [row["correct"] for row in rows] == [False] * 2
        server.behaviour = right_reply
        with open(tmp_path / "gold.jsonl", "a") as file:
            file.write('{"id": "gsm8k/train/0", "que')
        code, rows = gold(**flags)
        assert code == 0
        assert [row["correct"] for row in rows] == [False] * 2 + [True] * 4
        num_requests = len(server.requests)
        assert num_requests == 6
        assert gold(**flags)[0] == 0
        assert len(server.requests) == num_requests


def test_a_reply_that_was_cut_is_incorrect_and_reasoning_is_left_out(gold):
    def behave(request):
        text = FORMAT("It is.", number_in(request) + 1)
        is_cut = number_in(request) % 2
        return choice(f"<think>hm</think>\n{text}\n", "length" if is_cut else "stop")

    with FakeOpenAIServer(behave) as server:
        _, rows = gold(api_model="m", base_url=server.base_url, max_completion_length=0)
    for row in rows:
        number = int(row["id"][-1])
        assert row["correct"] == (number % 2 == 0)
        assert row["completion"] == ("" if number % 2 else FORMAT("It is.", number + 1))
    assert "max_tokens" not in server.requests[0]


def test_models_that_want_max_completion_tokens(gold):
    def behave(request):
        if "max_tokens" in request:
            return status(400, "'max_tokens' is not supported. Use 'max_completion_tokens'.")
        return right_reply(request)

    with FakeOpenAIServer(behave) as server:
        code, rows = gold(api_model="m", base_url=server.base_url, concurrency=2)
    assert (code, len(rows)) == (0, 6)
    assert server.requests[-1]["max_completion_tokens"] == 512


def test_an_endpoint_that_is_gone_or_refuses_the_key(gold, monkeypatch, capsys):
    monkeypatch.setattr(generate_gold, "MAX_FAILURES_IN_A_ROW", 3)
    url = f"http://127.0.0.1:{closed_port()}/v1"
    assert gold(api_model="m", base_url=url, concurrency=1) == (1, [])
    assert "error: 3 problems in a row got no reply" in capsys.readouterr().err
    with FakeOpenAIServer([status(401, "bad key")]) as server:
        assert gold(api_model="m", base_url=server.base_url) == (1, [])
        error = capsys.readouterr().err.splitlines()[-1]
        assert "bad key" in error
    # In a row means that a reply in between starts the count again. Requests of the run before may
    # still be under way, so that these replies need a server of their own.
    replies = [status(400)] * 2 + [ok("none")] + [status(400)] * 2 + [ok("none")]
    with FakeOpenAIServer(replies) as server:
        code, rows = gold(api_model="m", base_url=server.base_url, concurrency=1)
    assert (code, len(rows)) == (1, 2)


# --- Formats and mistakes -------------------------------------------------------------------------


def test_a_reply_in_another_format(gold):
    """The endpoint is always asked for the tags; what it gives is written in --prompt's format."""
    with FakeOpenAIServer(right_reply) as server:
        flags = dict(evaluator="math", prompt="r1_zero")
        _, rows = gold(api_model="m", base_url=server.base_url, **flags)
    row = next(row for row in rows if row["id"] == "gsm8k/train/3")
    assert row["completion"] == "\nIt is.\n</think> <answer>4</answer>"
    assert row["correct"]
    assert row["prompt_name"] == "r1_zero"
    assert in_format(PROMPTS["r1_zero"], "It is 4.") == "It is 4."


def test_mistakes_end_in_one_line(gold, capsys, tmp_path):
    gold(from_reference="")
    other = tmp_path / "other.jsonl"
    jsonl.write(other, [{"id": "gsm8k/train/0"}])
    stale = tmp_path / "stale.jsonl"
    row = jsonl.read(tmp_path / "gold.jsonl")[0]
    jsonl.write(stale, [row | {"question": "What is 9 + 1?"}])
    for flags, message in [
        ({}, "name one source"),
        (dict(from_reference="", api_model="m"), "name one source"),
        (dict(from_reference="", prompt="r1_zero"), "not r1_zero: use --evaluator math"),
        (dict(from_reference="", prompt="r1_zero", evaluator="math"), "for another prompt"),
        (dict(from_reference="", evaluator="creative"), "needs a judge"),
        (dict(solutions=other, num_problems=1, output=tmp_path / "new.jsonl"), "completion"),
        (dict(solutions=tmp_path / "absent.jsonl", output=tmp_path / "new.jsonl"), "absent.jsonl"),
        (dict(api_model="m", base_url="localhost", output=tmp_path / "new.jsonl"), "look like"),
        (dict(from_reference="", output=other), "not a JSON object with id, question"),
        (dict(from_reference="", output=stale), "solutions to other problems"),
    ]:
        capsys.readouterr()
        assert gold(**flags)[0] == 2, flags
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert message in line, line


def test_the_command_line(tmp_path):
    output = tmp_path / "new folder" / "gold.jsonl"
    flags = ["--from_reference", "--dataset_name", "arithmetic", "--num_problems", "20"]
    process = run_script("generate_gold.py", *flags, "--output", output)
    assert process.returncode == 0, process.stderr
    assert process.stdout == f"{output}: 20 correct, 0 incorrect, 0 still open\n"
    assert len(jsonl.read(output)) == 20
