"""Rewards: how completions are scored. An evaluator is a class here and one line in EVALUATORS.

Every evaluator reports two verdicts side by side for each completion. Strict: the required format holds and the answer
in it is right. Flexible: the answer is right wherever it stands. Much of what training seems to gain is format.
N completions, R rewards.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from grading import extraction
from grading.math_answers import MathGrader
from judges import report as judge_report
from judges import story_rules
from judges.endpoint import Halted
from judges.judges import Judge, Rubric, check_judge_flags, get_judge


@dataclass
class Rewards:
    """What an evaluator says of N completions.

    per_function: (N, R) float32, one column per reward; NaN is a reward that could not be given.
    details: N dicts with "parsed" (the final answer that was read, or None), "format" (whether the required format
        holds), "correct_strict" and "correct_flexible"; an evaluator may add to them.
    counts, means: what else of the whole batch is to be logged; over several processes counts add up.
    """

    per_function: torch.Tensor
    details: list[dict]
    counts: dict[str, int] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)


def collect(rows: list[tuple[list[float], dict]], reward_names: tuple[str, ...]) -> Rewards:
    """The Rewards of N completions from the rewards and details of each."""
    rewards = torch.tensor([rewards for rewards, _ in rows], dtype=torch.float32)
    return Rewards(rewards.view(len(rows), len(reward_names)), [details for _, details in rows])


class RewardEvaluator:
    """Rewards completions. A subclass names its rewards, and takes from get_evaluator's context what it needs."""

    reward_names: tuple[str, ...]
    reward_weights: tuple[float, ...]  # of each in the total reward; by default all 1
    said_of_shares = "accuracy {} strict, {} flexible"  # what the shares with those verdicts are called on a console

    def __init_subclass__(cls):
        if "reward_names" in vars(cls) and "reward_weights" not in vars(cls):
            cls.reward_weights = (1.0,) * len(cls.reward_names)

    @classmethod
    def check_flags(cls, args, prompt: str) -> None:
        """Raise ValueError, before anything is loaded, for flags that this evaluator cannot work with.

        prompt: the name of the prompt form.
        """

    def check_gold(self, *splits: list[dict]) -> None:
        """Raise ValueError for an example whose gold answer this evaluator cannot read, with its id and row."""
        for example in (example for split in splits for example in split):
            try:
                self.read_gold(example["answer"])
            except ValueError as error:
                row = int(example["id"].rpartition("/")[2]) + 1
                raise ValueError(f"{example['id']}, row {row}: {error}") from error

    def read_gold(self, answer: str) -> object:
        """What the gold answer means. Raises ValueError where it means nothing to this evaluator."""
        return answer

    def compute_rewards(
        self, prompts: list[str], completions: list[str], answers: list[str]
    ) -> Rewards:
        """Reward N completions of N prompts (repeated where several completions share one) against N gold answers.

        prompts: the questions as the data set has them, without the form that a model was given them in. A subclass
        defines this, or `reward`: the rewards of one completion, and its details.
        """
        return collect(
            [self.reward(*pair) for pair in zip(completions, answers, strict=True)],
            self.reward_names,
        )

    def check_rewards(
        self, prompts: list[str], completions: list[str], answers: list[str]
    ) -> Rewards:
        """compute_rewards, with what it returns held to its contract: ValueError names what is wrong."""
        rewards, n, name = (
            self.compute_rewards(prompts, completions, answers),
            len(completions),
            type(self).__name__,
        )
        values, shape = rewards.per_function, (n, len(self.reward_names))
        if not values.is_floating_point() or values.shape != shape:
            raise ValueError(
                f"{name}: per_function must be floats {shape}, not {values.dtype} {tuple(values.shape)}"
            )
        for reward, column in zip(self.reward_names, values.isinf().T, strict=True):
            if column.any():
                raise ValueError(
                    f"{name}: reward {reward} is infinite for completion {int(column.int().argmax())}"
                )
        if len(rewards.details) != n:
            raise ValueError(
                f"{name}: details must be {n} dicts, one for each completion, not {len(rewards.details)}"
            )
        for detail in rewards.details:
            for key in ("format", "correct_strict", "correct_flexible"):
                if type(detail.get(key)) is not bool:
                    raise ValueError(
                        f"{name}: details[{key!r}] must be True or False, not {detail.get(key)!r}"
                    )
        return rewards

    def total(self, rewards: Rewards) -> torch.Tensor:
        """(N,) the weighted sum of each completion's rewards; NaN where one is missing."""
        return rewards.per_function @ torch.tensor(self.reward_weights)

    def get_reward_breakdown(self, rewards: Rewards) -> dict[str, float]:
        """The mean of each reward over the completions that have it, under "rewards/<name>" (NaN where none has).

        With what else of the batch is to be logged.
        """
        means = rewards.per_function.nanmean(dim=0).tolist()
        breakdown = {
            f"rewards/{name}": mean for name, mean in zip(self.reward_names, means, strict=True)
        }
        return breakdown | rewards.counts | rewards.means

    def before_training(self, args, run, sample: Callable) -> None:
        """Called once before the first update of a run, with main.py's flags, the run and main.sample.

        The place to measure what the rewards come from, and to raise ValueError where training makes no sense.
        """


