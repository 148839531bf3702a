"""report.html: what the page of a run holds, and that nothing of a run is ever markup."""

from html.parser import HTMLParser

import pytest
from log_helpers import eval_row, write_answers, write_run

import plotter
from grpo import jsonl, report

HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror='alert(2)'>\"{{ 7 * 7 }}&amp;"


class Page(HTMLParser):
    """A page as a browser reads it: its elements with their attributes, and its text."""

    def __init__(self, path):
        super().__init__()
        self.elements = []
        self.text = ""
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def tokens(self):
        return [attrs for tag, attrs in self.elements if attrs.get("class") == "token"]


def completion(prompt, i, **changes):
    """Completion i of a prompt: the first is correct, and the last is cut."""
    row = {"id": prompt, "prompt": f"Think.\n<user>\nWhat is {prompt}?\n<end>\nGo:\n"}
    row |= {"completion": f"{prompt}: answer {i}", "gold": "7", "correct_strict": i == 0}
    row |= {"rewards/correctness": 2.0 * (i == 0), "reward": 2.25, "length": 5}
    return row | {"finished": i < 3, "advantage": 1.5 if i == 0 else -0.5, "parsed": None} | changes


def tokens(num_tokens=4, **values):
    return {"text": ["<b>", "\n", "", "c"][:num_tokens]} | values


@pytest.fixture
def run(tmp_path):
    """2 iterations of 2 prompts x 4 completions; evaluations of 6 questions: 3 fixed, 1 broken."""
    run = write_run(tmp_path / "run", [{"step": 1, "loss": 1.0}], [eval_row(0), eval_row(2)])
    for step in (1, 2):
        rows = [completion(prompt, i) for prompt in "ab" for i in range(4)]
        jsonl.write(run / f"rollouts/step_{step:06d}.jsonl", rows)
    write_answers(run, 0, [True, True, False, False, False, False])
    write_answers(run, 2, [True, False, True, True, True, False])
    return run


def page_of(run):
    assert plotter.main([str(run)]) == 0
    return Page(run / "report.html")


def change_rollout(run, **changes):
    """Change completion 1 of prompt b in the last iteration."""
    path = run / "rollouts/step_000002.jsonl"
    rows = jsonl.read(path)
    rows[5] |= changes
    jsonl.write(path, rows)


def test_what_the_page_holds(run):
    page = page_of(run)
    text = " ".join(page.text.split())
    for words in (
        "tiny/1m, arithmetic",
        "--dataset_name arithmetic",
        "accuracy (strict) 30.0% -> 30.0%",
        "3 questions were fixed",
        "1 questions were broken",
        "q1, gold answer 1 How many are 1? before At step 0 it is 1. after At step 2 it is 1.",
        "2 of 2 steps are in this page",
        "Step 2 2 of 2 prompts. a, gold answer 7 What is a?",
        "advantage 1.5, ✓ right, 5 tokens a: answer 0 reward 2.25, rewards/correctness: 2,",
        "advantage -0.5, ✗ wrong, 5 tokens, cut a: answer 3",
        "parsed: missing",
        "None of the rules in docs/tuning.md finds anything wrong.",
    ):
        assert words in text, words
    assert text.count("answer 0") == 4
    classes = [attributes.get("class", "") for _, attributes in page.elements]
    assert classes.count("head better") == 4 and classes.count("head worse") == 12
    assert not page.tokens()


def test_the_frame_of_all_prompts_is_shown_once(run):
    text = page_of(run).text
    assert text.count("Think.\n<user>\n[...]\n<end>\nGo:") == text.count("Think.") == 1
    assert report.prompt_frame(["a\nx 1\nc", "a\nx 2\nc"]) == ("a\n", "\nc")
    assert report.prompt_frame(["ab", "ac"]) == ("", "")
    assert report.prompt_frame([]) == ("", "")


