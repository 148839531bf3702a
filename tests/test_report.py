"""report.html and --report_to: what they show, and that nothing of a run is markup."""

import json
import re
import shutil
import subprocess
import sys
import types
from base64 import b64decode
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from urllib.parse import unquote

import numpy as np
import pytest
from conftest import ROOT, run_flags
from log_helpers import eval_row, plot, write_answers, write_run

import distributed
import main
import plotter
from grpo import tracker
from grpo.run import Run
from logs import jsonl, report
from plotter import draw_single_panels

TEMPLATE = (ROOT / "logs/report.html").read_text("utf-8")
# Texts that a model may write to break out of the page or to hide in it.
HOSTILE = (
    "</script><script>document.title = 'owned'</script>",
    "<!-- <script> a comment that never ends",
    "</textarea><img src='http://127.0.0.1:{port}/image' onerror='document.title = 1'>"
    "<iframe src='//x'></iframe>",
    "</pre></details><style>* { display: none }</style><h2 id=rollouts>{DATA}",
    "\u202eright to left\u2066 שלום \u2028 \x1b[31mred\x00 \ud800",
    "a" * 400,
)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Leave out the figures, which take longer than everything that is tested here."""
    monkeypatch.setattr(plotter, "save", lambda pages, output: None)
    monkeypatch.setattr(plotter, "draw_single_panels", lambda run, axis: [])


@pytest.fixture
def panels(no_figures, monkeypatch):
    """Draw those of the page all the same."""
    monkeypatch.setattr(plotter, "draw_single_panels", draw_single_panels)


def train_rows(n):
    return [{"step": t, "loss": 0.5, "reward": 1.0} for t in range(1, n + 1)]


def completion(step, prompt, i, **changes):
    """Return the row of completion i of a prompt: the first is correct, and the fourth is cut."""
    is_correct = i == 0
    row = {
        "id": f"train/{prompt}",
        "prompt": f"Think.\nQuestion {prompt}?\nAnswer:",
        "completion": f"answer {step} {i}",
        "gold": "7",
        "parsed": str(i),
        "format": True,
        "correct_strict": is_correct,
        "correct_flexible": i < 2,
        "rewards/correctness": 2.0 * is_correct,
        "rewards/form": 0.5,
        "reward": 0.5 + 2.0 * is_correct,
        "length": 10 + i,
        "finished": i != 3,
        "advantage": 1.5 if is_correct else -0.5,
    }
    return row | changes


def completions(step, prompts, num_completions=4):
    """Return the rows of several completions of each prompt."""
    rows = []
    for prompt in prompts:
        rows += [completion(step, prompt, i) for i in range(num_completions)]
    return rows


def with_tokens(row, *texts, change=0.25, **measures):
    """Return the row with these tokens, which all have the same values."""
    measures = {"logp": -0.5, "change": change} | measures
    values = {measure: [value] * len(texts) for measure, value in measures.items()}
    return row | {"tokens": {"text": list(texts)} | values}


def write_rollouts(run, step, rows):
    jsonl.write(run / f"rollouts/step_{step:06d}.jsonl", rows)


@pytest.fixture
def run(tmp_path):
    """3 iterations of 2 prompts x 4 completions; evaluations of 6 questions: 3 fixed, 1 broken."""
    run = write_run(tmp_path / "run", train_rows(3), [eval_row(0), eval_row(3, 0.5)])
    for step in (1, 2, 3):
        write_rollouts(run, step, completions(step, "ab"))
    write_answers(run, 0, [False, False, False, True, True, False])
    write_answers(run, 3, [True, True, True, False, True, False])
    return run


def data_of(run):
    """Return the data that the page of a run holds."""
    page = (run / "report.html").read_text("utf-8")
    return json.loads(re.search(r'id="data">(.*)</script>', page)[1])


class Tags(HTMLParser):
    """All tags and comments of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes).get("id")))

    handle_endtag = handle_comment = lambda self, text: self.tags.append(text)


# ---- the page


