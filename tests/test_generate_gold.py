"""Gold data: what is accepted, what is asked of an endpoint, and that nothing is lost or doubled, whatever happens."""

import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import anyio
import fake_openai_server as fake
import pytest
import torch
from conftest import ROOT, closed_port, run_script, transformers_serve
from fake_openai_server import FakeOpenAIServer, ok, status

import generate_gold
import llms
from rl_datasets import PROMPTS

KEY = "sk-secret-123"
COLUMNS = ["id", "question", "completion", "answer", "source", "attempt", "correct", "prompt_name"]
FORM = PROMPTS["reasoning_answer"].format_solution


@pytest.fixture(autouse=True)
def delays(monkeypatch):
    """No test waits for a back-off; the seconds that would have been waited are listed here."""
    waited = []

    async def sleep(seconds):
        if seconds:
            waited.append(seconds)

    monkeypatch.setattr(anyio, "sleep", sleep)  # the openai client's
    monkeypatch.setattr(generate_gold.asyncio, "sleep", sleep)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return waited


@pytest.fixture
def folder(tmp_path):
    """12 training problems in GSM8K's schema, `What is i + 1?`, in a folder of their own."""
    return write_problems(tmp_path / "data", [f"What is {{{i}}} + 1?" for i in range(12)])


def write_problems(folder, questions):
    folder.mkdir()
    for split in ("train", "test"):
        rows = [
            {"question": q, "answer": f"It is <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"} for i, q in enumerate(questions)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def number(request):
    """Which problem a request asks."""
    return int(re.search(r"\{(\d+)\}", request["messages"][-1]["content"])[1])


def right(request):
    return ok(FORM("It is easy.", str(number(request) + 1)))


def gold(folder, *flags):
    """Run generate_gold.py in this process."""
    return generate_gold.main(["--dataset_path", str(folder), "--output", str(folder / "gold.jsonl"), *map(str, flags)])


def ask(server, folder, *flags):
    return gold(folder, "--api_model", "fake", "--base_url", server.base_url, *flags)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def accepted(folder):
    return read(folder / "gold.jsonl")


def rejected(folder):
    return read(folder / "gold.rejected.jsonl")


def outcome(report, kind):
    """The number and the reasons behind it, in a printed report."""
    match = re.search(rf"^(?:- )?{kind} +([\d,]+)(?:  (.*))?$", report, re.MULTILINE)
    return int(match[1].replace(",", "")), match[2]


# The data set's own solutions


def test_reference_solutions_are_put_into_the_form_and_verified(folder, capsys):
    assert gold(folder, "--from_reference") == 0
    rows = sorted(accepted(folder), key=lambda row: row["answer"].zfill(2))
    assert [list(row) for row in rows] == [COLUMNS] * 12 and rejected(folder) == []
    assert rows[3] == {
        "id": "gsm8k/train/3",
        "question": "What is {3} + 1?",
        "completion": "<reasoning>\nIt is 4.\n</reasoning>\n<answer>\n4\n</answer>",
        "answer": "4",
        "source": "reference",
        "attempt": 1,
        "correct": True,
        "prompt_name": "reasoning_answer",
    }
    report = capsys.readouterr().out
    assert "12 of 12 problems solved" in report and outcome(report, "accepted") == (12, None)


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("r1_zero", "\nIt is 4.\n</think> <answer>4</answer>"), ("question_only", "It is 4.\nThe answer is \\boxed{4}.")],
)
def test_reference_solutions_in_other_forms(folder, prompt, completion):
    assert gold(folder, "--from_reference", "--prompt", prompt, "--evaluator", "math") == 0
    assert len(accepted(folder)) == 12 and accepted(folder)[0]["prompt_name"] == prompt
    assert completion in [row["completion"] for row in accepted(folder)]


def test_a_problem_without_a_solution_is_rejected_once_and_for_all(folder, capsys):
    with open(folder / "train.jsonl", "a") as file:
        file.write('{"question": "Why?", "answer": "#### 42"}\n')
    for tried in (13, 0):
        assert gold(folder, "--from_reference", "--num_attempts", 5) == 0
        report = capsys.readouterr().out
        assert outcome(report, "tried") == (tried, None)
    assert len(accepted(folder)) == 12
    assert [(row["question"], row["reason"]) for row in rejected(folder)] == [("Why?", "empty")]


