"""Reading numbers and boxes, the GSM8K rewards case by case, and what must hold for any text."""

import itertools
import math
import re
import time
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from conftest import LettersEvaluator, run_flags
from hypothesis import given, settings
from hypothesis import strategies as st

import generate_gold
import main
from evaluator import (
    EVALUATORS,
    FunctionEvaluator,
    GSM8kEvaluator,
    MathEvaluator,
    RewardError,
    RewardEvaluator,
    Rewards,
    get_evaluator,
)
from grading.extraction import last_boxed, only_number, to_number
from grpo import jsonl
from grpo.metrics import completion_metrics
from grpo.rollout import Completion
from grpo.run import Run
from rl_datasets import DATASETS, PROMPTS

gsm8k = GSM8kEvaluator()

NUMBERS = {
    "1,000": 1000,
    "$18.00": 18,
    "-5": -5,
    "−5": -5,
    "-$5": -5,
    "$-5": -5,
    "3.5": Fraction(7, 2),
    "50%": 50,
    ".5": Fraction(1, 2),
    "0012": 12,
    "1,234,567.25": Fraction(4938269, 4),
    "9" * 50: 10**50 - 1,
}
NOT_NUMBERS = [
    "",
    "-",
    "$",
    "1,00",
    "1,0000",
    "10,00,000",
    "1.2.3",
    "72 eggs",
    "7$2",
    "1e5",
    "²",
    "٣",
    "1_000",
    "inf",
    "nan",
    "0x10",
    "1/2",
    "--5",
    "5 %",
    "9" * 51,
    "$" + "9" * 60,
]


@pytest.mark.parametrize("text", [*NUMBERS, *NOT_NUMBERS], ids=lambda text: text[:20])
def test_to_number(text):
    assert to_number(text) == NUMBERS.get(text)


BOXES = {
    r"so $\boxed{5}$": "5",
    r"\boxed{1} then \boxed{2} end": "2",
    r"\boxed{\frac{1}{2}}.": r"\frac{1}{2}",
    r"\boxed{\{1, 2\}}": r"\{1, 2\}",
    r"\boxed{\left\{ x \right.}": r"\left\{ x \right.",
    r"\boxed{\}}": r"\}",
    r"\boxed{a \\} b}": r"a \\",
    "\\boxed{a\nb}": "a\nb",
    r"\fbox{9}": "9",
    r"\boxed {9}": "9",
    r"\boxed{}": "",
    r"\boxed{7} and \boxed{8": "7",
    r"\boxed{1 \boxed{3}": "3",
    r"\boxed{1 \boxed{3}}": "3",
    r"\boxed{1": None,
    r"is $\boxed 2$ or so": "2",
    r"\boxed{1} or \boxed 2": "1",
    r"\boxed 2": None,
    r"$\boxedsize 2$": None,
    "no box": None,
    "": None,
    r"\boxed{1}" + r"\boxed{" * 2500: "1",
    r"\boxed{1}" + r"\boxed " * 2500: "1",
    r"\boxed{" * 10**6: None,
    r"\boxed{" + "{" * 9000 + "}" * 9001: "{" * 9000 + "}" * 9000,
    r"\boxed{1}" + "x" * 10**6: None,
}


@pytest.mark.parametrize("text", BOXES, ids=lambda text: text[:30])
def test_last_boxed(text):
    start = time.process_time()
    assert last_boxed(text) == BOXES[text]
    assert time.process_time() - start < 10, "quadratic in the number of boxes: that takes minutes"


def score(completion, gold):
    """The five rewards and the two verdicts: (rewards, strict, flexible)."""
    rewards = gsm8k.compute_rewards([""], [completion], [gold])
    details = rewards.details[0]
    return rewards.per_function[0].tolist(), details["correct_strict"], details["correct_flexible"]


