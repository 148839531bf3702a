"""MATH rewards: the format of each prompt, and which answers are equal as mathematics.

No input may make the grader hang, nor harm the process that asks it.
"""

import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluator import get_evaluator
from grading import math_answers
from grading.math_answers import MathGrader
from grpo import jsonl
from rl_datasets import PROMPTS

PROMPT_NAMES = ("r1_zero", "question_only", "reasoning_answer")

# Pairs of `gold | answer`; four spaces separate them.
EQUAL = r"""
    \frac{1}{2} | \frac12    \frac12 | 0.5    0.5 | 1/2    \dfrac{3}{4} | 0.75
    -\frac{1}{2} | \frac{-1}{2}    .0000672 | 0.0000672    1,000 | 1000    1{,}000 | 1000
    10,\!080 | 10080    11,\! 111,\! 111,\! 100 | 11,111,111,100    1\frac{4}{5} | 9/5
    137 \frac{1}{2} | 137.5    1 4/5 | 1.8    -1\frac12 | -1.5    2^{10} | 1024    5! | 120
    12 | 4(3)    \binom{5}{2} | 10    \log_2 8 | 3    x^2+1 | 1+x^2    x^{10} | x^10
    (a+5)(b+2) | ab+2a+5b+10    2k+2 | 2(k+1)    p - q | -(q-p)    0.5x | \frac{x}{2}
    0.1x | \frac{x}{10}    \frac{11+9a}{20} | \frac{9a+11}{20}    \cot x | \frac{1}{\tan x}
    6 - 5i | -5i+6    2\sqrt{5} | \sqrt{20}    \frac{\sqrt{3}}{3} | \frac{1}{\sqrt{3}}
    \sqrt{2}/2 | 2^{-1/2}    3\sqrt{13} | 3√13    3\sqrt{13} | 3*sqrt(13)    \sqrt{51} | \sqrt51
    18+2\pi | 2π+18    \frac{\pi}{2} | pi/2    \frac{20000}{\pi} | 20000/\pi    90^\circ | 90
    90^\circ | 90 degrees    5.4 \text{ cents} | 5.4    12 cm | 12\text{ centimeters}
    15\mbox{ cm}^2 | 15 square centimeters    864 \mbox{ inches}^2 | 864 \text{ in}^2
    288 \pi | 288\pi \text{ cubic inches}    \frac{270}7\text{ degrees} | \frac{270}{7}
    \$32,\!348 | 32348    \$36 | $36    \$18.90 | 18.9 dollars    50\% | 50    42 | $42$.
    3, 5, 7 | 7,5,3    1,-2 | -2 \text{ or } 1    \{1,2,3\} | \{3,2,1\}    \{1,2\} | 1 and 2
    1 \pm \sqrt{19} | 1+\sqrt{19}, 1-\sqrt{19}
    \{1\pm\sqrt{5},-2\} | \{-2, 1-\sqrt{5}, 1+\sqrt{5}\}
    \left( 3, \frac{\pi}{2} \right) | (3, \pi/2)    (6,31,-1) | \left(6, 31, -1\right)
    (1,2) | (x,y) = (1,2)    (1,200) | (1, 200)    (3,4] | \left(3, \frac{8}{2}\right]
    (2,\infty) | (2, ∞)    (2,\infty) | x > 2    x \in [-2,7] | [-2, 7]
    x \in [-2,7] | -2 \le x \leq 7    (-\infty, 2) \cup (3, \infty) | (3,+\infty)\cup(-\infty,2)
    (-\infty, 2) \cup (3, \infty) | x<2 \text{ or } x>3
    \begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix} | \begin{bmatrix} -\frac13 \\ \frac23 \end{bmatrix}
    x=5 | 5    x=1,y=2 | y=2, x=1    x^2 | f(x) = x^2    y = 2x + 3 | 2x - y + 3 = 0
    5x - 7y + 11z + 4 = 0 | 7y = 5x + 11z + 4    \text{Evelyn} | evelyn
    \text{even} | \textbf{Even}    \text{(C)} | C    4210_{5} | 4210_5
    0 | 0\%
    2n-1 | k=2n-1    2n-1 | a_n = 2n-1    \sqrt2 \approx 1.41 | \sqrt{2}    \sqrt2 | \sqrt2≈1.41
    \frac{180}{\pi} \approx 57.3^\circ | 180/\pi    \frac{n!}{(n-2)!} | n^2-n
    1+\sqrt{2} | \sqrt{3+2\sqrt{2}}    \sqrt{2}+\sqrt{3} | \sqrt{5+2\sqrt{6}}
    \frac{1}{\sqrt[3]{2}-1} | 1+\sqrt[3]{2}+\sqrt[3]{4}
    \sin\frac{\pi}{12} | \frac{\sqrt6-\sqrt2}{4}    (2+\sqrt{3})^{10} | \frac{1}{(2-\sqrt{3})^{10}}
    \frac{\pi}{2}(1+\sqrt2) | \frac{\pi\sqrt{3+2\sqrt2}}{2}
    \ln 12 | \ln 3+2\ln 2    \frac{\pi}{4} | \arctan(1/2)+\arctan(1/3)
    \sin 2x | 2\sin x\cos x    \frac{x^2-1}{x-1} | x+1    2^{n+1} | 2\cdot 2^n
    1,-2 | x=1 \text{ or } x=-2    {5} | 5    \sqrt{x^2} | |x|    6 | (2)(3)    10\,080 | 10080
    -1 | i^2    2i | (1+i)^2    -i | \frac{1}{i}    3+4i | 4i+3    1\pm i | 1-i, 1+i
    \frac{-1+i\sqrt3}{2} | -\frac12+\frac{\sqrt3}{2}i    1,234.5 \text{ cm} | 1234.5
    5 \text{ cm} | \(5\;\text{cm}\)    3\pi | 3~\pi\,
"""