def test_all_of_gsm8k_is_verified(data_folder, tmp_path, capsys):
    """7,473 of 7,473; the expected number of rows and golds with commas are facts about the official file."""
    flags = ["--from_reference", "--dataset_path", str(data_folder / "data/gsm8k")]
    assert generate_gold.main([*flags, "--output", str(tmp_path / "gold.jsonl")]) == 0
    rows = read(tmp_path / "gold.jsonl")
    assert len({row["id"] for row in rows}) == len(rows) == 7473 and all(row["correct"] for row in rows)
    assert not any("<<" in row["completion"] or "," in row["answer"] for row in rows)
    report = capsys.readouterr().out
    assert outcome(report, "rejected") == (0, None) and outcome(report, "duplicates") == (0, None)


def test_fewer_problems_are_among_more_and_drawn_by_the_seed(folder):
    def ids(n, seed):
        output = folder / f"{n}-{seed}.jsonl"
        assert gold(folder, "--from_reference", "--num_problems", n, "--seed", seed, "--output", output) == 0
        return {row["id"] for row in read(output)}

    assert len(ids(5, 0)) == 5 and ids(5, 0) < ids(8, 0) and ids(5, 0) != ids(5, 1)


def test_a_repeated_question_is_tried_once(tmp_path, capsys):
    folder = write_problems(tmp_path / "data", ["Why?", "How?", "Why?", "Why?"])
    assert gold(folder, "--from_reference") == 0
    assert sorted(row["id"] for row in accepted(folder)) == ["gsm8k/train/0", "gsm8k/train/1"]
    assert outcome(capsys.readouterr().out, "duplicates") == (2, None)


# An endpoint


def test_an_endpoint_is_asked_for_no_more_than_needed(folder, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with FakeOpenAIServer(right) as server:
        assert ask(server, folder) == 0
    assert len(accepted(folder)) == len(server.requests) == 12
    for request in server.requests:
        chat = PROMPTS["reasoning_answer"].messages(f"What is {{{number(request['body'])}}} + 1?")
        assert request["body"] == {"model": "fake", "max_tokens": 512, "messages": chat}
        assert request["headers"]["authorization"] == f"Bearer {KEY}"
    row = next(row for row in accepted(folder) if row["id"] == "gsm8k/train/7")
    assert row["completion"] == FORM("It is easy.", "8") and row["source"] == "fake" and row["correct"] is True


def test_temperature_and_length_are_sent_where_given_and_loopback_needs_no_key(folder):
    with FakeOpenAIServer(right) as server:
        assert ask(server, folder, "--temperature", 0, "--max_completion_length", 0, "--num_problems", 1) == 0
    assert server.requests[0]["body"].keys() == {"model", "messages", "temperature"}
    assert server.requests[0]["body"]["temperature"] == 0
    assert server.requests[0]["headers"]["authorization"] == "Bearer none"


WRONG, NO_FORM = ok(FORM("Hm.", "-7")), ok("The answer is 1.")


def test_several_attempts_until_one_is_right(folder):
    first = ok(FORM("So.", "1"))
    with FakeOpenAIServer([WRONG, NO_FORM, first]) as server:
        (folder / "train.jsonl").write_text('{"question": "0+1?", "answer": "#### 1"}\n')
        assert ask(server, folder, "--num_attempts", 4) == 0
    assert len(server.requests) == 3
    assert [(row["attempt"], row["completion"]) for row in accepted(folder)] == [(3, FORM("So.", "1"))]
    assert [(row["attempt"], row["reason"], row["correct"]) for row in rejected(folder)] == [
        (1, "wrong answer", False),
        (2, "format", False),
    ]


def test_keep_incorrect_keeps_every_attempt_in_the_file_marked(folder):
    with FakeOpenAIServer([WRONG, NO_FORM, ok(FORM("So.", "1"))]) as server:
        (folder / "train.jsonl").write_text('{"question": "0+1?", "answer": "#### 1"}\n')
        assert ask(server, folder, "--num_attempts", 4, "--keep_incorrect") == 0
    assert [(row["attempt"], row["correct"]) for row in accepted(folder)] == [(1, False), (2, False), (3, True)]
    assert [list(row) for row in accepted(folder)] == [COLUMNS] * 3 and rejected(folder) == []


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (WRONG, "wrong answer"),
        (NO_FORM, "format"),
        (ok(FORM("So.", "1") + " Bye."), "format"),
        (ok("<reasoning>a</reasoning><answer>2</answer><answer>1</answer>"), "format"),
        (ok(FORM("</reasoning><answer>1</answer><reasoning>", "1")), "format"),
        (ok(FORM("So<|im_end|>", "1")), "special token"),
        (ok("<reasoning>So", finish_reason="length"), "truncated"),
        (ok(""), "empty"),
        (ok(None), "empty"),
    ],
)
def test_rejections_have_their_reason(folder, capsys, behaviour, reason):
    (folder / "train.jsonl").write_text('{"question": "0+1?", "answer": "#### 1"}\n')
    with FakeOpenAIServer([behaviour]) as server:
        assert ask(server, folder) == 0
    assert [row["reason"] for row in rejected(folder)] == [reason] and accepted(folder) == []
    assert outcome(capsys.readouterr().out, "rejected") == (1, f"{reason} 1")