MORE_ROWS = r"""
    2 0.5 0.5 0.5 0.5 | yes yes  | 18    | `<reasoning>a</reasoning><answer>$18.00</answer>`
    2 0.5 0.5 0.5 0.5 | yes yes  | -5    | `<reasoning>a</reasoning><answer>-$5</answer>`
    0 0 0.5 0.5 0.5   | no yes   | 2     | `<reasoning>a</reasoning><answer>1/2</answer>`
    0 0 0.5 0.5 0.5   | no yes   | 72    | `<reasoning>72</reasoning><answer></answer>`
    0 0 0 0 0.375     | no yes   | 72    | `<reasoning>a</reasoning><answer>72`
    2 0.5 0.5 0.5 0.5 | yes yes  | 72    | `<reasoning>6*12</reasoning><answer>72</answer>`
    2 0.5 0.5 0.5 0.5 | yes yes  | 72    | `\n <reasoning>6*12</reasoning> <answer> 72 </answer> \n`
    2 0.5 0.5 0.5 0.5 | yes yes  | 1,000 | `<reasoning>a</reasoning><answer>1000</answer>`
    2 0.5 0.5 0.5 0.5 | yes yes  | -5    | `<reasoning>a</reasoning><answer>-5</answer>`
    0 0 0.5 0.5 0.5   | no yes   | 5     | `<reasoning>a</reasoning><answer>- 5</answer>`
    2 0.5 0.5 0.5 0.5 | yes yes  | 3.5   | `<reasoning>a</reasoning><answer>3.5</answer>`
    0 0.5 0.5 0.5 0.5 | no no    | 3     | `<reasoning>a</reasoning><answer>3.5</answer>`
    2 0.5 0.5 0.5 0.5 | yes yes  | 50    | `<reasoning>a</reasoning><answer>50%</answer>`
    0 0.5 0.5 0.5 0.5 | no no    | 72    | `<reasoning>a</reasoning><answer>7</answer>`
    0 0 0.5 0.5 0.5   | no no    | 72    | `<reasoning>a</reasoning><answer>72 or 71</answer>`
    2 0.5 0 0.5 0.5   | no yes   | 72    | `<reasoning>a</reasoning> so <answer>72</answer>`
    2 0.5 0 0.5 0.5   | no no    | 72    | `<reasoning>a</reasoning><answer>72</answer> Or 73?`
    0 0 0 0 0.5       | no yes   | 72    | `<answer><reasoning>a</reasoning>72</answer>`
    2 0.5 0 0 0.5     | no yes   | 72    | `<answer>72</answer><reasoning>a</reasoning>`
    2 0.5 0 0 0.375   | no yes   | 72    | `<reasoning>a<answer>72</answer>`
    0 0 0 0 0.25      | no yes   | 72    | `</answer>72<answer>`
    0 0 0 0 0         | no yes   | 72    | `72`
"""


def rows_of(table):
    return [line.strip() for line in table.splitlines() if " | `" in line]


def test_every_row_of_the_evaluators_table():
    """The table that documents the rewards is run as a doctest is.

    A row that is untrue, or that cannot be read, fails.
    """
    documented_rows = rows_of(GSM8kEvaluator.__doc__)
    assert len(documented_rows) == 10
    for row in documented_rows + rows_of(MORE_ROWS):
        rewards, verdicts, gold, completion = [cell.strip() for cell in row.split("|")]
        strict, flexible = [verdict == "yes" for verdict in verdicts.split()]
        expected = [float(reward) for reward in rewards.split()], strict, flexible
        assert score(completion.strip("`").replace(r"\n", "\n"), gold) == expected, row


FIVE = r"""
    5    $5    \$5    5.00    5%    5\%    5 apples    $5 per day    5 points    5 times    5 logs
    5 m    5 square feet    5 months    5 egg(s)    x = 5    **5**    \boxed{5}    $\boxed{5}$
    \boxed{{5}}    \(5\)    \boxed{5 \text{ apples}}    \textbf{5}    5.    5 eggs.    5 or so
    the answer is 5
"""
NOT_FIVE = r"""
    –5    —5    ‑5    ‐5    ⁻5    －5    ﹣5    – 5    -(5)    -\$5    -¥5    -\boxed{5}    **-**5
    x-5    \sqrt{5}    \sqrt 5    √5    sqrt(5)    sqrt 5    \log 5    f(5)    \frac{1}{2}5
    10^5    1e5    5!    (5)!    5²    5 squared    square root of 5    5π    5\pi    5 k    $5 K
    5 M    $5 m    5 bn    5 million    5\text{ million}    5 thousand    5 dozen    5 tenths
    a fifth of 5    twice 5    half of 5    double 5    two times 5    5 divided by two
    negative 5    minus 5    not 5    ±5    ~5    5‰    five hundred 5    5 or 6    two dozen 5
    5½    5^    x5    5e3    ５    5５
    >5    x > 5    < 5    ≥5    x + 5    5 + x    x * 5
"""


