"""Make gold.jsonl, the solutions to a training split that sft.py learns from.

    python generate_gold.py --from_reference                                 # the data set's own
    python generate_gold.py --api_model NAME --base_url http://127.0.0.1:8000/v1
    python generate_gold.py --solutions written_elsewhere.jsonl

An endpoint may be any that is compatible with OpenAI's; vLLM and `transformers serve` make one of a
local model. A row says whether its completion is correct by the strict verdict: the required
format, and in it the right answer. sft.py trains on correct rows alone.

A second start with the same file goes on where the first one stopped: it skips the problems that
have a row, and asks again about those that got no reply.
"""

import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from config import RunConfig, again, parse, setting


@dataclass(frozen=True)
class GoldConfig:
    """Collect verified solutions for supervised fine-tuning."""

    from_reference: bool = setting(
        False, "Source 1: take the data set's own solutions.", title="sampling"
    )
    api_model: str | None = setting(
        None,
        "Source 2: ask the model of this name at an OpenAI-compatible endpoint, whose key is in the"
        " environment variable OPENAI_API_KEY.",
    )
    base_url: str | None = setting(
        None, "The endpoint, such as http://127.0.0.1:8000/v1. (default: OpenAI's own)"
    )
    solutions: Path | None = setting(
        None,
        "Source 3: take completions that were written elsewhere, from a .jsonl file with the id of"
        " a problem and a completion in the format of --prompt.",
    )
    temperature: float | None = setting(
        None, "Temperature of sampling. (default: the endpoint's own)", zero=True
    )
    max_completion_length: int = setting(
        512, "Tokens of a reply, reasoning included; 0 is no limit.", zero=True
    )

    dataset_name: str = again(RunConfig, "dataset_name")
    dataset_path: str | None = again(RunConfig, "dataset_path")
    prompt: str | None = again(RunConfig, "prompt")
    evaluator: str | None = again(RunConfig, "evaluator")
    num_problems: int | None = setting(
        None,
        "Training problems, drawn by --seed; a larger number includes those of a smaller one."
        " (default: all)",
    )
    output: Path = setting(
        Path("gold.jsonl"),
        "File that rows are appended to; the same command once more continues it.",
        title="output",
    )
    seed: int = again(RunConfig, "seed")


if __name__ == "__main__":
    parse(GoldConfig)  # --help and mistakes are answered before the seconds that imports take

from evaluator import RewardEvaluator, get_evaluator
from grpo import jsonl
from grpo.judges import Endpoint
from rl_datasets import Prompt, find_data_set, find_prompt
from utils import RunEnds

# Each of the three sources gives problems with the completions that were written for them.


def references(problems: list[dict], prompt: Prompt) -> Iterator[tuple[dict, list[str]]]:
    """The data set's own solutions."""
    for problem in problems:
        if problem["solution"]:
            yield problem, [prompt.format_solution(problem["solution"], problem["answer"])]


def written(problems: list[dict], rows: list[dict]) -> Iterator[tuple[dict, list[str]]]:
    """Completions that were written elsewhere, of which a problem may have several."""
    completions_of = defaultdict(list)
    for row in rows:
        if row["completion"].strip():
            completions_of[row["id"]].append(row["completion"].rstrip())
    for problem in problems:
        if completions_of[problem["id"]]:
            yield problem, completions_of[problem["id"]]


def replies(
    problems: list[dict], prompt: Prompt, config: GoldConfig
) -> Iterator[tuple[dict, list[str]]]:
    """The replies of an endpoint, as they come."""
    if not prompt.chat:
        raise ValueError(f"--api_model needs a --prompt with a chat, which {prompt.name} has not")
    options = {}
    if config.max_completion_length:
        options["max_tokens"] = config.max_completion_length
    if config.temperature is not None:
        options["temperature"] = config.temperature
    endpoint = Endpoint(config.api_model, config.base_url, **options)
    chats = [(problem, prompt.messages(problem["question"])) for problem in problems]
    for problem, text, why_empty in endpoint.ask(chats):
        if text:
            yield problem, [text]
        else:
            print(f"no reply about {problem['id']}: {why_empty}")


def collect(config: GoldConfig) -> int:
    """Collect solutions from one source; returns the exit code, 1 if no solution has come."""
    sources = [config.from_reference, config.api_model, config.solutions]
    if sum(bool(source) for source in sources) != 1:
        raise ValueError("name one source: --from_reference, --api_model or --solutions")
    data_set = find_data_set(config.dataset_name)
    prompt = find_prompt(config.prompt or data_set.default_prompt)
    own = data_set.default_evaluator
    problems = data_set.read("train", config.dataset_path)
    if not problems:
        raise ValueError(f"--dataset_name {config.dataset_name} has no training problem")
    golds = [problem["answer"] for problem in problems]
    evaluator = get_evaluator(config.evaluator or own, own=own, golds=golds, prompt=prompt.name)
    evaluator.check_gold(problems)
    random.Random(f"gold/{config.seed}").shuffle(problems)
    rows = read_rows(config.output, problems, prompt)
    done_ids = {row["id"] for row in rows}
    chosen = problems[: config.num_problems]
    open_problems = [problem for problem in chosen if problem["id"] not in done_ids]

    source = config.api_model or str(config.solutions or "reference")
    if config.from_reference:
        solved = references(open_problems, prompt)
    elif config.solutions:
        solved = written(open_problems, jsonl.read(config.solutions, ("id", "completion")))
    else:
        solved = replies(open_problems, prompt, config)
    num_new = 0
    try:
        for problem, completions in solved:
            completion, is_correct = choose(problem, completions, evaluator)
            row = {
                "id": problem["id"],
                "question": problem["question"],
                "completion": completion,
                "answer": problem["answer"],
                "correct": is_correct,
                "source": source,
                "prompt_name": prompt.name,
            }
            jsonl.append(config.output, row)
            rows.append(row)
            num_new += 1
    finally:
        num_correct = sum(row["correct"] for row in rows)
        num_open = len(open_problems) - num_new
        print(
            f"{config.output}: {num_correct:,} correct, {len(rows) - num_correct:,} incorrect,"
            f" {num_open:,} still open"
        )
    if open_problems and num_new == 0 and not config.api_model:
        raise ValueError(f"{source}: it solves none of the problems that are open")
    nothing_came = bool(open_problems) and num_new == 0
    return 1 if nothing_came or num_correct == 0 else 0


def choose(problem: dict, completions: list[str], evaluator: RewardEvaluator) -> tuple[str, bool]:
    """The first correct completion, or else the last one, and whether it is correct."""
    for completion in completions:
        _, (detail,) = evaluator.score([problem], [completion])
        if detail["correct_strict"]:
            return completion, True
    return completions[-1], False


def read_rows(path: Path, problems: list[dict], prompt: Prompt) -> list[dict]:
    """The rows of a file so far. A last line that was cut is removed from it."""
    rows = jsonl.read_log(path, ("id", "question", "correct", "prompt_name"))
    questions = {problem["id"]: problem["question"] for problem in problems}
    for row in rows:
        if questions.get(row["id"]) != row["question"] or row["prompt_name"] != prompt.name:
            raise ValueError(f"--output {path} is for other problems or for another prompt")
    jsonl.write(path, rows)
    return rows


def main(argv: list[str] | None = None) -> int:
    config = parse(GoldConfig, argv)
    try:
        return collect(config)
    except (ValueError, OSError, RunEnds) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, RunEnds) else 2


if __name__ == "__main__":
    sys.exit(main())