def test_half_of_a_surrogate_pair_cannot_reach_the_file(folder):
    """A tokenizer would refuse such text, in the middle of training."""
    (folder / "train.jsonl").write_text('{"question": "0+1?", "answer": "#### 1"}\n')
    with FakeOpenAIServer([ok(FORM("So \ud83d.", "1"))]) as server:
        assert ask(server, folder) == 0
    assert accepted(folder)[0]["completion"] == FORM("So ?.", "1")


def test_a_reply_is_put_into_another_form(folder):
    with FakeOpenAIServer([ok(FORM(r"It is \frac{2}{2}.", "1")), NO_FORM]) as server:
        (folder / "train.jsonl").write_text('{"question": "0+1?", "answer": "#### 1"}\n')
        assert ask(server, folder, "--prompt", "r1_zero", "--evaluator", "math") == 0
    assert server.requests[0]["body"]["messages"] == PROMPTS["reasoning_answer"].messages("0+1?")
    assert accepted(folder)[0]["completion"] == "\nIt is \\frac{2}{2}.\n</think> <answer>1</answer>"


def test_tokens_and_cost_are_reported(folder, capsys):
    with FakeOpenAIServer(lambda r: ok(FORM("x", "0"), prompt_tokens=1000, completion_tokens=100)) as server:
        assert ask(server, folder, "--num_attempts", 2, "--price_in", 0.5, "--price_out", 2) == 0
    # 24 attempts: 24,000 tokens at 0.5 and 2,400 at 2 dollars per million
    assert "24,000 + 2,400 tokens, $0.0168" in capsys.readouterr().out


def test_so_many_requests_at_a_time_and_no_more(folder):
    """Every request waits until three others wait too: with fewer at a time the barrier breaks."""
    barrier, lock, now, most = threading.Barrier(4, timeout=300), threading.Lock(), 0, 0

    def together(request):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        barrier.wait()
        with lock:
            now -= 1
        return right(request)

    with FakeOpenAIServer(together) as server:
        assert ask(server, folder, "--concurrency", 4) == 0
    assert len(accepted(folder)) == 12 and most == 4


def test_a_row_is_on_disk_before_the_next_request(folder, monkeypatch):
    synced, seen = [], []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), synced.append(os.fstat(fd).st_size)))

    def behave(request):
        seen.append(len(accepted(folder)))
        return right(request)

    with FakeOpenAIServer(behave) as server:
        assert ask(server, folder, "--concurrency", 1) == 0
    assert seen == list(range(12)) and max(synced) == (folder / "gold.jsonl").stat().st_size


# A misbehaving endpoint


@pytest.mark.parametrize(
    "trouble",
    [status(429, retry_after=3), status(500), status(503), fake.cut_json(), fake.empty_choices(), fake.web_page()]
    + [fake.drop, fake.body([]), fake.body({"choices": None}), fake.body(fake.completion([{}]))],
)
def test_a_failed_request_is_repeated_and_is_no_attempt(folder, trouble):
    with FakeOpenAIServer([trouble, trouble, ok(FORM("So.", "1"))]) as server:
        (folder / "train.jsonl").write_text('{"question": "0+1?", "answer": "#### 1"}\n')
        assert ask(server, folder) == 0
    assert [(row["attempt"], row["correct"]) for row in accepted(folder)] == [(1, True)] and rejected(folder) == []
    assert len(server.requests) == 3


