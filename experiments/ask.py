"""Ask a model, before and after its training.

    python experiments/ask.py output/demo "Leo has 9 bags with 18 apples each. How many is that?"
    python experiments/ask.py output/demo --file questions.txt   # a question in each line
    python experiments/ask.py output/demo                        # three of its evaluation

Answers are greedy. Of the folder of a run, the model before training is its --model_name, and the
one after is its newest checkpoint. A checkpoint or the name of a model is asked alone.
"""

import argparse
import sys
import textwrap
from itertools import zip_longest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import llms
from config import read_args
from grpo import generation
from rl_datasets import find_data_set, find_prompt

WIDTH = 56  # characters of a column


def models_of(place: str) -> tuple[dict[str, str], dict]:
    """({title: model}, the settings of the run that made it). Raises ValueError."""
    settings = read_args(Path(place) / "args.json")
    if not settings:  # a checkpoint of a run, or any model
        settings = read_args(Path(place).resolve().parent.parent / "args.json")
        return {"answer": llms.find_model(place)}, settings
    newest = llms.find_model(place)
    if newest == place:
        raise ValueError(f"{place} has no checkpoint")
    return {"before": settings["model_name"], "after": newest}, settings


def answers(name: str, settings: dict, questions: list[str], max_tokens: int) -> list[str]:
    """The greedy answer of a model to each question."""
    model, tokenizer = llms.get_llm_tokenizer(name)
    dataset = settings.get("dataset_name", "gsm8k")
    prompt = find_prompt(settings.get("prompt") or find_data_set(dataset).default_prompt)
    texts = [prompt.render(tokenizer, question) for question in questions]
    completions = generation.generate(
        model,
        tokenizer,
        texts,
        max_completion_length=max_tokens,
        temperature=0,
        stop_strings=prompt.stop_strings,
    )
    return [completion.text.strip() for completion in completions]


def evaluated(settings: dict) -> list[str]:
    """Three questions of the split that the run evaluates."""
    if not settings:
        raise ValueError("name a question: this is no run")
    data_set = find_data_set(settings["dataset_name"])
    examples = data_set.read(settings["eval_split"], settings["dataset_path"])
    return [example["question"] for example in examples[:3]]


def side_by_side(columns: dict[str, str]) -> str:
    """Texts as columns under their titles."""
    cells = []
    for title, text in columns.items():
        lines = [title, ""]
        for line in text.splitlines():
            lines += textwrap.wrap(line, WIDTH) or [""]
        cells.append(lines)
    rows = zip_longest(*cells, fillvalue="")
    return "\n".join("  ".join(cell.ljust(WIDTH) for cell in row).rstrip() for row in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a run, a checkpoint, or a model's name")
    parser.add_argument("questions", nargs="*")
    parser.add_argument("--file", type=Path, help="questions, one in each line")
    parser.add_argument("--max_completion_length", type=int, default=512, help="tokens")
    args = parser.parse_args(argv)
    try:
        models, settings = models_of(args.model)
        questions = args.questions
        if args.file:
            questions = questions + args.file.read_text("utf-8").splitlines()
        questions = questions or evaluated(settings)
        if not all(question.strip() for question in questions):
            raise ValueError("a question is empty")
        columns = {}
        for title, name in models.items():
            try:
                columns[title] = answers(name, settings, questions, args.max_completion_length)
            except (ValueError, OSError) as error:
                if title != "before":
                    raise
                print(f"only the model after training is asked: {error}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for i, question in enumerate(questions):
        print(f"\n{textwrap.fill(question, 2 * WIDTH)}\n")
        print(side_by_side({title: texts[i] for title, texts in columns.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