NOT_EQUAL = r"""
    1/3 | 0.333    \frac13 | 0.33333333333333333333    \pi | 3.14159265358979
    \sqrt{2} | 1.41421356237    \sqrt2 | \sqrt2+10^{-30}    3.21 | 3.2    3 | 3.0000001    5 | -5
    \frac{1}{2} | -\frac{1}{2}    \frac{1}{2} | 2    1 | \frac{0}{0}    10 | \frac{10}{0}
    2\frac{1}{2} | 1    7 | 4(3)    -\frac{32}{5} | (-2)\frac{12}{5}-2    12 | 1 2    12 | 21
    2^{10} | 210    1,234 | 1, 234    x^2+1 | x^2-1    x-1 | 1-x    2x | x^2    x | X    x | x1
    3R^2 | 3r^2    Rr^2 | rR^2    (a+b)^2 | a^2+b^2    \sqrt{x^2} | x    \frac{1}{2x} | 1/2x
    \frac{x}{2} | 1/2x    \frac{1}{23} | \frac123    \sqrt{13} | \sqrt{1}3    \sin^2 x | \sin x^2
    \log_2 x | \log_3 x    \ln x | \log x    f(x) | g(x)    6-5i | 6+5i    6-5i | 6-5
    2\pi | 2\pi r    \infty | -\infty    (1,2) | (2,1)    (1,2) | (1,-2)    (1,2) | [1,2]
    (1,2) | 1,2    (1,2) | \{1,2\}    (1,2,3) | (1,2)    (3,4] | [3,4)    (3,4] | (3,4)
    (2,\infty) | [2,\infty)    (2,\infty) | (-\infty,2)    (2,\infty) | x \ge 2    x > 2 | y > 2
    x > 2 | x < 2    x \in [-2,7] | -2 < x < 7
    (-\infty, 2) \cup (3, \infty) | (-\infty, 2] \cup (3, \infty)    (0,9) \cup (9,36) | (0,36)
    (1,2) \cup (3,4) | (1,2),(3,4)    1,2 | 1,2,3    1,1,2 | 1,2,2    \{1\} | 1    5 | \pm 5
    5 | 5 or 6    5 | 5, 6    1 \pm \sqrt{19} | 1+\sqrt{19}    5 \text{ cm} | 5 m
    5 \text{ cm} | 5 \text{ m}    15\mbox{ cm}^2 | 15 \text{ cm}    5 | 5 million    5 | 5 dozen
    50\% | 0.50    90^\circ | 90\%    52_8 | 52    52_8 | 52_9    x=5 | y=5    x=1,y=2 | x=2,y=1
    x=1,y=2 | 2,1    y=2x+3 | y=2x-3    y=2x | x=2y    x^2=4 | x=2
    \text{even} | \text{odd}    \text{even} | \text{not even}    \text{(C)} | \text{(B)}
    east | seat    7 | seven    0 | \text{no}
    \begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 2 \\ 1 \end{pmatrix}
    \begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 1 & 2 \end{pmatrix}
    \begin{pmatrix} 1 \\ 2 \end{pmatrix} | (1,2)
    \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}
    (2,1] | 1\le x>2    (1,2] | 1\ge x<2    0.5 | 0.5\%    2n-1 | n=2n-1    n | k=n
    2n-1 | k=2n-1=3    \sqrt2 \approx 1.41 | 1.41    5 | x \approx 5    1,2 | x=1,y=2
    abc | ABC    no | on    E | e    I | i    i | i^2    3+4i | 3-4i    i | i_2    0.333 | 0.333...
    0.333 | 0.333\ldots    0.1 | 0,100    720 | 3!!    5 | (2)(3)    5 | \frac{4}{2}3
    13 | 3\binom{5}{2}    55 | \sum_{k=1}^{10}k    \frac{1}{2}\text{abcd} | \frac{12}{}\text{abcd}
    x \in [1,2] | y \in [1,2]    (1,2),(3,4) | \{1,2\},\{3,4\}    f(x) | f'(x)
    0 | 10^{-2000}    0 | 2E-7    6.5 | [6.5]    1 | 1\%    5\text{ m} | 5m
    3 | 1 2    \frac{1}{2} | 1:2    20 | (5)_{2}    3 | \sqrt13    5 | \max(3,5)
    \$5 | 5\text{ cm}    5 | \not= 5    2 | 1{2}
    -2 | \begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}    x > 2 | x \ge 2    2x+3 | 3x+2
    2\ln x | \ln x^2    \pi | \frac{22}{7}    \sqrt{2} | \frac{577}{408}
    \sqrt{2}+\sqrt{3} | \pi    640320^3+744 | e^{\pi\sqrt{163}}
"""

