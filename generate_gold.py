"""Make gold.jsonl, the verified solutions to a training split that sft.py learns from.

The solutions come from one of three sources: the data set's own human solutions, any
OpenAI-compatible endpoint, or a local model.

    python generate_gold.py --from_reference
    python generate_gold.py --api_model NAME --base_url http://127.0.0.1:8000/v1
    python generate_gold.py --model_name tiny/1m --dataset_name arithmetic

A solution is kept if the evaluator's strict verdict holds: it has the required format, and its
answer equals the gold answer. Every row has an id, the question, the completion (in the format of
prompt_name, without EOS), the gold answer, the source, the number of the attempt (from 1 on),
whether it is correct, and prompt_name. Rows stand in the order in which they were finished, so
quick ones come first: whoever needs a subset should draw it at random.

Rejected attempts go to a second file beside gold.jsonl, gold.rejected.jsonl, with the reason. A
second start needs only these two files to continue. It skips problems that are solved or have no
attempts left, and tries problems again that got no reply.
"""

import asyncio
import fcntl
import os
import random
import re
import signal
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from config import GoldConfig, parse

if __name__ == "__main__":
    parse(GoldConfig)  # --help and mistakes are answered before the seconds that imports take

import llms
import utils
from evaluator import get_evaluator
from grading.extraction import strict_format, tagged_answer
from judges.endpoint import Endpoint, NoReply, check_base_url, for_each, get_api_key
from logs import jsonl
from rl_datasets import DATASETS, PROMPTS
from sampling import generation
from training.checks import check_device, check_lengths, check_names
from training.memory import flag_to_lower

# An endpoint is always asked for this format; `read_sample` then rewrites the reply in the format
# of --prompt.
ENDPOINT_PROMPT = PROMPTS["reasoning_answer"]
# In training, a special token inside a completion would end a turn in the middle of the text.
SPECIAL_TOKEN = re.compile(r"<\|[^|<>\s]+\|>")
# After this many problems in a row without a reply, the endpoint must be gone or the account empty.
MAX_FAILURES_IN_A_ROW = 20
# The number of reference solutions that are graded and written together.
REFERENCE_BATCH_SIZE = 500

# Every row of the output begins with these bytes and has at least these keys.
ROW_START = b'{"id": '
REQUIRED_KEYS = {"id", "question", "source", "attempt", "correct", "prompt_name"}


class JsonlFile:
    """A file of rows that only this process appends to; rows are on disk when `append` returns.

    Opening it reads the rows of earlier runs into `rows`, and drops a last line that a kill has
    left incomplete.

    Raises:
        ValueError: Another process has the file open, or it holds something else than such rows.
        OSError: The file cannot be written.
    """

    def __init__(self, path):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "ab+")
            # The lock lasts until the file is closed, or this process ends, however it ends.
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path} is in use by another process") from None
        except OSError as error:
            raise OSError(f"--output: cannot write {path} ({error.strerror})") from error
        self.file.seek(0)
        self.rows = self._read_rows(self.file.read())

    def _read_rows(self, content):
        """The rows of the file's content; an incomplete last line is cut off the file."""
        complete_lines, newline, last_line = content.rpartition(b"\n")
        try:
            rows = [jsonl.parse(line, self.path) for line in complete_lines.splitlines()]
            have_keys = all(REQUIRED_KEYS <= row.keys() for row in rows)
        except ValueError:
            have_keys = False
        # The last line may have been cut off after ROW_START, or already inside it.
        may_begin_a_row = last_line.startswith(ROW_START) or ROW_START.startswith(last_line)
        if not have_keys or not may_begin_a_row:
            raise ValueError(
                f"{self.path} holds lines that are not rows of generate_gold.py; "
                "name another --output"
            )
        if last_line:
            self.file.truncate(len(complete_lines + newline))
            print(f"{self.path}: dropped a last line that was not written to its end")
        return rows

    def append(self, rows):
        self.file.write("".join(jsonl.dumps(row) + "\n" for row in rows).encode())
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self):
        """Give up the lock, so that this process can open the file again."""
        self.file.close()


@dataclass(frozen=True)
class Sample:
    """The completion of one attempt at a problem."""

    text: str
    truncated: bool = False  # whether it was cut at the maximum length
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Outcome:
    """What this run has made of a problem so far."""

    kind: str  # "accepted", "rejected", "no reply", or "unfinished" while attempts are left
    reason: str | None  # why there is no solution; None if the problem is accepted


