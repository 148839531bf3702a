"""Rewards: how completions are scored. An evaluator is a class here and one line in EVALUATORS.

Every evaluator gives two verdicts side by side for each completion. The strict verdict asks for the
required format and for the right answer in it. The flexible verdict asks for the right answer
wherever it stands. Much of what training seems to gain is only format: the two verdicts show it.

In shapes and docstrings, N is the number of completions and R the number of rewards.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from config import JudgeConfig
from grading import extraction
from grading.math_answers import MathGrader
from judges import judge_report, story_rules
from judges.endpoint import Halted
from judges.judges import Judge, check_judge_flags, get_judge
from judges.rating import Rubric


@dataclass
class Rewards:
    """What an evaluator says of N completions.

    per_function: (N, R) float32, one column per reward; NaN is a reward that could not be given.
    details: N dicts with "parsed" (the final answer that was read, or None), "format" (whether the
        required format holds), "correct_strict" and "correct_flexible" (the two verdicts). An
        evaluator may add further keys.
    counts: further numbers to be logged, which add up over several processes.
    means: further numbers to be logged, of which the mean over processes is taken.
    """

    per_function: torch.Tensor
    details: list[dict]
    counts: dict[str, int] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)


class RewardEvaluator:
    """Rewards completions. A subclass names its rewards and defines `compute_rewards` or `reward`.

    Its __init__ takes from the context of `get_evaluator` what it needs.
    """

    reward_names: tuple[str, ...]
    # The weight of each reward in the total. All are 1 unless a subclass says so.
    reward_weights: tuple[float, ...]
    # What the console prints: the share of completions that are correct by the strict verdict, then
    # by the flexible one.
    accuracies_template = "accuracy {} strict, {} flexible"
    # Whether compute_rewards has an argument `examples`, and is therefore given them.
    takes_examples: bool

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
        """Raise ValueError, with id and row, for an example whose gold answer cannot be read."""
        for split in splits:
            for example in split:
                try:
                    self.read_gold(example["answer"])
                except ValueError as error:
                    # An id is data set/split/index, such as gsm8k/train/0.
                    row = int(example["id"].rpartition("/")[2]) + 1
                    raise ValueError(f"{example['id']}, row {row}: {error}") from error

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
        which have every column of their rows (rl_datasets.py).

        A subclass defines this method, or `reward(completion, gold)`, which returns the list of
        rewards of one completion and the dict of its details.
        """
        reward_rows = []
        details = []
        for completion, answer in zip(completions, answers, strict=True):
            completion_rewards, completion_details = self.reward(completion, answer)
            reward_rows.append(completion_rewards)
            details.append(completion_details)
        return Rewards(self.reward_matrix(reward_rows), details)

    def reward_matrix(self, reward_rows: list[list[float]]) -> torch.Tensor:
        """Return the (N, R) matrix of N lists of rewards, which has R columns even for N = 0."""
        matrix = torch.tensor(reward_rows, dtype=torch.float32)
        return matrix.view(len(reward_rows), len(self.reward_names))

    def compute_checked_rewards(self, examples: list[dict], completions: list[str]) -> Rewards:
        """Return compute_rewards(...) of N completions of N examples.

        Raises ValueError if that is not what Rewards promises.
        """
        questions = [example["question"] for example in examples]
        answers = [example["answer"] for example in examples]
        if self.takes_examples:
            rewards = self.compute_rewards(questions, completions, answers, examples=examples)
        else:
            rewards = self.compute_rewards(questions, completions, answers)
        name = type(self).__name__
        values = rewards.per_function
        shape = (len(completions), len(self.reward_names))
        if not values.is_floating_point() or values.shape != shape:
            raise ValueError(
                f"{name}: per_function must be floats {shape},"
                f" not {values.dtype} {tuple(values.shape)}"
            )
        for reward_name, infinite_rows in zip(self.reward_names, values.isinf().T, strict=True):
            if infinite_rows.any():
                row = int(infinite_rows.int().argmax())
                raise ValueError(f"{name}: reward {reward_name} is infinite for completion {row}")
        if len(rewards.details) != len(completions):
            raise ValueError(
                f"{name}: details must be {len(completions)} dicts, one for each completion,"
                f" not {len(rewards.details)}"
            )
        for detail in rewards.details:
            for key in ("format", "correct_strict", "correct_flexible"):
                if type(detail.get(key)) is not bool:
                    raise ValueError(
                        f"{name}: details[{key!r}] must be True or False, not {detail.get(key)!r}"
                    )
        return rewards

    def total(self, rewards: Rewards) -> torch.Tensor:
        """Return (N,), the weighted sum of each completion's rewards; NaN where one is missing."""
        return rewards.per_function @ torch.tensor(self.reward_weights)

    def get_reward_breakdown(self, rewards: Rewards) -> dict[str, float]:
        """Return what is logged of a batch: the mean of each reward, and its counts and means.

        "rewards/<name>" is the mean over the completions that have this reward, NaN if none has.
        """
        reward_means = rewards.per_function.nanmean(dim=0).tolist()
        breakdown = {}
        for name, mean in zip(self.reward_names, reward_means, strict=True):
            breakdown[f"rewards/{name}"] = mean
        return breakdown | rewards.counts | rewards.means

    def before_training(self, config, run, sample: Callable) -> None:
        """Look at the rewards once, before the first update of a run.

        An evaluator can measure here whether its rewards are worth training on. It raises
        ValueError if they are not, and the run then ends before it begins.

        config: the settings of main.py. run: the training run. sample: the function by which
        main.py samples completions.
        """


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
    `72 eggs`, `the answer is 72`, `x = 72` and `**72**`. A number is not accepted if the text
    next to it changes its value (`72k`, `72km`, `72!`, `72²`, `√72`, `72 thousand`, `half of 72`),
    or if it is written in numerals other than 0 to 9.

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
                f"the evaluator gsm8k reads only reasoning_answer as a prompt format, not {prompt}:"
                " use --evaluator math"
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

    def reward(self, completion: str, gold: str) -> tuple[list[float], dict]:
        """Return the two rewards of one completion and its details."""
        has_format, answer = extraction.answer_in_format(self.prompt, completion)
        final_answer = answer
        if answer is None:
            final_answer = extraction.final_answer(completion)
        grading = self.grader.grade(gold, final_answer or "")
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

    judge   The judge's score. A rating is the mean over the rubric's criteria, from 1 to 5. A
            likelihood is in nats per token. The score is NaN for a text below the floor, and where
            the judge gave none.
    floor   -1 for a text below the floor, otherwise 0. A text breaks a rule in these cases:
            empty           It has fewer than `min_words` words.
            no continuation It has a special token, a preamble ("Sure", "Title:"), or fewer letters
                            than other marks.
            copied prompt   Over 30 % of its word 4-grams are the prompt's.
            loop            Under 60 % of its word 3-grams are distinct, or a sentence occurs three
                            times.

    The total is the judge's score. For a text below the floor it is one less than the lowest score
    of the judge's scale, so that no degenerate text ever beats a story.

    There is no right answer. The strict verdict, which is logged as accuracy, asks for a text above
    the floor that got a score. The flexible verdict asks for a text above the floor. The details
    also have "floor" (the rule that the text breaks, or None), "distinct_2" (the share of the
    text's word pairs that are distinct), and what the judge adds.
    """

    reward_names = ("judge", "floor")
    accuracies_template = "{} above the floor and scored, {} above the floor"
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

    def __init__(self, judge: Judge | None = None, config=None, reference=(None, None), **_):
        """Take a judge, or make the one that the settings of main.py name.

        reference: the (frozen model or None, tokenizer) of the run.

        Raises ValueError for flags that name no usable judge, and OSError where it cannot be
        reached.
        """
        if judge is None:
            self.check_flags(config, "story")
            judge = get_judge(config, self.rubric, reference)
            max_judge_failures = config.max_judge_failures
        else:
            max_judge_failures = 0.5
        self.judge = judge
        self.max_judge_failures = max_judge_failures  # share of a batch that may lack a score

    @classmethod
    def check_flags(cls, config, prompt):
        if not isinstance(config, JudgeConfig):
            raise ValueError(
                "this evaluator needs a judge, and only main.py and selfcheck.py have flags for one"
            )
        check_judge_flags(config)

    def before_training(self, config, run, sample):
        """Measure the judge on the policy's stories; ValueError if it cannot tell them apart."""
        report = judge_report.make_judge_report(config, run, sample)
        judge_report.check_spread(report, config.min_judge_spread)

    def compute_rewards(self, prompts, completions, answers):
        """Show the judge the texts above the floor, and return the Rewards of all N texts.

        Raises Halted where more of the stories lack a score than --max_judge_failures allows.
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
            is_scored = not math.isnan(scores[i])
            # -0.0 instead of 0.0 changes no total, and keeps logs equal to earlier ones.
            floor_reward = -0.0 if above_floor else -1.0
            reward_rows.append([scores[i], floor_reward])
            detail = {
                "parsed": f"{scores[i]:.4f}" if is_scored else None,
                "format": above_floor,
                "correct_strict": is_scored,
                "correct_flexible": above_floor,
                "floor": broken_rules[i],
                "distinct_2": story_rules.distinct_n([text], 2),
            }
            details.append(detail | judge_details[i])

        num_missing = sum(math.isnan(score) for score in row_scores)
        counts = self.judge.take_counts() | {"missing": num_missing}
        if num_missing > self.max_judge_failures * len(judged_rows):
            raise Halted(self._too_many_failures(num_missing, row_details))
        distinct_2 = torch.tensor([detail["distinct_2"] for detail in details])
        return Rewards(
            self.reward_matrix(reward_rows),
            details,
            counts={f"judge/{name}": count for name, count in counts.items()},
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
            f"{most_frequent}, more than --max_judge_failures {self.max_judge_failures:g}"
        )

    def total(self, rewards):
        judge_scores, floor_rewards = rewards.per_function.unbind(1)
        below_floor = floor_rewards < 0
        # The floor reward is -1 there, so the total is one less than the lowest score.
        return torch.where(below_floor, self.judge.lowest + floor_rewards, judge_scores)

    def broken_rule(self, prompt: str, story: str) -> str | None:
        """Return the rule that puts a text below the floor; None for a text above it."""
        return story_rules.broken_rule(prompt, story, self.min_words)


EVALUATORS = {"gsm8k": GSM8kEvaluator, "math": MathEvaluator, "creative": CreativeWritingEvaluator}


def get_evaluator(name: str, **context) -> RewardEvaluator:
    """Return the evaluator called `name`, which takes from the context what it needs.

    prompt: the name of the prompt format. config: the settings of main.py. reference: the (frozen
    model or None, tokenizer) of the run.

    Raises ValueError for a name that is not in EVALUATORS.
    """
    if name not in EVALUATORS:
        raise ValueError(f"{name} is no evaluator; use one of {', '.join(EVALUATORS)}")
    return EVALUATORS[name](**context)
