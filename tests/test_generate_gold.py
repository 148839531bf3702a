"""Gold data: what is accepted, what is asked of an endpoint, and that nothing is lost or doubled, whatever happens."""

import asyncio
import math
import multiprocessing
import os
import random
import re
import signal
import threading
from collections import Counter
from dataclasses import replace

import anyio
import fake_openai_server as fake
import pytest
import torch
from conftest import ROOT, closed_port, run_script, small_tokenizer, transformers_serve
from fake_openai_server import FakeOpenAIServer, ok, status
from tqdm import tqdm

import generate_gold
import llms
from judges import judges
from logs import jsonl
from rl_datasets import PROMPTS
from sampling import generation

KEY = "sk-secret-123"
COLUMNS = ["id", "question", "completion", "answer", "source", "attempt", "correct", "prompt_name"]
FORM = PROMPTS["reasoning_answer"].format_solution
RIGHT, WRONG, NO_FORM = ok(FORM("So.", "1")), ok(FORM("Hm.", "-7")), ok("The answer is 1.")


@pytest.fixture(autouse=True)
def delays(monkeypatch):
    """No test waits for a back-off; the seconds that would have been waited are listed here."""
    waited = []

    async def sleep(seconds):
        if seconds:
            waited.append(seconds)

    monkeypatch.setattr(anyio, "sleep", sleep)  # the openai client's
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return waited


def write_problems(folder, questions):
    """A data set in GSM8K's schema whose i-th answer is i + 1."""
    folder.mkdir()
    rows = [
        {"question": q, "answer": f"It is <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"}
        for i, q in enumerate(questions)
    ]
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


def number(request):
    """Which problem a request asks."""
    return int(re.search(r"\{(\d+)\}", request["messages"][-1]["content"])[1])


def right(request):
    return ok(FORM("It is easy.", str(number(request) + 1)))


def gold(folder, *flags):
    """Run generate_gold.py in this process."""
    return generate_gold.main(
        ["--dataset_path", str(folder), "--output", str(folder / "gold.jsonl"), *map(str, flags)]
    )


def ask(server, folder, *flags):
    return gold(folder, "--api_model", "fake", "--base_url", server.base_url, *flags)


def accepted(folder):
    return jsonl.read(folder / "gold.jsonl")


def rejected(folder):
    return jsonl.read(folder / "gold.rejected.jsonl")


def all_solved_once(folder):
    return Counter(row["id"] for row in accepted(folder)) == {
        f"gsm8k/train/{i}": 1 for i in range(12)
    }


def outcome(report, kind):
    """The number and the reasons behind it, in a printed report."""
    match = re.search(rf"^(?:- )?{kind} +([\d,]+)(?:  (.*))?$", report, re.MULTILINE)
    return int(match[1].replace(",", "")), match[2]


def one_line(capsys):
    streams = capsys.readouterr()
    assert (
        streams.out == "" and streams.err.startswith("error: ") and streams.err.count("\n") == 1
    ), streams
    return streams.err


# The data set's own solutions


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("reasoning_answer", "<reasoning>\nIt is 4.\n</reasoning>\n<answer>\n4\n</answer>"),
        ("r1_zero", "\nIt is 4.\n</think> <answer>4</answer>"),
        ("question_only", "It is 4.\nThe answer is \\boxed{4}."),
    ],
)
def test_reference_solutions_are_put_into_the_form_and_verified(folder, capsys, prompt, completion):
    assert gold(folder, "--from_reference", "--prompt", prompt, "--evaluator", "math") == 0
    rows = sorted(accepted(folder), key=lambda row: int(row["answer"]))
    assert [list(row) for row in rows] == [COLUMNS] * 12 and rejected(folder) == []
    row = ["gsm8k/train/3", "What is {3} + 1?", completion, "4", "reference", 1, True, prompt]
    assert list(rows[3].values()) == row
    report = capsys.readouterr().out
    assert "12 of 12 problems solved" in report and outcome(report, "accepted") == (12, None)


def test_a_problem_without_a_solution_is_rejected_once_and_for_all(folder, capsys):
    with open(folder / "train.jsonl", "a") as file:
        file.write('{"question": "Why?", "answer": "#### 42"}\n')
    for tried in (13, 0):
        assert gold(folder, "--from_reference", "--num_attempts", 5) == 0
        assert outcome(capsys.readouterr().out, "tried") == (tried, None)
    assert len(accepted(folder)) == 12
    assert [(row["question"], row["reason"]) for row in rejected(folder)] == [("Why?", "empty")]


