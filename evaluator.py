r"""Rewards: how completions are scored. A reward is a function in a file of your own.

    def short(completions, answers, **columns):
        return [1 / (1 + len(text)) for text in completions]

`--evaluator my_rewards.py:short` trains on it, and `--evaluator gsm8k,my_rewards.py:short` on the
sum of both. FunctionEvaluator says what a function gets; one written for TRL works as it is.

Where an answer can be right, there are two verdicts beside the rewards, from the data set's own
evaluator or the one that --evaluator names. The strict one asks for the right answer in the
required format, the flexible one for the right answer anywhere.

Shapes: N completions, R rewards of each.
"""

import asyncio
import copy
import inspect
import math
import re
import threading
import traceback
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch
from math_verify import parse, verify
from torch import Tensor

import utils
from rl_datasets import last_boxed


@dataclass
class Rewards:
    """What an evaluator says of N completions.

    per_function: (N, R) float32, NaN where a reward is missing.
    details: N dicts for the transcript. Verdicts are "parsed" (the answer that was read, or None),
        "format" (whether the required format holds), "correct_strict" and "correct_flexible".
    """

    per_function: Tensor
    details: list[dict]


class RewardEvaluator(ABC):
    """Scores completions. A subclass names its rewards and defines `compute_rewards`."""

    reward_names: tuple[str, ...]
    reward_weights: tuple[float, ...] | None = None  # of each reward in the total; None: all 1
    optional: tuple[str, ...] = ()  # rewards that the total leaves out where they are missing
    formats: tuple[str, ...] = ()  # the prompt formats whose answers it reads, its default first

    @abstractmethod
    def compute_rewards(
        self, prompts: list[str], completions: list[str], answers: list[str], **columns
    ) -> Rewards:
        """The Rewards of N completions of N questions with N gold answers.

        prompts: the questions alone. Completions of one prompt are consecutive.
        columns: every other column of the data, as N values.
        """

    def total(self, rewards: Rewards) -> Tensor:
        """(N,): the weighted sum of each completion's rewards; NaN where one is missing."""
        weights = self.reward_weights or (1.0,) * len(self.reward_names)
        weighted = rewards.per_function * torch.tensor(weights)
        is_optional = torch.tensor([name in self.optional for name in self.reward_names])
        is_left_out = weighted.isnan() & is_optional
        totals = weighted.masked_fill(is_left_out, 0.0).sum(1)
        return totals.masked_fill(is_left_out.all(1), math.nan)

    def score(self, examples: list[dict], completions: list[str], **columns):
        """N total rewards, and N dicts of details in which each reward is "rewards/NAME".

        Random numbers have a seed of their own here, which depends on the completions: a reward
        that sets the random state does not change what is sampled next.
        """
        rows = []
        for example in examples:
            # Our solution lacks the answer: who asks for one wants the data's own column.
            made = {key: example[key] for key in example.keys() - {"row", "solution"}}
            rows.append(made | example.get("row", {}))
        names = set().union(*rows)
        columns = {name: [row.get(name) for row in rows] for name in names} | columns
        columns["prompts"] = [example["question"] for example in examples]
        columns["completions"] = completions
        columns["answers"] = columns["answer"] = [example["answer"] for example in examples]
        with utils.isolated_seed(zlib.crc32("".join(completions).encode("utf-8", "replace"))):
            rewards = self.compute_rewards(**columns)
        assert rewards.per_function.shape == (len(completions), len(self.reward_names))
        for detail, values in zip(rewards.details, rewards.per_function.tolist(), strict=True):
            for name, value in zip(self.reward_names, values, strict=True):
                detail[f"rewards/{name}"] = value
        return self.total(rewards).tolist(), rewards.details

    def check_gold(self, examples: list[dict]) -> None:
        """Raise ValueError for a gold answer that cannot be read. By default any can."""
        return


# --- Answers that are right or wrong --------------------------------------------------------------


