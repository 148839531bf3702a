"""Gold data: what is correct, what an endpoint is asked, and that nothing is lost or doubled."""

import math
import re
import signal
import threading

import fake_openai_server as fake
import pytest
from conftest import (
    ROOT,
    closed_port,
    random_model,
    run_script,
    small_tokenizer,
    transformers_serve,
)
from fake_openai_server import FakeOpenAIServer, ok, status
from filelock import FileLock

import generate_gold
import llms
from grpo import jsonl
from grpo.rollout import Completion
from judges import endpoint, judges
from rl_datasets import PROMPTS
from sampling import generation

pytestmark = pytest.mark.usefixtures("no_waiting")

KEY = "sk-secret-123"
COLUMNS = ["id", "question", "completion", "answer", "correct", "source", "attempt", "prompt_name"]
FORM = PROMPTS["reasoning_answer"].format_solution
# Replies to the problem `What is {0} + 1?`.
RIGHT = ok(FORM("So.", "1"))
WRONG = ok(FORM("Hm.", "-7"))


def write_problems(folder, questions):
    """A data set in GSM8K's schema whose i-th answer is i + 1."""
    folder.mkdir()
    rows = []
    for i, question in enumerate(questions):
        answer = f"It is <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"
        rows.append({"question": question, "answer": answer})
    for split in ("train", "test"):
        jsonl.write(folder / f"{split}.jsonl", rows)
    return folder


@pytest.fixture
def folder(tmp_path):
    """12 training problems, `What is {i} + 1?`, in a folder of their own."""
    return write_problems(tmp_path / "data", [f"What is {{{i}}} + 1?" for i in range(12)])


@pytest.fixture
def single(tmp_path):
    """One training problem, `What is {0} + 1?`."""
    return write_problems(tmp_path / "single", ["What is {0} + 1?"])


def problem_number(request):
    """Which problem a request asks."""
    return int(re.search(r"\{(\d+)\}", request["messages"][-1]["content"])[1])


def right_reply(request):
    return ok(FORM("It is easy.", str(problem_number(request) + 1)))


def run_gold(folder, *flags):
    """Run generate_gold.py on a folder in this process; returns its exit code."""
    return generate_gold.main(
        ["--dataset_path", str(folder), "--output", str(folder / "gold.jsonl"), *map(str, flags)]
    )


def run_gold_with(server, folder, *flags):
    """Run generate_gold.py with a fake endpoint; returns its exit code."""
    return run_gold(folder, "--api_model", "fake", "--base_url", server.base_url, *flags)


def rows_in(folder):
    return jsonl.read(folder / "gold.jsonl")


def correct_rows(folder):
    return [row for row in rows_in(folder) if row["correct"]]


def all_solved_once(folder):
    solved_ids = sorted(row["id"] for row in correct_rows(folder))
    return solved_ids == sorted(f"gsm8k/train/{i}" for i in range(12))


def reported(streams):
    """The four numbers of a report: correct, incorrect, done before, still open."""
    number = r"([\d,]+)"
    report = rf"{number} correct, {number} incorrect, {number} done before, {number} still open\n"
    match = re.search(report, streams)
    return [int(number.replace(",", "")) for number in match.groups()]


def one_line(capsys):
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("error: ")
    assert streams.err.count("\n") == 1, streams.err
    return streams.err


# --- The data set's own solutions -----------------------------------------------------------------


def test_reference_solutions_are_put_into_the_form_and_verified(folder, capsys):
    assert run_gold(folder, "--from_reference", "--prompt", "r1_zero", "--evaluator", "math") == 0
    rows = sorted(rows_in(folder), key=lambda row: int(row["answer"]))
    assert [list(row) for row in rows] == [COLUMNS] * 12
    assert rows[3] == {
        "id": "gsm8k/train/3",
        "question": "What is {3} + 1?",
        "completion": "\nIt is 4.\n</think> <answer>4</answer>",
        "answer": "4",
        "source": "reference",
        "attempt": 1,
        "correct": True,
        "prompt_name": "r1_zero",
    }
    assert reported(capsys.readouterr().out) == [12, 0, 0, 0]


def test_a_problem_without_a_solution_is_incorrect_once_and_for_all(folder, capsys):
    with open(folder / "train.jsonl", "a") as file:
        file.write('{"question": "Why?", "answer": "#### 42"}\n')
    for report in ([12, 1, 0, 0], [0, 0, 13, 0]):
        assert run_gold(folder, "--from_reference") == 0
        assert reported(capsys.readouterr().out) == report
    (row,) = [row for row in rows_in(folder) if not row["correct"]]
    assert (row["question"], row["completion"], row["attempt"]) == ("Why?", "", 1)