def test_what_changes_the_value_of_a_number():
    """Any dash is a minus. "–5", "twice 5" and "\\sqrt{5}" once were right answers for 5."""
    for text in re.split(r"\n *| {4}", FIVE.strip()):
        assert only_number(text) == 5, text
    for text in re.split(r"\n *| {4}", NOT_FIVE.strip()):
        assert only_number(text) in (None, -5), text
    assert to_number("–5") == only_number("\\boxed{–$5}") == only_number("-$5") == -5
    assert only_number("1,234.50") == 1234.5


def test_repeated_tags():
    two_answers = "<reasoning>a</reasoning><answer>71</answer><answer>72</answer>"
    nested_answer = "<reasoning>a</reasoning><answer><answer>72</answer></answer>"
    nested_reasoning = "<reasoning><reasoning>a</reasoning></reasoning><answer>72</answer>"
    all_twice = "<reasoning></reasoning>" * 2 + "<answer></answer>" * 2
    assert score(two_answers, "72") == ([0, 0, 0, 0, 0.25], False, True)
    assert score(nested_answer, "72") == ([0, 0, 0, 0, 0.25], False, True)
    assert score(nested_reasoning, "72") == ([2, 0.5, 0, 0, 0.25], False, True)
    assert score(all_twice, "72") == ([0, 0, 0, 0, 0], False, False)


@pytest.mark.parametrize(
    "text, last",
    [
        ("10-5=5", 5),
        ("about -3", -3),
        ("(7-2)-1", 1),
        ("1,000.", 1000),
        ("v1.2.3", None),
        ("so...72", 72),
        ("a.5", 5),
        ("cost: -$1,250.50!", Fraction(-2501, 2)),
        ("x" * 10**6 + " 42 " + "y" * 10**6, 42),
        ("9" * 10**6, None),
    ],
    ids=lambda text: str(text)[:20],
)
def test_flexible_reads_the_last_number(text, last):
    assert score(text, "12345")[2] is False
    if last is not None:
        assert score(text, str(float(last)))[2]


def test_details_and_means():
    completions = ["<reasoning>a</reasoning><answer>1,000</answer>", "so 7", ""]
    rewards = gsm8k.compute_rewards([""] * 3, completions, ["1000", "8", "8"])
    assert [detail["parsed"] for detail in rewards.details] == ["1,000", "7", None]
    assert [detail["format"] for detail in rewards.details] == [True, False, False]
    assert rewards.per_function.dtype == torch.float32 and rewards.per_function.shape == (3, 5)
    example = {"id": "x", "question": "", "prompt": ""}
    completions = [
        Completion([1], [1], text=text, example=example | {"answer": answer})
        for text, answer in zip(completions, ["1000", "8", "8"], strict=True)
    ]
    Run.reward(SimpleNamespace(evaluator=gsm8k), completions)
    assert [completion.reward for completion in completions] == [4.0, 0.0, 0.0]
    assert [completion.details["format"] for completion in completions] == [True, False, False]
    means = completion_metrics([completion.record() for completion in completions])
    expected = {
        "rewards/correctness": 2 / 3,
        "rewards/number_format": 1 / 6,
        "rewards/strict_format": 1 / 6,
        "rewards/soft_format": 1 / 6,
        "rewards/tag_count": 1 / 6,
        "reward": 4 / 3,
        "response_length": 1,
        "truncated_fraction": 1,
    }
    assert means == pytest.approx(expected)
    assert gsm8k.compute_rewards([], [], []).per_function.shape == (0, 5)
    assert gsm8k.reward_weights == (1.0,) * 5 and MathEvaluator.reward_weights == (0.0, 1.0)


def test_a_missing_reward_counts_in_no_mean():
    """A reward that could not be given is NaN, not 0."""
    nan = float("nan")
    rest = {"rewards/length": nan, "reward": nan, "length": 1, "finished": True}
    means = completion_metrics([{"rewards/grade": grade} | rest for grade in (1.0, 3.0, nan)])
    assert means["rewards/grade"] == 2.0
    assert math.isnan(means["rewards/length"])


