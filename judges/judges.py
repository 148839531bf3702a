"""Judges: objects that score stories. judge_report.py measures a judge before it is trusted.

    openai   a rating by a model behind any OpenAI-compatible endpoint
    local    a rating, or the log-likelihood, by a Hugging Face model in this process
    policy   the same by the frozen reference model of the run (not by the policy in training)

A rating is the mean of grades from 1 to 5, one for each criterion of the rubric. Where there are
log-probabilities, a grade is not the digit that was sampled but the expectation over the
probabilities of the five digits, which is finer. A story whose score is missing gets NaN, never a
number. In shapes and docstrings, N is the number of stories and V the size of the vocabulary.
"""

import asyncio
import hashlib
import json
import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from functools import partial

import torch

import distributed
import llms
from config import JudgeConfig
from judges.endpoint import Endpoint, Halted, NoReply, check_base_url, for_each, get_api_key
from judges.rating import GRADES, Rubric, rating_messages, read_rating
from logs import jsonl
from sampling.rollout import as_rollout, compute_rollout_logps

TIMEOUT = 60.0  # seconds without a sign of life from the endpoint, then a request is repeated
MAX_RETRIES = 5  # how many times a request is repeated if it fails or its reply is unreadable


class Judge(ABC):
    """Scores stories.

    lowest: the bottom of the scale of its scores.
    counts: what happened since the last `take_counts`, such as how many stories were asked about.
    """

    lowest: float = min(GRADES)

    def __init__(self):
        self.counts = Counter()
        self.noted_kinds = set()

    @abstractmethod
    def score(
        self, prompts: list[str], stories: list[str], fresh: bool = False
    ) -> tuple[list[float], list[dict]]:
        """Return N scores, NaN for each missing one, and N dicts of details for the transcripts.

        fresh: whether to ask again about stories that have a score already.
        """

    def take_counts(self) -> dict[str, int]:
        """Return the counts, and start them anew."""
        counts = dict(self.counts)
        self.counts = Counter()
        return counts

    def _note_once(self, kind, message):
        """Print a message, unless one of its kind was printed before."""
        if kind not in self.noted_kinds:
            print(f"note: {message}")
        self.noted_kinds.add(kind)


class Cache(dict):
    """Answers by the hash of their question, kept in a file: a resumed run asks nothing twice."""

    def __init__(self, path):
        super().__init__()
        self.path = path
        if not path.exists():
            return
        lines, newline, torn_line = path.read_bytes().rpartition(b"\n")
        if torn_line:  # the process that wrote it was killed
            os.truncate(path, len(lines + newline))
        for row in jsonl.read(path, ("key", "answer")):
            self[row["key"]] = row["answer"]

    def append(self, key, answer):
        self[key] = answer
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Every line is written by a single write call, so lines of several processes never mix.
        jsonl.append(self.path, {"key": key, "answer": answer})


class EndpointJudge(Judge):
    """Rates by a model behind an OpenAI-compatible endpoint.

    counts: the numbers of "asked" and of "cached" stories, and of failed requests of each kind, as
        in "failed_HTTP_429". A failed request counts even if its retry succeeds.
    """

    OPTIONS = {"temperature": 0, "max_tokens": 512, "logprobs": True, "top_logprobs": 20}

    def __init__(
        self,
        rubric,
        model,
        base_url=None,
        *,
        cache,
        concurrency=16,
        timeout=TIMEOUT,
        max_retries=MAX_RETRIES,
    ):
        super().__init__()
        self.rubric = rubric
        self.model = model
        self.cache = cache
        self.concurrency = concurrency
        self.connect = partial(Endpoint, model, base_url, timeout=timeout, max_retries=max_retries)
        # The extra fields of a request. Empty after the endpoint has refused them once.
        self.options = self.OPTIONS
        asyncio.run(self._check())

    async def _check(self):
        async with self.connect() as endpoint:
            await endpoint.check()

    def score(self, prompts, stories, fresh=False):
        chats = [
            rating_messages(self.rubric, prompt, story)
            for prompt, story in zip(prompts, stories, strict=True)
        ]
        keys = [self._key(chat) for chat in chats]
        answers = {} if fresh else {key: self.cache[key] for key in keys if key in self.cache}
        new_chats = {key: chat for key, chat in zip(keys, chats, strict=True) if key not in answers}
        self.counts += Counter(cached=len(answers), asked=len(new_chats))
        try:
            asyncio.run(self._ask_all(new_chats, answers, fresh))
        except ValueError as error:
            # The endpoint refuses the API key, although it accepted it when the run began.
            raise Halted(str(error)) from error
        details = [answers[key] for key in keys]
        scores = [self._mean_grade(answer) for answer in details]
        return scores, details

    def _key(self, chat):
        """The hash of everything that the answer to a chat depends on."""
        question = json.dumps([self.model, self.OPTIONS, chat], sort_keys=True)
        return hashlib.sha256(question.encode()).hexdigest()

    @staticmethod
    def _mean_grade(answer):
        if "grades" not in answer:
            return math.nan
        grades = answer["grades"].values()
        return sum(grades) / len(grades)

    async def _ask_all(self, chats, answers, fresh):
        """Ask all chats and add the replies to `answers`.

        With `fresh` they are not written to the cache.
        """
        async with self.connect() as endpoint:

            async def ask_one(key):
                try:
                    answers[key] = await self._ask(endpoint, chats[key])
                    if not fresh:
                        self.cache.append(key, answers[key])
                except NoReply as error:
                    reason = str(error)
                    answers[key] = {"judge_error": reason}
                    self._note_once(
                        reason, f"the judge gave no rating ({error.message}); counted as missing"
                    )

            await for_each(ask_one, chats, self.concurrency)
            failures = endpoint.failures.items()
            self.counts += Counter(
                {f"failed_{kind.replace(' ', '_')}": count for kind, count in failures}
            )

    async def _ask(self, endpoint, messages):
        """Return one rating; without log-probabilities where the endpoint refuses to give them."""
        options = self.options
        read = partial(read_rating, criteria=self.rubric.criteria)
        try:
            answer = await endpoint.ask(messages, read, **options)
        except NoReply as error:
            if not (error.refused and options):
                raise
            answer = await endpoint.ask(messages, read)
            self.options = {}
        if not answer["expected"]:  # not all grades are expectations
            self._note_once(
                "plain", "the judge gives no log-probs: its ratings are the numbers it writes"
            )
        return answer


