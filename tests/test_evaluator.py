"""GSM8K rewards case by case, stories, and reward functions of the user's own."""

import math
import pickle
import random
import re
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evaluator import (
    CreativeWritingEvaluator,
    GSM8kEvaluator,
    get_evaluator,
    last_number,
    to_number,
    why_no_story,
)

# --- Numbers and the five rewards -----------------------------------------------------------------

NUMBERS = r"""
    1,000 = 1000    $18.00 = 18    −5 = -5    -$5 = -5    $-5 = -5    50% = 50    .5 = 1/2
    0012 = 12    1,234,567.25 = 4938269/4    9{,}500 = 9500    9\,500 = 9500    9,\!500 = 9500
"""
NO_NUMBERS = "- $ 1,00 1,0000 10,00,000 1.2.3 1e5 ７２ ½ 9{,}50 5- (5) x72 72k 1, .".split()
LAST_NUMBERS = r"""
    10-5=5 | 5    it is 10-5 | 5    (3)-5 | 5    that is -5. | -5    1,000, or so | 1,000
    $5 and 50% more | 50%    so 12{,}345{,}678 | 12,345,678
"""


def pairs(table, separator):
    return [pair.split(separator) for pair in re.split(r"\n| {4}", table) if pair]


def test_numbers():
    for text, value in pairs(NUMBERS, " = "):
        assert to_number(text) == Fraction(value), text
    for text in ["", "72 eggs", "9" * 51, *NO_NUMBERS]:
        assert to_number(text) is None, text
    assert to_number("9" * 50) == 10**50 - 1
    for text, number in pairs(LAST_NUMBERS, " | "):
        assert last_number(text) == number, text
    assert last_number("no number") is None


R = "<reasoning>a</reasoning>"
# The five rewards | strict and flexible verdict | the answer that is read | gold answer |
# completion, in which R is the reasoning.
TABLE = r"""
    2 0.5 0.5 0.5 0.5  | 1 1 | 72 | 72 | <reasoning>\n6*12\n</reasoning>\n<answer>\n72\n</answer>
    2 0.5 0.5 0.5 0.5  | 1 1 | 1,000 | 1000 | R<answer>1,000</answer>
    2 0.5 0.5 0.5 0.5  | 1 1 | $72.0 | 72 | \n R \n <answer>$72.0</answer> \n
    0 0.5 0.5 0.5 0.5  | 0 0 | -5 | 5 | R<answer>-5</answer>
    2 0 0.5 0.5 0.5    | 1 1 | 72. | 72 | R<answer>72.</answer>
    2 0 0.5 0.5 0.5    | 1 1 | **72** | 72 | R<answer>**72**</answer>
    2 0 0.5 0.5 0.5    | 1 1 | $-5$ | -5 | R<answer>$-5$</answer>
    2 0 0.5 0.5 0.5    | 1 1 | \boxed{9{,}500} | 9500 | R<answer>\boxed{9{,}500}</answer>
    0 0 0.5 0.5 0.5    | 0 1 | 72 eggs | 72 | R<answer>72 eggs</answer>
    2 0.5 0 0.5 0.5    | 0 1 | 72 | 72 | So: R<answer>72</answer>
    2 0.5 0 0.5 0.5    | 0 1 | 72 | 72 | R<answer>72</answer> Done.
    2 0.5 0 0.5 0.5    | 0 1 | 72 | 72 | R so <answer>72</answer>
    2 0.5 0 0 0.5      | 0 0 | 72 | 72 | <answer>72</answer><reasoning>6*13</reasoning>
    0 0 0 0 0.25       | 0 1 | 72 | 72 | R<answer>71</answer><answer>72</answer>
    0 0 0 0 0.5        | 0 1 | <reasoning>72 | 72 | <answer><reasoning>72</answer></reasoning>
    0 0 0 0 0.375      | 0 1 | 72 | 72 | R<answer>72
    0 0 0 0 0          | 0 0 | None | 72 |
    0 0 0 0 0          | 0 0 | None | many | no number
"""


def test_the_five_rewards_and_two_verdicts():
    for row in TABLE.strip().splitlines():
        columns = [column.strip(" ") for column in row.split("|", 4)]
        rewards, verdicts, parsed, gold, completion = columns
        completion = completion.replace(r"\n", "\n").replace("R", R)
        got, details = GSM8kEvaluator().reward(completion, gold)
        assert got == [float(reward) for reward in rewards.split()], row
        got_verdicts = [details["correct_strict"], details["correct_flexible"]]
        assert got_verdicts == [verdict == "1" for verdict in verdicts.split()], row
        assert details["format"] == (got[2] > 0)
        assert str(details["parsed"]) == parsed.replace(r"\n", "\n")


@given(st.text(alphabet="<>/aensworig0123456789.,-$% \n{}\\boxed", max_size=80))
def test_any_text_is_scored_within_bounds(text):
    evaluator = GSM8kEvaluator()
    rewards = evaluator.compute_rewards([""], [text], ["5"])
    assert 0 <= evaluator.total(rewards).item() <= 4
    assert rewards.details[0]["correct_flexible"] or not rewards.details[0]["correct_strict"]