# --- A reward that is a function ------------------------------------------------------------------

REWARDS = """
import torch
from evaluator import RewardEvaluator, Rewards

def vowels(completions, answers, **columns):
    return [sum(letter in "aeiou" for letter in text) for text in completions]

def easy(completions, answers, difficulty, **columns):
    return [1 / number for number in difficulty]

def tensor(completions, answers, **columns):
    return torch.tensor([float("a" in text) for text in completions])

def without_columns(completions, answers):
    return [0.0] * len(completions)

both = {vowels: 1.0, easy: 0.5}
listed = [vowels]
number = 3
bad_weight = {vowels: "big"}

class Short(RewardEvaluator):
    reward_names = ("short",)
    returned = [1.0], {}

    def reward(self, completion, gold):
        return self.returned

class NoContext(Short):
    def __init__(self):
        pass

class OneName(Short):
    reward_names = "short"

class NoReward(RewardEvaluator):
    reward_names = ("short",)

class OneNumber(Short):
    returned = 1.0

class TwoRewards(Short):
    returned = [1.0, 2.0], {}

class NoNumber(Short):
    returned = [None], {}

class NoDict(Short):
    returned = [1.0], None

class NoFormat(Short):
    returned = [1.0], {"correct_strict": True, "correct_flexible": True}

class TensorVerdict(Short):
    returned = [1.0], {"format": True, "correct_strict": torch.tensor(True)}

class NoRewards(Short):
    def compute_rewards(self, prompts, completions, answers):
        return [1.0] * len(completions)

class Integers(Short):
    def compute_rewards(self, prompts, completions, answers):
        return Rewards(torch.ones(len(completions), 1).long(), [{} for _ in completions])

class TwoColumns(Short):
    def compute_rewards(self, prompts, completions, answers):
        return Rewards(torch.ones(len(completions), 2), [{} for _ in completions])

instance = Short()
"""


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS)
    return path


def test_a_function_is_a_reward(reward_file, model_folder, difficulty_data):
    """It is given the columns of the data, and there is no accuracy without verdicts."""
    folder = reward_file.parent / "run"
    flags = run_flags(
        model_folder,
        folder,
        dataset_name="gsm8k",
        dataset_path=difficulty_data,
        evaluator=f"{reward_file}:both",
        num_train_iters=1,
    )
    assert main.main(flags) == 0
    for row in jsonl.read(folder / "rollouts" / "step_000001.jsonl"):
        vowels = sum(letter in "aeiou" for letter in row["completion"])
        assert row["rewards/vowels"] == vowels
        difficulty = int(row["id"].split("/")[-1]) + 1
        assert row["rewards/easy"] == pytest.approx(1 / difficulty)
        assert row["reward"] == pytest.approx(vowels + 0.5 / difficulty)
    for log in ("train_log", "eval_log"):
        for row in jsonl.read(folder / f"{log}.jsonl"):
            assert "reward" in row and not any("accuracy" in key for key in row)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoReward", "must define compute_rewards or reward"),
        ("OneNumber", "reward must return a list of numbers (short) and a dict of details"),
        ("TwoRewards", "reward must return a list of numbers (short) and a dict of details"),
        ("NoNumber", "reward must return a list of numbers (short) and a dict of details"),
        ("NoDict", "details must be 2 dicts, one for each completion"),
        ("NoFormat", "details['format'] must be True or False, not None"),
        ("TensorVerdict", "details['correct_strict'] must be True or False, not tensor(True)"),
        ("Integers", "per_function must be floats (2, 1)"),
        ("TwoColumns", "per_function must be floats (2, 1)"),
        ("NoRewards", "compute_rewards must return Rewards(a tensor, a list of dicts)"),
    ],
)
def test_a_class_with_wrong_rewards_is_one_line_that_names_it(name, message, reward_file):
    evaluator = get_evaluator(f"{reward_file}:{name}", prompt="question_only")
    examples = [{"question": "q", "answer": "a"}] * 2
    with pytest.raises(RewardError, match=re.escape(message)) as error:
        evaluator.compute_checked_rewards(examples, ["x", "y"])
    assert str(error.value).startswith(name)