def test_what_the_page_of_a_run_holds(run, panels, capsys):
    assert plot(run) == 0
    last_lines = f"report: {run}/report.html\nplots: {run}/training_plots.pdf\n"
    assert capsys.readouterr().out.endswith(last_lines)
    data = data_of(run)
    assert data["name"] == "run"
    assert data["about"] == "1m, arithmetic, 1.05M parameters"
    assert [row["accuracy"] for row in data["ends"]] == [0.3, 0.5]
    assert [line.split(", exact")[0] for line in data["lines"]] == [
        "run, step 0 -> 3, strict: 3 fixed, 1 broken of 6 questions",
        "run, step 0 -> 3, flexible: 3 fixed, 1 broken of 6 questions",
    ]
    assert [(step["step"], step["all"]) for step in data["steps"]] == [(1, 2), (2, 2), (3, 2)]
    prompt = data["steps"][1]["prompts"][1]
    assert (prompt["id"], prompt["gold"], len(prompt["rows"])) == ("train/b", "7", 4)
    row = completion(2, "b", 3)
    assert prompt["rows"][3] == {key: row[key] for key in row if key not in prompt}
    verdicts = data["changes"]["verdicts"]["correct_strict"]
    assert verdicts == [
        [False, False, False, True, True, False],
        [True, True, True, False, True, False],
    ]
    assert [question["id"] for question in data["changes"]["questions"]] == ["q0", "q1", "q2", "q3"]
    titles = [" ".join(panel["alt"].split()) for panel in data["panels"]]
    assert titles == ["Accuracy: 30% → 50%", "Reward: 1.00 → 1.00", "Loss: 0.500 → 0.500"]
    assert all(panel["src"].startswith("data:image/svg+xml;base64,") for panel in data["panels"])


def test_the_page_has_the_diagnosis(run):
    rows = [row | {"truncated_fraction": 0.5} for row in train_rows(3)]
    jsonl.write(run / "train_log.jsonl", rows)
    assert plot(run) == 0
    data = data_of(run)
    assert data["diagnosis"].startswith("1 finding in 3 iterations and 2 evaluations, by 3 rules")
    assert [finding["rule"] for finding in data["findings"]] == ["truncation"]


def test_equal_logs_give_equal_bytes_and_only_one_run_without_output_gets_a_page(
    run, panels, tmp_path
):
    assert plot(run) == 0
    page = (run / "report.html").read_bytes()
    assert plot(run) == 0
    assert (run / "report.html").read_bytes() == page
    (run / "report.html").unlink()
    second_run = write_run(tmp_path / "second", train_rows(2))
    assert plot(run, second_run) == 0
    assert plot(run, flags=f"--output {tmp_path}/x.png") == 0
    assert plot(run, flags="--metrics loss") == 0
    assert not (run / "report.html").exists()


def test_what_a_run_wrote_is_never_markup(run):
    """Each hostile text is a completion, a prompt, a gold answer, a reward's name and an id.

    Two of them are also a flag and the command.
    """
    rows = [completion(3, "a", i, completion=text) for i, text in enumerate(HOSTILE)]
    for text in HOSTILE:
        row = dict.fromkeys(("id", "prompt", "gold", "completion"), text)
        rows.append({f"rewards/{text}": 1.0} | row)
    rows[0] = with_tokens(rows[0], *HOSTILE)
    write_rollouts(run, 3, rows)
    jsonl.write_json(run / "args.json", {"args": {"model_name": HOSTILE[0]}, "command": HOSTILE[1]})
    assert plot(run) == 0
    page = (run / "report.html").read_text("utf-8")
    assert Tags(page).tags == Tags(TEMPLATE).tags
    first_prompt, *hostile_prompts = data_of(run)["steps"][-1]["prompts"]
    assert tuple(row["completion"] for row in first_prompt["rows"]) == HOSTILE
    assert tuple(first_prompt["rows"][0]["tokens"]["text"]) == HOSTILE
    assert tuple(prompt["prompt"] for prompt in hostile_prompts) == HOSTILE


