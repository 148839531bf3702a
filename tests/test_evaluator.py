"""Reading answers (numbers, boxes), the GSM8K rewards case by case, and what must hold for any text."""

import re
import time
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluator import GSM8kEvaluator, MathEvaluator, RewardEvaluator, Rewards, get_evaluator
from grading.extraction import last_boxed, to_number
from logs import jsonl
from rl_datasets import PROMPTS

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
}
NUMBERS |= {
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
]
NOT_NUMBERS += ["nan", "0x10", "1/2", "--5", "5 %", "9" * 51, "$" + "9" * 60]


@pytest.mark.parametrize("text", [*NUMBERS, *NOT_NUMBERS], ids=lambda text: text[:20])
def test_to_number(text):
    assert to_number(text) == NUMBERS.get(text)


BOXES = {
    r"so $\boxed{5}$": "5",
    r"\boxed{1} then \boxed{2} end": "2",
    r"\boxed{\frac{1}{2}}.": r"\frac{1}{2}",
}
BOXES |= {
    r"\boxed{\{1, 2\}}": r"\{1, 2\}",
    r"\boxed{\left\{ x \right.}": r"\left\{ x \right.",
    r"\boxed{\}}": r"\}",
}
BOXES |= {
    r"\boxed{a \\} b}": r"a \\",
    "\\boxed{a\nb}": "a\nb",
    r"\fbox{9}": "9",
    r"\boxed {9}": "9",
    r"\boxed{}": "",
}
BOXES |= {
    r"\boxed{7} and \boxed{8": "7",
    r"\boxed{1 \boxed{3}": "3",
    r"\boxed{1 \boxed{3}}": "3",
    r"\boxed{1": None,
}
BOXES |= {
    r"is $\boxed 2$ or so": "2",
    r"\boxed{1} or \boxed 2": "1",
    r"\boxed 2": None,
    r"$\boxedsize 2$": None,
}
BOXES |= {"no box": None, "": None}
BOXES |= {
    r"\boxed{1}" + r"\boxed{" * 2500: "1",
    r"\boxed{1}" + r"\boxed " * 2500: "1",
    r"\boxed{" * 10**6: None,
}
BOXES |= {
    r"\boxed{" + "{" * 9000 + "}" * 9001: "{" * 9000 + "}" * 9000,
    r"\boxed{1}" + "x" * 10**6: None,
}


@pytest.mark.parametrize("text", BOXES, ids=lambda text: text[:30])
def test_last_boxed(text):
    start = time.process_time()
    assert last_boxed(text) == BOXES[text]
    assert time.process_time() - start < 10, "quadratic in the number of boxes: that takes minutes"


def score(completion, gold):
    """(five rewards, strict, flexible)"""
    rewards = gsm8k.compute_rewards([""], [completion], [gold])
    details = rewards.details[0]
    return rewards.per_function[0].tolist(), details["correct_strict"], details["correct_flexible"]


MORE_ROWS = r"""
    | `<reasoning>a</reasoning><answer>$18.00</answer>`             | 18   | 2 0.5 0.5 0.5 0.5           | yes yes     |
    | `<reasoning>a</reasoning><answer>-$5</answer>`                | -5   | 2 0.5 0.5 0.5 0.5           | yes yes     |
    | `<reasoning>a</reasoning><answer>1/2</answer>`                | 2    | 0 0 0.5 0.5 0.5             | no yes      |
    | `<reasoning>72</reasoning><answer></answer>`                  | 72   | 0 0 0.5 0.5 0.5             | no yes      |
    | `<reasoning>a</reasoning><answer>71</answer><answer>72</answer>` | 72 | 0 0 0 0 0.25               | no yes      |
    | `<reasoning>a</reasoning><answer>72`                          | 72   | 0 0 0 0 0.375               | no yes      |
    | `<reasoning>6*12</reasoning><answer>72</answer>`              | 72   | 2 0.5 0.5 0.5 0.5           | yes yes     |
    | `\n <reasoning>6*12</reasoning> <answer> 72 </answer> \n`     | 72   | 2 0.5 0.5 0.5 0.5           | yes yes     |
    | `<reasoning>a</reasoning><answer>1000</answer>`               | 1,000 | 2 0.5 0.5 0.5 0.5          | yes yes     |
    | `<reasoning>a</reasoning><answer>-5</answer>`                 | -5   | 2 0.5 0.5 0.5 0.5           | yes yes     |
    | `<reasoning>a</reasoning><answer>- 5</answer>`                | 5    | 0 0 0.5 0.5 0.5             | no yes      |
    | `<reasoning>a</reasoning><answer>3.5</answer>`                | 3.5  | 2 0.5 0.5 0.5 0.5           | yes yes     |
    | `<reasoning>a</reasoning><answer>3.5</answer>`                | 3    | 0 0.5 0.5 0.5 0.5           | no no       |
    | `<reasoning>a</reasoning><answer>50%</answer>`                | 50   | 2 0.5 0.5 0.5 0.5           | yes yes     |
    | `<reasoning>a</reasoning><answer>7</answer>`                  | 72   | 0 0.5 0.5 0.5 0.5           | no no       |
    | `<reasoning>a</reasoning><answer>72 or 71</answer>`           | 72   | 0 0 0.5 0.5 0.5             | no no       |
    | `<reasoning>a</reasoning> so <answer>72</answer>`             | 72   | 2 0.5 0 0.5 0.5             | no yes      |
    | `<reasoning>a</reasoning><answer>72</answer> Or 73?`          | 72   | 2 0.5 0 0.5 0.5             | no no       |
    | `<reasoning>a</reasoning><answer><answer>72</answer></answer>` | 72  | 0 0 0 0 0.25                | no yes      |
    | `<answer><reasoning>a</reasoning>72</answer>`                 | 72   | 0 0 0 0 0.5                 | no yes      |
    | `<answer>72</answer><reasoning>a</reasoning>`                 | 72   | 2 0.5 0 0 0.5               | no yes      |
    | `<reasoning><reasoning>a</reasoning></reasoning><answer>72</answer>` | 72 | 2 0.5 0 0 0.25         | no yes      |
    | `<reasoning></reasoning><reasoning></reasoning><answer></answer><answer></answer>` | 72 | 0 0 0 0 0 | no no      |
    | `<reasoning>a<answer>72</answer>`                             | 72   | 2 0.5 0 0 0.375             | no yes      |
    | `</answer>72<answer>`                                         | 72   | 0 0 0 0 0.25                | no yes      |
    | `72`                                                          | 72   | 0 0 0 0 0                   | no yes      |
"""