class AnswerEvaluator(RewardEvaluator):
    """Scores each completion by itself, with verdicts."""

    def __init__(self, prompt: str | None = None, **context):
        self.prompt = prompt or self.formats[0]
        if self.prompt not in self.formats:
            formats = " and ".join(self.formats)
            raise ValueError(f"--evaluator reads {formats}, not {prompt}: change either flag")

    @abstractmethod
    def reward(self, completion: str, gold: str) -> tuple[list[float], dict]:
        """The R rewards of one completion, and its details with the verdicts."""

    def compute_rewards(self, prompts, completions, answers, **columns):
        scored = [self.reward(*pair) for pair in zip(completions, answers, strict=True)]
        rewards = torch.tensor([values for values, _ in scored])
        return Rewards(rewards, [detail for _, detail in scored])


TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def soft_format(text: str) -> bool:
    """Whether each of the four tags occurs exactly once and in order, with any text around them."""
    positions = [text.find(tag) for tag in TAGS]
    return positions == sorted(positions) and all(text.count(tag) == 1 for tag in TAGS)


def strict_format(text: str) -> bool:
    """Whether a text is <reasoning>...</reasoning><answer>...</answer> and white space only."""
    text = text.strip()
    between = text.partition("</reasoning>")[2].partition("<answer>")[0]
    is_whole = text.startswith("<reasoning>") and text.endswith("</answer>")
    return is_whole and soft_format(text) and not between.strip()


def tagged_answer(text: str) -> str | None:
    """What stands in the answer tags; None unless both occur exactly once and in order."""
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return None
    content, closing_tag, _ = text.partition("<answer>")[2].partition("</answer>")
    return content.strip() if closing_tag else None


DASHES = "-‐‑‒–—―−⁻₋➖﹘﹣－"  # all of which people write for a minus
# A number that is well written, with a sign, a currency, or both in any order. 1,00 is not one.
NUMBER = re.compile(
    rf"(?:[{DASHES}][$€£]?|[$€£][{DASHES}]?)?"
    r"(?=\.?[0-9])(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.[0-9]+)?%?"
)
# Anything that looks like one. In 10-5 the dash is no sign, so the last number there is 5.
ANY_NUMBER = re.compile(
    rf"(?:(?<![\w)])[{DASHES}][$€£]?|[$€£][{DASHES}]?)?(?:(?<![\w.])\.)?[0-9](?:[0-9.,]*[0-9])?%?"
)
LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,!])(?=[0-9])")  # 9{,}500, 9\,500 or 9,\!500


def to_number(text: str) -> Fraction | None:
    """The exact value of `-1,234.50` or the like, also with a $ or %; None of anything else."""
    text = LATEX_COMMA.sub(",", text)
    if len(text) > 50 or not NUMBER.fullmatch(text):
        return None
    return Fraction(re.sub(f"[{DASHES}]", "-", re.sub("[,$€£%]", "", text)))


def without_markup(text: str) -> str:
    r"""A short answer without the full stop, **, $...$ or \boxed{...} around it."""
    text = re.sub(r"\\(?=[$%])", "", text).lstrip("*$ ").rstrip("*$. ")
    return re.sub(r"^\\boxed\{(.*)\}$", r"\1", text)


def last_number(text: str) -> str | None:
    """The last number of a text as it is written there; None if there is no number."""
    numbers = ANY_NUMBER.findall(LATEX_COMMA.sub(",", text))
    return numbers[-1] if numbers else None


class GSM8kEvaluator(AnswerEvaluator):
    r"""Answers that are numbers, in the format <reasoning>...</reasoning><answer>...</answer>.

    correctness    2.0    What stands in the answer tags is a number that equals the gold answer.
    number_format  0.5    It is a number, and nothing is around it.
    strict_format  0.5    The text is the format and nothing else.
    soft_format    0.5    Each tag occurs once and in order, with any text around and between them.
    tag_count      0.125  For each of the four tags that occurs exactly once.

    Numbers are compared exactly. `$72`, `72.0` and `72%` are 72, and so are `72.`, `**72**`, `$72$`
    and `\boxed{72}`, but for number_format; `72 eggs` and `x = 72` are not. The strict verdict is
    strict_format and correctness, the flexible one that the last number of the text is right.
    """

    reward_names = ("correctness", "number_format", "strict_format", "soft_format", "tag_count")
    formats = ("reasoning_answer",)

    def check_gold(self, examples):
        for example in examples:
            gold = example["answer"]
            if to_number(gold.strip()) is None:
                raise ValueError(f"{example['id']}: {gold!r} is no number: use --evaluator math")

    def reward(self, completion, gold):
        target = to_number(gold.strip())
        answer = tagged_answer(completion)
        last = last_number(completion)
        number = None if answer is None else to_number(without_markup(answer))
        is_strict = strict_format(completion)
        is_correct = number is not None and number == target
        rewards = [
            2.0 * is_correct,
            0.5 * (answer is not None and to_number(answer) is not None),
            0.5 * is_strict,
            0.5 * soft_format(completion),
            0.125 * sum(completion.count(tag) == 1 for tag in TAGS),
        ]
        return rewards, {
            "parsed": last if answer is None else answer,
            "format": is_strict,
            "correct_strict": is_strict and is_correct,
            "correct_flexible": target is not None and to_number(last or "") == target,
        }