# --- Stories --------------------------------------------------------------------------------------

STORY = "Mara climbed the rocks until the sea lay silver under her boots, and she laughed."
LOOP = "The lamp was dark and the keeper slept. " * 5


class FixedJudge:
    """Gives every story 4, but for those that say nothing."""

    def score(self, prompts, stories):
        self.asked = [*zip(prompts, stories, strict=True)]
        scores = [math.nan if "nothing" in story else 4.0 for story in stories]
        return scores, [{"grades": {}} for _ in stories]


def test_what_is_no_story():
    opens_like_a_reply = "opens like a reply"
    for text, reason in {
        STORY: None,
        "Of course, " + STORY: None,
        '"Sure!" ' + STORY: None,
        "Here's the thing about lighthouses: " + STORY: None,
        "Answer: none came, although " + STORY: None,
        "one two three four five six seven eight nine": "fewer than ten words",
        LOOP: "repeats itself",
        "Of course! " + STORY: opens_like_a_reply,
        "Title: The Lamp. " + STORY: opens_like_a_reply,
        "Here is a story of a lamp and its keeper, as you asked:\n": opens_like_a_reply,
    }.items():
        assert why_no_story(text) == reason, text


def test_the_judge_is_asked_about_stories_alone():
    """Whatever is no story has less than the worst grade. A missing score is no number."""
    judge = FixedJudge()
    evaluator = CreativeWritingEvaluator(judge=judge)
    missing = STORY + " There was nothing."
    texts = [LOOP, f" {STORY}\n", "", missing]
    examples = [{"question": f"line {i}", "answer": ""} for i in range(4)]
    totals, details = evaluator.score(examples, texts)
    assert judge.asked == [("line 1", STORY), ("line 3", missing)]
    assert totals[:3] == [0, 4, 0]
    assert math.isnan(totals[3])
    assert [detail["rewards/is_story"] for detail in details] == [0, 1, 0, 1]
    # LOOP has 8 words, so its 40 words have 39 pairs, of which 8 are distinct.
    assert details[0]["rewards/distinct_2"] == pytest.approx(8 / 39)


# --- Functions of one's own -----------------------------------------------------------------------

EXAMPLES = [
    {
        "id": f"gsm8k/train/{i}",
        "question": f"What is {i} + 1?",
        "answer": str(i + 1),
        "solution": "",
        "prompt": f"<|user|>What is {i} + 1?",
        "row": {"answer": f"#### {i + 1}", "level": i, "completions": ["old"], "task": "sum"},
    }
    for i in range(2)
]
TEXTS = [f"{R}<answer>1</answer>", "two"]


@pytest.fixture
def rewards_file(tmp_path, monkeypatch):
    """Writes a file of functions, beside another, and gives its path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    (tmp_path / "beside_rewards.py").touch()

    def write(text):
        path = tmp_path / "my_rewards.py"
        path.write_text("import beside_rewards\n" + text)
        return path

    return write


def score(path, names, own=None, texts=TEXTS, **context):
    evaluator = get_evaluator(f"{path}:{names}", own, **context)
    return evaluator.score(EXAMPLES, texts, completion_ids=[[1, 2, 3], [4]])


def test_a_function_gets_what_it_asks_for_by_name(rewards_file):
    """The forms in which reward functions are written for TRL."""
    path = rewards_file(
        """
import asyncio
seen = {}
def everything(prompts, completions, **kwargs):
    seen.update(kwargs, prompts=prompts, completions=completions)
    return [len(c) for c in completions]
def by_columns(level, answer, completion_ids, depth=3):
    return [x + 10 * int(y) + 100 * len(z) for x, y, z in zip(level, answer, completion_ids)]
class Caller:
    def __call__(self, completions, **kwargs):
        return (float("tw" in c) for c in completions)
caller = Caller()
async def first(completions, answers, **kwargs):
    await asyncio.sleep(0)
    answers.clear()
    return [1.0, None]
def second(completions):
    return [float("nan"), None]
def third(answers):
    return [float(answer) for answer in answers]
def endless(completions):
    return [1.0, float("inf")]
