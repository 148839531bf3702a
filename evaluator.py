"""Rewards: how completions are scored. A reward is a function, or a class where it needs state.

    def reward(completions, answers, **columns) -> list[float]

`--evaluator my_rewards.py:reward` trains on such a function. A class is for a reward that asks a
judge, or that gives verdicts; those of the project are in EVALUATORS.

Where a completion can be right or wrong, an evaluator gives two verdicts side by side. The strict
verdict asks for the required format and for the right answer in it. The flexible verdict asks for
the right answer wherever it stands. Much of what training seems to gain is only format: the two
verdicts show it.

In shapes and docstrings, N is the number of completions and R the number of rewards.
"""

import inspect
import math
import numbers
import runpy
import traceback
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import torch

from config import GRPOConfig
from grading import extraction
from grading.math_answers import MathGrader
from judges import story_rules
from judges.judges import check_judge_flags, get_judge
from judges.rating import GRADES, Rubric


class RewardError(ValueError):
    """A reward is not what it must be. The message names the reward."""


# In float32, greater rewards lose the differences between them, from which a model learns.
MAX_REWARD = 1e6
VERDICTS = ("format", "correct_strict", "correct_flexible")


@dataclass
class Rewards:
    """What an evaluator says of N completions.

    per_function: (N, R) float32, one column per reward; NaN is a reward that could not be given.
    details: N dicts, which become columns of the records. Where there are verdicts, they have
        "parsed" (the final answer that was read, or None), "format" (whether the required format
        holds), "correct_strict" and "correct_flexible" (the two verdicts). Accuracy is logged then.
    counts: further numbers to be logged, which add up over several processes.
    means: further numbers to be logged, of which the mean over processes is taken.
    """

    per_function: torch.Tensor
    details: list[dict]
    counts: dict[str, int] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)