def test_nothing_of_a_run_is_markup(run):
    """Hostile are a completion, a token, a prompt, an id, a gold answer, a flag and a reward."""
    args = {"model_name": HOSTILE, "dataset_name": HOSTILE, HOSTILE: HOSTILE}
    jsonl.write_json(run / "args.json", {"args": args, "command": HOSTILE})
    changes = dict.fromkeys(("id", "prompt", "gold", "completion", "parsed", HOSTILE), HOSTILE)
    change_rollout(run, **changes)
    path = run / "rollouts/step_000001.jsonl"
    jsonl.write(path, [completion("a", 0, tokens={"text": [HOSTILE], "logp": [-1.0]})])
    page = page_of(run)
    assert not {"script", "img"} & {tag for tag, _ in page.elements}
    assert len(page.tokens()) == 1
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert page.text.count(HOSTILE) >= 8
    assert "default-src 'none'" in str(page.elements)


def test_tokens_have_colours_and_come_first(run):
    """Change: 0.2 and more is the strongest blue, as the 98% quantile of 0, 0.1, 0.2, 0.2."""
    values = {"change": [0.0, -0.1, 0.2, 0.2], "logp": [-1.0, -2.0, -4.0, 0.0]}
    change_rollout(run, tokens=tokens(**values))
    page = page_of(run)
    styles = [token["style"] for token in page.tokens()]
    scale = report.token_scales([{"tokens": values}])
    assert scale == pytest.approx({"change": 0.2, "logp": 2 + 0.94 * 2}, abs=1e-9)
    strongest = ["--change:1;--logp:-1;", "--change:1;"]
    assert styles == ["--logp:-0.26;", "--change:-0.5;--logp:-0.52;", *strongest]
    assert page.tokens()[1]["title"] == "change -0.1000, logp -2.0000"
    text = " ".join(page.text.split()).partition("Step 2 ")[2]
    assert "What is b? advantage -0.5, ✗ wrong, 5 tokens <b>↵ c reward" in text
    assert text.index("What is b?") < text.index("What is a?")
    assert "The strongest colour of change is 0.2 nats." in text


def test_a_scale_leaves_out_outliers_and_is_never_0():
    """One token that changed by 10 nats would make all others look as if nothing had happened."""
    row = {
        "tokens": {"change": [0.01] * 99 + [10.0], "logp": [0.0] * 99 + [-3.0], "log_ratio": [0.0]}
    }
    scales = report.token_scales([row, {}])
    assert scales == pytest.approx({"change": 0.01, "logp": 3.0, "log_ratio": 1.0})
    token = report.token_of_page({"text": "a", "change": -10.0}, scales)
    assert token["style"] == "--change:-1;"


def test_what_is_too_much_for_a_page_is_left_out(run, monkeypatch):
    monkeypatch.setattr(report, "MAX_GROUPS", 1)
    monkeypatch.setattr(report, "MAX_QUESTIONS", 2)
    text = " ".join(page_of(run).text.split())
    assert "1 of 2 prompts." in text and "What is b?" not in text
    assert "3 questions were fixed The first 2 of them:" in text and "q4" not in text
    steps = list(range(1, 206))
    chosen = report.choose_steps(steps)
    assert len(chosen) == 12
    assert chosen[0] == 10 and chosen[-2:] == [200, 205]
    assert all(step % 10 == 0 for step in chosen[:-1])
    assert report.choose_steps([3, 1]) == [3, 1]


def test_runs_of_other_kinds_have_a_page(tmp_path):
    """SFT shows its evaluations; stories have no verdicts; a run may have no transcript yet."""
    sft = write_run(tmp_path / "sft", [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}])
    assert "0 of 0 steps" in " ".join(page_of(sft).text.split())
    write_answers(sft, 0, [None, None])
    text = " ".join(page_of(sft).text.split())
    assert "1 of 1 steps" in text and "At step 0 it is 1." in text and "advantage" not in text
    write_answers(sft, 2, [None, None])
    assert "0 questions were fixed" in page_of(sft).text
    (sft / "args.json").unlink()
    page_of(sft)


def test_a_broken_transcript_is_one_line(run, capsys):
    (run / "rollouts/step_000002.jsonl").write_text('{"id": 1}\n')
    assert plotter.main([str(run)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
