"""Make gold.jsonl, the verified solutions that sft.py learns from, out of the training split of a data set.

    python generate_gold.py --from_reference                                      the data set's own human solutions
    python generate_gold.py --api_model NAME --base_url http://127.0.0.1:8000/v1  any OpenAI-compatible endpoint
    python generate_gold.py --model_name tiny/1m --dataset_name arithmetic        a local model

A solution is kept where the evaluator's strict verdict holds: the required form, and an answer that equals the gold.
Rows: id, question, completion (in the form of prompt_name, without EOS), answer (gold), source, attempt (from 1 on),
correct, prompt_name. They stand in the order in which they were finished, quick ones first: draw subsets at random.
The other attempts go to the file's sibling .rejected.jsonl, with a reason. A second start needs only these two files to
go on: problems that are solved or out of attempts are skipped, those that got no reply are tried again.
"""

import asyncio
import fcntl
import os
import random
import re
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

import flags
import llms
import utils
from evaluator import get_evaluator
from grading.extraction import strict_format, tagged_answer
from judges.endpoint import Endpoint, NoReply, check_base_url, for_each, get_api_key
from logs import jsonl
from rl_datasets import DATASETS, PROMPTS
from sampling import generation

CHAT = PROMPTS["reasoning_answer"]  # the form that an endpoint is asked for
SPECIAL_TOKEN = re.compile(
    r"<\|[^|<>\s]+\|>"
)  # in training it would end a turn in the middle of the text
MAX_FAILURES_IN_A_ROW = (
    20  # problems without a reply: the endpoint is gone, or the account is empty
)