class RewardEvaluator:
    """Rewards completions. A subclass names its rewards and defines `compute_rewards` or `reward`.

    Its __init__ takes from the context of `get_evaluator` what it needs, and **context besides.
    """

    reward_names: tuple[str, ...]
    # The weight of each reward in the total. All are 1 unless a subclass says so.
    reward_weights: tuple[float, ...]
    # Whether compute_rewards has an argument `examples`, and is therefore given them.
    takes_examples: bool

    def __init__(self, **context):
        pass

    def __init_subclass__(cls):
        # The argument must have this name: **kwargs alone does not ask for examples.
        cls.takes_examples = "examples" in inspect.signature(cls.compute_rewards).parameters
        # vars holds what the subclass itself defines, without the names and weights it inherits.
        if "reward_names" in vars(cls) and "reward_weights" not in vars(cls):
            cls.reward_weights = (1.0,) * len(cls.reward_names)

    @classmethod
    def check_flags(cls, config, prompt: str) -> None:
        """Raise ValueError, before anything is loaded, for settings that do not suit it.

        prompt: the name of the prompt format.
        """

    def check_gold(self, *splits: list[dict]) -> None:
        """Raise ValueError, with its place, for an example whose gold answer cannot be read."""
        for split in splits:
            for example in split:
                try:
                    self.read_gold(example["answer"])
                except ValueError as error:
                    # An example that was not read from a file has only an id.
                    place = example.get("file_and_row") or example["id"]
                    raise ValueError(f"{place}: {error}") from error

    def read_gold(self, answer: str) -> object:
        """Return the gold answer in the form that this evaluator compares.

        Raises ValueError if it cannot be read.
        """
        return answer

    def compute_rewards(
        self, prompts: list[str], completions: list[str], answers: list[str]
    ) -> Rewards:
        """Return the Rewards of N completions of N prompts with N gold answers.

        prompts: the questions as the data set has them, without the format in which a model gets
            them. Where several completions share a prompt, it is repeated.

        A subclass may add an argument `examples`. It is then given the N examples of the data set,
        each with its "row", which has every column as the data set has it (rl_datasets.py).

        A subclass defines this method, or `reward`.
        """
        returned = [
            self.reward(completion, answer)
            for completion, answer in zip(completions, answers, strict=True)
        ]
        try:
            matrix = self.reward_matrix([completion_rewards for completion_rewards, _ in returned])
        except (TypeError, ValueError, RuntimeError) as error:
            raise RewardError(
                f"{type(self).__name__}: reward must return a list of numbers"
                f" ({', '.join(self.reward_names)}) and a dict of details: {error}"
            ) from error
        return Rewards(matrix, [details for _, details in returned])

    def reward(self, completion: str, gold: str) -> tuple[list[float], dict]:
        """Return the list of R rewards of one completion, and the dict of its details."""
        raise RewardError(f"{type(self).__name__} must define compute_rewards or reward")

    def reward_matrix(self, reward_rows: list[list[float]]) -> torch.Tensor:
        """Return the (N, R) matrix of N lists of rewards, which has R columns even for N = 0."""
        matrix = torch.tensor(reward_rows, dtype=torch.float32)
        return matrix.view(len(reward_rows), len(self.reward_names))

    def compute_checked_rewards(self, examples: list[dict], completions: list[str]) -> Rewards:
        """Return compute_rewards(...) of N completions of N examples, of which it gets copies.

        Raises RewardError if that is not what Rewards promises.
        """
        questions = [example["question"] for example in examples]
        answers = [example["answer"] for example in examples]
        arguments = {}
        if self.takes_examples:
            arguments["examples"] = [deepcopy(example) for example in examples]
        rewards = self.compute_rewards(questions, list(completions), answers, **arguments)
        name = type(self).__name__
        values = getattr(rewards, "per_function", None)
        if not isinstance(values, torch.Tensor):
            raise RewardError(
                f"{name}: compute_rewards must return Rewards(a tensor, a list of dicts),"
                f" not {rewards!r:.80}"
            )
        shape = (len(completions), len(self.reward_names))
        if not values.is_floating_point() or values.shape != shape:
            raise RewardError(
                f"{name}: per_function must be floats {shape},"
                f" not {values.dtype} {tuple(values.shape)}"
            )
        places_of_huge_rewards = (values.abs() > MAX_REWARD).nonzero().tolist()
        if places_of_huge_rewards:
            row, column = places_of_huge_rewards[0]
            raise RewardError(
                f"{name}: reward {self.reward_names[column]} is {values[row, column]:g} for"
                f" completion {row}; scale it, since beyond {MAX_REWARD:,.0f} float32 loses"
                " differences between rewards"
            )
        details = list(rewards.details or [])
        if len(details) != len(completions) or not all(isinstance(row, dict) for row in details):
            raise RewardError(
                f"{name}: details must be {len(completions)} dicts, one for each completion,"
                f" not {len(details)}: {details!r:.80}"
            )
        gives_verdicts = any("correct_strict" in detail for detail in rewards.details)
        for detail in rewards.details if gives_verdicts else ():
            for key in VERDICTS:
                if type(detail.get(key)) is not bool:
                    raise RewardError(
                        f"{name}: details[{key!r}] must be True or False, not {detail.get(key)!r}"
                    )
        return rewards

    def total(self, rewards: Rewards) -> torch.Tensor:
        """Return (N,), the weighted sum of each completion's rewards; NaN where one is missing."""
        weights = torch.tensor(self.reward_weights, dtype=torch.float32)
        return rewards.per_function.float() @ weights