def test_the_page_fetches_nothing_and_writes_no_markup():
    assert "default-src 'none'" in TEMPLATE
    assert "prefers-color-scheme: dark" in TEMPLATE
    writes_markup = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\("
    fetches = r"https?:|fetch\(|import "
    assert not re.search(f"{writes_markup}|{fetches}", TEMPLATE)


def test_a_large_run_is_cut_evenly_and_says_so(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", train_rows(3), [eval_row(step) for step in range(5)])
    for step in range(1, 12):
        write_rollouts(run, step, completions(step, range(30)))
    for step in range(5):
        write_answers(run, step, [(step + i) % 2 == 0 for i in range(40)])
    size = len(report.encode(report.step_of_page(run / "rollouts/step_000001.jsonl", 1, 1)))
    monkeypatch.setattr(report, "MAX_ROLLOUT_BYTES", 3 * size + 1000)
    monkeypatch.setattr(report, "MAX_QUESTION_BYTES", 5000)
    assert plot(run) == 0
    data = data_of(run)
    assert [step["step"] for step in data["steps"]] == [1, 6, 11]
    assert data["all"] == 11
    assert all(step["all"] == len(step["prompts"]) == 30 for step in data["steps"])
    assert (data["compared"][0], data["compared"][-1], data["evaluated"]) == (0, 4, 5)
    assert len(data["changes"]["verdicts"]["correct_strict"][0]) == 40
    questions = data["changes"]["questions"]
    assert 0 < len(questions) < 40
    assert len(report.encode(questions)) < 5100

    # Not even two transcripts fit, so prompts are left out.
    monkeypatch.setattr(report, "MAX_ROLLOUT_BYTES", size)
    assert plot(run) == 0
    steps = data_of(run)["steps"]
    assert [step["step"] for step in steps] == [1, 11]
    assert all(0 < len(step["prompts"]) < 30 for step in steps)
    assert len(report.encode(steps)) < size + 200


def test_escapes_count_in_the_size():
    """A completion of brackets takes six times its bytes in the page."""
    problems = [{"prompt": "<" * 100}] * 10
    assert len(report.encode(problems[0])) == 613
    assert len(report.first_that_fit(problems, 2000)) == 3


def test_groups_of_dynamic_sampling_stand_apart(run):
    """A prompt that is sampled again later has two groups, which do not follow each other."""
    write_rollouts(run, 3, completions(3, "abca"))
    assert plot(run) == 0
    prompts = data_of(run)["steps"][-1]["prompts"]
    assert [prompt["id"] for prompt in prompts] == ["train/a", "train/b", "train/c", "train/a"]


def test_prompts_with_tokens_stand_first_with_compact_values(run):
    rows = completions(3, "abc", 2)
    rows[2] = with_tokens(rows[2], "12", "<|im_end|>", change=-0.0213, log_ratio=1.5)
    rows[3] = with_tokens(rows[3], "7", change=None)
    write_rollouts(run, 3, rows)
    assert plot(run) == 0
    *_, earlier_step, step = data_of(run)["steps"]
    assert [prompt["id"] for prompt in step["prompts"]] == ["train/b", "train/a", "train/c"]
    first, second = step["prompts"][0]["rows"]
    assert first["tokens"] == {
        "text": ["12", "<|im_end|>"],
        "logp": [-5000, -5000],
        "change": [-213, -213],
        "log_ratio": [15000, 15000],
    }
    assert second["tokens"] == {"text": ["7"], "logp": [-5000], "change": [None]}
    assert not any("tokens" in row for prompt in step["prompts"][1:] for row in prompt["rows"])
    assert step["scales"] == {"logp": 0.5, "change": 0.0213, "log_ratio": 1.5}
    assert earlier_step["scales"] == {}


def test_a_scale_leaves_out_outliers_and_is_never_0_where_a_value_is_not():
    """One token that changed by 10 nats would make all others look as if nothing had happened."""
    usual = with_tokens({}, *"abcdefghij" * 10, change=-0.1)
    outlier = with_tokens({}, "z", change=10.0)
    assert report.token_scales([usual, outlier, {}])["change"] == 0.1
    unchanged = with_tokens({}, *"abcdefghij" * 10, change=0.0)
    assert report.token_scales([unchanged, outlier])["change"] == 10
    assert report.token_scales([unchanged])["change"] == 0


def sft(path):
    write_run(path, [{"step": 1, "loss": 2.0}], [eval_row(0), eval_row(1)])
    write_answers(path, 0, [False, True])
    write_answers(path, 1, [True, True])


def eval_only(path):
    write_run(path, None, [eval_row(0)], eval_only=True)
    write_answers(path, 0, [False, True])


def killed(path):
    """Write a run of an older version that was killed before its first evaluation was written."""
    write_run(path, [{"step": 1, "loss": 2.0}])
    write_rollouts(path, 1, [{"id": 1}, {"id": 1, "completion": None, "advantage": None}])
    (path / "args.json").unlink()


def expert_iteration(path):
    write_run(path, [{"step": 1, "loss": 2.0, "ei_step": 1}])
    rows = completions(1, "a")
    for row in rows:
        del row["advantage"]
    write_rollouts(path, 1, rows)


def stories(path):
    evaluations = [{"step": 0, "reward": -1.5, "accuracy": 0.5}]
    write_run(path, train_rows(2), evaluations, dataset_name="creative")
    row = completion(1, "a", 0, parsed=None, gold="", floor=None)
    row |= {"judge_error": "no rating", "grades": {"coherence": 2.5}}
    row |= dict.fromkeys(("rewards/judge", "reward", "advantage"), float("nan"))
    write_rollouts(path, 1, [row])


@pytest.mark.parametrize(
    "write_kind, num_steps, num_compared",
    [(sft, 2, 2), (eval_only, 1, 1), (killed, 1, 0), (expert_iteration, 1, 0), (stories, 1, 0)],
)
def test_every_kind_of_run_has_a_page(tmp_path, panels, write_kind, num_steps, num_compared):
    write_kind(tmp_path / "run")
    assert plot(tmp_path / "run") == 0
    data = data_of(tmp_path / "run")
    assert (len(data["steps"]), len(data["compared"])) == (num_steps, num_compared)
    assert data["sampled"] == (write_kind not in (sft, eval_only))


def test_questions_that_an_evaluation_lacks_are_not_compared(run):
    """And an unknown verdict (null) is a change, but neither fixed nor broken."""
    write_answers(run, 3, [True, True, True, None], gold=lambda i: "another" if i == 1 else str(i))
    assert plot(run) == 0
    changes = data_of(run)["changes"]
    assert changes["verdicts"]["correct_strict"] == [[False, False, True], [True, True, None]]
    assert [question["id"] for question in changes["questions"]] == ["q0", "q2", "q3"]


def test_evaluations_that_share_no_question_have_a_list_of_verdicts_each(run):
    """The script of the page reads one list per evaluation, and ended where there was none."""
    write_answers(run, 3, [True, True], gold=lambda i: "another data set")
    assert plot(run) == 0
    data = data_of(run)
    assert data["compared"] == [0, 3]
    empty_lists = {"correct_strict": [[], []], "correct_flexible": [[], []]}
    assert data["changes"] == {"verdicts": empty_lists, "questions": []}


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"id": 1\n{"id": 2}\n', "step_000002.jsonl, line 1: not valid JSON"),
        ('{"step": 1}\n', 'step_000002.jsonl, line 1: not an object with "id"'),
    ],
)
def test_a_broken_transcript_is_one_line(run, capsys, line, message):
    (run / "rollouts/step_000002.jsonl").write_text(line)
    assert plot(run) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (run / "report.html").exists()