class GoldCollector:
    """Grades the attempts at some problems, writes them to disk, and knows which problems are still
    open.

    Raises:
        ValueError: The output file was made from other problems or for another prompt, or it is
            not one of this script's.
        OSError: The output file cannot be written.
    """

    def __init__(self, config, problems, evaluator):
        self.config = config
        self.problems = problems
        self.evaluator = evaluator
        self.source = config.api_model or config.model_name or "reference"
        rejected_path = Path(str(config.output).removesuffix(".jsonl") + ".rejected.jsonl")
        self.accepted_file = JsonlFile(config.output)
        self.rejected_file = JsonlFile(rejected_path)
        self.solved_ids = set()
        self.num_attempts = Counter()  # problem id -> attempts that this source has made
        self._count_earlier_rows(self.accepted_file.rows + self.rejected_file.rows)
        self.open_problems = [problem for problem in problems if self.attempts_left(problem)]
        self.outcomes = {}  # problem id -> Outcome, of the problems that this run tries
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.failures_in_a_row = 0
        self.shown_reasons = set()  # why problems got no reply, as far as the user has been told
        # With a delay, tqdm draws nothing before a problem is done. An error that comes first is
        # then the only line on the screen.
        self.progress_bar = tqdm(
            total=len(self.open_problems),
            desc="gold",
            dynamic_ncols=True,
            leave=False,
            delay=0.1,
            disable=None,  # no bar where stderr is not a terminal
        )

    def _count_earlier_rows(self, rows):
        """Note what earlier runs have solved, and how often this source has tried."""
        questions = {problem["id"]: problem["question"] for problem in self.problems}
        for row in rows:
            has_same_prompt = row["prompt_name"] == self.config.prompt
            # The row's problem may not be among the --num_problems of this run.
            is_known = row["id"] in questions
            has_same_question = not is_known or questions[row["id"]] == row["question"]
            if not has_same_prompt or not has_same_question:
                raise ValueError(
                    f"{self.config.output} was made from other problems or for another prompt; "
                    "name another --output"
                )
            if row["correct"]:
                self.solved_ids.add(row["id"])
            if row["source"] == self.source:
                attempt = max(self.num_attempts[row["id"]], row["attempt"])
                self.num_attempts[row["id"]] = attempt

    def attempts_left(self, problem):
        """How many more attempts this source may make at a problem: 0 once it is solved."""
        if problem["id"] in self.solved_ids:
            return 0
        # A second reading of the data set's own solution would not differ from the first.
        max_attempts = 1 if self.config.from_reference else self.config.num_attempts
        return max(0, max_attempts - self.num_attempts[problem["id"]])

    def record(self, problems, samples):
        """Grade one sample for each of the problems and write it to disk."""
        texts = [sample.text for sample in samples]
        rewards = self.evaluator.compute_checked_rewards(problems, texts)
        accepted_rows = []
        rejected_rows = []
        for problem, sample, detail in zip(problems, samples, rewards.details, strict=True):
            reason = rejection_reason(sample, detail)
            self._count_attempt(problem, sample, reason)
            row = {
                "id": problem["id"],
                "question": problem["question"],
                "completion": sample.text,
                "answer": problem["answer"],
                "source": self.source,
                "attempt": self.num_attempts[problem["id"]],
                "correct": reason is None,
                "prompt_name": self.config.prompt,
            }
            if reason is None or self.config.keep_incorrect:
                accepted_rows.append(row)
            else:
                rejected_rows.append({**row, "reason": reason})
        self.accepted_file.append(accepted_rows)
        self.rejected_file.append(rejected_rows)
        self.failures_in_a_row = 0
        postfix = f"{len(self.solved_ids)} solved, {self.token_usage()}"
        self.progress_bar.set_postfix_str(postfix, refresh=False)

    def _count_attempt(self, problem, sample, reason):
        """Count one graded sample, and note what it makes of its problem."""
        self.prompt_tokens += sample.prompt_tokens
        self.completion_tokens += sample.completion_tokens
        self.num_attempts[problem["id"]] += 1
        if reason is None:
            self.solved_ids.add(problem["id"])
            kind = "accepted"
        elif self.attempts_left(problem):
            kind = "unfinished"
        else:
            kind = "rejected"
        self.outcomes[problem["id"]] = Outcome(kind, reason)
        if kind != "unfinished":
            self.progress_bar.update()

    def record_no_reply(self, problem, reason, message):
        """Note that a problem got no reply from the endpoint.

        Nothing is written, so that a second start tries it again. Failures are counted by their
        reason, a few words; the message says more, and is shown once for each reason.

        Raises:
            OSError: MAX_FAILURES_IN_A_ROW problems in a row got no reply.
        """
        if reason not in self.shown_reasons:
            self.shown_reasons.add(reason)
            self.progress_bar.write(f"no reply: {message}")
        self.outcomes[problem["id"]] = Outcome("no reply", reason)
        self.progress_bar.update()
        self.failures_in_a_row += 1
        if self.failures_in_a_row == MAX_FAILURES_IN_A_ROW:
            raise OSError(
                f"{MAX_FAILURES_IN_A_ROW} problems in a row got no reply ({reason}): stopped"
            )

    def token_usage(self):
        return f"{self.prompt_tokens:,} + {self.completion_tokens:,} tokens"

    def report(self):
        """Print what came of the problems, unless an error came before the first attempt."""
        self.progress_bar.close()
        if self.open_problems and not self.outcomes:
            return
        num_solved = sum(problem["id"] in self.solved_ids for problem in self.problems)
        print(
            f"{self.config.output}: {num_solved:,} of {len(self.problems):,} problems solved; "
            f"{self.token_usage()}"
        )
        num_done_before = len(self.problems) - len(self.open_problems)
        print(f"{'done before':12} {num_done_before:7,}")
        print(f"{'tried':12} {len(self.outcomes):7,}")
        for kind in ("accepted", "rejected", "no reply", "unfinished"):
            self._report_kind(kind)

    def _report_kind(self, kind):
        """Print how many problems have an outcome of this kind, and why, in one line."""
        reasons = Counter(
            outcome.reason for outcome in self.outcomes.values() if outcome.kind == kind
        )
        explanation = ", ".join(f"{reason} {n:,}" for reason, n in reasons.most_common() if reason)
        if kind == "no reply" and reasons:
            explanation += "; start again to try them"
        print(f"- {kind:10} {reasons.total():7,}  {explanation}".rstrip(), flush=True)