def test_every_row_of_the_evaluators_table():
    """The table that documents the rewards is run as a doctest is: a row that is untrue, or cannot be read, fails."""
    rows = [
        line.strip(" |")
        for line in (GSM8kEvaluator.__doc__ + MORE_ROWS).splitlines()
        if line.lstrip().startswith("| `")
    ]
    assert rows
    for row in rows:
        completion, gold, rewards, verdicts = map(str.strip, row.split("|"))
        strict, flexible = (verdict == "yes" for verdict in verdicts.split())
        expected = [float(reward) for reward in rewards.split()], strict, flexible
        assert score(completion.strip("`").replace(r"\n", "\n"), gold) == expected, row


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
    ]
    + [
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


def test_details_and_breakdown():
    completions = ["<reasoning>a</reasoning><answer>1,000</answer>", "so 7", ""]
    rewards = gsm8k.compute_rewards([""] * 3, completions, ["1000", "8", "8"])
    assert [detail["parsed"] for detail in rewards.details] == ["1,000", "7", None]
    assert [detail["format"] for detail in rewards.details] == [True, False, False]
    assert rewards.per_function.dtype == torch.float32 and rewards.per_function.shape == (3, 5)
    breakdown = gsm8k.get_reward_breakdown(rewards)
    assert breakdown == pytest.approx(
        {
            "rewards/correctness": 2 / 3,
            "rewards/number_format": 1 / 6,
            "rewards/strict_format": 1 / 6,
        }
        | {"rewards/soft_format": 1 / 6, "rewards/tag_count": 1 / 6}
    )
    assert gsm8k.compute_rewards([], [], []).per_function.shape == (0, 5)


def test_breakdown_leaves_missing_rewards_out():
    """A reward that could not be given is NaN, not 0: the mean is over the completions that have it."""

    class Judge(RewardEvaluator):
        reward_names = ("grade", "length")

        def compute_rewards(self, prompts, completions, answers):
            raise NotImplementedError

    nan = float("nan")
    breakdown = Judge().get_reward_breakdown(
        Rewards(torch.tensor([[1.0, nan], [3.0, nan], [nan, nan]]), [])
    )
    assert (
        breakdown["rewards/grade"] == 2.0
        and breakdown["rewards/length"] != breakdown["rewards/length"]
    )
    assert Judge.reward_weights == (1.0, 1.0) and gsm8k.reward_weights == (1.0,) * 5
    assert MathEvaluator.reward_weights == (0.0, 1.0)


def test_errors():
    with pytest.raises(ValueError, match="--evaluator math"):
        get_evaluator("gsm8k", prompt="r1_zero")
    with pytest.raises(ValueError, match="'x=1' is not a number"):
        score("1", "x=1")
    assert isinstance(get_evaluator("gsm8k", prompt="reasoning_answer", model=None), GSM8kEvaluator)


def test_every_gold_answer_of_gsm8k_gets_everything(data_folder):
    files = [
        jsonl.read(data_folder / "data" / "gsm8k" / f"{split}.jsonl") for split in ("train", "test")
    ]
    rows = [row["answer"].split("####") for rows in files for row in rows]
    rows = [(solution.strip(), gold.strip()) for solution, gold in rows]
    assert len(rows) == 7473 + 1319 and sum("," in gold for _, gold in rows) == 93
    completions = [PROMPTS["reasoning_answer"].format_solution(*row) for row in rows]
    for golds in ([gold for _, gold in rows], [gold.replace(",", "") for _, gold in rows]):
        rewards = gsm8k.compute_rewards(completions, completions, golds)
        assert (rewards.per_function == torch.tensor([2.0, 0.5, 0.5, 0.5, 0.5])).all()
        assert all(
            detail["correct_strict"] and detail["correct_flexible"] for detail in rewards.details
        )


# Pieces that a completion is made of: tags whole and broken, numbers in every dress, hostile runs, any unicode.
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


@pytest.mark.parametrize("examples", [200, pytest.param(3_000, marks=pytest.mark.slow)])
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