def test_back_off_is_exponential_and_respects_retry_after(folder, delays):
    with FakeOpenAIServer([status(500), status(500), status(500), status(429, retry_after=70), ok("x")]) as server:
        assert ask(server, folder, "--num_problems", 1) == 0
    bounds = [(0.375, 0.5), (0.75, 1), (1.5, 2), (70, 70)]  # the client takes up to a quarter off, at random
    assert len(delays) == 4 and all(low <= d <= high for d, (low, high) in zip(delays, bounds, strict=True))


def test_back_off_of_broken_replies_is_exponential(folder, delays):
    with FakeOpenAIServer([fake.cut_json()]) as server:
        assert ask(server, folder, "--num_problems", 1) == 0
    assert delays == [0.5, 1, 2, 4, 8] and len(server.requests) == 6


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (status(500), "HTTP 500"),
        (status(400, "max_tokens is not supported"), "HTTP 400"),
        (fake.drop, "no connection"),
        (fake.empty_choices(), "broken reply"),
    ],
)
def test_what_gets_no_reply_is_tried_again_by_the_next_run(folder, capsys, trouble, reason):
    with FakeOpenAIServer(lambda request: trouble if number(request) < 3 else right(request)) as server:
        assert ask(server, folder, "--max_retries", 0) == 0
        report = capsys.readouterr()
        assert outcome(report.out, "no reply") == (3, f"{reason} 3; start again to try them")
        assert (report.out + report.err).count("no reply: ") == 1, "said once, not three times"
        assert ("max_tokens is not supported" in report.out + report.err) == (reason == "HTTP 400")
        assert len(accepted(folder)) == 9 and rejected(folder) == []
        server.behaviour = right
        assert ask(server, folder) == 0
    report = capsys.readouterr().out
    assert outcome(report, "done before") == (9, None) and outcome(report, "tried") == (3, None)
    assert Counter(row["id"] for row in accepted(folder)) == {f"gsm8k/train/{i}": 1 for i in range(12)}


def test_an_endpoint_that_is_gone_ends_the_run(tmp_path, capsys):
    folder = write_problems(tmp_path / "data", [f"{{{i}}}?" for i in range(60)])
    with FakeOpenAIServer([ok("x")] * 5 + [status(500)]) as server:
        assert ask(server, folder, "--max_retries", 0, "--concurrency", 4) == 2
    assert len(server.requests) <= 5 + 20 + 2 * 4, "but for the requests that were under way"
    streams = capsys.readouterr()
    assert streams.err.endswith("error: 20 problems in a row got no reply (HTTP 500): stopped\n")
    assert outcome(streams.out, "rejected")[0] == 5
    # Of 4 requests under way, an "ok" may be read after 3 failures and start the count anew; 3 may end after the 20th.
    assert 20 <= outcome(streams.out, "no reply")[0] <= 20 + 2 * 3


@pytest.mark.parametrize("where", ["models", "behaviour"])
def test_a_refused_key_stops_at_once_in_one_line_that_does_not_hold_it(folder, capsys, monkeypatch, where):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    refusal = status(401, f"Incorrect API key provided: {KEY}")
    with FakeOpenAIServer([refusal], models=refusal if where == "models" else None) as server:
        assert ask(server, folder, "--concurrency", 2) == 2
    assert len(server.requests) <= 2
    streams = capsys.readouterr()
    assert streams.err.splitlines()[-1] == "error: the endpoint refuses the key in OPENAI_API_KEY (HTTP 401)"
    assert KEY not in streams.out + streams.err