def rejection_reason(sample, detail):
    """Why a sample is rejected, in a few words; None if it is accepted.

    detail: the evaluator's verdict on its text.
    """
    if not sample.text.strip():
        return "empty"
    if SPECIAL_TOKEN.search(sample.text):
        return "special token"
    if detail["correct_strict"]:
        return None
    if sample.truncated:
        return "truncated"
    if detail["format"]:
        return "wrong answer"
    return "format"


# --- The three sources ----------------------------------------------------------------------------


def collect_references(config, collector):
    """Grade the data set's own solutions; a missing one counts as an empty completion."""
    prompt = PROMPTS[config.prompt]
    for start in range(0, len(collector.open_problems), REFERENCE_BATCH_SIZE):
        batch = collector.open_problems[start : start + REFERENCE_BATCH_SIZE]
        samples = []
        for problem in batch:
            if problem["solution"]:
                text = prompt.format_solution(problem["solution"], problem["answer"])
            else:
                text = ""
            samples.append(Sample(text))
        collector.record(batch, samples)


def sample_local_model(config, collector, model, tokenizer):
    """Sample until every problem is solved or out of attempts, --concurrency problems at a time."""
    # The seed counts the attempts of earlier runs, so that a second start draws other samples.
    utils.seed_everything(config.seed + collector.num_attempts.total())
    batch_size = config.concurrency
    for start in range(0, len(collector.open_problems), batch_size):
        batch = collector.open_problems[start : start + batch_size]
        while batch:
            collector.record(batch, sample_batch(config, batch, model, tokenizer))
            batch = [problem for problem in batch if collector.attempts_left(problem)]


def render_prompts(config, problems, tokenizer):
    """The prompt of each problem, as a local model gets it."""
    prompt = PROMPTS[config.prompt]
    return [prompt.render(tokenizer, problem["question"]) for problem in problems]


def sample_batch(config, problems, model, tokenizer):
    """One Sample for each problem."""

    with flag_to_lower("concurrency", config.concurrency, how="start again with"):
        rollout = generation.generate(
            model,
            tokenizer,
            render_prompts(config, problems, tokenizer),
            max_completion_length=config.max_completion_length,
            temperature=1.0 if config.temperature is None else config.temperature,
            stop_strings=PROMPTS[config.prompt].stop_strings,
            max_concurrent_sequences=config.concurrency,
        )
    finished = rollout.finished.tolist()
    completion_tokens = rollout.lengths.tolist()
    prompt_tokens = (rollout.attention_mask.sum(1) - rollout.lengths).tolist()
    return [
        Sample(text.rstrip(), not finished[i], prompt_tokens[i], completion_tokens[i])
        for i, text in enumerate(rollout.texts)
    ]