@pytest.mark.parametrize(
    ("name", "rewards"),
    [("vowels", [0, 1]), ("listed", [0, 1]), ("tensor", [0, 1]), ("Short", [1, 1])],
)
def test_what_may_be_a_reward(name, rewards, reward_file):
    """A function, a list of functions, a function that returns a tensor, a class without init."""
    evaluator = get_evaluator(f"{reward_file}:{name}", prompt="question_only")
    examples = [{"question": "q", "answer": "a"}] * 2
    checked = evaluator.compute_checked_rewards(examples, ["x", "a"])
    assert evaluator.total(checked).tolist() == rewards


def test_a_reward_that_takes_no_columns_is_told_to(reward_file):
    evaluator = get_evaluator(f"{reward_file}:without_columns")
    with pytest.raises(RewardError, match=r"unexpected keyword argument.*end its arguments with"):
        evaluator.compute_checked_rewards([{"question": "q", "answer": "a"}], ["x"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm9k", "gsm9k is not known; use one of gsm8k, math, creative"),
        ("nowhere.py:reward", "there is no file nowhere.py"),
        ("{}:number", "must be a function, a list of functions, or a dict of functions"),
        ("{}:absent", "there is no absent in"),
        ("{}:bad_weight", "must be a function, a list of functions, or a dict of functions"),
        ("{}:instance", "a subclass of RewardEvaluator (not an instance)"),
        ("an instance", "a subclass of RewardEvaluator (not an instance)"),
        ("{}:NoContext", "end its arguments with **context"),
        ("{}:OneName", "reward_names must be a tuple of names"),
    ],
)
def test_an_evaluator_that_leads_nowhere_is_one_line(name, message, reward_file, monkeypatch):
    monkeypatch.setitem(EVALUATORS, "an instance", gsm8k)
    with pytest.raises(ValueError, match=re.escape(message)):
        get_evaluator(name.format(reward_file), prompt="reasoning_answer")


# --- Examples with columns of the user's own ------------------------------------------------------


class DifficultyEvaluator(RewardEvaluator):
    """Rewards a completion by a column of its example. Answers to easy questions are right."""

    reward_names = ("points",)

    def __init__(self, **_):
        pass

    def compute_rewards(self, prompts, completions, answers, examples):
        assert prompts == [example["question"] for example in examples]
        points = torch.tensor([[float(example["difficulty"])] for example in examples])
        details = []
        for example in examples:
            is_easy = example["difficulty"] <= 3
            verdicts = {"correct_strict": is_easy, "correct_flexible": is_easy}
            details.append({"parsed": None, "format": True} | verdicts)
        return Rewards(points, details)


@pytest.fixture
def difficulty_data(tmp_path, monkeypatch):
    """A folder in GSM8K's schema, whose rows have further columns: difficulty is 1 to 8."""
    monkeypatch.setitem(EVALUATORS, "difficulty", DifficultyEvaluator)
    folder = tmp_path / "data"
    for split in ("train", "test"):
        rows = []
        for i in range(8):
            row = {"question": f"{i} and 1?", "answer": f"So.\n#### {i + 1}", "difficulty": i + 1}
            rows.append(row | {"level": ["not", "a level"], "id": "theirs"})
        jsonl.write(folder / f"{split}.jsonl", rows)
    return folder


def test_a_run_gives_the_evaluator_the_columns_of_each_completion(
    difficulty_data, model_folder, tmp_path
):
    """The transcripts have the columns that they always have, and no others."""
    flags = run_flags(
        model_folder,
        tmp_path / "run",
        dataset_name="gsm8k",
        dataset_path=difficulty_data,
        evaluator="difficulty",
        num_train_iters=2,
        eval_samples=2,
        eval_temperature=1,
    )
    assert main.main(flags) == 0
    for transcript in ("rollouts/step_000002.jsonl", "eval/step_000002.jsonl"):
        rows = jsonl.read(tmp_path / "run" / transcript)
        assert len(rows) == 8
        for row in rows:
            example_number = int(row["id"].removeprefix("gsm8k/").split("/")[1])
            assert row["rewards/points"] == example_number + 1
            assert not row.keys() & {"difficulty", "level"}