def test_the_key_is_neither_shown_nor_stored(folder, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with FakeOpenAIServer(lambda r: right(r) if number(r) else status(400, f"{KEY} has no access")) as server:
        assert ask(server, folder, "--keep_incorrect") == 0
    streams = capsys.readouterr()
    assert "*** has no access" in streams.out + streams.err
    files = "".join(path.read_text() for path in folder.iterdir())
    assert KEY not in streams.out + streams.err + files


def test_an_endpoint_without_a_list_of_models_will_do(folder):
    with FakeOpenAIServer(right, models=status(404)) as server:
        assert ask(server, folder) == 0
    assert len(accepted(folder)) == 12


def one_line(capsys):
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.startswith("error: ") and streams.err.count("\n") == 1, streams
    return streams.err


def test_an_unreachable_endpoint_is_one_line(folder, capsys):
    assert gold(folder, "--api_model", "m", "--base_url", f"http://127.0.0.1:{closed_port()}/v1") == 2
    assert "cannot reach http://127.0.0.1:" in one_line(capsys)


# What takes its time. Three seconds, because on a busy machine an honest reply may take one.


@pytest.mark.slow
def test_a_hanging_endpoint_is_unreachable(folder, capsys):
    with FakeOpenAIServer(right, models=fake.hang) as server:
        assert ask(server, folder, "--timeout", 3) == 2
    assert "no reply in time" in one_line(capsys)


@pytest.mark.slow
def test_a_hanging_request_is_given_up_and_repeated(folder, capsys):
    (folder / "train.jsonl").write_text('{"question": "0+1?", "answer": "#### 1"}\n')
    with FakeOpenAIServer([fake.hang]) as server:
        assert ask(server, folder, "--timeout", 3, "--max_retries", 0) == 0
        assert outcome(capsys.readouterr().out, "no reply") == (1, "no reply in time 1; start again to try them")
        server.behaviour = [fake.hang, ok(FORM("So.", "1"))]
        assert ask(server, folder, "--timeout", 3) == 0
    assert [(row["attempt"], row["correct"]) for row in accepted(folder)] == [(1, True)]


# Starting again


def test_a_second_start_asks_nothing_of_finished_problems(folder, capsys):
    answer = lambda r: right(r) if number(r) % 3 else WRONG  # noqa: E731
    with FakeOpenAIServer(answer) as server:
        for requests in (16, 16, 20):  # 8 right at once, 4 never: 2 attempts each, then a third
            assert ask(server, folder, "--num_attempts", 2 if requests == 16 else 3) == 0
            assert len(server.requests) == requests
    assert len(accepted(folder)) == 8
    assert sorted((row["id"], row["attempt"]) for row in rejected(folder)) == [
        (f"gsm8k/train/{i}", attempt) for i in (0, 3, 6, 9) for attempt in (1, 2, 3)
    ]
    assert outcome(capsys.readouterr().out.split("gold.jsonl: ")[2], "done before") == (12, None)


def test_another_source_has_attempts_of_its_own_at_what_is_left(folder):
    with FakeOpenAIServer(lambda r: right(r) if number(r) % 3 else WRONG) as server:
        assert ask(server, folder) == 0
    assert gold(folder, "--from_reference") == 0
    assert Counter(row["source"] for row in accepted(folder)) == {"fake": 8, "reference": 4}
    assert Counter(row["id"] for row in accepted(folder)) == {f"gsm8k/train/{i}": 1 for i in range(12)}


@pytest.mark.parametrize("left", [1, 7, 8, 60, -1])
def test_a_torn_last_line_is_dropped_and_made_again(folder, capsys, left):
    """A kill in the middle of a write leaves the first bytes of a row."""
    assert gold(folder, "--from_reference") == 0
    path = folder / "gold.jsonl"
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    path.write_bytes(whole[:start] + whole[start:-1][:left])
    assert gold(folder, "--from_reference") == 0
    assert path.read_bytes() == whole
    assert "dropped a last line that was not written to its end" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", ["My notes", "My notes\n", '{"id": 1}\n', "[]\n", "7\n", '{"question": "q"}\n{"id": ']
)
def test_a_file_that_is_not_ours_is_left_alone(folder, capsys, content):
    (folder / "gold.jsonl").write_text(content)
    assert gold(folder, "--from_reference") == 2
    assert "not rows of generate_gold.py" in one_line(capsys)
    assert (folder / "gold.jsonl").read_text() == content


def test_a_file_of_another_prompt_or_of_other_problems_is_refused(folder, tmp_path, capsys):
    assert gold(folder, "--from_reference") == 0
    before = (folder / "gold.jsonl").read_bytes()
    capsys.readouterr()
    assert gold(folder, "--from_reference", "--prompt", "r1_zero", "--evaluator", "math") == 2
    assert "another prompt" in one_line(capsys)
    other = write_problems(tmp_path / "other", ["Why?"])
    assert gold(other, "--from_reference", "--output", folder / "gold.jsonl") == 2
    assert "other problems" in one_line(capsys)
    assert (folder / "gold.jsonl").read_bytes() == before