# ---- trackers


@pytest.fixture
def wandb(monkeypatch):
    """A module that records what is logged to it."""
    module = types.ModuleType("wandb")
    module.lines = []
    module.runs = []

    class WandbRun:
        id = "abc"

        def log(self, numbers, step):
            module.lines.append((step, numbers))

    def init(**settings):
        module.runs.append(settings)
        return WandbRun()

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    tracker.start_wandb.cache_clear()
    return module


def resume(run, num_train_iters):
    command = ["--resume", "--output_dir", str(run), "--num_train_iters", str(num_train_iters)]
    assert main.main(command) == 0


def test_what_is_logged_goes_to_the_tracker_and_a_resumed_run_goes_on_in_it(
    wandb, model_folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    flags = run_flags(model_folder, tmp_path / "run", report_to="wandb", num_train_iters=2)
    assert main.main(flags) == 0
    train_log = jsonl.read(tmp_path / "run/train_log.jsonl")
    eval_log = jsonl.read(tmp_path / "run/eval_log.jsonl")
    assert [step for step, _ in wandb.lines] == [0, 1, 2, 2]
    assert wandb.lines[1][1]["train/reward"] == train_log[0]["reward"]
    assert wandb.lines[3][1]["eval/accuracy"] == eval_log[1]["accuracy"]
    resume(tmp_path / "run", num_train_iters=3)
    assert [settings["id"] for settings in wandb.runs] == [None, "abc"]
    assert [step for step, _ in wandb.lines[4:]] == [3, 3]
    assert wandb.runs[1]["resume"] == "allow"
    files = [path.read_text() for path in (tmp_path / "run").glob("*.json*")]
    assert "secret" not in str(wandb.runs) + "".join(files)


def test_of_several_processes_the_first_one_reports(wandb, tmp_path, monkeypatch):
    config = types.SimpleNamespace(output_dir=tmp_path, report_to="wandb")
    monkeypatch.setattr(distributed, "is_main", lambda: False)
    Run.write(types.SimpleNamespace(config=config), "train", {"loss": 2.0})
    assert not wandb.runs
    assert not list(tmp_path.iterdir())


def test_tensorboard_reads_what_was_reported(model_folder, tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed",
    )
    flags = run_flags(model_folder, tmp_path / "run", report_to="tensorboard", num_train_iters=2)
    assert main.main(flags) == 0
    resume(tmp_path / "run", num_train_iters=4)
    events = accumulator.EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    rows = jsonl.read(tmp_path / "run/train_log.jsonl")
    logged = [(row["step"], row["reward"]) for row in rows]
    reported = [(event.step, event.value) for event in events.Scalars("train/reward")]
    np.testing.assert_allclose(reported, logged, rtol=1e-6)  # TensorBoard stores float32
    assert [event.step for event in events.Scalars("eval/accuracy")] == [0, 2, 4]


# ---- in a browser

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
in_browser = pytest.mark.skipif(
    not BROWSER, reason="no Chromium here (Debian: apt-get install chromium)"
)


def browse(run, tmp_path, javascript, fragment="", width=1280):
    """Return the value of an expression inside the page of a run, opened in a frame of that width.

    The page posts the value to the page around the frame, which writes it into its own text.
    """
    page = (run / "report.html").read_text("utf-8")
    page += f"<script type=module>parent.postMessage(JSON.stringify({javascript}), '*')</script>"
    (tmp_path / "page.html").write_text(page, "utf-8")
    style = f"width: {width}px; height: 900px; border: 0"
    frame = f"<iframe src='page.html#{fragment}' style='{style}'></iframe>"
    answer = "'said ' + btoa(encodeURIComponent(event.data))"
    listener = f"<script>onmessage = (event) => document.body.textContent = {answer}</script>"
    (tmp_path / "frame.html").write_text(f"{listener}<body>{frame}", "utf-8")
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
        "--window-size=1400,1000",
        "--virtual-time-budget=5000",
        "--dump-dom",
        f"file://{tmp_path}/frame.html",
    ]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    match = re.search(r"said ([\w+/=]+)", process.stdout)
    assert match, f"no answer from the page: {process.stdout[:2000]} {process.stderr[-2000:]}"
    return json.loads(unquote(b64decode(match[1]).decode()))