class GSM8kEvaluator(RewardEvaluator):
    r"""Answers that are numbers, in the form <reasoning>...</reasoning><answer>...</answer>.

    The answer is what stands in the answer tags, if both occur exactly once and in order (`tagged_answer`).

    correctness    2.0    the answer holds exactly one number, with any words around it, equal to the gold answer
    number_format  0.5    the answer is a number and nothing else (a sign, commas, $ and % belong to it)
    strict_format  0.5    the whole text is the form: each tag once, and nothing but white space outside the two pairs
    soft_format    0.5    each tag once and in order, with any text before, between and after
    tag_count      0.125  for each of the four tags that occurs exactly once

    Strict verdict: strict format and correctness. Flexible verdict: the last number of the text equals the gold answer.
    Numbers are compared exactly. One of more than 50 characters, or not written like a number (`1,00`), is not read.
    Accepted for 72: `72`, `72.`, `72.0`, `$72`, `72%`, `72 eggs`, `the answer is 72`, `x = 72`, `**72**`. Not: a number
    that what stands beside it changes (`72k`, `72km`, `72!`, `72²`, `√72`, `72 thousand`, `half of 72`), other digits.
    Each row below is a test, and there are more in tests/test_evaluator.py; `\n` is a line break.

    | completion                                                    | gold | corr. num. strict soft tags | strict flex |
    |---------------------------------------------------------------|------|-----------------------------|-------------|
    | `<reasoning>\n6*12\n</reasoning>\n<answer>\n72\n</answer>`    | 72   | 2 0.5 0.5 0.5 0.5           | yes yes     |
    | `<reasoning>a</reasoning><answer>1,000</answer>`              | 1000 | 2 0.5 0.5 0.5 0.5           | yes yes     |
    | `<reasoning>a</reasoning><answer>-5</answer>`                 | 5    | 0 0.5 0.5 0.5 0.5           | no no       |
    | `<reasoning>a</reasoning><answer>72 eggs.</answer>`           | 72   | 2 0 0.5 0.5 0.5             | yes yes     |
    | `<reasoning>a</reasoning><answer>1,00</answer>`               | 100  | 0 0 0.5 0.5 0.5             | no no       |
    | `<reasoning>a</reasoning><answer>71 or 72</answer>`           | 72   | 0 0 0.5 0.5 0.5             | no yes      |
    | `So: <reasoning>a</reasoning><answer>72</answer>`             | 72   | 2 0.5 0 0.5 0.5             | no yes      |
    | `<reasoning>a</reasoning><answer>72</answer> Done.`           | 72   | 2 0.5 0 0.5 0.5             | no yes      |
    | `10-5=5`                                                      | 5    | 0 0 0 0 0                   | no yes      |
    | ``                                                            | 72   | 0 0 0 0 0                   | no no       |
    """

    reward_names = ("correctness", "number_format", "strict_format", "soft_format", "tag_count")

    def __init__(self, prompt: str = "reasoning_answer", **_):
        self.check_flags(None, prompt)

    @classmethod
    def check_flags(cls, args, prompt):
        if prompt != "reasoning_answer":
            raise ValueError(
                f"the evaluator gsm8k reads only reasoning_answer, not {prompt}: use --evaluator math"
            )

    def read_gold(self, answer):
        number = extraction.to_number(answer.strip())
        if number is None:
            raise ValueError(f"the gold answer {answer!r} is not a number: use --evaluator math")
        return number

    def reward(self, completion: str, gold: str) -> tuple[list[float], dict]:
        """The five rewards of one completion, and its details. Raises ValueError where the gold is not a number."""
        target = self.read_gold(gold)
        answer, last = extraction.tagged_answer(completion), extraction.last_number(completion)
        correct = answer is not None and extraction.only_number(answer) == target
        strict = extraction.strict_format(completion)
        rewards = [
            2.0 * correct,
            0.5 * (answer is not None and extraction.to_number(answer) is not None),
            0.5 * strict,
            0.5 * (strict or extraction.soft_format(completion)),
            0.125 * sum(completion.count(tag) == 1 for tag in extraction.TAGS),
        ]
        details = {
            "parsed": last if answer is None else answer,
            "format": strict,
            "correct_strict": strict and correct,
            "correct_flexible": last is not None and extraction.to_number(last) == target,
        }
        return rewards, details