class GSM8kEvaluator(RewardEvaluator):
    r"""Answers that are numbers, in the format <reasoning>...</reasoning><answer>...</answer>.

    The answer is what stands in the answer tags, if both occur exactly once and in order
    (`tagged_answer`). The five rewards:

    correctness    2.0    The answer holds exactly one number, maybe with words around it, and it
                          equals the gold answer.
    number_format  0.5    The answer is a number and nothing else. A sign, commas, $ and % belong to
                          the number.
    strict_format  0.5    The text is nothing but the format: each tag occurs once, and there is
                          only white space outside of the two pairs.
    soft_format    0.5    Each tag occurs once and in order, with any text around and between them.
    tag_count      0.125  This is given for each of the four tags that occurs exactly once.

    The strict verdict asks for strict format and correctness. The flexible verdict asks whether the
    last number of the text equals the gold answer.

    Numbers are compared exactly. A number of more than 50 characters is not read, nor is one that
    is not written like a number (`1,00`). Accepted for 72 are `72`, `72.`, `72.0`, `$72`, `72%`,
    `72 eggs`, `the answer is 72`, `x = 72`, `**72**` and `\boxed{72}`. A number is not accepted if
    the text next to it changes its value (`72k`, `72 k`, `72km`, `72!`, `72²`, `√72`, `\sqrt{72}`,
    `72 thousand`, `twice 72`, `half of 72`), or if it is written in numerals other than 0 to 9. Any
    dash before a number is a minus (`–72`).

    Each row of this table is a test, and tests/test_evaluator.py has more. A row has the five
    rewards in the order above, the strict and the flexible verdict, the gold answer and the
    completion, in which `\n` is a line break.

    rewards           | verdicts | gold | completion
    ------------------|----------|------|-----------
    2 0.5 0.5 0.5 0.5 | yes yes | 72 | `<reasoning>\n6*12\n</reasoning>\n<answer>\n72\n</answer>`
    2 0.5 0.5 0.5 0.5 | yes yes  | 1000 | `<reasoning>a</reasoning><answer>1,000</answer>`
    0 0.5 0.5 0.5 0.5 | no no    | 5    | `<reasoning>a</reasoning><answer>-5</answer>`
    2 0 0.5 0.5 0.5   | yes yes  | 72   | `<reasoning>a</reasoning><answer>72 eggs.</answer>`
    0 0 0.5 0.5 0.5   | no no    | 100  | `<reasoning>a</reasoning><answer>1,00</answer>`
    0 0 0.5 0.5 0.5   | no yes   | 72   | `<reasoning>a</reasoning><answer>71 or 72</answer>`
    2 0.5 0 0.5 0.5   | no yes   | 72   | `So: <reasoning>a</reasoning><answer>72</answer>`
    2 0.5 0 0.5 0.5   | no yes   | 72   | `<reasoning>a</reasoning><answer>72</answer> Done.`
    0 0 0 0 0         | no yes   | 5    | `10-5=5`
    0 0 0 0 0         | no no    | 72   | ``
    """

    reward_names = ("correctness", "number_format", "strict_format", "soft_format", "tag_count")

    def __init__(self, prompt: str = "reasoning_answer", **_):
        self.check_flags(None, prompt)

    @classmethod
    def check_flags(cls, config, prompt):
        if prompt != "reasoning_answer":
            raise ValueError(
                f"the evaluator gsm8k reads only the prompt format reasoning_answer, not {prompt}:"
                " use --evaluator math, or leave --evaluator and --prompt out"
            )

    def read_gold(self, answer):
        number = extraction.to_number(answer.strip())
        if number is None:
            raise ValueError(f"the gold answer {answer!r} is not a number: use --evaluator math")
        return number

    def reward(self, completion: str, gold: str) -> tuple[list[float], dict]:
        """Return the five rewards of one completion and its details.

        Raises ValueError where the gold answer is not a number.
        """
        target = self.read_gold(gold)
        answer = extraction.tagged_answer(completion)
        last_number = extraction.last_number(completion)
        is_correct = answer is not None and extraction.only_number(answer) == target
        is_number = answer is not None and extraction.to_number(answer) is not None
        has_strict_format = extraction.strict_format(completion)
        has_soft_format = has_strict_format or extraction.soft_format(completion)
        num_tags = sum(completion.count(tag) == 1 for tag in extraction.TAGS)
        rewards = [
            2.0 * is_correct,
            0.5 * is_number,
            0.5 * has_strict_format,
            0.5 * has_soft_format,
            0.125 * num_tags,
        ]
        last_is_correct = last_number is not None and extraction.to_number(last_number) == target
        details = {
            "parsed": last_number if answer is None else answer,
            "format": has_strict_format,
            "correct_strict": has_strict_format and is_correct,
            "correct_flexible": last_is_correct,
        }
        return rewards, details