COUNT = "document.getElementById('count').textContent"
CARDS = "[...document.querySelectorAll('#found .box > pre')].map((card) => card.textContent)"


@pytest.mark.slow
@in_browser
def test_filters_select_completions_in_a_browser(run, tmp_path):
    assert plot(run) == 0

    def cards(fragment):
        return browse(run, tmp_path, CARDS, fragment)

    all_answers = [f"answer 3 {i}" for i in range(4)]
    counted = browse(run, tmp_path, f"[{COUNT}, {CARDS}]")
    assert counted == ["8 of 8 completions.", 2 * all_answers]
    assert cards("step=2&verdict=right") == 2 * ["answer 2 0"]
    assert cards("verdict=wrong&end=cut") == 2 * ["answer 3 3"]
    assert cards("advantage=high") == 2 * ["answer 3 0"]
    assert cards("advantage=low") == []
    assert cards("text=QUESTION b&end=finished&step=9") == all_answers[:3]
    box = "document.getElementById('text')"
    event = "new Event('input', { bubbles: true })"
    typed = f"({box}.value = 'answer 3 2', {box}.dispatchEvent({event}))"
    assert browse(run, tmp_path, f"[{typed}, {CARDS}]")[1] == 2 * ["answer 3 2"]


@pytest.mark.slow
@in_browser
def test_keys_choose_the_iteration_in_a_browser(run, tmp_path):
    assert plot(run) == 0
    event = "new KeyboardEvent('keydown', { key, bubbles: true })"
    chosen = "document.getElementById('step').value"
    press = f"(key) => (document.body.dispatchEvent({event}), {chosen})"
    steps = f"['k', 'ArrowLeft', 'ArrowLeft', 'j'].map({press})"
    assert browse(run, tmp_path, f"[{steps}, location.hash, {CARDS}[0]]") == [
        ["2", "1", "1", "2"],
        "#step=2",
        "answer 2 0",
    ]


