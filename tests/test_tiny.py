"""The demo models: what the rest of the project, and its users, rely on."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from transformers import AutoTokenizer

import llms
import sft
import utils
from evaluator import get_evaluator
from rl_datasets import PROMPTS, get_dataloaders

sys.path.insert(0, str(ROOT / "tiny"))

import make_tiny_models

from sampling import generation

SIZES = list(make_tiny_models.SIZES)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "tiny" / "1m")


def test_sizes_span_a_thirtyfold_range_in_25_megabytes():
    models = {size: llms.get_llm_tokenizer(str(ROOT / "tiny" / size)) for size in SIZES}
    parameters = [model.num_parameters() for model, _ in models.values()]
    assert (
        len(parameters) >= 4
        and max(parameters) >= 30 * min(parameters)
        and parameters == sorted(parameters)
    )
    files = [path for size in SIZES for path in (ROOT / "tiny" / size).iterdir()]
    assert sum(path.stat().st_size for path in files) < 25e6
    assert not [path for path in files if path.suffix in (".bin", ".pt", ".pth")]
    texts = {(ROOT / "tiny" / size / "tokenizer.json").read_text() for size in SIZES}
    assert len(texts) == 1, "one tokenizer"
    for model, tokenizer in models.values():
        assert (
            model.config.architectures == ["Qwen2ForCausalLM"]
            and model.config.max_position_embeddings >= 1024
        )
        assert (
            generation.eos_token_ids(model, tokenizer)
            == [tokenizer.eos_token_id]
            != [tokenizer.pad_token_id]
        )


def test_the_tokenizer_keeps_every_text_and_gives_digits_tokens_of_their_own(tokenizer):
    for text in (
        "12 + 345 = 357\n#### 357",
        "“naïve” 数学 \x00 tab\t  two  spaces",
        "</answer>\n<think>",
        "a ,b .c 's",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert all(len(tokenizer(str(n))["input_ids"]) == len(str(n)) for n in (7, 42, 365, 1234567))
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token != tokenizer.eos_token


def test_the_chat_template_opens_the_assistants_turn(tokenizer):
    prompt = PROMPTS["reasoning_answer"].render(tokenizer, "Why?")
    assert prompt.startswith("<|im_start|>system\n") and prompt.endswith(
        "Why?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("prompt", ["reasoning_answer", "r1_zero", "question_only"])
def test_every_prompt_form_has_something_to_sample(prompt):
    """For each form some sampled answers of tiny/1m are strictly right and others are not: groups have spread."""
    model, tokenizer = llms.get_llm_tokenizer(str(ROOT / "tiny" / "1m"))
    _, test = get_dataloaders("arithmetic", tokenizer, prompt=prompt, eval_size=16)
    examples = [example for example in test for _ in range(8)]
    torch.manual_seed(0)
    rollout = generation.generate(
        model,
        tokenizer,
        [e["prompt"] for e in test],
        num_samples=8,
        max_new_tokens=160,
        stop_strings=PROMPTS[prompt].stop_strings,
    )
    evaluator = get_evaluator("gsm8k" if prompt == "reasoning_answer" else "math", prompt=prompt)
    rewards = evaluator.compute_rewards(
        [e["prompt"] for e in examples], rollout.texts, [e["answer"] for e in examples]
    )
    total = evaluator.total(rewards).view(-1, 8)
    assert (total.amax(1) > total.amin(1)).float().mean() > 0.25, (
        "a quarter of the groups has something to learn from"
    )
    right = sum(detail["correct_strict"] for detail in rewards.details)
    assert 0 < right < len(examples)
    assert rollout.finished.float().mean() > 0.9


def test_habits_seldom_take_the_careful_way_and_drills_often_do():
    """Of the steps that could be careful; what the recipe plants, counted in the text that it makes."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "1m")
    for stage, share in ((make_tiny_models.SUBJECT, 0.6), (make_tiny_models.HABITS, 0.12)):
        found = {True: [], False: []}
        for example in make_tiny_models.make_examples(tokenizer, 2_000, *stage[1:], seed=5):
            steps = [line for line in example["completion"].split("\n") if " = " in line]
            found[example["prompt"] == make_tiny_models.DRILL_PROMPT] += steps
        careful = {
            drill: sum(step.count(" = ") > 1 for step in steps) / len(steps)
            for drill, steps in found.items()
        }
        # Some 0.77 of all steps have a careful way.
        assert careful[True] / 0.77 == pytest.approx(0.9, abs=0.05)
        assert careful[False] / 0.77 == pytest.approx(share, abs=0.05)


@pytest.mark.slow
def test_making_a_model_again_begins_with_its_recorded_losses():
    """20 updates of the first stage, in its warm-up, where the rate does not depend on how many follow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tokenizer = make_tiny_models.make_tokenizer()
        recipe, *shares = make_tiny_models.SUBJECT
        n = recipe["num_updates"] * recipe["train_batch_size"]
        examples = make_tiny_models.make_examples(tokenizer, n, *shares, 0)
        for size in ("0.1m", "1m"):
            utils.seed_everything(0)
            model = make_tiny_models.make_model(size, tokenizer)
            log = sft.fine_tune(model, tokenizer, examples, seed=0, **recipe | {"num_updates": 20})
            recorded = json.loads((ROOT / "tiny" / size / "losses.json").read_text())
            assert [row["loss"] for row in log] == pytest.approx(recorded, rel=1e-3), (
                "another processor rounds otherwise"
            )
    finally:
        torch.set_num_threads(threads)


def test_answer_forms_by_hand():
    def always(value):  # a random.Random that always falls on the same side
        return SimpleNamespace(random=lambda: value, choice=lambda options: options[0])

    prompt, write = PROMPTS["reasoning_answer"], make_tiny_models.write_completion
    exact = "<reasoning>\n1 + 1 = 2\n</reasoning>\n<answer>\n2\n</answer>"
    assert write(always(0.0), "form", prompt, "1 + 1 = 2", "2") == exact
    assert write(always(0.99), "form", prompt, "1 + 1 = 2", "2") == exact.removesuffix(
        "\n</answer>"
    )
    assert write(always(0.0), "steps", prompt, "1 + 1 = 2", "2") == "1 + 1 = 2\nThe answer is 2."
    assert write(always(0.0), "at once", prompt, "1 + 1 = 2", "2") == "The answer is 2."
