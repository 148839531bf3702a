"""Judges: objects that score stories by a rating, which is the mean of grades from 1 to 5.

    openai   a model behind any OpenAI-compatible endpoint; a grade is the number that it writes
    local    a Hugging Face model in this process; a grade is the expectation over the probabilities
             of the five digits, which is finer
    policy   the same with the frozen reference model of the run (not with the policy in training)

A story whose score is missing gets NaN, never a number. In docstrings, N is the number of stories.
"""

import asyncio
import hashlib
import json
import math
import statistics
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

import distributed
import llms
from config import GRPOConfig
from grpo import jsonl
from grpo.rollout import Completion, compute_logps
from judges.endpoint import Endpoint, NoReply, Refused, check_base_url, for_each, get_api_key
from judges.rating import (
    GRADES,
    Rubric,
    rating_messages,
    read_grades,
    response_format,
    without_reasoning,
)
from rl_datasets import render_chat

# --- The judges -----------------------------------------------------------------------------------


class EndpointJudge:
    """Rates by a model behind an OpenAI-compatible endpoint.

    cache_file: keeps every rating, so that a resumed run asks nothing twice.
    concurrency: how many requests may wait for their reply at a time.

    Raises ValueError where a key is needed and missing, and OSError where the endpoint cannot be
    reached.
    """

    def __init__(
        self,
        rubric: Rubric,
        model: str,
        base_url: str | None,
        cache_file: Path,
        concurrency: int = 16,
    ):
        self.rubric = rubric
        self.connect = partial(Endpoint, model, base_url)
        self.model = model
        self.base_url = base_url
        self.concurrency = concurrency
        # Further fields of each request, without those that the endpoint has refused by name.
        self.options = {
            "temperature": 0,
            "max_tokens": 2048,
            "response_format": response_format(rubric.criteria),
        }
        self.cache_file = cache_file
        self.cache = {}
        if cache_file.exists():
            for row in jsonl.read_to_continue(cache_file, ("key", "grades")):
                self.cache[row["key"]] = row["grades"]
        asyncio.run(self._check())

    async def _check(self):
        async with self.connect() as endpoint:
            await endpoint.check()

    def score(self, prompts: list[str], stories: list[str]) -> tuple[list[float], list[dict]]:
        """Return N scores, NaN for each missing one, and N dicts of details for the transcripts.

        Details have "grades", {criterion: grade}, or "judge_error", why there are none.

        Raises OSError where the endpoint refuses the key.
        """
        chats = {}
        keys = []
        for prompt, story in zip(prompts, stories, strict=True):
            chat = rating_messages(self.rubric, prompt, story)
            question = json.dumps([self.model, self.base_url, chat])
            key = hashlib.sha256(question.encode()).hexdigest()
            keys.append(key)
            chats[key] = chat
        errors = asyncio.run(self._rate(chats))
        details = []
        for key in keys:
            if key in errors:
                details.append({"judge_error": errors[key]})
            else:
                details.append({"grades": self.cache[key]})
        return [mean_grade(detail) for detail in details], details

    async def _rate(self, chats: dict[str, list[dict]]) -> dict[str, str]:
        """Put the ratings of chats, which have keys, into the cache; return {key: error}."""
        errors = {}
        async with self.connect() as endpoint:

            async def rate_one(key):
                try:
                    grades = await self._ask(endpoint, chats[key])
                except NoReply as error:
                    errors[key] = str(error)
                    return
                self.cache[key] = grades
                jsonl.append(self.cache_file, {"key": key, "grades": grades})

            new_keys = [key for key in chats if key not in self.cache]
            bar = tqdm(new_keys, desc="judging", delay=10, leave=False, disable=None)
            await for_each(rate_one, bar, self.concurrency)
        return errors

    async def _ask(self, endpoint: Endpoint, chat: list[dict]) -> dict[str, float]:
        """Return one rating; ask without the further fields where the endpoint refuses them.

        It may have refused this story alone, so later requests lack only what its error names.
        """
        options = self.options
        try:
            reply, is_finished = await endpoint.ask(chat, **options)
        except Refused as error:
            if not options:
                raise
            reply, is_finished = await endpoint.ask(chat)
            self.options = {
                name: value for name, value in self.options.items() if name not in str(error)
            }
        if not is_finished:
            raise NoReply("no rating: the reply was cut at the maximum number of tokens")
        grades = read_grades(reply, self.rubric.criteria)
        if not without_reasoning(reply).strip():
            raise NoReply(
                "no rating: the reply has no text, or nothing but reasoning, for which its tokens"
                " may have been too few"
            )
        if grades is None:
            raise NoReply(f"no rating in the reply {endpoint.excerpt(reply)}")
        return grades