# The classes of each token and the strength of its colour.
COLOURS = "[...document.querySelectorAll('.token')].map((t) => [t.className, t.style.cssText])"
OPTIONS = "[...document.getElementById('colour').options].map((option) => option.value)"
SHOWN_TOKEN = "document.getElementById('token').textContent"


@pytest.fixture
def run_with_tokens(run):
    """The second completion of prompt b has tokens: a line break and a part of a character too.

    It stands first on the page.
    """
    rows = completions(3, "ab")
    rows[5] = with_tokens(rows[5], "<b>", "", "é", "\n", *HOSTILE)
    rows[5]["tokens"]["change"] = [0.4, -0.1, 0.0, None, *[-0.4] * len(HOSTILE)]
    write_rollouts(run, 3, rows)
    return run


@pytest.mark.slow
@in_browser
def test_tokens_have_colours_in_a_browser(run_with_tokens, tmp_path):
    assert plot(run_with_tokens) == 0
    box = "document.getElementById('colour')"
    event = "new Event('input', { bubbles: true })"
    select = f"{box}.value = measure, {box}.dispatchEvent({event})"
    view = f"(measure) => ({select}, [{COLOURS}, {CARDS}])"
    views = f"['change', 'logp', 'plain'].map({view})"
    measures, cards, views = browse(run_with_tokens, tmp_path, f"[{OPTIONS}, {CARDS}, {views}]")
    assert measures == ["change", "logp", "plain"]
    (by_change, cards_by_change), (by_logp, _), (by_nothing, plain_cards) = views
    assert cards == cards_by_change
    assert cards[0].startswith("<b>é\n</script><script>")
    assert cards[1] == "answer 3 0", "prompt b is the first one"
    assert by_change[:4] == [
        ["token up", "--deep: 1.000;"],
        ["token part down", "--deep: 0.250;"],
        ["token", ""],
        ["token break", ""],
    ]
    assert by_logp[0] == ["token unlikely", "--deep: 1.000;"]
    assert by_nothing == []
    assert plain_cards[:2] == ["answer 3 1", "answer 3 0"]


@pytest.mark.slow
@in_browser
def test_the_keyboard_and_the_mouse_reach_each_token_in_a_browser(run_with_tokens, tmp_path):
    """Only one token of a completion is a stop of Tab, and arrows do not change the iteration."""
    assert plot(run_with_tokens) == 0
    key = "new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true })"
    press = f"(key) => (document.activeElement.dispatchEvent({key}), {SHOWN_TOKEN})"
    keys = "['ArrowRight', 'ArrowRight', 'ArrowLeft', 'Home', 'ArrowLeft', 'Escape']"
    focus = "document.querySelector('.token').focus()"
    hover = "document.querySelectorAll('.token')[2]"
    hover += ".dispatchEvent(new MouseEvent('mouseover', { bubbles: true }))"
    stops = "document.querySelectorAll('.token[tabindex=\"0\"]').length"
    step = "document.getElementById('step').value"
    javascript = (
        f"[{focus}, {SHOWN_TOKEN}, {keys}.map({press}), {stops}, {step},"
        f" document.activeElement.blur(), {hover}, {SHOWN_TOKEN}]"
    )
    _, first, shown, num_stops, step, _, _, hovered = browse(run_with_tokens, tmp_path, javascript)
    assert "“<b>” token 1 of 10" in first
    assert "60.7%" in first
    assert "−0.5000 nats" in first
    assert "+0.4000 nats" in first
    assert "reference" not in first
    assert ["a part of a character" in text for text in shown] == [True, False] + [True] + [
        False
    ] * 3
    assert "“é”" in shown[1]
    assert shown[3] == shown[4] == first
    assert shown[5] == ""
    assert (num_stops, step) == (1, "3")
    assert "“é”" in hovered


@pytest.mark.slow
@in_browser
def test_a_page_without_tokens_offers_no_colours_in_a_browser(run, tmp_path):
    assert plot(run) == 0
    hidden = "[...document.querySelectorAll('.tokens')].every((part) => part.hidden)"
    assert browse(run, tmp_path, f"[{hidden}, {COLOURS}]") == [True, []]


