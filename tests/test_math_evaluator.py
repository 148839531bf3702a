"""MATH rewards: the format of each prompt, and which answers are equal as mathematics."""

import re
import resource

import pytest

from evaluator import MathEvaluator, are_equal, get_evaluator
from grpo import jsonl
from rl_datasets import PROMPTS

# Pairs of `gold | answer`; four spaces separate them. EQUAL and MISSED are right answers.
EQUAL = r"""
    1<x<2 | (1,2)    x>2 | (2,\infty)
    \frac{1}{2} | \frac12    \frac12 | 0.5    0.5 | 1/2    \dfrac{3}{4} | 0.75
    -\frac{1}{2} | \frac{-1}{2}    .0000672 | 0.0000672    1,000 | 1000    1{,}000 | 1000
    10,\!080 | 10080    11,\! 111,\! 111,\! 100 | 11,111,111,100    1\frac{4}{5} | 9/5
    137 \frac{1}{2} | 137.5    -1\frac12 | -1.5    2^{10} | 1024    5! | 120    \binom{5}{2} | 10
    \log_2 8 | 3    x^2+1 | 1+x^2    x^{10} | x^10    (a+5)(b+2) | ab+2a+5b+10    2k+2 | 2(k+1)
    p - q | -(q-p)    0.5x | \frac{x}{2}    0.1x | \frac{x}{10}
    \frac{11+9a}{20} | \frac{9a+11}{20}    \cot x | \frac{1}{\tan x}    6 - 5i | -5i+6
    2\sqrt{5} | \sqrt{20}    \frac{\sqrt{3}}{3} | \frac{1}{\sqrt{3}}    \sqrt{2}/2 | 2^{-1/2}
    3\sqrt{13} | 3*sqrt(13)    18+2\pi | 2π+18    \frac{20000}{\pi} | 20000/\pi    90^\circ | 90
    90^\circ | 90 degrees    5.4 \text{ cents} | 5.4    12 cm | 12\text{ centimeters}
    864 \mbox{ inches}^2 | 864 \text{ in}^2    288 \pi | 288\pi \text{ cubic inches}
    \frac{270}7\text{ degrees} | \frac{270}{7}    \$32,\!348 | 32348    \$36 | $36    50\% | 50
    42 | $42$.    3, 5, 7 | 7,5,3    1,-2 | -2 \text{ or } 1    \{1,2,3\} | \{3,2,1\}
    \{1,2\} | 1 and 2    1 \pm \sqrt{19} | 1+\sqrt{19}, 1-\sqrt{19}
    \{1\pm\sqrt{5},-2\} | \{-2, 1-\sqrt{5}, 1+\sqrt{5}\}
    \left( 3, \frac{\pi}{2} \right) | (3, \pi/2)    (6,31,-1) | \left(6, 31, -1\right)
    (1,2) | (x,y) = (1,2)    (1,200) | (1, 200)    (3,4] | \left(3, \frac{8}{2}\right]
    x \in [-2,7] | [-2, 7]    (-\infty, 2) \cup (3, \infty) | (3,+\infty)\cup(-\infty,2)
    \begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix} | \begin{bmatrix} -\frac13 \\ \frac23 \end{bmatrix}
    x=5 | 5    x=1,y=2 | y=2, x=1    x^2 | f(x) = x^2    y = 2x + 3 | 2x - y + 3 = 0
    5x - 7y + 11z + 4 = 0 | 7y = 5x + 11z + 4    \text{Evelyn} | evelyn
    \text{even} | \textbf{Even}    \text{(C)} | C    4210_{5} | 4210_5    0 | 0\%    2n-1 | k=2n-1
    2n-1 | a_n = 2n-1    \sqrt2 \approx 1.41 | \sqrt{2}
    \frac{180}{\pi} \approx 57.3^\circ | 180/\pi    \frac{n!}{(n-2)!} | n^2-n
    1+\sqrt{2} | \sqrt{3+2\sqrt{2}}    \sqrt{2}+\sqrt{3} | \sqrt{5+2\sqrt{6}}
    \frac{1}{\sqrt[3]{2}-1} | 1+\sqrt[3]{2}+\sqrt[3]{4}
    \sin\frac{\pi}{12} | \frac{\sqrt6-\sqrt2}{4}
    (2+\sqrt{3})^{10} | \frac{1}{(2-\sqrt{3})^{10}}
    \frac{\pi}{2}(1+\sqrt2) | \frac{\pi\sqrt{3+2\sqrt2}}{2}    \ln 12 | \ln 3+2\ln 2
    \frac{\pi}{4} | \arctan(1/2)+\arctan(1/3)    \sin 2x | 2\sin x\cos x
    \frac{x^2-1}{x-1} | x+1    2^{n+1} | 2\cdot 2^n    1,-2 | x=1 \text{ or } x=-2    {5} | 5
    \sqrt{x^2} | |x|    10\,080 | 10080    3+4i | 4i+3    1\pm i | 1-i, 1+i
    \frac{-1+i\sqrt3}{2} | -\frac12+\frac{\sqrt3}{2}i    1,234.5 \text{ cm} | 1234.5
    2/3 | \text{2/3}    x^3-x^2+x^4 | x^4 + x^3 - x^2    x^2+y^2+z^2=1 | z^2+x^2+y^2=1
    1800 | 2^3\cdot 3^2\cdot 5^2
"""