def test_all_of_gsm8k_is_verified(data_folder, tmp_path, capsys):
    """7,473 of 7,473; the expected number of rows and golds with commas are facts about the official file."""
    flags = ["--from_reference", "--dataset_path", str(data_folder / "data/gsm8k")]
    assert generate_gold.main([*flags, "--output", str(tmp_path / "gold.jsonl")]) == 0
    rows = accepted(tmp_path)
    assert len({row["id"] for row in rows}) == len(rows) == 7473 and all(
        row["correct"] for row in rows
    )
    assert not any("<<" in row["completion"] or "," in row["answer"] for row in rows)
    report = capsys.readouterr().out
    assert outcome(report, "rejected") == (0, None)


def test_fewer_problems_are_among_more_and_drawn_by_the_seed(folder):
    def ids(n, seed):
        output = folder / f"{n}-{seed}.jsonl"
        assert (
            gold(
                folder, "--from_reference", "--num_problems", n, "--seed", seed, "--output", output
            )
            == 0
        )
        return {row["id"] for row in jsonl.read(output)}

    assert len(ids(5, 0)) == 5 and ids(5, 0) < ids(8, 0) and ids(5, 0) != ids(5, 1)


# An endpoint


def test_an_endpoint_is_asked_for_no_more_than_needed(folder, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with FakeOpenAIServer(right) as server:
        assert ask(server, folder) == 0
    assert all_solved_once(folder) and len(server.requests) == 12
    for request in server.requests:
        chat = PROMPTS["reasoning_answer"].messages(f"What is {{{number(request['body'])}}} + 1?")
        assert request["body"] == {"model": "fake", "max_tokens": 512, "messages": chat}
        assert request["headers"]["authorization"] == f"Bearer {KEY}"
    row = next(row for row in accepted(folder) if row["id"] == "gsm8k/train/7")
    assert (
        row["completion"] == FORM("It is easy.", "8")
        and row["source"] == "fake"
        and row["correct"] is True
    )


def test_temperature_and_length_are_sent_where_given_and_loopback_needs_no_key(single):
    """Nor does it need a list of models."""
    with FakeOpenAIServer(right, models=status(404)) as server:
        assert ask(server, single, "--temperature", 0, "--max_completion_length", 0) == 0
    assert server.requests[0]["body"].keys() == {"model", "messages", "temperature"}
    assert server.requests[0]["body"]["temperature"] == 0
    assert server.requests[0]["headers"]["authorization"] == "Bearer none"


@pytest.mark.parametrize("keep", [[], ["--keep_incorrect"]])
def test_several_attempts_until_one_is_right(single, keep):
    """The wrong ones go to the file of rejected ones, or where they are kept into the same file, marked."""
    with FakeOpenAIServer([WRONG, NO_FORM, RIGHT]) as server:
        assert ask(server, single, "--num_attempts", 4, *keep) == 0
    assert len(server.requests) == 3
    rows = [
        (row["attempt"], row["correct"], row.get("reason"))
        for row in accepted(single) + rejected(single)
    ]
    wrong = (
        [(1, False, None), (2, False, None)]
        if keep
        else [(1, False, "wrong answer"), (2, False, "format")]
    )
    assert sorted(rows, key=lambda row: row[0]) == [*wrong, (3, True, None)]
    assert len(accepted(single)) == (3 if keep else 1) and accepted(single)[-1][
        "completion"
    ] == FORM("So.", "1")
    assert all(list(row) == COLUMNS for row in accepted(single))


REJECTED = [  # replies to `What is {i} + 1?` and why they are no gold
    (WRONG, "wrong answer"),
    (ok("The answer is 2."), "format"),
    (ok(FORM("So.", "3") + " Bye."), "format"),
    (ok("<reasoning>a</reasoning><answer>2</answer><answer>4</answer>"), "format"),
    (ok(FORM("</reasoning><answer>5</answer><reasoning>", "5")), "format"),
    (ok(FORM("So<|im_end|>", "6")), "special token"),
    (ok("<reasoning>So", finish_reason="length"), "truncated"),
    (ok(""), "empty"),
    (ok(None), "empty"),
]


def test_rejections_have_their_reason(folder, capsys):
    with FakeOpenAIServer(
        lambda r: REJECTED[number(r)][0] if number(r) < len(REJECTED) else right(r)
    ) as server:
        assert ask(server, folder) == 0
    reasons = {int(row["id"].rpartition("/")[2]): row["reason"] for row in rejected(folder)}
    assert (
        reasons == {i: reason for i, (_, reason) in enumerate(REJECTED)}
        and len(accepted(folder)) == 3
    )
    n, said = outcome(capsys.readouterr().out, "rejected")
    counts = Counter(reason for _, reason in REJECTED)
    assert n == 9 and sorted(said.split(", ")) == sorted(
        f"{reason} {n}" for reason, n in counts.items()
    )


def test_a_reply_is_put_into_another_form_without_half_a_surrogate_pair(single):
    """A tokenizer would refuse such text, in the middle of training."""
    with FakeOpenAIServer([ok(FORM("So \ud83d is \\frac{2}{2}.", "1"))]) as server:
        assert ask(server, single, "--prompt", "r1_zero", "--evaluator", "math") == 0
    assert server.requests[0]["body"]["messages"] == PROMPTS["reasoning_answer"].messages(
        "What is {0} + 1?"
    )
    assert (
        accepted(single)[0]["completion"] == "\nSo ? is \\frac{2}{2}.\n</think> <answer>1</answer>"
    )


def test_tokens_are_reported(folder, capsys):
    with FakeOpenAIServer(
        lambda r: ok(FORM("x", "0"), prompt_tokens=1000, completion_tokens=100)
    ) as server:
        assert ask(server, folder, "--num_attempts", 2) == 0
    assert "24,000 + 2,400 tokens" in capsys.readouterr().out


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

TROUBLES = [
    status(429, retry_after=3),
    status(500),
    status(503),
    fake.cut_json(),
    fake.empty_choices(),
]
TROUBLES += [
    fake.web_page(),
    fake.drop,
    fake.body([]),
    fake.body({"choices": None}),
    fake.body(fake.completion([{}])),
]
TROUBLES += [fake.body(b"[" * 100_000)]  # deeper than Python's recursion


def test_a_failed_request_is_repeated_and_is_no_attempt(folder):
    """Each kind of trouble twice in a row, each on a problem of its own."""
    asked = Counter()

    def behave(request):
        i = number(request)
        asked[i] += 1  # one request of a problem at a time
        return TROUBLES[i] if i < len(TROUBLES) and asked[i] < 3 else right(request)

    with FakeOpenAIServer(behave) as server:
        assert ask(server, folder) == 0
    assert asked == {i: 3 if i < len(TROUBLES) else 1 for i in range(12)}
    assert (
        all_solved_once(folder)
        and {row["attempt"] for row in accepted(folder)} == {1}
        and rejected(folder) == []
    )


def test_back_off_is_exponential_and_respects_retry_after(single, delays):
    """Of failed requests by the client, and of replies that cannot be read."""
    with FakeOpenAIServer(
        [status(500), status(500), status(500), status(429, retry_after=70), ok("x")]
    ) as server:
        assert ask(server, single) == 0
        bounds = [
            (0.375, 0.5),
            (0.75, 1),
            (1.5, 2),
            (70, 70),
        ]  # the client takes up to a quarter off, at random
        assert len(delays) == 4 and all(
            low <= d <= high for d, (low, high) in zip(delays, bounds, strict=True)
        )
        delays.clear()
        server.behaviour = [fake.cut_json()]
        assert ask(server, single, "--num_attempts", 2) == 0
    assert delays == [0.5, 1, 2, 4, 8] and len(server.requests) == 5 + 6


def test_what_gets_no_reply_is_tried_again_by_the_next_run(folder, capsys):
    troubles = [
        status(500),
        status(400, "max_tokens is not supported"),
        fake.drop,
        fake.empty_choices(),
    ]
    with FakeOpenAIServer(
        lambda r: troubles[number(r) % 4] if number(r) < 8 else right(r)
    ) as server:
        assert ask(server, folder, "--max_retries", 0) == 0
        report = capsys.readouterr()
        n, said = outcome(report.out, "no reply")
        reasons = {"HTTP 500 2", "HTTP 400 2", "no connection 2", "broken reply 2"}
        assert n == 8 and set(said.partition("; start again to try them")[0].split(", ")) == reasons
        assert (report.out + report.err).count("no reply: ") == 4, (
            "each reason is said once, not twice"
        )
        assert (report.out + report.err).count("max_tokens is not supported") == 1
        assert len(accepted(folder)) == 4 and rejected(folder) == [] and len(server.requests) == 12
        server.behaviour = right
        assert ask(server, folder) == 0
    report = capsys.readouterr().out
    assert outcome(report, "done before") == (4, None) and outcome(report, "tried") == (8, None)
    assert all_solved_once(folder)


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
def test_a_refused_key_stops_at_once_in_one_line_that_does_not_hold_it(
    folder, capsys, monkeypatch, where
):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    refusal = status(401, f"Incorrect API key provided: {KEY}")
    with FakeOpenAIServer([refusal], models=refusal if where == "models" else None) as server:
        assert ask(server, folder, "--concurrency", 2) == 2
    assert len(server.requests) <= 2
    assert one_line(capsys) == "error: the endpoint refuses the key in OPENAI_API_KEY (HTTP 401)\n"


def test_the_key_is_neither_shown_nor_stored(folder, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with FakeOpenAIServer(
        lambda r: right(r) if number(r) else status(400, f"{KEY} has no access")
    ) as server:
        assert ask(server, folder, "--keep_incorrect") == 0
    streams = capsys.readouterr()
    assert "*** has no access" in streams.out + streams.err
    files = "".join(path.read_text() for path in folder.iterdir())
    assert KEY not in streams.out + streams.err + files


def test_an_endpoint_that_does_not_answer_is_one_line(single, capsys):
    assert (
        gold(single, "--api_model", "m", "--base_url", f"http://127.0.0.1:{closed_port()}/v1") == 2
    )
    assert "cannot reach http://127.0.0.1:" in one_line(capsys)
    with FakeOpenAIServer(right, models=fake.hang) as server:
        assert ask(server, single, "--timeout", 0.2, "--output", single / "another.jsonl") == 2
    assert "no reply in time" in one_line(capsys)


def test_a_hanging_request_is_given_up_and_repeated(single, capsys):
    with FakeOpenAIServer([fake.hang]) as server:
        assert (
            ask(server, single, "--timeout", 1, "--max_retries", 0) == 0
        )  # on a busy machine an honest reply is slow
        assert outcome(capsys.readouterr().out, "no reply") == (
            1,
            "no reply in time 1; start again to try them",
        )
        server.behaviour = [fake.hang, RIGHT]
        assert ask(server, single, "--timeout", 1) == 0
    assert [(row["attempt"], row["correct"]) for row in accepted(single)] == [(1, True)]


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
    assert all_solved_once(folder)


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
    "content",
    ["My notes", "My notes\n", '{"id": 1}\n', "[]\n", "7\n", '{"question": "q"}\n{"id": '],
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
    assert streams.err.endswith(
        "interrupted: every finished attempt is on disk; start again to continue\n"
    )
    assert len(accepted(folder)) == 5 and outcome(streams.out, "accepted") == (5, None)
    with FakeOpenAIServer(right) as server:
        assert ask(server, folder) == 0
    assert len(server.requests) == 7 and all_solved_once(folder)


# Killed and started again


class Trouble:
    """Answers half of the requests with some trouble; kills the client that it watches, a moment after request kill_at.

    Every right reply holds a number of its own. Problems 0, 7, 14 ... are never answered right.
    """

    def __init__(self):
        self.random, self.lock = random.Random(0), threading.Lock()
        self.process, self.served, self.kill_at = None, 0, None

    def watch(self, process, kill_at=None):
        with self.lock:
            self.process, self.kill_at = process, kill_at and self.served + kill_at

    def __call__(self, request):
        with self.lock:
            self.served += 1
            if self.served == self.kill_at:
                threading.Timer(self.random.uniform(0, 0.03), self.process.kill).start()
            text = FORM(
                f"Reply {self.served}.", str(number(request) + 1 if number(request) % 7 else -1)
            )
            troubles = [
                status(429, retry_after=0.01),
                status(500),
                fake.cut_json(),
                fake.empty_choices(),
                fake.drop,
            ]
            troubles += [
                ok("No form."),
                ok(text + "<answer>1</answer>"),
                ok("", finish_reason="length"),
            ]
            return self.random.choice(troubles) if self.random.random() < 0.5 else ok(text)


def test_every_accepted_row_is_there_once_after_five_kills(tmp_path, kills=5, problems=40):
    """Start, kill at a random moment, look at the file; after so many kills, let a last start finish.

    In forks of this process, which has imported everything already.
    """
    folder = write_problems(tmp_path / "data", [f"What is {{{i}}} + 1?" for i in range(problems)])
    trouble, draw, kept = Trouble(), random.Random(0), b""

    def child():
        tqdm.set_lock(
            threading.RLock()
        )  # the default one is shared by forks: a kill could leave it locked
        os._exit(ask(server, folder, "--num_attempts", 20, "--concurrency", 8))

    with FakeOpenAIServer(trouble) as server:
        for kill in range(kills + 1):
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
            trouble.watch(process, draw.randint(1, problems) if kill < kills else None)
            process.join()
            assert process.exitcode == (-signal.SIGKILL if kill < kills else 0)
            now = (folder / "gold.jsonl").read_bytes() if (folder / "gold.jsonl").exists() else b""
            assert now.startswith(kept), "a row that was on disk is gone"
            kept = now[: now.rfind(b"\n") + 1]
    rows = accepted(folder)
    solvable = {f"gsm8k/train/{i}" for i in range(problems) if i % 7}
    assert Counter(row["id"] for row in rows) == dict.fromkeys(solvable, 1)
    assert len({row["completion"] for row in rows}) == len(rows)
    assert all(
        row["correct"] and row["completion"].startswith("<reasoning>\nReply ") for row in rows
    )
    attempts = Counter((row["id"], row["attempt"]) for row in rows + rejected(folder))
    assert max(attempts.values()) == 1, "an attempt was counted twice"
    hopeless = {(f"gsm8k/train/{i}", n) for i in range(0, problems, 7) for n in range(1, 21)}
    assert {key for key in attempts if key[0] not in solvable} == hopeless


# Local models, and a server that we did not write


def test_a_local_model_samples_what_is_still_open(tmp_path, monkeypatch, capsys):
    """The sampler is scripted: problem 0 is right at once, 1 at the second attempt, 2 never, and cut at the end."""
    calls = []

    def generate(model, tokenizer, prompts, **options):
        calls.append((prompts, options))
        texts = []
        for prompt in prompts:
            i, again = number({"messages": [{"content": prompt}]}), len(calls) > 1
            texts.append(
                FORM("So.", str(i + 1)) + "\n" if i == 0 or (i == 1 and again) else "<reasoning>Hm"
            )
        rollout = judges.as_rollout([([0] * 5, [0] * 3)] * len(prompts), 0, "cpu")
        return replace(
            rollout, texts=texts, finished=torch.tensor([text.endswith("\n") for text in texts])
        )

    folder = write_problems(tmp_path / "data", [f"What is {{{i}}} + 1?" for i in range(3)])
    monkeypatch.setattr(llms, "get_llm_tokenizer", lambda *args: (None, small_tokenizer()))
    monkeypatch.setattr(generation, "generate", generate)
    assert (
        gold(folder, "--model_name", "small", "--num_attempts", 3, "--max_completion_length", 7)
        == 0
    )
    assert [len(prompts) for prompts, _ in calls] == [3, 2, 1]
    assert calls[0][1] == {"max_new_tokens": 7, "temperature": 1.0, "stop_strings": ()}
    assert {row["id"]: (row["attempt"], row["completion"]) for row in accepted(folder)} == {
        "gsm8k/train/0": (1, FORM("So.", "1")),
        "gsm8k/train/1": (2, FORM("So.", "2")),
    }
    report = capsys.readouterr().out
    assert outcome(report, "rejected") == (1, "truncated 1") and "30 + 18 tokens" in report


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
    solved = {row["id"] for row in accepted(tmp_path)}
    assert 0 < len(solved) <= 20
    assert all(row["id"] not in solved for row in rejected(tmp_path) if row["attempt"] == 2)


@pytest.mark.slow
def test_transformers_serve_makes_gold_and_rates(tmp_path, monkeypatch):
    """It refuses fields that it does not know, and warns of those that it leaves out, such as logprobs, n.

    The demo model of arithmetic writes no rating that can be read: each story is asked for twice, and counted.
    """
    monkeypatch.undo()  # a real server needs its moment between two requests
    lines, model, rubric = (
        [],
        str(ROOT / "tiny/1m"),
        judges.Rubric("Write.", {"wit": "is it witty?"}),
    )
    with transformers_serve(model, lines) as base_url:
        flags = ["--api_model", model, "--base_url", base_url, *TWENTY, "--concurrency", 4]
        done = run_script("generate_gold.py", *flags, "--output", tmp_path / "gold.jsonl")
        assert done.returncode == 0, done.stderr
        assert not any("unsupported fields" in line for line in lines), (
            "only fields that it knows were asked for"
        )
        judge = judges.EndpointJudge(
            rubric, model, base_url, cache=judges.Cache(tmp_path / "cache"), max_retries=1
        )
        judge.options = judge.OPTIONS | {"max_tokens": 24}
        scores, details = judge.score(["A line."] * 3, ["One story.", "Another.", "One story."])
    assert outcome(done.stdout, "tried")[0] == 20 and outcome(done.stdout, "no reply")[0] == 0
    assert 0 < outcome(done.stdout, "accepted")[0] == len(accepted(tmp_path))
    assert " 0 + 0 tokens" not in done.stdout
    counts = judge.take_counts()
    assert all(map(math.isnan, scores)) and counts.pop("asked") == 2
    assert sum(counts.values()) == 4 and set(counts) <= {
        "failed_no_rating",
        "failed_rating_out_of_range",
    }, counts
    assert all(detail["judge_error"] in ("no rating", "rating out of range") for detail in details)