class MathEvaluator(RewardEvaluator):
    r"""Answers that are mathematics or words, in the format that `prompt` asks for.

    grading.math_answers decides whether an answer equals the gold answer. The two rewards:

    format  1 if the completion has the format of the prompt:
        r1_zero           `</think> <answer>`, and `</answer>` after it. The answer is what follows
                          the last `<answer>`, up to `</answer>`; if this text holds a balanced
                          \boxed{}, the answer is the content of its last \boxed{}.
        question_only     The text holds a balanced \boxed{}. The answer is the content of the
                          last one.
        reasoning_answer  The strict format of GSM8kEvaluator. The answer is found as for r1_zero.
    answer  1 if the completion has the format, and its answer equals the gold answer. The total
            reward is this reward alone.

    The strict verdict is the answer reward. The flexible verdict asks whether the final answer
    equals the gold answer. The final answer is the answer in the format if the completion has the
    format, otherwise what the last \boxed{} holds, otherwise what follows the last <answer>,
    otherwise the last number. Because a strict verdict needs the format, (format, correct_strict)
    takes only three values: (1, 1), (1, 0) and (0, 0).

    The details also have "grading": "equal", "different", or why there is no verdict: "timeout" or
    "failed". An answer without a verdict counts as different.
    """

    reward_names = ("format", "answer")
    reward_weights = (0.0, 1.0)

    def __init__(self, prompt: str = "r1_zero", grader: MathGrader | None = None, **_):
        self.check_flags(None, prompt)
        self.prompt = prompt
        self.grader = grader or MathGrader()

    @classmethod
    def check_flags(cls, config, prompt):
        if prompt not in ("r1_zero", "question_only", "reasoning_answer"):
            raise ValueError(
                "the evaluator math reads the prompt formats r1_zero, question_only and"
                f" reasoning_answer, not {prompt}"
            )

    def read_gold(self, answer):
        """Return the gold answer without the box in which it may be written."""
        boxed = extraction.last_boxed(answer)
        gold = answer if boxed is None else boxed
        if not gold.strip("{} "):
            raise ValueError(f"the gold answer {answer!r} is empty")
        return gold

    def reward(self, completion: str, gold: str) -> tuple[list[float], dict]:
        """Return the two rewards of one completion and its details."""
        has_format, answer = extraction.answer_in_format(self.prompt, completion)
        final_answer = answer
        if answer is None:
            final_answer = extraction.final_answer(completion)
        grading = self.grader.grade(self.read_gold(gold), final_answer or "")
        is_equal = grading == "equal"
        is_correct = has_format and answer is not None and is_equal
        details = {
            "parsed": final_answer,
            "format": has_format,
            "correct_strict": is_correct,
            "correct_flexible": is_equal,
            "grading": grading,
        }
        return [float(has_format), float(is_correct)], details


class CreativeWritingEvaluator(RewardEvaluator):
    """Stories that continue an opening line, scored by a judge.

    A text that breaks a rule is below the floor, and the judge is not asked about it. The two
    rewards:

    judge   The judge's score, the mean of its grades for the rubric's criteria, from 1 to 5. It is
            NaN for a text below the floor, and where the judge gave none.
    floor   -1 for a text below the floor, otherwise 0. A text breaks a rule in these cases:
            empty           It has fewer than `min_words` words.
            no continuation It has a special token, a preamble ("Sure", "Title:"), or fewer letters
                            than other marks.
            copied prompt   Over 30 % of its word 4-grams are the prompt's.
            loop            Under 60 % of its word 3-grams are distinct, or a sentence occurs three
                            times.

    The total is the judge's score. For a text below the floor it is 0, one less than the lowest
    grade, so that no degenerate text ever beats a story.

    There is no right answer, so there are no verdicts. The details have "floor" (the rule that the
    text breaks, or None), "distinct_2" (the share of the text's word pairs that are distinct), and
    what the judge adds.
    """

    reward_names = ("judge", "floor")
    min_words = 10
    rubric = Rubric(
        task="Continue an opening line into a short story of one paragraph.",
        criteria={
            "creativity": "is it original, with ideas and images of its own?",
            "coherence": (
                "does it follow from the opening line and make sense from sentence to sentence?"
            ),
            "engagement": "does one want to read on, and is it well told?",
        },
    )

    def __init__(self, judge=None, config=None, reference=(None, None), **_):
        """Take a judge, such as a judges.LocalJudge, or make the one that the settings name.

        reference: the (frozen model or None, tokenizer) of the run.

        Raises ValueError for flags that name no usable judge, and OSError where it cannot be
        reached.
        """
        if judge is None:
            self.check_flags(config, "story")
            judge = get_judge(config, self.rubric, reference)
        self.judge = judge
        self.max_judge_failures = 0.5  # share of a batch that may lack a score

    @classmethod
    def check_flags(cls, config, prompt):
        if not isinstance(config, GRPOConfig):
            raise ValueError("this evaluator needs a judge, and only main.py has flags for one")
        check_judge_flags(config)

    def compute_rewards(self, prompts, completions, answers):
        """Show the judge the texts above the floor, and return the Rewards of all N texts.

        Raises OSError where more of the stories lack a score than max_judge_failures allows.
        """
        texts = [completion.strip() for completion in completions]
        broken_rules = [
            self.broken_rule(prompt, text) for prompt, text in zip(prompts, texts, strict=True)
        ]
        judged_rows = [i for i, rule in enumerate(broken_rules) if rule is None]
        row_scores, row_details = self.judge.score(
            [prompts[i] for i in judged_rows], [texts[i] for i in judged_rows]
        )
        scores = [math.nan] * len(texts)
        judge_details = [{} for _ in texts]
        for i, score, judge_detail in zip(judged_rows, row_scores, row_details, strict=True):
            scores[i] = score
            judge_details[i] = judge_detail

        reward_rows = []
        details = []
        for i, text in enumerate(texts):
            above_floor = broken_rules[i] is None
            reward_rows.append([scores[i], 0.0 if above_floor else -1.0])
            detail = {
                "floor": broken_rules[i],
                "distinct_2": story_rules.distinct_n([text], 2),
            }
            details.append(detail | judge_details[i])

        num_missing = sum(math.isnan(score) for score in row_scores)
        if num_missing > self.max_judge_failures * len(judged_rows):
            raise OSError(self._too_many_failures(num_missing, row_details))
        distinct_2 = torch.tensor([detail["distinct_2"] for detail in details])
        return Rewards(
            self.reward_matrix(reward_rows),
            details,
            counts={"judge/missing": num_missing},
            means={
                "below_floor_fraction": 1 - len(judged_rows) / max(1, len(texts)),
                "distinct_2": distinct_2.nanmean().item(),
                "distinct_2_batch": story_rules.distinct_n(texts, 2),
            },
        )

    def _too_many_failures(self, num_missing: int, judge_details: list[dict]) -> str:
        """The message that says how many stories have no score, with the most frequent error."""
        errors = Counter(
            detail["judge_error"] for detail in judge_details if "judge_error" in detail
        )
        most_frequent = f" ({errors.most_common(1)[0][0]})" if errors else ""
        return (
            f"the judge gave no score for {num_missing} of {len(judge_details)} stories"
            f"{most_frequent}, more than {self.max_judge_failures:g}"
        )

    def total(self, rewards):
        judge_scores, floor_rewards = rewards.per_function.unbind(1)
        return torch.where(floor_rewards < 0, min(GRADES) - 1.0, judge_scores)

    def broken_rule(self, prompt: str, story: str) -> str | None:
        """Return the rule that puts a text below the floor; None for a text above it."""
        return story_rules.broken_rule(prompt, story, self.min_words)