MISSED = r"""
    1 4/5 | 1.8    12 | 4(3)    3\sqrt{13} | 3√13    \sqrt{51} | \sqrt51    \frac{\pi}{2} | pi/2
    15\mbox{ cm}^2 | 15 square centimeters    \$18.90 | 18.9 dollars    (2,\infty) | (2, ∞)
    (2,\infty) | x > 2    x \in [-2,7] | -2 \le x \leq 7
    (-\infty, 2) \cup (3, \infty) | x<2 \text{ or } x>3    \sqrt2 | \sqrt2≈1.41    6 | (2)(3)
    -1 | i^2    2i | (1+i)^2    -i | \frac{1}{i}    5 \text{ cm} | \(5\;\text{cm}\)
    3\pi | 3~\pi\,    617 | 1,234/2    (-\infty,1)\cup(2,\infty) | x<1 or x>2
    5 | 5 miles per hour
"""

# NOT_EQUAL and ACCEPTED are wrong answers.
NOT_EQUAL = r"""
    1<x<2 | 1,2    1<x<2 | \{1,2\}    x^2<4 | \pm 2
    1/3 | 0.333    3.21 | 3.2    3 | 3.0000001    5 | -5    \frac{1}{2} | -\frac{1}{2}
    \frac{1}{2} | 2    1 | \frac{0}{0}    10 | \frac{10}{0}    2\frac{1}{2} | 1    12 | 1 2
    12 | 21    2^{10} | 210    1,234 | 1, 234    x^2+1 | x^2-1    x-1 | 1-x    2x | x^2    x | x1
    (a+b)^2 | a^2+b^2    \sqrt{x^2} | x    \frac{x}{2} | 1/2x    \sqrt{13} | \sqrt{1}3
    \sin^2 x | \sin x^2    \log_2 x | \log_3 x    \ln x | \log x    f(x) | g(x)    6-5i | 6+5i
    6-5i | 6-5    2\pi | 2\pi r    \infty | -\infty    (1,2) | (2,1)    (1,2) | (1,-2)
    (1,2) | [1,2]    (1,2,3) | (1,2)    (3,4] | [3,4)    (3,4] | (3,4)    (2,\infty) | [2,\infty)
    (2,\infty) | (-\infty,2)    (2,\infty) | x \ge 2    x > 2 | y > 2    x > 2 | x < 2
    x \in [-2,7] | -2 < x < 7    (-\infty, 2) \cup (3, \infty) | (-\infty, 2] \cup (3, \infty)
    (0,9) \cup (9,36) | (0,36)    (1,2) \cup (3,4) | (1,2),(3,4)    1,2 | 1,2,3    5 | \pm 5
    5 | 5 or 6    5 | 5, 6    1 \pm \sqrt{19} | 1+\sqrt{19}    5 | 5 million    5 | 5 dozen
    x=5 | y=5    x=1,y=2 | x=2,y=1    y=2x+3 | y=2x-3    y=2x | x=2y    x^2=4 | x=2
    \text{even} | \text{odd}    \text{even} | \text{not even}    \text{(C)} | \text{(B)}
    7 | seven    0 | \text{no}
    \begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 2 \\ 1 \end{pmatrix}
    \begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 1 & 2 \end{pmatrix}
    \begin{pmatrix} 1 \\ 2 \end{pmatrix} | (1,2)
    \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}
    (2,1] | 1\le x>2    (1,2] | 1\ge x<2    0.5 | 0.5\%    2n-1 | k=2n-1=3
    \sqrt2 \approx 1.41 | 1.41    5 | x \approx 5    I | i    i | i^2    3+4i | 3-4i    i | i_2
    0.333 | 0.333...    0.1 | 0,100    \frac{1}{2}\text{abcd} | \frac{12}{}\text{abcd}
    x \in [1,2] | y \in [1,2]    0 | 10^{-2000}    0 | 2E-7    2 | 1{2}    x > 2 | x \ge 2
    2x+3 | 3x+2    2\ln x | \ln x^2    \pi | \frac{22}{7}    \sqrt{2} | \frac{577}{408}
    \sqrt{2}+\sqrt{3} | \pi    640320^3+744 | e^{\pi\sqrt{163}}    10^{400} | \sqrt{10^{800}+1}
    \pi | \pi+e^{-1000}    1 | \tanh(100)    1 | \cos(10^{-30})    x | x+10^{-60}
    \ln x | \ln(x+10^{-60})    1 | 1+i\cdot 10^{-60}    1,2 | 1<x<2    \pm 2 | x^2<4
    \sqrt2 | \sqrt2 \approx 7    5 | 5 \approx 6    (1,2) | 1<x<2    \{1,2\} | 1<x<2
"""