def test_fewer_problems_are_among_more_and_drawn_by_the_seed(folder, capsys):
    def draw_ids(num_problems, seed):
        output = folder / f"{num_problems}-{seed}.jsonl"
        flags = ["--num_problems", num_problems, "--seed", seed, "--output", output]
        assert run_gold(folder, "--from_reference", *flags) == 0
        return {row["id"] for row in jsonl.read(output)}

    five = draw_ids(5, seed=0)
    assert len(five) == 5
    assert five < draw_ids(8, seed=0)
    assert five != draw_ids(5, seed=1)
    assert "note" not in capsys.readouterr().out
    assert len(draw_ids(13, seed=0)) == 12
    assert "note: --num_problems 13: there are only 12\n" in capsys.readouterr().out


# --- An endpoint ----------------------------------------------------------------------------------


def test_an_endpoint_is_asked_for_no_more_than_needed(folder, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with FakeOpenAIServer(right_reply) as server:
        assert run_gold_with(server, folder) == 0
    assert all_solved_once(folder)
    assert len(server.requests) == 12
    for request in server.requests:
        chat = PROMPTS["reasoning_answer"].messages(
            f"What is {{{problem_number(request['body'])}}} + 1?"
        )
        assert request["body"] == {"model": "fake", "max_tokens": 512, "messages": chat}
        assert request["headers"]["authorization"] == f"Bearer {KEY}"
    (row,) = [row for row in rows_in(folder) if row["id"] == "gsm8k/train/7"]
    assert row["completion"] == FORM("It is easy.", "8")
    assert row["source"] == "fake"
    assert row["correct"] is True


def test_temperature_and_length_are_sent_where_given_and_loopback_needs_no_key(single):
    """Nor does it need a list of models."""
    with FakeOpenAIServer(right_reply, models=status(404)) as server:
        assert run_gold_with(server, single, "--temperature", 0, "--max_completion_length", 0) == 0
    assert server.requests[0]["body"].keys() == {"model", "messages", "temperature"}
    assert server.requests[0]["body"]["temperature"] == 0
    assert server.requests[0]["headers"]["authorization"] == "Bearer none"


@pytest.mark.parametrize(
    ("num_attempts", "row_of", "text"), [(4, (3, True), FORM("So.", "1")), (2, (2, False), "No 1.")]
)
def test_several_attempts_until_one_is_right_or_none_is_left(single, num_attempts, row_of, text):
    """There is one row: that of the correct attempt, or else that of the last one."""
    with FakeOpenAIServer([WRONG, ok("No 1."), RIGHT]) as server:
        assert run_gold_with(server, single, "--num_attempts", num_attempts) == 0
    assert len(server.requests) == row_of[0]
    (row,) = rows_in(single)
    assert list(row) == COLUMNS
    assert (row["attempt"], row["correct"]) == row_of
    assert row["completion"] == text


INCORRECT = [  # replies to `What is {i} + 1?`
    WRONG,
    ok("The answer is 2."),
    ok(FORM("So.", "3") + " Bye."),
    ok("<reasoning>a</reasoning><answer>2</answer><answer>4</answer>"),
    ok(FORM("</reasoning><answer>5</answer><reasoning>", "5")),
    ok(FORM("So<|im_end|>", "6")),
    ok("<reasoning>So", finish_reason="length"),
    ok(FORM("So.", "8"), finish_reason="length"),
    ok(""),
    ok(None),
]


def test_what_is_wrong_or_out_of_form_is_incorrect(folder, capsys):
    def behave(request):
        i = problem_number(request)
        return INCORRECT[i] if i < len(INCORRECT) else right_reply(request)

    with FakeOpenAIServer(behave) as server:
        assert run_gold_with(server, folder) == 0
    verdicts = {row["id"]: row["correct"] for row in rows_in(folder)}
    assert verdicts == {f"gsm8k/train/{i}": i >= len(INCORRECT) for i in range(12)}
    assert reported(capsys.readouterr().out) == [2, 10, 0, 0]


def test_a_reply_is_put_into_another_form(single):
    with FakeOpenAIServer([ok(FORM("So it is \\frac{2}{2}.", "1"))]) as server:
        assert run_gold_with(server, single, "--prompt", "r1_zero", "--evaluator", "math") == 0
    chat = PROMPTS["reasoning_answer"].messages("What is {0} + 1?")
    assert server.requests[0]["body"]["messages"] == chat
    (row,) = rows_in(single)
    assert row["completion"] == "\nSo it is \\frac{2}{2}.\n</think> <answer>1</answer>"


def test_so_many_requests_at_a_time_and_no_more(folder):
    """Every request waits until three others wait too: with fewer at a time the barrier breaks."""
    barrier = threading.Barrier(4, timeout=300)
    lock = threading.Lock()
    num_open = 0
    max_open = 0

    def reply_together(request):
        nonlocal num_open, max_open
        with lock:
            num_open += 1
            max_open = max(max_open, num_open)
        barrier.wait()
        with lock:
            num_open -= 1
        return right_reply(request)

    with FakeOpenAIServer(reply_together) as server:
        assert run_gold_with(server, folder, "--concurrency", 4) == 0
    assert len(rows_in(folder)) == 12
    assert max_open == 4


def test_a_row_is_written_before_the_next_request(folder):
    rows_at_request = []

    def behave(request):
        rows_at_request.append(len(rows_in(folder)))
        return right_reply(request)

    with FakeOpenAIServer(behave) as server:
        assert run_gold_with(server, folder, "--concurrency", 1) == 0
    assert rows_at_request == list(range(12))


# --- A misbehaving endpoint -----------------------------------------------------------------------


def test_what_gets_no_reply_is_tried_again_by_the_next_run(folder, capsys, monkeypatch):
    """Failed requests, refused ones and broken replies leave no row."""
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 0)
    half_of_a_character = ok("So \ud83d")  # which a tokenizer would refuse
    troubles = [status(500), status(400), fake.drop, fake.cut_json(), half_of_a_character]

    def behave(request):
        i = problem_number(request)
        return troubles[i] if i < len(troubles) else right_reply(request)

    with FakeOpenAIServer(behave) as server:
        assert run_gold_with(server, folder, "--concurrency", 1) == 0
        streams = capsys.readouterr()
        assert reported(streams.out) == [7, 0, 0, 5]
        assert (streams.out + streams.err).count("no reply: ") == 1
        assert len(server.requests) == 12
        server.behaviour = right_reply
        assert run_gold_with(server, folder) == 0
    assert reported(capsys.readouterr().out) == [5, 0, 7, 0]
    assert all_solved_once(folder)