# Pairs that agree in 40 digits or more, which proves nothing.
NEARLY_EQUAL = r"""
    10^{20} | \sqrt{10^{40}+1}    10^{40} | \sqrt{10^{80}+1}    10^{400} | \sqrt{10^{800}+1}
    \sqrt[3]{10^{90}+1} | 10^{30}    \sqrt{2} | \sqrt{2}+10^{-70}    2^{-200} | 3^{-200}
    10^{-50} | 10^{-51}    \pi | \pi+e^{-1000}    \pi | \pi+10^{-60}    1 | \tanh(100)
    10^{-30} | \sin(10^{-30})    1 | \cos(10^{-30})    x^2 | x^2+e^{-200}    x | x+10^{-60}
    y=2x+3 | y=2x+3+10^{-60}    \ln x | \ln(x+10^{-60})    1 | 1+i\cdot 10^{-60}
"""

# Each of these would hang, exhaust the memory or overflow a stack in a computer algebra system.
HOSTILE = {
    "tower": "9^{9^{9^{9}}}",
    "factorial": "999999999!",
    "power of a sum": "(x+1)^{99999}",
    "power of a root": r"(1+\sqrt{2})^{99999999}",
    "many roots": "+".join(rf"\sqrt[{n}]{{{n}}}" for n in range(2, 30)),
    "binomial": r"\binom{99999999}{4999999}",
    "fraction bomb": r"\frac{" * 40 + "1" + "}{2}" * 40,
    "root bomb": r"\sqrt{2+" * 60 + "x" + "}" * 60,
    "parentheses": "(" * 200 + "7" + ")" * 200,
    "sets": r"\{" * 100 + "7" + r"\}" * 100,
    "python tower": "9**9**9**9",
    "a megabyte of braces": "{" * 10**6,
    "a megabyte of boxes": r"\boxed{" * 150_000,
    "a megabyte of digits": "9" * 10**6,
    "NUL": "x\0+1",
    "half a surrogate": "x+\ud800",
}