def score_token_rows(model, tokenizer, rows, group_size: int = 1) -> torch.Tensor:
    """Return the float64 log-probs of the tokens of some completions, 0 after a completion's end.

    The shape is (number of rows, tokens of the longest completion).

    rows: pairs (prompt ids, completion ids). A prompt has at least one token.
    group_size: how many consecutive rows share a prompt.
    """
    rollout = as_rollout(rows, tokenizer.pad_token_id, model.device)
    logps = compute_rollout_logps(
        model, rollout, group_size=group_size, temperature=1.0, micro_batch_tokens=16384
    )
    return logps.double().cpu()


class ModelJudge(Judge):
    """Scores by a model in this process.

    A story that does not fit into the model's positions, with all that the model reads about it, is
    missing: beyond its positions, a model's probabilities mean nothing.
    """

    def __init__(self, model, tokenizer):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer

    @abstractmethod
    def token_rows(self, prompts: list[str], stories: list[str]) -> list[list[tuple]]:
        """Return for each of N stories the rows (prompt ids, completion ids) that are scored."""

    @abstractmethod
    def score_rows(self, rows: list[list[tuple]]) -> tuple[list[float], list[dict]]:
        """Return the scores and details of N stories, at least one, from their rows."""

    def score(self, prompts, stories, fresh=False):
        rows = self.token_rows(prompts, stories) if stories else []
        fitting = [i for i in range(len(rows)) if self._fits(rows[i])]
        scores = [math.nan] * len(rows)
        details = [{} for _ in rows]
        if len(fitting) < len(rows):
            reason = f"too long for the {llms.max_positions(self.model):,} positions of the judge"
            details = [{"judge_error": reason} for _ in rows]
            self._note_once(
                "too long", f"the judge gave no score ({reason}); such stories count as missing"
            )
        if fitting:
            fitting_scores, fitting_details = self.score_rows([rows[i] for i in fitting])
            for i, score, detail in zip(fitting, fitting_scores, fitting_details, strict=True):
                scores[i] = score
                details[i] = detail
        return scores, details

    def _fits(self, rows):
        """Whether all rows of a story fit into the positions of the model."""
        limit = llms.max_positions(self.model)
        longest = max(len(prompt_ids) + len(ids) for prompt_ids, ids in rows)
        return limit is None or longest <= limit