@pytest.mark.slow
@in_browser
@pytest.mark.parametrize(
    "fragment, counts, questions",
    [
        ("", "3 fixed, 1 broken", ["q0", "q1", "q2"]),
        ("change=broken", "3 fixed, 1 broken", ["q3"]),
        ("before=3&after=0", "1 fixed, 3 broken", ["q3"]),
    ],
)
def test_changed_questions_are_shown_in_a_browser(run, tmp_path, fragment, counts, questions):
    assert plot(run) == 0
    javascript = "['moved', 'questions'].map((id) => document.getElementById(id).textContent)"
    summary, text = browse(run, tmp_path, javascript, fragment)
    assert summary == f"{counts} of 6 questions."
    assert re.findall(r"q\d", text) == questions


@pytest.mark.slow
@in_browser
def test_a_page_without_a_common_question_says_so_in_a_browser(run, tmp_path):
    write_answers(run, 3, [True, True], gold=lambda i: "another data set")
    assert plot(run) == 0
    summary = browse(run, tmp_path, "document.getElementById('moved').textContent")
    assert summary == "0 fixed, 0 broken of 0 questions."


@pytest.mark.slow
@in_browser
def test_answers_without_verdicts_are_neither_fixed_nor_broken_in_a_browser(run, tmp_path):
    """Stories are neither right nor wrong."""
    for step in (0, 3):
        jsonl.write(run / f"eval/step_{step:06d}.jsonl", [{"id": "q0", "completion": "once"}])
    rows = completions(3, "ab")
    for row in rows:
        del row["correct_strict"], row["correct_flexible"]
    write_rollouts(run, 3, rows)
    for step in (1, 2):
        write_rollouts(run, step, rows)
    assert plot(run) == 0
    hidden = "['#changed', '.verdict'].map((name) => document.querySelector(name).hidden)"
    assert browse(run, tmp_path, f"[{hidden}, {COUNT}]") == [[True, True], "8 of 8 completions."]


@pytest.mark.slow
@in_browser
def test_a_hostile_completion_shows_itself_does_nothing_and_fetches_nothing(run, panels, tmp_path):
    requests = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)

    server = HTTPServer(("127.0.0.1", 0), Server)
    Thread(target=server.serve_forever, daemon=True).start()
    hostile_texts = [text.replace("{port}", str(server.server_port)) for text in HOSTILE]
    rows = []
    for i, text in enumerate(hostile_texts):
        rows.append(completion(3, "a", i, completion=text, id=text, gold=text))
    write_rollouts(run, 3, rows)
    assert plot(run) == 0
    selected = "document.querySelectorAll('script, style, iframe, textarea, main img')"
    tag_names = f"[...{selected}].map((tag) => tag.tagName).sort()"
    javascript = f"[{CARDS}, document.title, {tag_names}]"
    card_texts, title, tags = browse(run, tmp_path, javascript)
    server.shutdown()
    assert card_texts[:4] == hostile_texts[:4]
    assert card_texts[4] == r"\u202eright to left\u2066 שלום \u2028 \u001b[31mred\u0000 \ud800"
    assert title == "run"
    assert not requests
    assert tags == sorted(["IMG"] * len(data_of(run)["panels"]) + ["SCRIPT"] * 3 + ["STYLE"])


@pytest.mark.slow
@in_browser
@pytest.mark.parametrize("write_kind", [None, sft, eval_only, killed, expert_iteration, stories])
def test_no_page_is_wider_than_a_phone(run, panels, tmp_path, write_kind):
    rows = [completion(3, HOSTILE[5], i, completion=text) for i, text in enumerate(HOSTILE)]
    rows[0] = with_tokens(rows[0], "", *HOSTILE)
    write_rollouts(run, 3, rows)
    path = run
    if write_kind:
        path = tmp_path / write_kind.__name__
        write_kind(path)
    assert plot(path) == 0
    elements = "html, main :is(h3, pre, div, p, dl, dd, article, section)"
    blocks = f"document.querySelectorAll('{elements}')"
    too_wide = "(block) => block.scrollWidth > block.clientWidth + 1"
    start = "(block) => block.outerHTML.slice(0, 80)"
    wide_blocks = f"[...{blocks}].filter({too_wide}).map({start})"
    javascript = f"[{wide_blocks}, innerWidth, document.body.innerText.length]"
    wide, inner_width, text_length = browse(path, tmp_path, javascript, width=360)
    assert wide == [], "text is cut off, on the page or in its box"
    assert inner_width == 360
    assert text_length > 100
