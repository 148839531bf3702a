"""Make gold.jsonl, the solutions to a training split that sft.py learns from.

    python generate_gold.py --from_reference                                 # the data set's own
    python generate_gold.py --api_model NAME --base_url http://127.0.0.1:8000/v1
    python generate_gold.py --solutions written_elsewhere.jsonl

An endpoint may be any that is compatible with OpenAI's; vLLM and `transformers serve` make one of a
local model. A row has the id of a problem, the question, the completion (in the format of
prompt_name, without EOS), the gold answer, whether the completion is correct, its source, the
number of the attempt and prompt_name. Correct means the strict verdict: the required format, and in
it the right answer. sft.py trains on correct rows alone.

A second start with the same file goes on where the first one stopped: it skips the problems that
have a row, and asks again about those that got no reply.
"""

import random
import re
import sys
from collections import defaultdict

from config import GoldConfig, parse

if __name__ == "__main__":
    parse(GoldConfig)  # --help and mistakes are answered before the seconds that imports take

from evaluator import AnswerEvaluator, get_evaluator, strict_format, tagged_answer
from grpo import jsonl
from grpo.judges import Endpoint, EndpointError, Reply
from rl_datasets import PROMPTS, Prompt, find_data_set, find_prompt

# An endpoint is always asked for this format; `in_format` rewrites the reply in that of --prompt.
ENDPOINT_PROMPT = PROMPTS["reasoning_answer"]
# In training, a special token inside a completion would end a turn in the middle of the text.
SPECIAL_TOKEN = re.compile(r"<\|[^|<>\s]+\|>")
# After this many problems in a row without a reply, the endpoint is gone or the account empty.
MAX_FAILURES_IN_A_ROW = 20


class GoldFile:
    """Grades completions, and appends a row for each problem that is done.

    Raises ValueError if the file holds something else than solutions to these problems.
    """

    def __init__(self, config: GoldConfig, prompt: Prompt, evaluator, problems: list[dict]):
        self.path = config.output
        self.prompt = prompt
        self.evaluator = evaluator
        self.source = config.api_model or str(config.solutions or "reference")
        self.counts = {True: 0, False: 0}  # of the rows that are correct, and of those that are not
        questions = {problem["id"]: problem["question"] for problem in problems}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        rows = jsonl.read(self.path, ("id", "question", "correct", "prompt_name"))
        jsonl.write(self.path, rows)  # without a last line that was cut
        for row in rows:
            if questions.get(row["id"]) != row["question"] or row["prompt_name"] != prompt.name:
                raise ValueError(
                    f"--output {self.path} has solutions to other problems or for another prompt"
                    f" ({row['id']}, {row['prompt_name']}): name another file"
                )
            self.counts[row["correct"]] += 1
        done_ids = {row["id"] for row in rows}
        chosen = problems[: config.num_problems]
        # {id: problem} of those that have no row yet
        self.open = {problem["id"]: problem for problem in chosen if problem["id"] not in done_ids}

    def record(self, problem: dict, completion: str, attempt: int, is_last: bool) -> None:
        """Grade a completion, and write the problem's row if it is correct or the last one."""
        _, (detail,) = self.evaluator.score([problem], [completion])
        is_correct = detail["correct_strict"] and not SPECIAL_TOKEN.search(completion)
        if not is_correct and not is_last:
            return
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
        self.counts[is_correct] += 1
        del self.open[problem["id"]]


# --- The three sources ----------------------------------------------------------------------------


def take_references(gold: GoldFile) -> None:
    """Take the data set's own solutions. A problem without one is incorrect."""
    for problem in list(gold.open.values()):
        completion = ""
        if problem["solution"]:
            completion = gold.prompt.format_solution(problem["solution"], problem["answer"])
        gold.record(problem, completion, attempt=1, is_last=True)