class ModelRatingJudge(ModelJudge):
    """Rates by a model in this process.

    The grade of a criterion is the expectation over the digits that may follow its name. Each
    criterion is asked for by itself, so no grade depends on another one. The details also have
    "digit_mass", the probability that the next token is one of the digits: near 0, the model
    has not understood what is asked.
    """

    def __init__(self, rubric, model, tokenizer):
        super().__init__(model, tokenizer)
        self.rubric = rubric
        # Each text is a reply up to a grade. The five must differ in their last token only.
        texts = [f'{{"a": {grade}' for grade in GRADES]
        rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
        self.grade_ids = [ids[-1] for ids in rows]
        beginnings = {tuple(ids[:-1]) for ids in rows}
        if len(beginnings) > 1 or len(set(self.grade_ids)) < len(GRADES):
            raise ValueError(
                "the judge's tokenizer has no token for each of the digits 1 to 5: it cannot rate;"
                " use --judge_score likelihood, or another --judge_model"
            )
        (rows_without_story,) = self.token_rows([""], [""])
        if not self._fits(rows_without_story):
            raise ValueError(
                f"the judge has {llms.max_positions(model):,} positions, which the question about"
                " a story fills alone: it cannot rate; use --judge_score likelihood, or another"
                " --judge_model"
            )

    def token_rows(self, prompts, stories):
        """Return for each story a row for each criterion and grade, in this order."""
        rows = []
        for prompt, story in zip(prompts, stories, strict=True):
            chat = self._chat(prompt, story)
            # A 1 stands in place of the grade, so that the text before it is split into tokens as
            # in a full reply.
            texts = [f'{chat}{{"{name}": 1' for name in self.rubric.criteria]
            story_rows = []
            for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]:
                # The 1 is taken off again, and each of the five digits takes its place once.
                story_rows += [(ids[:-1], [grade_id]) for grade_id in self.grade_ids]
            rows.append(story_rows)
        return rows

    def score_rows(self, rows):
        all_rows = sum(rows, [])
        logps = score_token_rows(self.model, self.tokenizer, all_rows, len(GRADES))
        logps = logps.view(-1, len(GRADES))  # (N * criteria, 5)
        possible_grades = torch.tensor(GRADES, dtype=torch.float64)
        grades = (logps.softmax(-1) @ possible_grades).view(len(rows), -1)  # (N, criteria)
        digit_masses = logps.exp().sum(-1).view(len(rows), -1).mean(1)  # (N,)
        details = [
            {
                "grades": dict(zip(self.rubric.criteria, story_grades, strict=True)),
                "expected": True,  # all grades are expectations
                "digit_mass": digit_mass,
            }
            for story_grades, digit_mass in zip(grades.tolist(), digit_masses.tolist(), strict=True)
        ]
        return grades.mean(1).tolist(), details

    def _chat(self, prompt, story):
        """The question about a story as the text that the model reads."""
        messages = rating_messages(self.rubric, prompt, story)
        if self.tokenizer.chat_template:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        return "\n\n".join(message["content"] for message in messages) + "\n\n"


class LikelihoodJudge(ModelJudge):
    """Scores by the mean log-likelihood of a story's tokens after its opening line, in nats.

    It is for models that are too small to follow instructions. A score below -log V, the
    log-likelihood of a token that is drawn uniformly, is raised to -log V.
    """

    def __init__(self, model, tokenizer):
        super().__init__(model, tokenizer)
        vocabulary_size = model.get_output_embeddings().weight.shape[0]
        self.lowest = -math.log(vocabulary_size)

    def token_rows(self, prompts, stories):
        """Return one row for each story."""
        texts = [
            f"{prompt} {story.strip()}".rstrip()
            for prompt, story in zip(prompts, stories, strict=True)
        ]
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        bos_ids = self.tokenizer("")["input_ids"]  # none for some tokenizers
        rows = []
        for prompt, ids, offsets in zip(
            prompts, encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            # Tokens that end inside the prompt belong to the prompt. A token across its end belongs
            # to the story.
            num_prompt_tokens = sum(end <= len(prompt) for _, end in offsets)
            if not bos_ids:  # the first token has no log-likelihood, for nothing stands before it
                num_prompt_tokens = max(1, num_prompt_tokens)
            rows.append([(bos_ids + ids[:num_prompt_tokens], ids[num_prompt_tokens:])])
        return rows

    def score_rows(self, rows):
        all_rows = sum(rows, [])
        logps = score_token_rows(self.model, self.tokenizer, all_rows)
        lengths = torch.tensor([len(story_ids) for _, story_ids in all_rows])
        means = logps.sum(1) / lengths  # NaN for a story without any token
        scores = means.clamp(min=self.lowest).tolist()
        return scores, [{} for _ in scores]


# --- From the settings ----------------------------------------------------------------------------


def check_judge_flags(config: JudgeConfig) -> None:
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
        if config.judge_score == "likelihood":
            raise ValueError(
                "--judge_score likelihood needs a model in this process: use --judge_type local or"
                " policy"
            )
        get_api_key(config.judge_base_url)
    if config.judge_type == "local":
        llms.check_model_name("--judge_model", config.judge_model)


def get_judge(config: JudgeConfig, rubric: Rubric, reference=(None, None)) -> Judge:
    """Return the judge that the flags name.

    reference: (frozen model, tokenizer) of the run, for --judge_type policy.

    Raises ValueError for flags that name no usable judge, and OSError where it cannot be reached or
    loaded.
    """
    if config.judge_type == "openai":
        return EndpointJudge(
            rubric,
            config.judge_model,
            config.judge_base_url,
            cache=Cache(config.output_dir / "judge_cache.jsonl"),
            concurrency=config.judge_concurrency,
            timeout=TIMEOUT,
            max_retries=MAX_RETRIES,
        )
    model, tokenizer = reference
    if config.judge_type == "local":
        try:
            model, tokenizer = llms.get_llm_tokenizer(config.judge_model, config.device)
        except ValueError as error:
            # The message names the flag by which scripts load the model that they train.
            message = str(error).replace("--model_name", "--judge_model", 1)
            raise ValueError(message) from error
        model.requires_grad_(False).eval()
    if config.judge_score == "likelihood":
        return LikelihoodJudge(model, tokenizer)
    return ModelRatingJudge(rubric, model, tokenizer)