def pairs(table):
    """The (gold, answer) pairs of a table."""
    texts = re.split(r"\n| {4}", table)
    return [tuple(text.split(" | ")) for text in texts if text]


@pytest.fixture(scope="module")
def grader():
    return MathGrader(seconds=60)  # a busy machine must not fail a test


@pytest.fixture(scope="module")
def evaluators(grader):
    return {name: get_evaluator("math", prompt=name, grader=grader) for name in PROMPT_NAMES}


@pytest.fixture
def hasty(grader, monkeypatch):
    """The same grader with a short time limit, for questions that would take for ever."""
    monkeypatch.setattr(grader, "seconds", 0.1)


def grade(evaluator, completion, gold):
    """The two rewards and the two verdicts: (format, answer, strict, flexible)."""
    rewards = evaluator.compute_rewards([""], [completion], [gold])
    details = rewards.details[0]
    format_reward, answer_reward = rewards.per_function[0].tolist()
    assert details["format"] == format_reward
    return format_reward, answer_reward, details["correct_strict"], details["correct_flexible"]


def test_equal_pairs(grader):
    missed = [pair for pair in pairs(EQUAL) if grader.grade(*pair) != "equal"]
    assert missed == [
        (r"\sqrt{51}", r"\sqrt51"),  # LaTeX sets the latter as \sqrt{5}1
        (r"(-\infty, 2) \cup (3, \infty)", r"x<2 \text{ or } x>3"),
    ]


@pytest.mark.parametrize("table", [NOT_EQUAL, NEARLY_EQUAL], ids=["near misses", "many digits"])
def test_wrong_answers(table, grader):
    for gold, answer in pairs(table):
        assert grader.grade(gold, answer) in ("different", "failed"), (gold, answer)
        assert grader.grade(answer, gold) in ("different", "failed"), (answer, gold)


def test_an_expression_may_get_a_name_but_an_equation_keeps_its_own(grader):
    assert grader.grade("2x+3", "y=2x+3") == "equal"
    assert grader.grade("y=2x+3", "2x+3") == "different"


def test_nothing_equals_an_empty_answer(grader):
    for gold, answer in ("", ""), ("5", ""), ("", "5"), (" ", "$$"):
        assert grader.grade(gold, answer) == "different"


def test_a_gold_answer_may_stand_in_a_box_that_is_not_empty(evaluators):
    for gold in r"\boxed{18}", r"\boxed{{18}}", "{18}", "18":
        assert grade(evaluators["question_only"], r"\boxed{{18}}", gold) == (1, 1, True, True)
    for gold in r"\boxed{}", r"\boxed{{}}", "{}", " ":
        with pytest.raises(ValueError, match="gsm8k/train/0: the gold answer .* is empty"):
            evaluators["question_only"].check_gold([{"id": "gsm8k/train/0", "answer": gold}])