def take_written(gold: GoldFile, config: GoldConfig) -> None:
    """Take the completions of --solutions. Of several for a problem, the first correct one."""
    completions_of = defaultdict(list)
    for row in jsonl.read(config.solutions, required=("id", "completion")):
        if row["completion"].strip():
            completions_of[row["id"]].append(row["completion"].rstrip())
    for problem in list(gold.open.values()):
        completions = completions_of[problem["id"]]
        for attempt, completion in enumerate(completions, 1):
            if problem["id"] in gold.open:
                gold.record(problem, completion, attempt, attempt == len(completions))


def ask_endpoint(gold: GoldFile, config: GoldConfig) -> None:
    """Ask about each problem until it is solved or out of attempts, --concurrency at a time.

    Raises EndpointError if the endpoint cannot be used, or has stopped replying.
    """
    options = {}
    if config.max_completion_length:
        options["max_tokens"] = config.max_completion_length
    if config.temperature is not None:
        options["temperature"] = config.temperature
    endpoint = Endpoint(config.api_model, config.base_url, **options)
    without_reply = set()  # ids; they are asked about again at the next start
    failures = []  # of problems in a row
    for attempt in range(1, config.num_attempts + 1):
        problems = [p for id_, p in gold.open.items() if id_ not in without_reply]

        def receive(number: int, reply: Reply, problems=problems, attempt=attempt) -> None:
            if not reply.problem:
                failures.clear()
                # One that was cut teaches no end.
                completion = in_format(gold.prompt, reply.text) if reply.finished else ""
                gold.record(problems[number], completion, attempt, attempt == config.num_attempts)
                return
            without_reply.add(problems[number]["id"])
            failures.append(reply.problem)
            if len(without_reply) == 1:  # most often the others fail alike
                print(f"no reply: {reply.problem}")
            if len(failures) == MAX_FAILURES_IN_A_ROW:
                raise EndpointError(f"{len(failures)} problems in a row got no reply")

        chats = [ENDPOINT_PROMPT.messages(problem["question"]) for problem in problems]
        endpoint.ask(chats, receive, config.concurrency)


def in_format(prompt: Prompt, reply: str) -> str:
    """An endpoint's reply in the format of `prompt`, if it is in the one that was asked for."""
    if prompt is ENDPOINT_PROMPT or not strict_format(reply):
        return reply
    solution = reply.partition("<reasoning>")[2].partition("</reasoning>")[0].strip()
    return prompt.format_solution(solution, tagged_answer(reply))


# --- The command line -----------------------------------------------------------------------------


def collect(config: GoldConfig) -> int:
    """Collect solutions from the source that the settings name.

    Returns:
        the exit code: 1 if no solution has come.
    """
    sources = [config.from_reference, config.api_model, config.solutions]
    if sum(bool(source) for source in sources) != 1:
        raise ValueError("name one source: --from_reference, --api_model or --solutions")
    data_set = find_data_set(config.dataset_name)
    prompt = find_prompt(config.prompt or data_set.default_prompt)
    problems = data_set.read("train", config.dataset_path)
    random.Random(f"gold/{config.seed}").shuffle(problems)
    evaluator = get_evaluator(config.evaluator or data_set.default_evaluator, prompt=prompt.name)
    if not isinstance(evaluator, AnswerEvaluator):
        raise ValueError("--evaluator must give verdicts, or no solution can be right")
    evaluator.check_gold(problems[: config.num_problems])
    gold = GoldFile(config, prompt, evaluator, problems)
    num_open = len(gold.open)
    try:
        if config.from_reference:
            take_references(gold)
        elif config.solutions:
            take_written(gold, config)
        else:
            ask_endpoint(gold, config)
    finally:
        print(
            f"{config.output}: {gold.counts[True]:,} correct, {gold.counts[False]:,} incorrect,"
            f" {len(gold.open):,} still open"
        )
    nothing_came = num_open > 0 and len(gold.open) == num_open
    return 1 if nothing_came or gold.counts[True] == 0 else 0


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit code."""
    config = parse(GoldConfig, argv)
    try:
        return collect(config)
    except (ValueError, OSError, EndpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, EndpointError) else 2


if __name__ == "__main__":
    sys.exit(main())
