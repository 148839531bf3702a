"""Make gold.jsonl, the solutions to a training split that sft.py learns from.

The solutions come from one of three sources: the data set's own human solutions, any
OpenAI-compatible endpoint, or a local model.

    python generate_gold.py --from_reference
    python generate_gold.py --api_model NAME --base_url http://127.0.0.1:8000/v1
    python generate_gold.py --model_name tiny/1m --dataset_name arithmetic

Every problem gets one row: its id, the question, the completion (in the format of prompt_name,
without EOS), the gold answer, whether the completion is correct, the source, the number of attempts
and prompt_name. A completion is correct if the evaluator's strict verdict holds: it has the
required format, and its answer equals the gold answer. sft.py trains on the correct rows alone.

Rows stand in the order in which they were finished, so quick ones come first: whoever needs a
subset should draw it at random. A second start with the same file skips the problems that are in
it, and tries again those that got no reply.
"""

import asyncio
import random
import re
import sys
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout

from config import GoldConfig, parse

if __name__ == "__main__":
    parse(GoldConfig)  # --help and mistakes are answered before the seconds that imports take

import distributed
import llms
import utils
from evaluator import get_evaluator, strict_verdicts
from grading.extraction import strict_format, tagged_answer
from judges.endpoint import Endpoint, NoReply, check_base_url, for_each, get_api_key
from logs import jsonl
from rl_datasets import PROMPTS, find_data_set, find_prompt, render_prompts
from sampling import generation

# An endpoint is always asked for this format; `in_format` rewrites the reply in that of --prompt.
ENDPOINT_PROMPT = PROMPTS["reasoning_answer"]
# In training, a special token inside a completion would end a turn in the middle of the text.
SPECIAL_TOKEN = re.compile(r"<\|[^|<>\s]+\|>")
# After this many problems in a row without a reply, the endpoint must be gone or the account empty.
MAX_FAILURES_IN_A_ROW = 20


def locked(path: Path) -> AbstractContextManager:
    """Lock the file of solutions, which is made if there is none; leaving the context unlocks it.

    Raises:
        ValueError: Another process writes it.
        OSError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        return FileLock(f"{path}.lock").acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"--output {path} is being written by another process; wait for its end, or name"
            " another file"
        ) from None
    except OSError as error:
        raise OSError(
            f"--output: cannot write {path} ({error.strerror}); name another file"
        ) from error


class GoldFile:
    """Grades attempts, and appends a row to the file of solutions for each problem that is done.

    open_problems: those that are not in the file yet.
    counts: how many problems this run has found correct or incorrect, or left without a reply.

    Raises:
        ValueError: The file holds something else than solutions to these problems for this prompt.
    """

    def __init__(self, config, examples, prompt, evaluator):
        """Open the file; `examples` is the training split, whose first ones are to be solved."""
        self.path = config.output
        self.source = config.api_model or config.model_name or "reference"
        self.num_attempts = config.num_attempts
        self.prompt = prompt
        self.evaluator = evaluator
        done_ids = self._read_ids(examples)
        problems = examples[: config.num_problems]
        self.open_problems = [problem for problem in problems if problem["id"] not in done_ids]
        self.num_done_before = len(problems) - len(self.open_problems)
        self.counts = Counter()
        self.failures_in_a_row = 0
        self.progress_bar = distributed.progress_bar(
            total=len(self.open_problems), desc="gold", unit="problem"
        )

    def _read_ids(self, examples):
        """Return the ids of the problems that are in the file."""
        columns = ("id", "question", "completion", "correct", "source", "prompt_name")
        try:
            rows = jsonl.read_to_continue(self.path, columns)
        except ValueError as error:
            raise ValueError(f"--output holds other rows ({error}); name another file") from error
        questions = {example["id"]: example["question"] for example in examples}
        for row in rows:
            has_same_question = questions.get(str(row["id"])) == row["question"]
            if not has_same_question or row["prompt_name"] != self.prompt.name:
                raise ValueError(
                    f"--output {self.path} was made from other problems or for another prompt "
                    f"({row['id']}, {row['prompt_name']}); name another file"
                )
            if row["source"] != self.source:
                raise ValueError(
                    f"--output {self.path} has solutions of {row['source']}, not of {self.source};"
                    " name another file"
                )
        return {row["id"] for row in rows}

    def record(self, problem, completion, attempt, finished=True):
        """Grade an attempt, and write the problem's row if it is correct or the last one.

        A completion that was cut at its maximum length teaches no end, so it is not correct.

        Returns:
            Whether the problem is done.
        """
        self.failures_in_a_row = 0
        rewards = self.evaluator.compute_checked_rewards([problem], [completion])
        has_special_token = SPECIAL_TOKEN.search(completion) is not None
        is_correct = strict_verdicts(rewards)[0] and finished and not has_special_token
        if not is_correct and attempt < self.num_attempts:
            return False
        row = {
            "id": problem["id"],
            "question": problem["question"],
            "completion": completion,
            "answer": problem["answer"],
            "correct": is_correct,
            "source": self.source,
            "attempt": attempt,
            "prompt_name": self.prompt.name,
        }
        jsonl.append(self.path, row)
        self._count("correct" if is_correct else "incorrect")
        return True

    def record_no_reply(self, error):
        """Count a problem that got no reply. Nothing is written, so a second start tries it again.

        Raises:
            OSError: MAX_FAILURES_IN_A_ROW problems in a row got no reply.
        """
        if not self.counts["no reply"]:
            self.progress_bar.write(f"no reply: {error}")  # most often the others fail alike
        self._count("no reply")
        self.failures_in_a_row += 1
        if self.failures_in_a_row == MAX_FAILURES_IN_A_ROW:
            raise OSError(f"{MAX_FAILURES_IN_A_ROW} problems in a row got no reply ({error})")

    def _count(self, outcome):
        self.counts[outcome] += 1
        self.progress_bar.set_postfix(self.counts, refresh=False)
        self.progress_bar.update()

    def print_counts(self):
        """Print what came of the problems, unless an error came before the first of them."""
        self.progress_bar.close()
        if self.open_problems and not self.counts:
            return
        num_open = len(self.open_problems) - self.counts["correct"] - self.counts["incorrect"]
        print(
            f"{self.path}: {self.counts['correct']:,} correct, {self.counts['incorrect']:,} "
            f"incorrect, {self.num_done_before:,} done before, {num_open:,} still open"
        )


# --- The three sources ----------------------------------------------------------------------------


def collect_references(gold):
    """Take the data set's own solutions; a missing one counts as an empty completion."""
    for problem in gold.open_problems:
        completion = ""
        if problem["solution"]:
            completion = gold.prompt.format_solution(problem["solution"], problem["answer"])
        gold.record(problem, completion, attempt=1)