@pytest.mark.parametrize("prompt_name", PROMPT_NAMES)
def test_every_gold_answer_of_math500_equals_itself(prompt_name, evaluators, data_folder):
    golds = [row["answer"] for row in jsonl.read(data_folder / "data" / "math" / "math500.jsonl")]
    assert len(golds) == 500
    prompt = PROMPTS[prompt_name]
    for template in "%s", r"\boxed{%s}", r"$\boxed{ %s }$.":
        answers = [template.replace("%s", gold) for gold in golds]
        completions = [prompt.format_solution("So \\boxed{1}.", answer) for answer in answers]
        rewards = evaluators[prompt_name].compute_rewards(completions, completions, golds)
        assert (rewards.per_function == 1).all()
        assert all(detail["correct_strict"] for detail in rewards.details)
        assert all(detail["correct_flexible"] for detail in rewards.details)


def test_r1_zero(evaluators):
    r1_zero = evaluators["r1_zero"]
    all_right = (1, 1, True, True)
    assert grade(r1_zero, "a</think> <answer>5</answer>", "5") == all_right
    assert grade(r1_zero, "a</think> <answer>\n\\boxed{5}\n</answer> and 6", "5") == all_right
    assert (
        grade(
            r1_zero, "a</think> <answer>it is \\boxed{4}, no, \\boxed{\\frac{10}{2}}</answer>", "5"
        )
        == all_right
    )
    assert grade(r1_zero, "\\boxed{4}</think> <answer>5</answer>", "5") == all_right
    assert grade(r1_zero, "a</think> <answer>4</answer> <answer>5</answer>", "5") == all_right
    assert grade(r1_zero, "a</think> <answer>5</answer> <answer>4</answer>", "5") == (
        1,
        0,
        False,
        False,
    )
    assert grade(r1_zero, "a</think> <answer>5</answer> <answer>6", "6") == (1, 0, False, True)
    assert grade(r1_zero, "a</think> <answer></answer>", "5") == (1, 0, False, False)
    assert grade(r1_zero, "5</think> <answer> </answer>", "5") == (1, 0, False, False)
    # Without the format there is no answer reward, but there may be the flexible verdict.
    for text in (
        "a</think><answer>5</answer>",
        "a <answer>5</answer>",
        "a</think> <answer>5",
        "\\boxed{5}",
        "it is 5.",
    ):
        assert grade(r1_zero, text, "5") == (0, 0, False, True)
    assert grade(r1_zero, "</answer></think> <answer>5", "5") == (0, 0, False, True)
    assert grade(r1_zero, "5 <answer>4</answer> 5", "5") == (0, 0, False, False)
    assert grade(r1_zero, "", "5") == (0, 0, False, False)


def test_question_only(evaluators):
    question_only = evaluators["question_only"]
    assert grade(question_only, "\\boxed{4} or \\boxed{5}.", "5") == (1, 1, True, True)
    assert grade(question_only, "\\boxed{5} or \\boxed{4}.", "5") == (1, 0, False, False)
    assert grade(question_only, "\\boxed{\\{1,\\frac{1}{2}\\}}", "1, 0.5") == (1, 1, True, True)
    last_is_not_balanced = "\\boxed{5} and \\boxed{6"
    assert grade(question_only, last_is_not_balanced, "5") == (1, 1, True, True)
    assert grade(question_only, "\\boxed{5", "5") == (0, 0, False, True)
    assert grade(question_only, "<answer>5</answer> 6", "5") == (0, 0, False, True)
    assert grade(question_only, "5", "5") == (0, 0, False, True)


def test_reasoning_answer(evaluators):
    reasoning_answer = evaluators["reasoning_answer"]
    completion = "<reasoning>a</reasoning>\n<answer>$\\frac12$</answer>"
    assert grade(reasoning_answer, completion, "0.5") == (1, 1, True, True)
    assert grade(reasoning_answer, completion + " ok", "0.5") == (0, 0, False, True)
    assert grade(reasoning_answer, completion + completion, "0.5") == (0, 0, False, True)


def test_parsed_and_reasons_in_details(evaluators, hasty):
    completions = [
        "</think> <answer>x+\\boxed{5}</answer>",
        "so 7.50 it is",
        "",
        "\\boxed{9^{9^{9^{9}}}}",
    ]
    golds = ["5", "5", "5", "7"]
    details = evaluators["r1_zero"].compute_rewards([""] * 4, completions, golds).details
    assert [detail["parsed"] for detail in details] == ["5", "7.50", None, "9^{9^{9^{9}}}"]
    gradings = [detail["grading"] for detail in details]
    assert gradings == ["equal", "different", "different", "timeout"]