async def ask_endpoint(config, collector):
    """Solve the open problems with at most --concurrency requests at a time."""
    options = {}
    if config.max_completion_length:
        options["max_tokens"] = config.max_completion_length
    if config.temperature is not None:
        options["temperature"] = config.temperature
    read_reply = partial(read_sample, prompt=PROMPTS[config.prompt])
    # Ctrl-C cancels this task at once. asyncio's own handler does not wake an event loop that has
    # just gone to sleep, so the script would go on until the next reply.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, asyncio.current_task().cancel)
    async with Endpoint(
        config.api_model, config.base_url, timeout=config.timeout, max_retries=config.max_retries
    ) as endpoint:
        await endpoint.check()

        async def solve(problem):
            messages = ENDPOINT_PROMPT.messages(problem["question"])
            try:
                while collector.attempts_left(problem):
                    sample = await endpoint.ask(messages, read_reply, **options)
                    collector.record([problem], [sample])
            except NoReply as error:
                collector.record_no_reply(problem, str(error), error.message)

        await for_each(solve, collector.open_problems, config.concurrency)


def read_sample(reply_text, prompt):
    """The Sample in an endpoint's JSON.

    If the text keeps to ENDPOINT_PROMPT's format, it is rewritten in that of `prompt`. If this
    function raises, Endpoint.ask counts a broken reply and sends the request again.
    """
    reply = jsonl.parse(reply_text, "a reply")
    choice = reply["choices"][0]
    text = (choice["message"]["content"] or "").rstrip()
    # Half of a surrogate pair becomes "?": a tokenizer would refuse it, in the middle of training.
    text = text.encode(errors="replace").decode()
    if prompt is not ENDPOINT_PROMPT and strict_format(text):
        solution = text.partition("<reasoning>")[2].partition("</reasoning>")[0].strip()
        text = prompt.format_solution(solution, tagged_answer(text))
    usage = reply.get("usage") or {}
    return Sample(
        text,
        truncated=choice.get("finish_reason") == "length",
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
    )


# --- The command line -----------------------------------------------------------------------------


def check_config(config: GoldConfig) -> None:
    """Raise ValueError, in one line, for settings that cannot work together."""
    sources = [config.from_reference, config.model_name, config.api_model]
    if sum(bool(source) for source in sources) != 1:
        raise ValueError("name one source: --from_reference, --model_name or --api_model")
    if config.base_url and not config.api_model:
        raise ValueError("--base_url goes with --api_model, the name of a model there")
    check_base_url("--base_url", config.base_url)
    if config.api_model:
        get_api_key(config.base_url)
    elif config.max_completion_length == 0:
        raise ValueError("--max_completion_length must be more than 0 without an endpoint")
    check_names(config)
    check_device(config.device)


def complete(config: GoldConfig) -> GoldConfig:
    """The settings with the defaults of the data set filled in."""
    data_set = DATASETS[config.dataset_name]
    return replace(
        config,
        prompt=config.prompt or data_set.default_prompt,
        evaluator=config.evaluator or data_set.default_evaluator,
    )


def choose_problems(config):
    """The first --num_problems (default: all) of the training split after a shuffle by --seed.

    Raises:
        ValueError: There is no training split.
    """
    examples = DATASETS[config.dataset_name].read("train", config.dataset_path)
    if not examples:
        raise ValueError(f"{config.dataset_path or config.dataset_name} has no training split")
    random.Random(f"gold/{config.seed}").shuffle(examples)
    return examples[: config.num_problems]


def collect(config):
    """Collect solutions from the source that the flags name, and print a report even after an
    error.
    """
    config = replace(config, device=llms.resolve_device(config.device))
    check_config(config)
    config = complete(config)
    problems = choose_problems(config)
    if config.model_name:
        model, tokenizer = llms.get_llm_tokenizer(config.model_name, config.device)
        prompts = render_prompts(config, problems, tokenizer)
        prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
        longest_prompt = max(len(ids) for ids in prompt_ids)
        check_lengths(model, longest_prompt, config.max_completion_length)
    evaluator = get_evaluator(config.evaluator, prompt=config.prompt)
    evaluator.check_gold(problems)
    collector = GoldCollector(config, problems, evaluator)
    try:
        if config.from_reference:
            collect_references(config, collector)
        elif config.model_name:
            sample_local_model(config, collector, model, tokenizer)
        elif collector.open_problems:
            asyncio.run(ask_endpoint(config, collector))
    finally:
        collector.report()
        collector.accepted_file.close()
        collector.rejected_file.close()


def main(argv=None):
    """The command line; returns its exit code."""
    config = parse(GoldConfig, argv)
    try:
        collect(config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(
            "interrupted: every finished attempt is on disk; start again to continue",
            file=sys.stderr,
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