def test_two_processes_cannot_write_one_file(folder, capsys):
    first = generate_gold.JsonlFile(folder / "gold.jsonl")
    assert gold(folder, "--from_reference") == 2
    assert "in use by another process" in one_line(capsys)
    first.file.close()


def test_ctrl_c_loses_nothing_and_says_how_to_go_on(folder, capsys):
    def interrupt(request):
        if len(server.requests) == 6:
            os.kill(os.getpid(), signal.SIGINT)
            return fake.hang
        return right(request)

    with FakeOpenAIServer(interrupt) as server:
        assert ask(server, folder, "--concurrency", 1) == 130
    streams = capsys.readouterr()
    assert streams.err.endswith("interrupted: every finished attempt is on disk; start again to continue\n")
    assert len(accepted(folder)) == 5 and outcome(streams.out, "accepted") == (5, None)
    with FakeOpenAIServer(right) as server:
        assert ask(server, folder) == 0
    assert len(server.requests) == 7
    assert Counter(row["id"] for row in accepted(folder)) == {f"gsm8k/train/{i}": 1 for i in range(12)}


# Killed and started again


class Trouble:
    """Answers half of the requests with some trouble; kills the client that it watches, a moment after request kill_at.

    Every right reply holds a number of its own. Problems 0, 7, 14 ... are never answered right.
    """

    def __init__(self, seed):
        self.random, self.lock = random.Random(seed), threading.Lock()
        self.process, self.served, self.kill_at = None, 0, None

    def watch(self, process, kill_at=None):
        with self.lock:
            self.process, self.kill_at = process, kill_at and self.served + kill_at

    def __call__(self, request):
        with self.lock:
            self.served += 1
            if self.served == self.kill_at:
                threading.Timer(self.random.uniform(0, 0.03), self.process.kill).start()
            text = FORM(f"Reply {self.served}.", str(number(request) + 1 if number(request) % 7 else -1))
            troubles = [status(429, retry_after=0.01), status(500), fake.cut_json(), fake.empty_choices(), fake.drop]
            troubles += [ok("No form."), ok(text + "<answer>1</answer>"), ok("", finish_reason="length")]
            return self.random.choice(troubles) if self.random.random() < 0.5 else ok(text)