# --- Mathematics ----------------------------------------------------------------------------------

# Powers and factorials that take gigabytes, and approximations.
REFUSED = re.compile(
    r"\^\{?-?\d{4}|\^[^^]*\^[^^]*\^|\^\{[^{}]*\^|\*\*.*\*\*|\d{4}\)?!|binom.*\d{5}|\\approx|≈"
)
# A power such as x^2 or 10^{-3}. Where all powers are like this, none is the exponent of another.
PLAIN_POWER = re.compile(r"(?<=\w)\^(?:\d\d?|[a-z]|\{-?\w\w?\})(?![\d^])")
INEQUALITY = re.compile(r"[<>≤≥]|\\[lg](?:e|eq|t)(?![a-zA-Z])")
# What math-verify misreads, and how it reads it right: 4(3) would be 7.
REWRITTEN = (
    (r"\\;|~|\\,$|^\\\(|\\\)$", " "),
    (r"√(\d+)|\\sqrt(\d\d+)", r"\\sqrt{\1\2}"),
    (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
    ("∞", r"\\infty "),
    (r"(\d) (\d+)/(\d+)", r"\1\\frac{\2}{\3}"),
    (r"(?<=[\d)])(?=\(-?\d|\\binom)|(?<=\))(?=\\frac)", r"\\cdot "),
)
# An answer has none of these if the gold answer has none.
FOREIGN = re.compile(
    r"\.\d{6}|\d:\d|\d \d|!!|'|≠|\\(?:not|ne|neq|[lc]?dots)(?![a-zA-Z])"
    r"|hundred|thousand|[mbt]r?illion|dozen"
)
# Bases, large exponents: both have the same.
EXACT = re.compile(r"(?<=[\d)])_\{?(\d+)|\^\{?(-?(?:[2-9]\d|\d{3}))")
QUANTITY = re.compile(  # a number, and a unit with its exponent
    r"[\d.,]+\s*(?:\\(?:text|mbox|mathrm)\{\s*)?([a-zA-Z])[a-zA-Z]*\}?(\^\{?\d)?\}?"
)


def are_equal(gold: str, answer: str) -> bool:
    r"""Whether an answer equals the gold answer as mathematics; what cannot be read equals nothing.

    Plain numbers are compared exactly, everything else by math-verify with its time limits, as in
    TRL. Refused before that are bombs such as towers of exponents, an approximation, of which
    math-verify drops what follows the sign, single values for an inequality, and differences that
    math-verify does not see (`differ`).

    Of 166 wrong pairs that were tried it accepts 29: another case (x for X), a list for a tuple or
    a set of one for its element, an equation for its right side (k=n for n), a per cent sign, what
    can be read in two ways (1/2x, \frac123), and numbers that agree in hundreds of digits. Of 119
    right ones it misses 12, such as i^2 for -1 and x>2 for (2,\infty).
    """
    gold = gold.strip()
    answer = re.sub(r"^\*\*(.+)\*\*$", r"\1", re.sub(r"(?<!\.)\.(\*\*)?$", r"\1", answer.strip()))
    answer = re.sub(r"(?<!\.)\.$", "", answer)
    if gold == answer:
        return gold != ""
    numbers = (to_number(gold), to_number(answer))
    if None not in numbers:
        return numbers[0] == numbers[1]
    for pattern, replacement in REWRITTEN:
        gold = re.sub(pattern, replacement, gold)
        answer = re.sub(pattern, replacement, answer)
    words = [re.sub(r"\\(?:text|textbf|mbox)\{(.*)\}", r"\1", text) for text in (gold, answer)]
    if all(len(word) > 1 and word.isalpha() for word in words):
        return words[0].lower() == words[1].lower()
    without_powers = PLAIN_POWER.sub("", answer)
    risky = answer if "^" in without_powers else without_powers
    if REFUSED.search(risky) or not 0 < len(answer) <= 300 or differ(gold, answer):
        return False
    is_range = INEQUALITY.search(answer) or re.search(r"[(\[]", answer)
    if INEQUALITY.search(gold) and not is_range:
        return False
    # Its time limits are signals, which no thread but the main one can have.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    try:
        parsed = [parse(f"\\boxed{{{text}}}", parsing_timeout=limit) for text in (gold, answer)]
        return verify(*parsed, timeout_seconds=limit)
    except Exception:  # math-verify raises nothing narrower
        return False


def differ(gold: str, answer: str) -> bool:
    """Whether answers differ in a way that math-verify does not see."""
    if FOREIGN.search(answer) and not FOREIGN.search(gold):
        return True
    if set(EXACT.findall(gold)) != set(EXACT.findall(answer)):
        return True
    quantities = [QUANTITY.fullmatch(text) for text in (gold, answer)]
    if all(quantities) and quantities[0].groups() != quantities[1].groups():
        return True
    if re.fullmatch(r"-?[\d.]+[a-z]", gold) and to_number(answer) is not None:
        return True  # math-verify takes the t of 3t for a unit
    left, equals, _ = answer.partition("=")
    return bool(equals) and "=" not in gold and to_number(left.strip()) is not None  # 6 = 5


class MathEvaluator(AnswerEvaluator):
    r"""Answers in LaTeX or words, in the format that `prompt` asks for, compared by `are_equal`.

    format  1 if the completion has the format. It is only logged.
        r1_zero           `</think> <answer>`, and `</answer>` after it. The answer is what follows
                          the last `<answer>`; if that holds a \boxed{}, the content of the last.
        question_only     A balanced \boxed{}, of which the last is the answer.
        reasoning_answer  The strict format of GSM8kEvaluator; the answer is found as for r1_zero.
    answer  1 if the completion has the format, and its answer is right: the strict verdict.

    Without the format, the flexible verdict is about the last \boxed{}, otherwise what follows the
    last <answer>, otherwise the last number. Where the gold answer is a number, the last number of
    the text may also be it.
    """

    reward_names = ("format", "answer")
    reward_weights = (0.0, 1.0)
    formats = ("r1_zero", "question_only", "reasoning_answer")

    def reward(self, completion, gold):
        boxed = last_boxed(completion)
        _, opening_tag, rest = completion.rpartition("<answer>")
        tagged, closing_tag, _ = rest.partition("</answer>")
        answer = None
        if self.prompt == "question_only":
            has_format = boxed is not None
            answer = boxed
        elif self.prompt == "r1_zero":
            has_format = "</answer>" in completion.partition("</think> <answer>")[2]
        else:
            has_format = strict_format(completion)
        if has_format and closing_tag and answer is None:
            answer = last_boxed(tagged) or tagged.strip()
        is_answered = answer is not None
        if answer is None:
            answer = boxed
        if answer is None:
            answer = tagged.strip() if opening_tag else last_number(completion)
        gold = last_boxed(gold) or gold
        is_equal = are_equal(gold, answer or "")
        is_correct = is_answered and is_equal
        number = to_number(gold.strip())
        ends_with_it = number is not None and to_number(last_number(completion) or "") == number
        return [float(has_format), float(is_correct)], {
            "parsed": answer,
            "format": has_format,
            "correct_strict": is_correct,
            "correct_flexible": is_equal or ends_with_it,
        }


# --- Functions of your own ------------------------------------------------------------------------


class FunctionEvaluator(RewardEvaluator):
    """A reward function of the user's own, called by keyword as TRL calls them; it may be async.

    It gets N values of what it asks for by name, or everything if it ends in **columns: `prompts`
    (the questions alone), `completions` (texts), `answers` (the gold answers, also `answer`), every
    column of the data, and `completion_ids`. It returns N numbers. None is a reward that does not
    apply: the total leaves it out, and a completion without any reward is not trained on.
    """

    def __init__(self, function: Callable, **context):
        self.function = function
        self.reward_names = (getattr(function, "__name__", type(function).__name__),)
        self.optional = self.reward_names

    def compute_rewards(self, **columns):
        num_completions = len(columns["completions"])
        parameters = inspect.signature(self.function).parameters
        for name, p in parameters.items():
            is_needed = p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
            if is_needed and name not in columns:
                raise ValueError(f"there is no column {name}, but {', '.join(sorted(columns))}")
        if not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
            columns = {name: columns[name] for name in parameters if name in columns}
        # A copy, since what a function changes is not for training, nor for the next one.
        returned = self.function(**copy.deepcopy(columns))
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        values = [math.nan if value is None else float(value) for value in returned]
        if len(values) != num_completions or math.inf in map(abs, values):
            raise ValueError(f"it must return {num_completions} finite numbers, not {values!r:.80}")
        return Rewards(torch.tensor(values).unsqueeze(1), [{} for _ in values])


class SumOfRewards(RewardEvaluator):
    """Several evaluators, whose rewards are added up.

    verdicts: the data set's own evaluator, of which only the verdicts are wanted; or None.
    """

    def __init__(self, evaluators: list[RewardEvaluator], verdicts: AnswerEvaluator | None):
        self.evaluators = evaluators
        self.verdicts = verdicts
        self.reward_names = ()
        self.reward_weights = ()
        for evaluator in evaluators:
            self.reward_names += evaluator.reward_names
            self.reward_weights += evaluator.reward_weights or (1.0,) * len(evaluator.reward_names)
            self.optional += evaluator.optional
        if len(set(self.reward_names)) < len(self.reward_names):
            raise ValueError(f"--evaluator: two rewards have one name ({self.reward_names})")

    def check_gold(self, examples):
        for evaluator in self.evaluators:
            evaluator.check_gold(examples)

    def compute_rewards(self, **columns):
        scored = [evaluator.compute_rewards(**columns) for evaluator in self.evaluators]
        details = [{} for _ in columns["completions"]]
        if self.verdicts is not None:
            details = self.verdicts.compute_rewards(**columns).details
        for rewards in scored:
            details = [row | more for row, more in zip(details, rewards.details, strict=True)]
        return Rewards(torch.cat([rewards.per_function for rewards in scored], dim=1), details)


# --- By name --------------------------------------------------------------------------------------

EVALUATORS = {"gsm8k": GSM8kEvaluator, "math": MathEvaluator}


def get_evaluator(
    names: str, own: str | None = None, golds: Iterable[str] = (), **context
) -> RewardEvaluator:
    """The evaluator of these names, such as "gsm8k" or "gsm8k,my_rewards.py:short".

    own: the name of the data set's own evaluator, which gives the verdicts if no other does.
    golds: the data's gold answers. If one is no number, the verdicts are those of `math`.
    context: what evaluators need of a run: prompt (the name of the format), config, and frozen,
        which gives its (frozen model, tokenizer).
    """
    evaluators = [find_evaluator(name)(**context) for name in names.split(",")]
    are_numbers = all(to_number(gold.strip()) is not None for gold in golds)
    prompt = context.get("prompt", "reasoning_answer")
    if own == "gsm8k" and not (are_numbers and prompt == "reasoning_answer"):
        own = "math"  # which reads the other formats and words, and numbers too
    verdicts = None
    gives_verdicts = any(isinstance(evaluator, AnswerEvaluator) for evaluator in evaluators)
    if not gives_verdicts and prompt in EVALUATORS.get(own, RewardEvaluator).formats:
        verdicts = EVALUATORS[own](**context)
    if len(evaluators) == 1 and verdicts is None:
        return evaluators[0]
    return SumOfRewards(evaluators, verdicts)


def find_evaluator(name: str) -> Callable[..., RewardEvaluator]:
    """What makes the evaluator of this name, or of the class or function in FILE.py:NAME."""
    if name in EVALUATORS:
        return EVALUATORS[name]
    if ":" not in name:
        names = ", ".join(EVALUATORS)
        raise ValueError(f"--evaluator {name}: use one of {names}, or my_rewards.py:FUNCTION")
    found = utils.import_from_file(name, "--evaluator")
    return found if isinstance(found, type) else partial(FunctionEvaluator, found)


def try_functions(names: str, examples: list[dict]) -> None:
    """Call each reward function among these names once, with completions of two examples.

    Raises ValueError, in one line, for one that fails, as those written for messages do.
    """
    gold = examples[0]["answer"]
    right = f"<reasoning>\nSo it is {gold}.\n</reasoning>\n<answer>\n{gold}\n</answer>"
    completions = [right, "I do not know."]
    for name in names.split(","):
        make_evaluator = find_evaluator(name)
        if isinstance(make_evaluator, type):
            continue
        try:
            make_evaluator().score(examples, completions, completion_ids=[[1, 2], [1]])
        except Exception as error:  # whatever the user's code raises
            line = traceback.extract_tb(error.__traceback__)[-1]
            hint = ""
            if isinstance(error, TypeError) and "indices" in str(error):
                hint = "; prompts and completions are texts, not messages"
            raise ValueError(
                f"--evaluator {name} fails with {error!r} in line {line.lineno} of {line.filename}"
                f"{hint}"
            ) from error


# --- Not in the copy for a candidate --------------------------------------------------------------
# Stories.

from grpo.metrics import share_of_distinct  # noqa: E402


class CreativeWritingEvaluator(RewardEvaluator):
    """Stories that continue an opening line, scored by a judge. There are no verdicts.

    judge       The mean of the judge's grades, from 1 to 5; NaN where it gave none. It is 0, and no
                judge is asked, for a text that is no story (`why_no_story`).
    is_story    1 for a text that the judge is shown. It is only logged.
    distinct_2  The share of the text's word pairs that are distinct (arXiv:1510.03055), logged.
    """

    reward_names = ("judge", "is_story", "distinct_2")
    reward_weights = (1.0, 0.0, 0.0)

    def __init__(self, judge=None, config=None, frozen=None, **context):
        if judge is None and not hasattr(config, "judge_model"):
            raise ValueError("the evaluator creative needs a judge, which only main.py has")
        from grpo.judges import get_judge  # no other evaluator needs it

        self.judge = judge or get_judge(config, frozen)
        if judge is None:  # a wrong key is noticed now, and not when a story has come
            (score,), (detail,) = self.judge.score(["The lamp went out."], ["Mara lit it again."])
            name = config.judge_model or "this run's model before training"
            print(f"judge: {name}, which gives {score:.2g} to a first story")
            if "judge_error" in detail:
                raise ValueError(f"the judge {name} gives no score: {detail['judge_error']}")

    def compute_rewards(self, prompts, completions, answers, **columns):
        rewards = torch.zeros(len(completions), 3)
        details = [{"no_story": why_no_story(text)} for text in completions]
        stories = [i for i, detail in enumerate(details) if detail["no_story"] is None]
        scores, judge_details = self.judge.score(
            [prompts[i] for i in stories], [completions[i].strip() for i in stories]
        )
        for i, score, judge_detail in zip(stories, scores, judge_details, strict=True):
            rewards[i, :2] = torch.tensor([score, 1.0])
            details[i] |= judge_detail
        rewards[:, 2] = torch.tensor([share_of_distinct([text], 2) for text in completions])
        return Rewards(rewards, details)


def why_no_story(text: str) -> str | None:
    """Why a text is no story, for which no judge need be asked; None for a story."""
    if len(re.findall(r"\w+", text)) < 10:
        return "fewer than ten words"
    if share_of_distinct([text], 3) < 0.6:
        return "repeats itself"
    # Of course! or Title: The Lamp, unquoted; but not Oh no! or Monday: It rained.
    if re.match(r"(?is)\s*(?:(?:sure|certainly|of course)!|title:)|.*:\s*\Z", text):
        return "opens like a reply"
    return None


EVALUATORS["creative"] = CreativeWritingEvaluator