def test_gold_answers_are_judged_with_the_columns_of_their_problems(difficulty_data, tmp_path):
    flags = ["--from_reference", "--dataset_name", "gsm8k", "--evaluator", "difficulty"]
    flags += ["--dataset_path", str(difficulty_data), "--output", str(tmp_path / "gold.jsonl")]
    assert generate_gold.main(flags) == 0
    rows = jsonl.read(tmp_path / "gold.jsonl")
    assert {row["answer"] for row in rows if row["correct"]} == {"1", "2", "3"}


def test_an_evaluator_that_names_no_examples_is_given_none():
    """**kwargs does not name them, since it may be passed on to one that does not take them."""

    class ThreeArguments(LettersEvaluator):
        def compute_rewards(self, prompts, completions, answers):
            return super().compute_rewards(prompts, completions, answers)

    class PassesOn(ThreeArguments):
        def compute_rewards(self, *args, **kwargs):
            return super().compute_rewards(*args, **kwargs)

    class Inherits(DifficultyEvaluator):
        pass

    examples = [{"question": "q", "answer": "a", "difficulty": 5}]
    for evaluator in (ThreeArguments(), PassesOn()):
        rewards = evaluator.compute_checked_rewards(examples, ["aeio"])
        assert rewards.per_function.tolist() == [[1, 1]]
    rewards = Inherits().compute_checked_rewards(examples, ["aeio"])
    assert rewards.per_function.tolist() == [[5]]


def test_every_gold_answer_of_gsm8k_gets_everything(data_folder):
    files = [
        jsonl.read(data_folder / "data" / "gsm8k" / f"{split}.jsonl") for split in ("train", "test")
    ]
    golds = []
    completions = []
    for row in itertools.chain.from_iterable(files):
        solution, gold = row["answer"].split("####")
        golds.append(gold.strip())
        prompt = PROMPTS["reasoning_answer"]
        completions.append(prompt.format_solution(solution.strip(), gold.strip()))
    assert len(golds) == 7473 + 1319
    assert sum("," in gold for gold in golds) == 93
    golds_without_commas = [gold.replace(",", "") for gold in golds]
    for answers in golds, golds_without_commas:
        rewards = gsm8k.compute_rewards(completions, completions, answers)
        assert (rewards.per_function == torch.tensor([2.0, 0.5, 0.5, 0.5, 0.5])).all()
        assert all(detail["correct_strict"] for detail in rewards.details)
        assert all(detail["correct_flexible"] for detail in rewards.details)


# Pieces that a completion is made of: tags whole and broken, numbers in any notation, long
# repetitions, any unicode.
TAG = st.sampled_from(
    "<reasoning> </reasoning> <answer> </answer> <answer </think> \\boxed{ } { \\{ \\boxed".split(
        " "
    )
)
NUMERAL = st.one_of(
    st.integers().map(str),
    st.decimals(allow_nan=True, allow_infinity=True).map(str),
    st.integers(-(10**7), 10**7).map("{:,}".format),
    st.sampled_from("72 -$5 50% 1e999999999 9**9**9 1,,,2 ... ٣ ² −5 0x 1/0 $ -".split()),
)
PIECE = st.one_of(
    TAG,
    NUMERAL,
    st.text(max_size=20),
    st.sampled_from(["\0", "\n", " ", "\ud800", "<" * 50, "9" * 60]),
)
REPEATED = st.tuples(PIECE, st.sampled_from([1, 1, 1, 2, 1000])).map(lambda pair: pair[0] * pair[1])
COMPLETION = st.lists(REPEATED, max_size=12).map("".join)


@pytest.mark.parametrize("examples", [200, pytest.param(1_000, marks=pytest.mark.slow)])
def test_any_text_is_scored_within_bounds(examples):
    @settings(max_examples=examples, deadline=None)
    @given(completion=COMPLETION, gold=st.sampled_from(["72", "-5", "1,000", "3.5"]))
    def check(completion, gold):
        rewards, strict, flexible = score(completion, gold)
        correct, number, strict_format, soft_format, tags = rewards
        assert correct in (0, 2) and {number, strict_format, soft_format} <= {0, 0.5}
        assert tags in (0, 0.125, 0.25, 0.375, 0.5)
        assert strict == (correct == 2 and strict_format == 0.5)
        assert flexible or not strict
        assert soft_format >= strict_format and (tags == 0.5 or not soft_format)
        assert last_boxed(completion) is None or re.search(r"\\(boxed|fbox)", completion)
        # Writing it all twice never pays: no tag occurs once any more.
        assert sum(score(completion + "\n" + completion, gold)[0]) == 0

    check()