def check_after_kills(folder, start, kills, problems, seed):
    """Start, kill at a random moment, look at the file; after so many kills, let a last start finish."""
    write_problems(folder, [f"What is {{{i}}} + 1?" for i in range(problems)])
    trouble, draw, kept = Trouble(seed), random.Random(seed), b""
    with FakeOpenAIServer(trouble) as server:
        flags = ["--api_model", "fake", "--base_url", server.base_url, "--dataset_path", str(folder)]
        flags += ["--output", str(folder / "gold.jsonl"), "--num_attempts", "20", "--concurrency", "8"]
        for kill in range(kills + 1):
            process = start(flags)
            trouble.watch(process, draw.randint(1, problems // kills) if kill < kills else None)
            code = process.wait()
            assert code == (-signal.SIGKILL if kill < kills else 0)
            now = (folder / "gold.jsonl").read_bytes() if (folder / "gold.jsonl").exists() else b""
            assert now.startswith(kept), "a row that was on disk is gone"
            kept = now[: now.rfind(b"\n") + 1]
    rows = accepted(folder)
    solvable = {f"gsm8k/train/{i}" for i in range(problems) if i % 7}
    assert Counter(row["id"] for row in rows) == dict.fromkeys(solvable, 1)
    assert len({row["completion"] for row in rows}) == len(rows)
    assert all(row["correct"] and row["completion"].startswith("<reasoning>\nReply ") for row in rows)
    attempts = Counter((row["id"], row["attempt"]) for row in rows + rejected(folder))
    assert max(attempts.values()) == 1, "an attempt was counted twice"
    hopeless = {(f"gsm8k/train/{i}", n) for i in range(0, problems, 7) for n in range(1, 21)}
    assert {key for key in attempts if key[0] not in solvable} == hopeless


def test_every_accepted_row_is_there_once_after_two_kills(tmp_path):
    """In a fork of this process, which has imported everything already."""

    def start(flags):
        process = multiprocessing.get_context("fork").Process(target=generate_gold.main, args=(flags,))
        process.start()
        wait = lambda: process.join() or process.exitcode  # noqa: E731
        return SimpleNamespace(kill=process.kill, wait=wait)

    check_after_kills(tmp_path / "data", start, kills=2, problems=40, seed=0)


@pytest.mark.slow
def test_every_accepted_row_is_there_once_after_ten_kills(tmp_path):
    def start(flags):
        command = [sys.executable, str(ROOT / "generate_gold.py"), *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    check_after_kills(tmp_path / "data", start, kills=10, problems=150, seed=1)


# Local models, and a server that we did not write


def test_a_local_model_samples_what_is_still_open(folder, monkeypatch, capsys):
    """The sampler is scripted: problem 0 is right at once, 1 at the second attempt, 2 never, and cut at the end."""
    calls = []

    def generate(model, tokenizer, prompts, **options):
        calls.append((prompts, options))
        texts = []
        for prompt in prompts:
            i, again = number({"messages": [{"content": prompt}]}), len(calls) > 1
            texts.append(FORM("So.", str(i + 1)) + "\n" if i == 0 or (i == 1 and again) else "<reasoning>Hm")
        B = len(prompts)
        return llms.Rollout(
            prompt_ids=torch.zeros(B, 5, dtype=torch.long),
            completion_ids=torch.zeros(B, 3, dtype=torch.long),
            attention_mask=torch.ones(B, 8, dtype=torch.long),
            completion_mask=torch.ones(B, 3, dtype=torch.long),
            sampled_logps=torch.zeros(B, 3),
            finished=torch.tensor([text.endswith("\n") for text in texts]),
            texts=texts,
        )

    (folder / "train.jsonl").write_text("".join((folder / "train.jsonl").read_text().splitlines(True)[:3]))
    monkeypatch.setattr(llms, "get_llm_tokenizer", lambda *args: (None, SimpleNamespace(chat_template=None)))
    monkeypatch.setattr(llms, "generate", generate)
    assert gold(folder, "--model_name", "small", "--num_attempts", 3, "--max_completion_length", 7) == 0
    assert [len(prompts) for prompts, _ in calls] == [3, 2, 1]
    assert calls[0][1] == {"max_new_tokens": 7, "temperature": 1.0, "stop_strings": ()}
    assert {row["id"]: (row["attempt"], row["completion"]) for row in accepted(folder)} == {
        "gsm8k/train/0": (1, FORM("So.", "1")),
        "gsm8k/train/1": (2, FORM("So.", "2")),
    }
    report = capsys.readouterr().out
    assert outcome(report, "rejected") == (1, "truncated 1") and "30 + 18 tokens" in report


@pytest.fixture
def demo_model():
    folder = ROOT / "tiny" / "1m"
    if not folder.exists():
        pytest.skip("tiny/1m is not there: python tiny/make_tiny_models.py makes it")
    return folder


FIFTY = ["--dataset_name", "arithmetic", "--num_problems", 50, "--num_attempts", 2, "--max_completion_length", 128]


@pytest.mark.slow
def test_a_demo_model_makes_gold(demo_model, tmp_path):
    done = run_script("generate_gold.py", "--model_name", demo_model, "--output", tmp_path / "gold.jsonl", *FIFTY)
    assert done.returncode == 0, done.stderr
    solved = {row["id"] for row in read(tmp_path / "gold.jsonl")}
    assert 0 < len(solved) <= 50
    assert all(row["id"] not in solved for row in read(tmp_path / "gold.rejected.jsonl") if row["attempt"] == 2)


@pytest.mark.slow
def test_gold_from_transformers_serve(demo_model, tmp_path):
    """It refuses fields that it does not know, and warns of those that it leaves out, such as logprobs, n."""
    lines = []
    with transformers_serve(demo_model, lines) as base_url:
        flags = ["--api_model", demo_model, "--base_url", base_url, *FIFTY]
        done = run_script("generate_gold.py", *flags, "--concurrency", 4, "--output", tmp_path / "gold.jsonl")
    assert done.returncode == 0, done.stderr
    assert outcome(done.stdout, "tried")[0] == 50 and outcome(done.stdout, "no reply")[0] == 0
    assert 0 < outcome(done.stdout, "accepted")[0] == len(read(tmp_path / "gold.jsonl"))
    assert " 0 + 0 tokens" not in done.stdout
    assert not any("unsupported fields" in line for line in lines), "only fields that it knows were asked for"