def test_an_endpoint_that_is_gone_ends_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 0)
    folder = write_problems(tmp_path / "data", [f"{{{i}}}?" for i in range(60)])
    with FakeOpenAIServer([ok("x")] * 5 + [status(500)]) as server:
        assert run_gold_with(server, folder, "--concurrency", 4) == 2
    # Besides the replies that are counted, some requests are under way. The last "ok" may be read
    # late, after up to 19 failures, and starts the count anew.
    assert len(server.requests) <= 5 + 19 + 20 + 2 * 4 < 60
    streams = capsys.readouterr()
    assert "error: 20 problems in a row got no reply (HTTP 500: " in streams.err
    assert reported(streams.out) == [0, 5, 0, 55]


def test_failures_with_replies_between_end_no_run(tmp_path, capsys, monkeypatch):
    """Every 15th of the 30 requests gets a reply."""
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 0)
    folder = write_problems(tmp_path / "data", [f"{{{i}}}?" for i in range(30)])
    replies = ([status(500)] * 14 + [ok("x")]) * 2
    with FakeOpenAIServer(replies) as server:
        assert run_gold_with(server, folder, "--concurrency", 1) == 0
    assert reported(capsys.readouterr().out) == [0, 2, 0, 28]


@pytest.mark.parametrize("refused_request", ["list of models", "completion"])
def test_a_refused_key_stops_at_once_in_one_line_that_does_not_hold_it(
    folder, capsys, monkeypatch, refused_request
):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    refusal = status(401, f"Incorrect API key provided: {KEY}")
    models = refusal if refused_request == "list of models" else None
    with FakeOpenAIServer([refusal], models=models) as server:
        assert run_gold_with(server, folder, "--concurrency", 2) == 2
    assert len(server.requests) <= 2
    assert one_line(capsys) == "error: the endpoint refuses the key in OPENAI_API_KEY (HTTP 401)\n"


def test_an_endpoint_that_does_not_answer_is_one_line(single, capsys):
    closed_url = f"http://127.0.0.1:{closed_port()}/v1"
    assert run_gold(single, "--api_model", "m", "--base_url", closed_url) == 2
    assert "cannot reach http://127.0.0.1:" in one_line(capsys)
    with FakeOpenAIServer(right_reply, models=fake.hang) as server:
        assert (
            run_gold_with(server, single, "--timeout", 0.2, "--output", single / "another.jsonl")
            == 2
        )
    assert "(no reply in time)" in one_line(capsys)