def functions_of(**rewards):
    """An evaluator of these functions."""
    for name, function in rewards.items():
        function.__name__ = name
    return FunctionEvaluator(dict.fromkeys(rewards.values(), 1.0), "my_rewards.py")


@pytest.mark.parametrize("name", ["gsm8k", "creative"])
def test_a_function_gets_the_columns_of_the_row_as_they_are(name, tmp_path):
    """A row's id, level, subject and solution were dropped or replaced."""
    row = {"id": 17, "level": "hard", "subject": ["s"], "solution": "mine", "prompt": 5, "row": 6}
    row |= {"question": "1+1?", "opening": "A cat.", "answer": "two\n#### 2"}
    jsonl.write(tmp_path / "test.jsonl", [row])
    seen = {}

    def look(completions, answers, **columns):
        seen.update(columns, answers=answers)
        return [0.0]

    functions_of(look=look).compute_checked_rewards(DATASETS[name].read("test", tmp_path), ["c"])
    assert seen["answers"] == ["2" if name == "gsm8k" else row.pop("answer")]
    assert {column: [row[column]] for column in row if column != "answer"}.items() <= seen.items()


def test_what_a_function_does_to_its_arguments_changes_nothing_else():
    """Sorted completions got the rewards of others, and the data set lost what was popped."""

    def spoil(completions, answers, tests, **columns):
        completions.sort(key=len)
        answers.clear()
        return [tests_of_row.pop() for tests_of_row in tests]

    def length(completions, answers, tests, **columns):
        assert answers == ["a", "a"] and tests == [[1, 2], [1, 2]]
        return [len(completion) for completion in completions]

    example = {"id": "x", "question": "q", "answer": "a", "tests": [1, 2]}
    completions = ["long", "c"]
    evaluator = functions_of(spoil=spoil, length=length)
    rewards = evaluator.compute_checked_rewards([example, example], completions)
    assert rewards.per_function.tolist() == [[2, 4], [2, 1]]
    assert completions == ["long", "c"] and example["tests"] == [1, 2]


@pytest.mark.parametrize(
    "returned",
    [
        [0.0],
        [[0.0], [1.0]],
        [0.0, math.nan],
        [0, 10**400],
        ["1", "2"],
        [None, None],
        None,
        "no",
        torch.tensor(1.0),
        {0.0, 1.0},
        {0: 1.0, 1: 2.0},
    ],
)
def test_what_is_not_one_finite_number_for_each_completion_is_one_line(returned):
    """A set gave its members in any order."""
    examples = [{"id": "x", "question": "q", "answer": "a"}] * 2
    evaluator = functions_of(given=lambda completions, answers, **columns: returned)
    with pytest.raises(RewardError, match="^my_rewards.py:given must return a list of 2 ") as error:
        evaluator.compute_checked_rewards(examples, ["", ""])
    assert f"not {returned!r:.80}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0, -1e30], "reward given is -1e.30 for completion 1; scale it"),
        ([1e8, 1e8 + 1], "reward given is 1e.08 for completion 0; scale it"),
    ],
)
def test_huge_rewards_are_refused(returned, words):
    """They had advantages of 0."""
    examples = [{"id": "x", "question": "q", "answer": "a"}] * 2
    evaluator = functions_of(given=lambda completions, answers, **columns: returned)
    with pytest.raises(RewardError, match=words):
        evaluator.compute_checked_rewards(examples, ["", ""])


@pytest.mark.parametrize("weight", ["float('nan')", "float('inf')", "1e30"])
def test_a_weight_must_be_a_number_that_can_be_added(weight, tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(f"def f(completions, answers, **columns): ...\nboth = {{f: {weight}}}")
    with pytest.raises(ValueError, match="the weight of a reward must be a number of at most"):
        get_evaluator(f"{file}:both")