class MathEvaluator(RewardEvaluator):
    r"""Answers that are mathematics or words, in the form that `prompt` asks for; equality: grading.math_answers.

    format 1 if the completion holds the prompt's form:
        r1_zero           `</think> <answer>` and after it `</answer>`; the answer is what follows the last `<answer>`,
                          up to `</answer>`, and of that the last balanced \boxed{} if there is one
        question_only     a balanced \boxed{}; the answer is the last one
        reasoning_answer  GSM8kEvaluator's strict format; the answer as in r1_zero
    answer 1 if the format holds and the answer equals the gold answer. The total reward is the answer reward.

    Strict verdict: the answer reward. Flexible verdict: the final answer equals the gold answer, where the final answer
    is the form's own if the form holds, otherwise the last \boxed{}, otherwise what follows the last <answer>,
    otherwise the last number. So (format, correct_strict) gives three categories: (1, 1), (1, 0) and (0, 0).
    details also has "grading": "equal", "different", or why there is no verdict, which counts as different: "timeout",
    "failed".
    """

    reward_names, reward_weights = ("format", "answer"), (0.0, 1.0)

    def __init__(self, prompt: str = "r1_zero", grader: MathGrader | None = None, **_):
        self.check_flags(None, prompt)
        self.prompt = prompt
        self.grader = grader or MathGrader()

    @classmethod
    def check_flags(cls, args, prompt):
        if prompt not in ("r1_zero", "question_only", "reasoning_answer"):
            raise ValueError(
                f"the evaluator math knows r1_zero, question_only and reasoning_answer, not {prompt}"
            )

    def reward(self, completion: str, gold: str) -> tuple[list[float], dict]:
        """The two rewards of one completion, and its details."""
        in_form, answer = extraction.answer_in_form(self.prompt, completion)
        final = extraction.final_answer(completion) if answer is None else answer
        grading = self.grader.grade(gold, final or "")
        equal = grading == "equal"
        strict = in_form and answer is not None and equal
        details = {
            "parsed": final,
            "format": in_form,
            "correct_strict": strict,
            "correct_flexible": equal,
        }
        return [float(in_form), float(strict)], details | {"grading": grading}