def test_a_hanging_request_is_given_up_and_repeated(single, capsys, monkeypatch):
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 0)
    with FakeOpenAIServer([fake.hang]) as server:
        # On a busy machine an honest reply takes up to a second.
        assert run_gold_with(server, single, "--timeout", 1) == 0
        streams = capsys.readouterr()
        assert "no reply: no reply in time" in streams.out + streams.err
        monkeypatch.setattr(endpoint, "MAX_RETRIES", 1)
        server.behaviour = [fake.hang, RIGHT]
        assert run_gold_with(server, single, "--timeout", 1) == 0
    assert [(row["attempt"], row["correct"]) for row in rows_in(single)] == [(1, True)]


# --- Starting again -------------------------------------------------------------------------------


def wrong_on_every_third(request):
    """Problems 0, 3, 6 and 9 are never answered right."""
    return WRONG if problem_number(request) % 3 == 0 else right_reply(request)


def test_a_second_start_asks_nothing_of_finished_problems(folder, capsys):
    """Solved or not: 8 are right at once, and the other 4 get two attempts each."""
    with FakeOpenAIServer(wrong_on_every_third) as server:
        for report in ([8, 4, 0, 0], [0, 0, 12, 0]):
            assert run_gold_with(server, folder, "--num_attempts", 2) == 0
            assert len(server.requests) == 8 + 2 * 4
            assert reported(capsys.readouterr().out) == report


@pytest.mark.parametrize("num_bytes", [1, 60, -1])
def test_a_torn_last_line_is_dropped_and_made_again(folder, num_bytes):
    """A kill in the middle of a write leaves the first bytes of a row."""
    assert run_gold(folder, "--from_reference") == 0
    path = folder / "gold.jsonl"
    content = path.read_bytes()
    start_of_last_line = content.rindex(b"\n", 0, -1) + 1
    last_line = content[start_of_last_line:-1]
    path.write_bytes(content[:start_of_last_line] + last_line[:num_bytes])
    assert run_gold(folder, "--from_reference") == 0
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "content",
    ["My notes", "My notes\n", '{"id": 1}\n', "[]\n", "7\n", '{"question": "q"}\n{"id": '],
)
def test_a_file_that_is_not_ours_is_left_alone(folder, capsys, content):
    (folder / "gold.jsonl").write_text(content)
    assert run_gold(folder, "--from_reference") == 2
    assert "error: --output holds other rows (" in one_line(capsys)
    assert (folder / "gold.jsonl").read_text() == content


def test_a_file_that_another_process_writes_is_left_alone(folder, capsys):
    """Two writers solved every problem twice."""
    with FileLock(folder / "gold.jsonl.lock"):
        assert run_gold(folder, "--from_reference") == 2
    assert "being written by another process" in one_line(capsys)
    assert run_gold(folder, "--from_reference") == 0


def test_a_file_of_another_source_is_refused(single, capsys):
    """Rows of two models were once mixed in one file."""
    assert run_gold(single, "--from_reference") == 0
    content = (single / "gold.jsonl").read_bytes()
    capsys.readouterr()
    with FakeOpenAIServer([RIGHT]) as server:
        assert run_gold_with(server, single) == 2
    assert "has solutions of reference, not of fake; name another file" in one_line(capsys)
    assert (single / "gold.jsonl").read_bytes() == content


def test_a_file_of_another_prompt_or_of_other_problems_is_refused(folder, tmp_path, capsys):
    assert run_gold(folder, "--from_reference") == 0
    content = (folder / "gold.jsonl").read_bytes()
    capsys.readouterr()
    assert run_gold(folder, "--from_reference", "--prompt", "r1_zero", "--evaluator", "math") == 2
    assert "another prompt" in one_line(capsys)
    other_problems = write_problems(tmp_path / "other", ["Why?"])
    assert run_gold(other_problems, "--from_reference", "--output", folder / "gold.jsonl") == 2
    assert "other problems" in one_line(capsys)
    assert (folder / "gold.jsonl").read_bytes() == content