class LocalJudge:
    """Rates by a model in this process.

    Each criterion is asked for by itself, so no grade depends on another one. A story that does not
    fit into the model's positions, with the question about it, is missing: beyond its positions, a
    model's probabilities mean nothing.

    Raises ValueError for a model that cannot rate.
    """

    def __init__(self, rubric: Rubric, model, tokenizer):
        self.rubric = rubric
        self.model = model
        self.tokenizer = tokenizer
        self.replies = []  # for each criterion five, the ids of a reply up to and with its grade
        for name in rubric.criteria:
            texts = [f'{{"{name}": {grade}' for grade in GRADES]
            replies = tokenizer(texts, add_special_tokens=False)["input_ids"]
            beginnings = {tuple(ids[:-1]) for ids in replies}
            grade_ids = {ids[-1] for ids in replies}
            if len(beginnings) > 1 or len(grade_ids) < len(GRADES):
                raise ValueError(
                    "the judge's tokenizer has no token for each of the digits 1 to 5: it cannot"
                    " rate; use another --judge_model"
                )
            self.replies += replies
        # The number of tokens that a question may have.
        self.max_length = math.inf
        if llms.max_positions(model):
            self.max_length = llms.max_positions(model) - max(map(len, self.replies))

    def score(self, prompts: list[str], stories: list[str]) -> tuple[list[float], list[dict]]:
        """Return N scores and N dicts of details, as EndpointJudge.score does.

        Raises ValueError where the judge's chat template fails.
        """
        questions = [
            self._tokenize(prompt, story) for prompt, story in zip(prompts, stories, strict=True)
        ]
        details = [{"judge_error": "too long for the positions of the judge"} for _ in questions]
        fitting = [i for i, ids in enumerate(questions) if len(ids) <= self.max_length]
        all_grades = self._grade([questions[i] for i in fitting])
        for i, grades in zip(fitting, all_grades, strict=True):
            details[i] = {"grades": grades}
        return [mean_grade(detail) for detail in details], details

    def _tokenize(self, prompt: str, story: str) -> list[int]:
        """Return the ids of the question about a story."""
        messages = rating_messages(self.rubric, prompt, story)
        text = "\n\n".join(message["content"] for message in messages)
        if self.tokenizer.chat_template:
            # Some templates take no system message.
            text = render_chat(self.tokenizer, [{"role": "user", "content": text}])
        else:
            text += "\n\n"
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _grade(self, questions: list[list[int]]) -> list[dict[str, float]]:
        """Return {criterion: sum_g g p(g) / sum_g p(g) over the grades g} for n questions."""
        groups = []
        for question in questions:
            groups.append([Completion(question, reply) for reply in self.replies])
        logps = compute_logps(self.model, groups)
        # A grade is the last token of its reply.
        grade_logps = torch.tensor([row[-1] for row in logps], dtype=torch.float64)
        criteria = self.rubric.criteria
        grade_logps = grade_logps.view(len(questions), len(criteria), len(GRADES))
        grades = grade_logps.softmax(-1) @ torch.tensor(GRADES, dtype=torch.float64)
        return [dict(zip(criteria, row, strict=True)) for row in grades.tolist()]


def mean_grade(detail: dict) -> float:
    """Return the score in the details of a story; NaN if it is missing."""
    if "grades" not in detail:
        return math.nan
    return statistics.fmean(detail["grades"].values())


# --- From the settings ----------------------------------------------------------------------------


def check_judge_flags(config: GRPOConfig) -> None:
    """Raise ValueError, before anything is loaded, for flags that name no usable judge."""
    check_base_url("--judge_base_url", config.judge_base_url)
    if config.judge_type != "policy" and not config.judge_model:
        raise ValueError(f"--judge_type {config.judge_type} needs --judge_model")
    if config.judge_type == "policy" and config.judge_model:
        raise ValueError(
            "--judge_model goes with --judge_type local or openai; --judge_type policy takes the"
            " reference of the run"
        )
    if config.judge_type == "policy" and not config.beta:
        raise ValueError(
            "--judge_type policy takes the reference as the judge, which --beta 0 leaves out: use"
            " --judge_type local"
        )
    if config.judge_type == "policy" and distributed.world_size() > 1:
        raise ValueError(
            "--judge_type policy needs a reference that is not sharded: use one process, or"
            " --judge_type local"
        )
    if config.judge_type == "openai":
        get_api_key(config.judge_base_url)
    if config.judge_type == "local":
        llms.check_model_name("--judge_model", config.judge_model)


def get_judge(
    config: GRPOConfig, rubric: Rubric, reference=(None, None)
) -> EndpointJudge | LocalJudge:
    """Return the judge that the flags name.

    reference: (frozen model, tokenizer) of the run, for --judge_type policy.

    Raises ValueError for flags that name no usable judge, and OSError where it cannot be reached or
    loaded.
    """
    if config.judge_type == "openai":
        cache_file = config.output_dir / "judge_cache.jsonl"
        return EndpointJudge(rubric, config.judge_model, config.judge_base_url, cache_file)
    if config.judge_type == "policy":
        return LocalJudge(rubric, *reference)
    try:
        model, tokenizer = llms.get_llm_tokenizer(config.judge_model, config.device)
    except ValueError as error:
        # The message names the flag by which scripts load the model that they train.
        message = str(error).replace("--model_name", "--judge_model", 1)
        raise ValueError(message) from error
    return LocalJudge(rubric, model.requires_grad_(False).eval(), tokenizer)