def sample_local_model(config, gold, model, tokenizer):
    """Sample until every problem is solved or out of attempts, --concurrency problems at a time."""
    utils.seed_everything(config.seed)
    for start in range(0, len(gold.open_problems), config.concurrency):
        batch = gold.open_problems[start : start + config.concurrency]
        for attempt in range(1, gold.num_attempts + 1):
            completions = generation.generate(
                model,
                tokenizer,
                [gold.prompt.render(tokenizer, problem["question"]) for problem in batch],
                max_completion_length=config.max_completion_length,
                temperature=1.0 if config.temperature is None else config.temperature,
                stop_strings=gold.prompt.stop_strings,
                max_concurrent_sequences=config.concurrency,
            )
            batch = [
                problem
                for problem, sample in zip(batch, completions, strict=True)
                if not gold.record(problem, sample.text.rstrip(), attempt, sample.finished)
            ]
            if not batch:
                break


async def ask_endpoint(config, gold):
    """Ask about every problem until it is solved or out of attempts, --concurrency at a time.

    Raises:
        OSError: The endpoint cannot be reached, refuses the key, or has stopped replying.
    """
    options = {}
    if config.max_completion_length:
        options["max_tokens"] = config.max_completion_length
    if config.temperature is not None:
        options["temperature"] = config.temperature
    async with Endpoint(config.api_model, config.base_url, config.timeout) as endpoint:
        await endpoint.check()

        async def solve(problem):
            messages = ENDPOINT_PROMPT.messages(problem["question"])
            try:
                for attempt in range(1, gold.num_attempts + 1):
                    reply, is_finished = await endpoint.ask(messages, **options)
                    if gold.record(problem, in_format(gold.prompt, reply), attempt, is_finished):
                        return
            except NoReply as error:
                gold.record_no_reply(error)

        await for_each(solve, gold.open_problems, config.concurrency)


def in_format(prompt, reply):
    """An endpoint's reply as a completion, in the format of `prompt` if it is in the one asked."""
    text = reply.rstrip()
    if prompt is ENDPOINT_PROMPT or not strict_format(text):
        return text
    solution = text.partition("<reasoning>")[2].partition("</reasoning>")[0].strip()
    return prompt.format_solution(solution, tagged_answer(text))


# --- The command line -----------------------------------------------------------------------------


def check_config(config: GoldConfig) -> None:
    """Raise ValueError, in one line, for settings that cannot work together."""
    sources = [config.from_reference, config.model_name, config.api_model]
    if sum(bool(source) for source in sources) != 1:
        raise ValueError("name one source: --from_reference, --model_name or --api_model")
    if config.base_url and not config.api_model:
        raise ValueError("--base_url goes with --api_model, the name of a model there")
    if config.from_reference and (config.num_attempts > 1 or config.temperature is not None):
        raise ValueError("--num_attempts and --temperature go with --model_name or --api_model")
    check_base_url("--base_url", config.base_url)
    if config.api_model:
        get_api_key(config.base_url)
    elif config.max_completion_length == 0:
        raise ValueError("--max_completion_length must be more than 0 without an endpoint")


def collect(config: GoldConfig) -> None:
    """Collect solutions from the source that the settings name, and print what came of it."""
    check_config(config)
    data_set = find_data_set(config.dataset_name)
    prompt = find_prompt(config.prompt or data_set.default_prompt)
    examples = data_set.read("train", config.dataset_path)
    if not examples:
        raise ValueError(f"{config.dataset_path or config.dataset_name} has no training split")
    if config.num_problems and config.num_problems > len(examples):
        print(f"note: --num_problems {config.num_problems}: there are only {len(examples):,}")
    random.Random(f"gold/{config.seed}").shuffle(examples)
    problems = examples[: config.num_problems]
    evaluator = get_evaluator(config.evaluator or data_set.default_evaluator, prompt=prompt.name)
    evaluator.check_gold(problems)
    if config.model_name:
        device = llms.resolve_device(config.device)
        model, tokenizer = llms.get_llm_tokenizer(config.model_name, device)
        prompts = render_prompts(prompt, tokenizer, problems)
        prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
        longest_prompt = max(len(ids) for ids in prompt_ids)
        llms.check_positions(model, longest_prompt, config.max_completion_length)
    with locked(config.output):
        gold = GoldFile(config, examples, prompt, evaluator)
        try:
            if config.from_reference:
                collect_references(gold)
            elif config.model_name:
                sample_local_model(config, gold, model, tokenizer)
            elif gold.open_problems:
                asyncio.run(ask_endpoint(config, gold))
        finally:
            gold.print_counts()


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit code."""
    config = parse(GoldConfig, argv)
    try:
        collect(config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: start again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