def test_ctrl_c_loses_nothing_and_says_how_to_go_on(folder, capsys):
    def interrupt(request):
        if len(server.requests) == 6:
            # As in a terminal: a signal that another thread takes would not wake the event loop.
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            return fake.hang
        return right_reply(request)

    # A worker of pytest-xdist ignores the signal.
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with FakeOpenAIServer(interrupt) as server:
            assert run_gold_with(server, folder, "--concurrency", 1) == 130
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    streams = capsys.readouterr()
    assert streams.err.endswith("interrupted: start again to continue\n")
    assert len(rows_in(folder)) == 5
    assert reported(streams.out) == [5, 0, 0, 7]
    with FakeOpenAIServer(right_reply) as server:
        assert run_gold_with(server, folder) == 0
    assert len(server.requests) == 7
    assert all_solved_once(folder)


# --- Local models, and a server that we did not write ---------------------------------------------


def test_a_local_model_samples_what_is_still_open(tmp_path, monkeypatch, capsys):
    """The sampler is scripted.

    Problem 0 is right at once and 1 at the second attempt. Problem 2 never is, and is cut.
    """
    batch_sizes = []
    options_of_calls = []

    def generate(model, tokenizer, prompts, **options):
        batch_sizes.append(len(prompts))
        options_of_calls.append(options)
        completions = []
        for prompt in prompts:
            i = problem_number({"messages": [{"content": prompt}]})
            is_right = i == 0 or (i == 1 and len(batch_sizes) > 1)
            text = FORM("So.", str(i + 1)) + "\n" if is_right else "<reasoning>Hm"
            completions.append(Completion([0], [0], finished=is_right, text=text))
        return completions

    folder = write_problems(tmp_path / "data", [f"What is {{{i}}} + 1?" for i in range(3)])
    monkeypatch.setattr(
        llms, "get_llm_tokenizer", lambda *args: (random_model(), small_tokenizer())
    )
    monkeypatch.setattr(generation, "generate", generate)
    flags = ["--model_name", "small", "--num_attempts", 3, "--max_completion_length", 7]
    assert run_gold(folder, *flags) == 0
    assert batch_sizes == [3, 2, 1]
    assert options_of_calls[0] == {
        "max_completion_length": 7,
        "temperature": 1.0,
        "stop_strings": (),
        "max_concurrent_sequences": 16,  # --concurrency
    }
    outcomes = {
        row["id"]: (row["attempt"], row["correct"], row["completion"]) for row in rows_in(folder)
    }
    assert outcomes == {
        "gsm8k/train/0": (1, True, FORM("So.", "1")),
        "gsm8k/train/1": (2, True, FORM("So.", "2")),
        "gsm8k/train/2": (3, False, "<reasoning>Hm"),
    }
    assert reported(capsys.readouterr().out) == [2, 1, 0, 0]


TWENTY = ["--dataset_name", "arithmetic", "--num_problems", "20", "--num_attempts", "2"]


def test_a_demo_model_makes_gold(tmp_path):
    flags = [
        "--model_name",
        str(ROOT / "tiny/1m"),
        *TWENTY,
        "--output",
        str(tmp_path / "gold.jsonl"),
    ]
    assert generate_gold.main([*flags, "--max_completion_length", "96"]) == 0
    rows = rows_in(tmp_path)
    assert len({row["id"] for row in rows}) == len(rows) == 20
    assert any(row["correct"] for row in rows)
    assert all(row["correct"] or row["attempt"] == 2 for row in rows)


@pytest.mark.slow
def test_transformers_serve_makes_gold_and_rates(tmp_path, monkeypatch):
    """It refuses fields that it does not know, and warns of those that it leaves out.

    The demo model of arithmetic writes no rating that can be read.
    """
    monkeypatch.undo()  # a real server needs its moment between two requests
    lines = []
    model = str(ROOT / "tiny/1m")
    rubric = judges.Rubric("Write.", {"wit": "is it witty?"})
    with transformers_serve(model, lines) as base_url:
        flags = ["--api_model", model, "--base_url", base_url, *TWENTY, "--concurrency", 4]
        done = run_script("generate_gold.py", *flags, "--output", tmp_path / "gold.jsonl")
        assert done.returncode == 0, done.stderr
        unsupported = [line for line in lines if "unsupported fields" in line]
        assert not unsupported, "only fields that it knows are asked for"
        judge = judges.EndpointJudge(rubric, model, base_url, tmp_path / "cache")
        judge.options["max_tokens"] = 24
        scores, details = judge.score(["A line."] * 3, ["One story.", "Another.", "One story."])
    num_correct, num_incorrect, *rest = reported(done.stdout)
    assert num_correct + num_incorrect == 20 and rest == [0, 0]
    assert 0 < num_correct == len(correct_rows(tmp_path))
    assert all(map(math.isnan, scores))
    assert all(detail["judge_error"].startswith("no rating") for detail in details)