ACCEPTED = r"""
    \frac13 | 0.33333333333333333333    \pi | 3.14159265358979    \sqrt{2} | 1.41421356237
    \sqrt2 | \sqrt2+10^{-30}    7 | 4(3)    -\frac{32}{5} | (-2)\frac{12}{5}-2    x | X
    3R^2 | 3r^2    Rr^2 | rR^2    \frac{1}{2x} | 1/2x    \frac{1}{23} | \frac123    (1,2) | 1,2
    (1,2) | \{1,2\}    1,1,2 | 1,2,2    \{1\} | 1    5 \text{ cm} | 5 m
    5 \text{ cm} | 5 \text{ m}    15\mbox{ cm}^2 | 15 \text{ cm}    50\% | 0.50    90^\circ | 90\%
    52_8 | 52    52_8 | 52_9    x=1,y=2 | 2,1    east | seat    2n-1 | n=2n-1    n | k=n
    1,2 | x=1,y=2    abc | ABC    no | on    E | e    0.333 | 0.333\ldots    720 | 3!!
    5 | (2)(3)    5 | \frac{4}{2}3    13 | 3\binom{5}{2}    55 | \sum_{k=1}^{10}k
    (1,2),(3,4) | \{1,2\},\{3,4\}    f(x) | f'(x)    6.5 | [6.5]    1 | 1\%    5\text{ m} | 5m
    3 | 1 2    \frac{1}{2} | 1:2    20 | (5)_{2}    3 | \sqrt13    5 | \max(3,5)
    \$5 | 5\text{ cm}    5 | \not= 5    -2 | \begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}
    10^{20} | \sqrt{10^{40}+1}    10^{40} | \sqrt{10^{80}+1}    \sqrt[3]{10^{90}+1} | 10^{30}
    \sqrt{2} | \sqrt{2}+10^{-70}    2^{-200} | 3^{-200}    10^{-50} | 10^{-51}
    \pi | \pi+10^{-60}    10^{-30} | \sin(10^{-30})    x^2 | x^2+e^{-200}
    y=2x+3 | y=2x+3+10^{-60}    (0,\infty) | (0,\infty]    \infty | \infty+1
"""

# Each of these would hang, exhaust the memory or overflow a stack in a computer algebra system.
HOSTILE = [
    "9^{9^{9^{9}}}",
    "9^(9^(9^9+1))",
    "((((9^99)^99)^99)^99)^99",
    "999999999!",
    "(x+1)^{99999}",
    r"(1+\sqrt{2})^{99999999}",
    "+".join(rf"\sqrt[{n}]{{{n}}}" for n in range(2, 30)),
    r"\binom{99999999}{4999999}",
    r"\frac{" * 40 + "1" + "}{2}" * 40,
    r"\sqrt{2+" * 60 + "x" + "}" * 60,
    "(" * 200 + "7" + ")" * 200,
    "9**9**9**9",
    r"\boxed{" * 150_000,
    "9" * 10**6,
    "x\0+1",
    "x+\ud800",
]


def pairs(table):
    """The (gold, answer) pairs of a table."""
    texts = re.split(r"\n| {4}", table)
    return [tuple(text.strip().split(" | ")) for text in texts if text.strip()]


def test_how_often_answers_are_accepted_and_missed():
    """What math-verify makes of these pairs; the docstring of are_equal has the numbers."""
    accepted = [are_equal(*pair) for pair in pairs(EQUAL) + pairs(MISSED)]
    assert accepted == [True] * len(pairs(EQUAL)) + [False] * len(pairs(MISSED))
    assert len(pairs(MISSED)) == 21
    assert len(accepted) == 119
    accepted = [are_equal(*pair) for pair in pairs(NOT_EQUAL) + pairs(ACCEPTED)]
    assert accepted == [False] * len(pairs(NOT_EQUAL)) + [True] * len(pairs(ACCEPTED))
    assert len(pairs(ACCEPTED)) == 61
    assert len(accepted) == 166