class FunctionEvaluator(RewardEvaluator):
    """Reward functions of the user's own, each with a weight in the total.

    A function gets N completions, N gold answers, and each other column of the data as N values by
    its name, and returns N numbers. The columns `question`, `solution`, `id` and `prompt` are there
    in any case. What the functions get are copies.
    """

    def __init__(self, functions: dict[Callable, float], source: str = "", **_):
        self.functions = list(functions)
        self.source = source  # where the functions are, for messages
        self.reward_names = tuple(function.__name__ for function in functions)
        self.reward_weights = tuple(float(weight) for weight in functions.values())

    def compute_rewards(self, prompts, completions, answers, examples):
        """Return the Rewards of N completions, without verdicts.

        Raises RewardError where a function returns something else than N finite numbers.
        """
        rows = []
        for example in examples:
            example = dict(example)
            own_columns = example.pop("row", {})
            rows.append(example | own_columns)
        names = set().union(*rows) - {"answer"}
        values = []
        for function in self.functions:
            columns = {name: [deepcopy(row.get(name)) for row in rows] for name in names}
            try:
                inspect.signature(function).bind(completions, answers, **columns)
            except TypeError as error:
                raise RewardError(
                    f"{self.source}: {error}; a reward is called with completions, answers and the"
                    f" columns {', '.join(sorted(columns))}: end its arguments with **columns"
                ) from error
            try:
                returned = function(list(completions), list(answers), **columns)
            except Exception as error:  # the function is the user's, and may raise anything
                line = traceback.extract_tb(error.__traceback__)[-1]
                raise RewardError(
                    f"{self.source}:{function.__name__} fails with {error!r} in line {line.lineno}"
                    f" of {line.filename}"
                ) from error
            values.append(self._check(function.__name__, returned, len(completions)))
        return Rewards(torch.stack(values, dim=1), [{} for _ in completions])

    def _check(self, name: str, returned: object, num_completions: int) -> torch.Tensor:
        """Return the (N,) tensor of what a function returned."""
        try:
            rewards = torch.as_tensor(returned, dtype=torch.float32, device="cpu").detach()
            is_valid = rewards.shape == (num_completions,) and bool(rewards.isfinite().all())
        except (TypeError, ValueError, RuntimeError, OverflowError):  # no numbers, or of any shape
            is_valid = False
        if not is_valid:
            shown = " ".join(repr(returned).split())
            raise RewardError(
                f"{self.source}:{name} must return a list of {num_completions} finite numbers, one"
                f" for each completion, not {shown:.80}"
            )
        return rewards