def test_unknown_prompt():
    with pytest.raises(ValueError, match="not limerick"):
        get_evaluator("math", prompt="limerick")


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_hostile_input_is_wrong_and_does_no_harm(answer, grader, evaluators, hasty, monkeypatch):
    gold = "x+1" if "x" in answer else "7"
    completion = PROMPTS["r1_zero"].format_solution("", answer)
    assert grade(evaluators["r1_zero"], completion, gold)[2:] == (False, False)
    monkeypatch.undo()
    assert grader.grade("x+1", "1+x") == "equal"  # the grader still works


@pytest.mark.parametrize("prompt_name", ["question_only", "reasoning_answer"])
def test_megabytes_are_read_in_linear_time(prompt_name, evaluators):
    """As in the format r1_zero above."""
    for answer in HOSTILE.values():
        if len(answer) >= 10**6:
            completion = PROMPTS[prompt_name].format_solution("", answer)
            assert grade(evaluators[prompt_name], completion, "7")[2:] == (False, False)


@pytest.mark.slow
def test_what_python_prints_at_its_start_is_no_verdict(tmp_path, monkeypatch, capfd):
    """Such a line once was the first verdict, and each later verdict that of the answer before."""
    (tmp_path / "sitecustomize.py").write_text("print('equal')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    grader = MathGrader(seconds=60)
    assert grader.grade("x+1", "x") == "different"
    assert grader.grade("x+1", "1+x") == "equal"
    assert capfd.readouterr().out == ""


def test_a_killed_server_is_replaced(grader):
    os.kill(grader._server.pid, signal.SIGKILL)
    grader._server.wait()
    assert grader.grade("x+1", "1+x") == "equal"


def test_a_reply_never_answers_the_next_question(grader, monkeypatch):
    """A grader that is interrupted between question and reply forgets the reply that is under way.

    Otherwise it would take the old "equal" for the verdict on the next question.
    """
    send_bytes = grader._channel.send_bytes

    def interrupted(question):
        send_bytes(question)
        raise KeyboardInterrupt

    monkeypatch.setattr(grader._channel, "send_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grader.grade("x+1", "1+x")
    assert grader.grade("x+1", "x") == "different"


def test_a_server_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr(math_answers.sys, "executable", "/bin/false")
    with pytest.raises(ChildProcessError, match="is math-verify installed"):
        MathGrader().grade("x+1", "1+x")


OWNER = """
import json, sys
from grading.math_answers import MathGrader
grader = MathGrader()
assert "math_verify" not in sys.modules, "its libraries are for the server, not for those who ask"
grader._channel.send_bytes(json.dumps(["7", "9^{9^{9^{9}}}", 1]).encode())
print("asked", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["normally", "killed"])
def test_the_server_does_not_outlive_its_owner(end):
    """The server shares its owner's standard error, which ends only when both are gone."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdin=-1, stdout=-1, stderr=-1, text=True
    )
    assert owner.stdout.readline() == "asked\n"
    if end == "killed":
        owner.kill()
    assert owner.communicate("\n", timeout=120) == ("", "")


ANSWER = st.one_of(st.text(alphabet=r"x1+-*/^(){}[]|,.!=<\ ", max_size=30), st.text(max_size=100))


@settings(max_examples=100, deadline=None)
@given(answer=ANSWER)
def test_any_text_gets_a_verdict(answer, grader):
    """Every text equals itself, and what cannot be read harms no other verdict."""
    for gold in "x+1", "11":
        assert grader.grade(gold, answer) in ("equal", "different", "failed")
    assert (grader.grade(answer, answer) == "equal") == bool(answer.strip())
    assert grader.grade("x+1", "1+x") == "equal"