def test_hostile_input_is_wrong_and_takes_little_memory():
    """Time is bounded by math-verify, which gives up after seconds."""
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for answer in HOSTILE:
        assert not are_equal("7", answer)
        assert not are_equal("x+1", answer)
    for gold, answer in ("", ""), ("5", ""), (" ", "$$"), (str(2**53 + 1), str(2**53)):
        assert not are_equal(gold, answer)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before < 500_000  # kB


@pytest.mark.parametrize("prompt_name", ("r1_zero", "question_only", "reasoning_answer"))
def test_every_gold_answer_of_math500_equals_itself(prompt_name, data_folder):
    rows = jsonl.read(data_folder / "data" / "math" / "math500.jsonl")
    evaluator = get_evaluator("math", prompt=prompt_name)
    for i, gold in enumerate(row["answer"] for row in rows):
        template = ("%s", r"\boxed{%s}", r"$\boxed{ %s }$.")[i % 3]
        answer = template.replace("%s", gold)
        completion = PROMPTS[prompt_name].format_solution("So \\boxed{1}.", answer)
        rewards, details = evaluator.reward(completion, gold)
        assert rewards == [1, 1], (gold, answer)
        assert details["correct_strict"] and details["correct_flexible"]


# A completion | its gold answer | format, strict and flexible verdict
FORMATS = {
    "r1_zero": r"""
        a</think> <answer>5</answer> | 5 | 1 1 1
        a</think> <answer>\n\boxed{5}\n</answer> and 6 | 5 | 1 1 1
        a</think> <answer>it is \boxed{4}, no, \boxed{\frac{10}{2}}</answer> | 5 | 1 1 1
        \boxed{4}</think> <answer>5</answer> | 5 | 1 1 1
        a</think> <answer>5</answer> <answer>4</answer> | 5 | 1 0 0
        a</think> <answer>5</answer> <answer>6 | 6 | 1 0 1
        5</think> <answer> </answer> | 5 | 1 0 0
        a</think><answer>5</answer> | 5 | 0 0 1
        a</think> <answer>5 | 5 | 0 0 1
        \boxed{5} | 5 | 0 0 1
        it is 5. | 5 | 0 0 1
        </answer></think> <answer>5 | 5 | 0 0 1
        5 <answer>4</answer> 5 | 5 | 0 0 0
        none | 5 | 0 0 0""",
    "question_only": r"""
        \boxed{4} or \boxed{5}. | 5 | 1 1 1
        \boxed{5} or \boxed{4}. | 5 | 1 0 0
        \boxed{\{1,\frac{1}{2}\}} | 1, 0.5 | 1 1 1
        \boxed{5} and \boxed{6 | 5 | 1 1 1
        \boxed{5} | \boxed{5} | 1 1 1
        \boxed{5 | 5 | 0 0 1
        <answer>5</answer> 6 | 5 | 0 0 1
        5 | 5 | 0 0 1""",
    "reasoning_answer": r"""
        <reasoning>a</reasoning>\n<answer>$\frac12$</answer> | 0.5 | 1 1 1
        <reasoning>a</reasoning>\n<answer>5</answer> ok | 5 | 0 0 1
        <reasoning>a</reasoning>\n<answer>6</answer> | So it is \boxed{6}. | 1 1 1
        <reasoning>a</reasoning>\n<answer>6</answer> | 5 | 1 0 0""",
}


@pytest.mark.parametrize("prompt_name", FORMATS)
def test_formats_and_verdicts(prompt_name):
    evaluator = MathEvaluator(prompt=prompt_name)
    for row in FORMATS[prompt_name].strip().splitlines():
        completion, gold, expected = row.strip().split(" | ")
        rewards, details = evaluator.reward(completion.replace(r"\n", "\n"), gold)
        verdicts = [rewards[0], rewards[1], details["correct_flexible"]]
        assert verdicts == [int(verdict) for verdict in expected.split()], row
        assert details["format"] == rewards[0]
        assert details["correct_strict"] == rewards[1]
    # The total reward is that of the answer alone.
    example = {"question": "", "answer": "5"}
    assert evaluator.score([example], [r"</think> <answer>4</answer> \boxed{4}"])[0] == [0]