class CreativeWritingEvaluator(RewardEvaluator):
    """Stories that continue an opening line, scored by a judge above a floor of rules.

    judge   the judge's score: 1 to 5 for a rating (mean of the rubric's criteria), nats per token for a likelihood; NaN
            where it could not be had, or was not asked for since the text is below the floor
    floor   0, or -1 for a text below the floor, which is any of
            empty               fewer than `min_words` words
            no continuation     a special token, a preamble ("Sure", "Title:"), or fewer letters than other marks
            copied prompt       over 30 % of its word 4-grams are the prompt's
            loop                under 60 % of its word 3-grams are distinct, or a sentence that occurs three times

    The total is the judge's score; of a text below the floor it is one less than the lowest score of the judge's scale:
    no degenerate text ever beats a story.

    There is no right answer. Strict verdict (logged as accuracy): above the floor and scored. Flexible: above the
    floor. details also has "floor" (the rule, or None), "distinct_2" within the text, and what the judge has to say.
    """

    reward_names = ("judge", "floor")
    said_of_shares = "{} above the floor and scored, {} above the floor"
    min_words = 10
    rubric = Rubric(
        task="Continue an opening line into a short story of one paragraph.",
        criteria={
            "creativity": "is it original, with ideas and images of its own?",
            "coherence": "does it follow from the opening line and make sense from sentence to sentence?",
            "engagement": "does one want to read on, and is it well told?",
        },
    )

    def __init__(self, judge: Judge | None = None, flags=None, reference=(None, None), **_):
        """judge: by default the one that main.py's flags name. reference: the run's (frozen model or None, tokenizer).

        Raises ValueError for flags that name no judge, OSError where it cannot be reached.
        """
        self.max_judge_failures = 0.5  # share of the stories of a batch that may lack a score
        if judge is None:
            self.check_flags(flags, "story")
            judge, self.max_judge_failures = (
                get_judge(flags, self.rubric, reference),
                flags.max_judge_failures,
            )
        self.judge = judge

    @classmethod
    def check_flags(cls, args, prompt):
        if args is None or "judge_type" not in args:
            raise ValueError(
                "this evaluator needs a judge, and only main.py and selfcheck.py have flags for one"
            )
        check_judge_flags(args)

    def before_training(self, args, run, sample):
        """Measure the judge on the policy's stories; ValueError where it cannot tell them apart."""
        judge_report.check_spread(judge_report.make(args, run, sample), args.min_judge_spread)

    def compute_rewards(self, prompts, completions, answers):
        """Raises Halted where the judge fails more than the set share of the stories."""
        texts = [completion.strip() for completion in completions]
        broken = [self.floor(*pair) for pair in zip(prompts, texts, strict=True)]
        asked = [i for i, rule in enumerate(broken) if rule is None]
        scores, sayings = self.judge.score([prompts[i] for i in asked], [texts[i] for i in asked])
        judged = dict(zip(asked, zip(scores, sayings, strict=True), strict=True))
        rows = []
        for i, (text, rule) in enumerate(zip(texts, broken, strict=True)):
            score, saying = judged.get(i, (math.nan, {}))
            details = {
                "parsed": None if math.isnan(score) else f"{score:.4f}",
                "format": rule is None,
                "correct_strict": not math.isnan(score),
                "correct_flexible": rule is None,
                "floor": rule,
                "distinct_2": story_rules.distinct_n([text], 2),
            }
            rows.append(([score, -float(rule is not None)], details | saying))
        rewards = collect(rows, self.reward_names)
        missing = sum(map(math.isnan, scores))
        counts = self.judge.take_counts() | {"missing": missing}
        rewards.counts = {f"judge/{name}": n for name, n in counts.items()}
        rewards.means = {
            "below_floor_fraction": 1 - len(asked) / max(1, len(texts)),
            "distinct_2": torch.tensor([detail["distinct_2"] for detail in rewards.details])
            .nanmean()
            .item(),
            "distinct_2_batch": story_rules.distinct_n(texts, 2),
        }
        if missing > self.max_judge_failures * len(asked):
            errors = Counter(saying["judge_error"] for saying in sayings if "judge_error" in saying)
            why = f" ({errors.most_common(1)[0][0]})" if errors else ""
            raise Halted(
                f"the judge gave no score for {missing} of {len(asked)} stories{why}, more than --max_judge_failures"
                f" {self.max_judge_failures:g}"
            )
        return rewards

    def total(self, rewards):
        judge, floor = rewards.per_function.unbind(1)
        return torch.where(floor < 0, self.judge.lowest + floor, judge)

    def floor(self, prompt: str, story: str) -> str | None:
        """The rule that a text breaks; None if it is above the floor."""
        return story_rules.broken_rule(prompt, story, self.min_words)


EVALUATORS = {"gsm8k": GSM8kEvaluator, "math": MathEvaluator, "creative": CreativeWritingEvaluator}


def get_evaluator(name: str, **context) -> RewardEvaluator:
    """The evaluator called `name`; of the context each takes what it needs.

    prompt: the prompt's name; flags: main.py's; reference: (the run's frozen model or None, tokenizer).
    """
    return EVALUATORS[name](**context)