"""
    )
    totals, details = score(path, "everything")
    assert totals == [len(text) for text in TEXTS]
    assert details[1] == {"rewards/everything": 3.0}
    module = sys.modules["my_rewards"]
    assert pickle.loads(pickle.dumps(module.third)) is module.third, "as a process pool needs it"
    seen = module.seen
    assert seen["prompts"] == ["What is 0 + 1?", "What is 1 + 1?"]
    assert seen["completions"] == TEXTS  # and not the column of this name
    assert seen["answers"] == seen["answer"] == ["1", "2"]
    assert seen["level"] == [0, 1]
    assert seen["id"] == ["gsm8k/train/0", "gsm8k/train/1"]
    assert "row" not in seen
    assert score(path, "by_columns")[0] == [310.0, 121.0]
    assert score(path, "caller")[0] == [0.0, 1.0]
    # None is left out of a sum, and no reward at all is no number.
    assert score(path, f"first,{path}:second,{path}:third")[0] == [2.0, 2.0]
    totals, details = score(path, f"first,{path}:second")
    assert totals[0] == details[0]["rewards/first"] == 1.0
    assert math.isnan(totals[1])
    with pytest.raises(ValueError, match="must return 2 finite numbers"):
        score(path, "endless")


def test_a_column_of_the_data_wins_over_the_project_s_own(rewards_file):
    path = rewards_file("def of_id(id):\n    return [float(value) for value in id]")
    examples = [example | {"row": {"id": 7}} for example in EXAMPLES]
    assert get_evaluator(f"{path}:of_id").score(examples, TEXTS)[0] == [7.0, 7.0]


def test_a_function_changes_nothing_that_is_trained_on(rewards_file):
    """It once could take the EOS from a completion."""
    path = rewards_file(
        """
def pops(completions, completion_ids, tests):
    return [float(ids.pop() + cases.pop()) for ids, cases in zip(completion_ids, tests)]
"""
    )
    examples = [example | {"row": {"tests": [0]}} for example in EXAMPLES]
    ids = [[1, 2], [3]]
    for _ in range(2):
        totals, _ = get_evaluator(f"{path}:pops").score(examples, TEXTS, completion_ids=ids)
        assert totals == [2.0, 3.0]
    assert ids == [[1, 2], [3]]


def test_a_missing_score_of_a_judge_is_not_left_out(rewards_file):
    """Without it a story would have less than others of its group, as if it were worse."""
    path = rewards_file("def one(completions, **kwargs):\n    return [1.0, 1.0]\n")
    evaluator = get_evaluator(f"creative,{path}:one", "creative", judge=FixedJudge())
    totals, details = evaluator.score(EXAMPLES, [STORY, STORY + " There was nothing."])
    assert totals[0] == 5.0
    assert math.isnan(totals[1])
    assert "correct_strict" not in details[0]


def test_verdicts_are_always_those_of_the_data_set(rewards_file):
    path = rewards_file("def short(completions, **kwargs):\n    return [1.0, 2.0]\n")
    totals, details = score(path, "short", own="gsm8k")
    assert totals == [1.0, 2.0]
    assert [detail["correct_strict"] for detail in details] == [True, False]
    assert "rewards/correctness" not in details[0]
    # Another prompt format than that of GSM8kEvaluator is read as mathematics.
    texts = ["</think> <answer>1</answer>"] * 2
    _, details = score(path, "short", own="gsm8k", texts=texts, prompt="r1_zero")
    assert [detail["correct_strict"] for detail in details] == [True, False]
    # So are words, which it would call wrong.
    paris = [{**example, "answer": "Paris"} for example in EXAMPLES]
    context = dict(own="gsm8k", golds=["12", "Paris"], prompt="reasoning_answer")
    evaluator = get_evaluator(f"{path}:short", **context)
    texts = [f"<reasoning>\n</reasoning>\n<answer>{city}</answer>" for city in ("Paris", "Rome")]
    _, details = evaluator.score(paris, texts)
    assert [detail["correct_strict"] for detail in details] == [True, False]
    # A format in which nothing is right or wrong has none: this was refused.
    totals, details = score(path, "short", own="gsm8k", prompt="story")
    assert totals == [1.0, 2.0]
    assert "correct_strict" not in details[0]
    assert isinstance(get_evaluator("gsm8k", own="gsm8k"), GSM8kEvaluator)
    # Both add up, each with its own rewards.
    totals, details = get_evaluator(f"gsm8k,{path}:short", "gsm8k").score(EXAMPLES, TEXTS)
    assert totals == [5.0, 2.0]
    assert details[0]["rewards/correctness"] == 2.0
    assert details[0]["correct_strict"]
    with pytest.raises(ValueError, match="two rewards have one name"):
        get_evaluator(f"{path}:short,{path}:short")


def test_a_reward_leaves_the_random_state_and_draws_anew(rewards_file):
    """A reward that seeds torch once made every iteration sample the same completions."""
    path = rewards_file(
        """
import random, torch
def drawn(completions):
    values = [random.random(), torch.rand(()).item()]
    torch.manual_seed(42), random.seed(42)
    return values
"""
    )
    torch.manual_seed(0), random.seed(0)
    expected = random.random(), torch.rand(3).tolist()
    torch.manual_seed(0), random.seed(0)
    first = score(path, "drawn")[0]
    assert (random.random(), torch.rand(3).tolist()) == expected
    assert score(path, "drawn")[0] == first  # so a resumed run repeats it
    other = score(path, "drawn", texts=["one", "two"])[0]
    assert first[0] != other[0]
    assert first[1] != other[1]
