"""report.html: what the page of a run holds, and that nothing of a run is ever markup."""

from html.parser import HTMLParser

import pytest
from log_helpers import eval_row, train_rows, write_answers, write_run

import plotter
from grpo import jsonl

HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror='alert(2)'>\"{{ 7 * 7 }}&amp;"


class Page(HTMLParser):
    """A page as a browser reads it: its elements with their attributes, and its text."""

    def __init__(self, path):
        super().__init__()
        self.elements = []
        self.text = ""
        self.feed(path.read_text("utf-8"))
        self.words = " ".join(self.text.split())

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def attributes_of(self, class_name):
        return [attrs for _, attrs in self.elements if attrs.get("class") == class_name]


def completion(prompt, i):
    """Completion i of a prompt: the first is correct, and the last is cut."""
    row = {"id": prompt, "prompt": f"What is {prompt}?", "completion": f"{prompt}: answer {i}"}
    row |= {"gold": "7", "correct_strict": i == 0, "rewards/correctness": 2.0 * (i == 0)}
    row |= {"reward": 2.25, "length": 5, "finished": i < 3, "parsed": None}
    return row | {"advantage": 1.5 if i == 0 else -0.5}


@pytest.fixture
def run(tmp_path):
    """2 iterations of 2 prompts x 4 completions; evaluations of 6 questions: 3 fixed, 1 broken."""
    run = write_run(tmp_path / "run", train_rows(2, loss=abs), [eval_row(0), eval_row(2)])
    for step in (1, 2):
        rows = [completion(prompt, i) for prompt in "ab" for i in range(4)]
        jsonl.write(run / f"rollouts/step_{step:06d}.jsonl", rows)
    write_answers(run, 0, [True, True, False, False, False, False])
    write_answers(run, 2, [True, False, True, True, True, False])
    return run


def page_of(run):
    assert plotter.main([str(run)]) == 0
    return Page(run / "report.html")


def test_what_the_page_holds(run):
    page = page_of(run)
    for words in (
        "tiny/1m, arithmetic",
        "--dataset_name arithmetic",
        "accuracy (strict) 30.0% -> 30.0%",
        "3 questions were fixed",
        "1 questions were broken q1, gold answer 1",
        "How many are 1? <end> Go: before At step 0 it is 1. after At step 2 it is 1.",
        "2 of 2 steps are in this page",
        "Step 2 2 of 2 prompts. a, gold answer 7 What is a?",
        "advantage 1.5, ✓ right, 5 tokens a: answer 0 reward 2.25, rewards/correctness: 2,",
        "advantage -0.5, ✗ wrong, 5 tokens, cut a: answer 3",
        "parsed: missing",
        "Nothing looks wrong by the rules.",
    ):
        assert words in page.words, words
    assert page.words.count("answer 0") == 4
    assert len(page.attributes_of("head better")) == 4
    assert len(page.attributes_of("head worse")) == 12
    assert not page.attributes_of("token")


def test_a_long_run_keeps_every_tenth_step_and_the_last(run):
    for step in range(3, 26):
        jsonl.write(run / f"rollouts/step_{step:06d}.jsonl", [completion("a", 0)])
    words = page_of(run).words
    assert "3 of 25 steps are in this page" in words
    assert all(f"Step {step} " in words for step in (10, 20, 25))


def test_nothing_of_a_run_is_markup(run):
    """Hostile are a completion, a token, a prompt, an id, a gold answer, a flag and a reward."""
    args = {"model_name": HOSTILE, "dataset_name": HOSTILE, HOSTILE: HOSTILE}
    jsonl.write_json(run / "args.json", {"args": args, "command": HOSTILE})
    changes = dict.fromkeys(("id", "prompt", "gold", "completion", "parsed", HOSTILE), HOSTILE)
    for path in run.glob("*/step_*"):
        jsonl.write(path, [row | changes for row in jsonl.read(path)])
    tokens = {"tokens": {"text": [HOSTILE], "logp": [-1.0]}}
    rows = [completion("a", 0) | tokens, completion("a", 1) | {"completion": HOSTILE}]
    jsonl.write(run / "rollouts/step_000001.jsonl", rows)
    page = page_of(run)
    assert not {"script", "img"} & {tag for tag, _ in page.elements}
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert len(page.attributes_of("token")) == 1
    assert page.text.count(HOSTILE) > 20


def test_tokens_have_colours_and_come_first(run):
    """The strongest colour is the 98% quantile of a measure's sizes, or 1 where this is 0.

    One token that changed by 10 nats would make all others look as if nothing had happened. The
    last step with colours is open.
    """
    values = {
        "change": [0.0, -0.1, -0.2, None] + [-0.2] * 95 + [10.0],  # null: it was not finite
        "logp": [-1.0] + [0.0] * 99,
    }
    path = run / "rollouts/step_000001.jsonl"
    rows = jsonl.read(path)
    rows[5]["tokens"] = {"text": ["<b>", "\n"] + ["c"] * 98} | values
    jsonl.write(path, rows)
    page = page_of(run)
    first, second, third, fourth, *_, last = page.attributes_of("token")
    assert first["style"] == "--change:0.00;--logp:-1.00;"
    assert second == {
        "class": "token",
        "style": "--change:-0.50;--logp:0.00;",
        "title": "change -0.1000, logp +0.0000",
    }
    assert third["style"] == "--change:-1.00;--logp:0.00;"
    assert fourth["style"] == "--logp:0.00;"
    assert last["style"] == "--change:1.00;--logp:0.00;"
    text = page.words.partition("Step 1 ")[2]
    assert "The strongest colour of change is 0.2 nats." in text
    assert "✗ wrong, 5 tokens <b>↵ ccc" in text
    assert text.index("What is b?") < text.index("What is a?")
    steps = [attributes for tag, attributes in page.elements if tag == "details"]
    assert ["open" in attributes for attributes in steps[-2:]] == [True, False]


def test_runs_of_other_kinds_have_a_page(tmp_path):
    """SFT shows its evaluations; stories have no verdicts; a run may have no transcript yet."""
    sft = write_run(tmp_path / "sft", train_rows(2, loss=abs))
    assert "0 of 0 steps" in page_of(sft).words
    for step in (0, 2):
        write_answers(sft, step, [None, None])
    words = page_of(sft).words
    assert "2 of 2 steps" in words and "At step 0 it is 1." in words
    assert "advantage" not in words and "fixed" not in words