class JsonlFile:
    """Rows that this process alone appends to, and that are on disk when `append` returns.

    Opening it reads the rows of earlier runs and drops a last line that a kill has torn. Raises ValueError, OSError.
    """

    def __init__(self, path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "ab+")
            fcntl.flock(
                self.file, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # held until this process ends, however it ends
        except BlockingIOError:
            raise ValueError(f"{path} is in use by another process") from None
        except OSError as error:
            raise OSError(f"--output: cannot write {path} ({error.strerror})") from error
        self.file.seek(0)
        whole, newline, torn = self.file.read().rpartition(b"\n")
        start, keys = b'{"id": ', {"id", "question", "source", "attempt", "correct", "prompt_name"}
        try:
            self.rows = [jsonl.parse(line, path) for line in whole.splitlines()]
            ours = (
                all(keys <= row.keys() for row in self.rows)
                and torn[: len(start)] == start[: len(torn)]
            )
        except ValueError:
            ours = False
        if not ours:
            raise ValueError(
                f"{path} holds lines that are not rows of generate_gold.py; name another --output"
            )
        if torn:
            self.file.truncate(len(whole + newline))
            print(f"{path}: dropped a last line that was not written to its end")

    def append(self, rows):
        self.file.write("".join(jsonl.dumps(row) + "\n" for row in rows).encode())
        self.file.flush()
        os.fsync(self.file.fileno())


@dataclass
class Sample:
    """One attempt: the completion's text, whether it was cut at the maximum length, and the tokens that it took."""

    text: str
    cut: bool = False
    tokens_in: int = 0
    tokens_out: int = 0


class Gold:
    """Grades the attempts at some problems, keeps them on disk, and knows which problems are still open."""

    def __init__(self, args, problems, evaluator):
        self.args, self.problems, self.evaluator = args, problems, evaluator
        self.source = args.api_model or args.model_name or "reference"
        self.accepted = JsonlFile(args.output)
        self.rejected = JsonlFile(Path(str(args.output).removesuffix(".jsonl") + ".rejected.jsonl"))
        self.solved, self.attempts = (
            set(),
            Counter(),
        )  # ids of solved problems; attempts of this source, by id
        questions = {problem["id"]: problem["question"] for problem in problems}
        for row in self.accepted.rows + self.rejected.rows:
            if (
                row["prompt_name"] != args.prompt
                or questions.get(row["id"], row["question"]) != row["question"]
            ):
                raise ValueError(
                    f"{args.output} was made from other problems or for another prompt; name another"
                )
            if row["correct"]:
                self.solved.add(row["id"])
            if row["source"] == self.source:
                self.attempts[row["id"]] = max(self.attempts[row["id"]], row["attempt"])
        self.open_problems = [problem for problem in problems if self.attempts_left(problem)]
        self.outcomes = {}  # of each problem that this run tries: (accepted | rejected | no reply | unfinished, reason)
        self.tokens_in = self.tokens_out = self.failures_in_a_row = 0
        # The delay keeps the bar away until the first problem is done: what is wrong before that is one line alone.
        n = len(self.open_problems)
        self.bar = tqdm(
            total=n, desc="gold", dynamic_ncols=True, leave=False, delay=0.1, disable=None
        )

    def attempts_left(self, problem):
        most = 1 if self.args.from_reference else self.args.num_attempts
        return 0 if problem["id"] in self.solved else max(0, most - self.attempts[problem["id"]])

    def record(self, problems, samples):
        """Grade one sample for each of the problems and write it down."""
        questions, answers = (
            [problem[key] for problem in problems] for key in ("question", "answer")
        )
        details = self.evaluator.compute_rewards(
            questions, [sample.text for sample in samples], answers
        ).details
        accepted, rejected = [], []
        for problem, sample, detail in zip(problems, samples, details, strict=True):
            reason = reason_against(sample, detail)
            self.attempts[problem["id"]] += 1
            if not reason:
                self.solved.add(problem["id"])
            kind = (
                "accepted"
                if not reason
                else "unfinished"
                if self.attempts_left(problem)
                else "rejected"
            )
            self.outcomes[problem["id"]] = (kind, reason)
            self.bar.update(kind != "unfinished")
            self.tokens_in, self.tokens_out = (
                self.tokens_in + sample.tokens_in,
                self.tokens_out + sample.tokens_out,
            )
            row = {
                "id": problem["id"],
                "question": problem["question"],
                "completion": sample.text,
                "answer": problem["answer"],
                "source": self.source,
                "attempt": self.attempts[problem["id"]],
                "correct": not reason,
                "prompt_name": self.args.prompt,
            }
            if reason and not self.args.keep_incorrect:
                rejected.append(row | {"reason": reason})
            else:
                accepted.append(row)
        self.accepted.append(accepted)
        self.rejected.append(rejected)
        self.failures_in_a_row = 0
        self.bar.set_postfix_str(f"{len(self.solved)} solved, {self.usage()}", refresh=False)

    def no_reply(self, problem, reason, message):
        """The endpoint has failed this problem. Nothing is written, so that a second start tries it again."""
        if ("no reply", reason) not in self.outcomes.values():
            self.bar.write(f"no reply: {message}")  # once for each reason
        self.outcomes[problem["id"]] = ("no reply", reason)
        self.bar.update()
        self.failures_in_a_row += 1
        if self.failures_in_a_row == MAX_FAILURES_IN_A_ROW:
            raise OSError(
                f"{MAX_FAILURES_IN_A_ROW} problems in a row got no reply ({reason}): stopped"
            )

    def usage(self):
        return f"{self.tokens_in:,} + {self.tokens_out:,} tokens"

    def report(self):
        """Print what came of the problems, unless an error has ended the run before its first attempt."""
        self.bar.close()
        if self.open_problems and not self.outcomes:
            return
        solved = sum(problem["id"] in self.solved for problem in self.problems)
        print(
            f"{self.args.output}: {solved:,} of {len(self.problems):,} problems solved; {self.usage()}"
        )
        done_before = len(self.problems) - len(self.open_problems)
        print(f"{'done before':12} {done_before:7,}\n{'tried':12} {len(self.outcomes):7,}")
        for kind in ("accepted", "rejected", "no reply", "unfinished"):
            reasons = Counter(reason for k, reason in self.outcomes.values() if k == kind)
            why = ", ".join(f"{reason} {n:,}" for reason, n in reasons.most_common() if reason)
            why += "; start again to try them" if kind == "no reply" and reasons else ""
            print(f"- {kind:10} {sum(reasons.values()):7,}  {why}".rstrip(), flush=True)


def reason_against(sample, detail):
    """Why an attempt is rejected; None if it is not."""
    if not sample.text.strip():
        return "empty"
    if SPECIAL_TOKEN.search(sample.text):
        return "special token"
    if detail["correct_strict"]:
        return None
    return "truncated" if sample.cut else "wrong answer" if detail["format"] else "format"


# --- The three sources ----------------------------------------------------------------------------


def use_reference(args, gold):
    form = PROMPTS[args.prompt].format_solution
    for start in range(0, len(gold.open_problems), 500):
        batch = gold.open_problems[start : start + 500]
        gold.record(
            batch,
            [Sample(form(p["solution"], p["answer"]) if p["solution"] else "") for p in batch],
        )


def use_local_model(args, gold, model, tokenizer):
    prompt = PROMPTS[args.prompt]
    utils.seed_everything(
        args.seed + sum(gold.attempts.values())
    )  # so that a second start draws other samples
    for start in range(0, len(gold.open_problems), args.concurrency):
        batch = gold.open_problems[start : start + args.concurrency]
        while batch := [problem for problem in batch if gold.attempts_left(problem)]:
            rollout = generation.generate(
                model,
                tokenizer,
                [prompt.render(tokenizer, problem["question"]) for problem in batch],
                max_new_tokens=args.max_completion_length,
                temperature=1.0 if args.temperature is None else args.temperature,
                stop_strings=prompt.stop_strings,
            )
            lengths, totals = rollout.lengths.tolist(), rollout.attention_mask.sum(1).tolist()
            rows = zip(rollout.texts, rollout.finished.tolist(), lengths, totals, strict=True)
            gold.record(
                batch,
                [Sample(text.rstrip(), not finished, T - C, C) for text, finished, C, T in rows],
            )


async def use_endpoint(args, gold):
    """Solve the open problems with at most --concurrency requests at a time."""
    options = {"max_tokens": args.max_completion_length} if args.max_completion_length else {}
    options |= {"temperature": args.temperature} if args.temperature is not None else {}
    read = partial(read_solution, prompt=PROMPTS[args.prompt])
    # asyncio's own handler does not wake a loop that has just gone to sleep: Ctrl-C would wait for the next reply.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, asyncio.current_task().cancel)
    async with Endpoint(
        args.api_model, args.base_url, timeout=args.timeout, max_retries=args.max_retries
    ) as endpoint:
        await endpoint.check()

        async def solve(problem):
            try:
                while gold.attempts_left(problem):
                    gold.record(
                        [problem],
                        [await endpoint.ask(CHAT.messages(problem["question"]), read, **options)],
                    )
            except NoReply as error:
                gold.no_reply(problem, str(error), error.message)

        await for_each(solve, gold.open_problems, args.concurrency)


def read_solution(text, prompt):
    """The Sample in an endpoint's JSON, put in the prompt's form where it holds to the form that was asked for."""
    reply = jsonl.parse(text, "a reply")
    choice, usage = reply["choices"][0], reply.get("usage") or {}
    text = (choice["message"]["content"] or "").rstrip()
    text = text.encode(errors="replace").decode()  # half of a surrogate pair cannot be tokenized
    if prompt is not CHAT and strict_format(text):
        solution = text.partition("<reasoning>")[2].partition("</reasoning>")[0].strip()
        text = prompt.format_solution(solution, tagged_answer(text))
    tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
    return Sample(text, choice.get("finish_reason") == "length", *tokens)


def parse_args(argv=None):
    parser = flags.ArgumentParser(
        description="Collect verified solutions for supervised fine-tuning."
    )
    add = parser.add_argument_group("source, one of three").add_argument
    add("--from_reference", action="store_true", help="the data set's own solutions")
    add("--model_name", help="a local model: hub name or directory with safetensors weights")
    add(
        "--api_model",
        help="a model of an OpenAI-compatible endpoint; its key is read from OPENAI_API_KEY",
    )
    add("--base_url", help="the endpoint, such as http://127.0.0.1:8000/v1 (default: OpenAI's own)")

    add = flags.add_data(parser)
    add(
        "--num_problems",
        type=int,
        help="so many, at random; fewer are always among more (default: all)",
    )

    add = parser.add_argument_group("sampling").add_argument
    add("--num_attempts", type=int, default=1, help="per problem, until one is right")
    add("--temperature", type=float, help="(default: the endpoint's own; 1 for a local model)")
    add(
        "--max_completion_length", type=int, default=512, help="tokens; 0 leaves it to the endpoint"
    )
    add(
        "--concurrency",
        type=int,
        default=16,
        help="requests at a time, or prompts per batch of a local model",
    )
    add(
        "--timeout",
        type=float,
        default=120.0,
        help="seconds without a sign of the endpoint until a retry",
    )
    add("--max_retries", type=int, default=5, help="of a failed request, with exponential back-off")

    add = parser.add_argument_group("output").add_argument
    add(
        "--output",
        type=Path,
        default=Path("gold.jsonl"),
        help="appended to; start again to continue",
    )
    add(
        "--keep_incorrect",
        action="store_true",
        help='keep the other attempts here too, marked "correct": false',
    )
    flags.add_runtime(parser)
    return parser.parse_args(argv)


def check_args(args):
    """Raise ValueError, in one line, for flags that cannot work together; fill in the data set's own defaults."""
    if bool(args.from_reference) + bool(args.model_name) + bool(args.api_model) != 1:
        raise ValueError("name one source: --from_reference, --model_name or --api_model")
    if args.base_url and not args.api_model:
        raise ValueError("--base_url goes with --api_model, the name of a model there")
    check_base_url("--base_url", args.base_url)
    zero_is_fine = ["temperature", "max_retries", "seed"]
    if args.api_model:
        get_api_key(args.base_url)
        zero_is_fine.append("max_completion_length")
    flags.check_numbers(args, zero_is_fine)
    flags.check_names(args)
    args.prompt = args.prompt or DATASETS[args.dataset_name].default_prompt
    args.evaluator = args.evaluator or DATASETS[args.dataset_name].default_evaluator


def choose_problems(args):
    """--num_problems of the training split, in an order drawn from --seed."""
    examples = DATASETS[args.dataset_name].read("train", args.dataset_path)
    if not examples:
        raise ValueError(f"{args.dataset_path or args.dataset_name} has no training split")
    random.Random(f"gold/{args.seed}").shuffle(examples)
    return examples[: args.num_problems]


def main(argv=None):
    args = parse_args(argv)
    try:
        check_args(args)
        problems = choose_problems(args)
        local = llms.get_llm_tokenizer(args.model_name, args.device) if args.model_name else ()
        evaluator = get_evaluator(args.evaluator, prompt=args.prompt)
        evaluator.check_gold(problems)
        gold = Gold(args, problems, evaluator)
        try:
            if args.from_reference:
                use_reference(args, gold)
            elif args.model_name:
                use_local_model(args, gold, *local)
            elif gold.open_problems:
                asyncio.run(use_endpoint(args, gold))
        finally:
            gold.report()
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