def strict_verdicts(rewards: Rewards) -> list[bool]:
    """Which completions are strictly correct. Raises ValueError for rewards without verdicts."""
    if not all("correct_strict" in detail for detail in rewards.details):
        raise ValueError(
            "the evaluator gives rewards without verdicts, so no completion can be chosen as"
            " correct; use one that says `correct_strict`"
        )
    return [detail["correct_strict"] for detail in rewards.details]


EVALUATORS = {
    "gsm8k": GSM8kEvaluator,
    "math": MathEvaluator,
    "creative": CreativeWritingEvaluator,
}


def find_evaluator(name: str) -> Callable[..., RewardEvaluator]:
    """What makes the evaluator of this name: a class in EVALUATORS, or what FILE.py:NAME holds.

    NAME may be a function, a list of functions, a dict {function: weight}, or a subclass of
    RewardEvaluator.

    Raises ValueError, in one line, for a name that leads nowhere.
    """
    path, colon, attribute = name.rpartition(":")
    if name in EVALUATORS:
        path, attribute = "EVALUATORS", name
        found = EVALUATORS[name]
    elif not colon:
        raise ValueError(
            f"--evaluator {name} is not known; use one of {', '.join(EVALUATORS)}, or a function"
            " of your own: my_rewards.py:reward"
        )
    elif not Path(path).is_file():
        raise ValueError(f"--evaluator {name}: there is no file {path}")
    else:
        try:
            found = run_file(path).get(attribute)
        except Exception as error:
            raise ValueError(f"--evaluator {name}: {path} fails with {error!r}") from error
        if found is None:
            raise ValueError(f"--evaluator {name}: there is no {attribute} in {path}")
    if isinstance(found, type) and issubclass(found, RewardEvaluator):
        return found
    functions = list(found) if isinstance(found, list | dict) else [found]
    weights = list(found.values()) if isinstance(found, dict) else [1.0] * len(functions)
    are_functions = all(inspect.isfunction(function) for function in functions)
    are_weights = all(isinstance(weight, numbers.Real) for weight in weights)
    have_names = are_functions and len({f.__name__ for f in functions}) == len(functions)
    if not functions or not have_names or not are_weights:
        raise ValueError(
            f"--evaluator {name}: {attribute} in {path} must be a function, a list of functions, or"
            " a dict of functions and their weights, each with a name of its own, or a subclass of"
            f" RewardEvaluator (not an instance), not {found!r:.80}"
        )
    return partial(FunctionEvaluator, dict(zip(functions, weights, strict=True)), path)


@cache
def run_file(path: str) -> dict:
    """What a Python file defines. It runs once, however often it is asked for."""
    return runpy.run_path(path)


def get_evaluator(name: str, **context) -> RewardEvaluator:
    """Return the evaluator called `name`, which takes from the context what it needs.

    prompt: the name of the prompt format. config: the settings of main.py. reference: the (frozen
    model or None, tokenizer) of the run.

    Raises ValueError for a name that leads nowhere, and for a class that is no evaluator.
    """
    make_evaluator = find_evaluator(name)
    try:
        inspect.signature(make_evaluator).bind(**context)
    except TypeError as error:
        raise ValueError(
            f"--evaluator {name}: {error}; its __init__ is called with {', '.join(context)}: end"
            " its arguments with **context, and give the others defaults"
        ) from error
    evaluator = make_evaluator(**context)
    names = getattr(evaluator, "reward_names", None)
    if not isinstance(names, tuple | list) or len(names) != len(evaluator.reward_weights):
        raise ValueError(
            f"--evaluator {name}: reward_names must be a tuple of names, such as ('length',), with"
            " as many reward_weights, if it has any"
        )
    for weight in evaluator.reward_weights:
        if not isinstance(weight, numbers.Real) or not abs(weight) <= MAX_REWARD:
            raise ValueError(
                f"--evaluator {name}: the weight of a reward must be a number of at most"
                f" {MAX_REWARD:,.0f}, not {weight!r}"
            )
    return evaluator
