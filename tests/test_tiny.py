"""The demo models: what the rest of the project, and its users, rely on."""

import dataclasses
import itertools
import sys

import pytest
import torch
from conftest import ROOT
from transformers import AutoTokenizer

import llms
import utils
from evaluator import get_evaluator
from grpo import generation
from rl_datasets import PROMPTS, get_dataloaders
from tiny import make_tiny_models


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "tiny" / "1m")


@pytest.mark.parametrize(("size", "num_parameters"), [("0.3m", 271_680), ("1m", 1_018_496)])
def test_the_models_load_as_qwen2_with_their_end_token(size, num_parameters):
    model, tokenizer = llms.get_llm_tokenizer(str(ROOT / "tiny" / size))
    assert model.num_parameters() == num_parameters
    assert model.config.architectures == ["Qwen2ForCausalLM"]
    assert generation.eos_token_ids(model, tokenizer) == [tokenizer.eos_token_id]
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    made = make_tiny_models.make_model(size, tokenizer)
    assert made.num_parameters() == num_parameters
    assert made.generation_config.eos_token_id == tokenizer.eos_token_id


def test_the_tokenizer_keeps_every_text_and_gives_digits_tokens_of_their_own(tokenizer):
    for text in ("12 + 345 = 357\n#### 357", "“naïve” 数学 \x00 tab\t  two  spaces", "a ,b .c 's"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("1234567")["input_ids"]) == 7
    prompt = PROMPTS["reasoning_answer"].render(tokenizer, "Why?")
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("Why?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("prompt", ["reasoning_answer", "r1_zero", "question_only"])
def test_every_prompt_format_has_something_to_sample(prompt):
    """In each format tiny/1m samples strictly right answers and others, so groups have spread."""
    model, tokenizer = llms.get_llm_tokenizer(str(ROOT / "tiny" / "1m"))
    _, eval_loader = get_dataloaders(
        "arithmetic", tokenizer, eval_split="validation", prompt=prompt, eval_size=16
    )
    torch.manual_seed(0)
    completions = generation.generate(
        model,
        tokenizer,
        [example["prompt"] for example in eval_loader],
        num_samples=8,
        max_completion_length=160,
        stop_strings=PROMPTS[prompt].stop_strings,
    )
    evaluator = get_evaluator("gsm8k" if prompt == "reasoning_answer" else "math", prompt=prompt)
    examples = [example for example in eval_loader.examples for _ in range(8)]
    totals, details = evaluator.score(examples, [completion.text for completion in completions])
    groups = torch.tensor(totals).view(-1, 8)
    has_spread = groups.amax(1) > groups.amin(1)
    assert has_spread.float().mean() > 0.25, "a quarter of the groups has something to learn from"
    assert 0 < sum(detail["correct_strict"] for detail in details) < len(examples)
    assert sum(completion.finished for completion in completions) / len(completions) > 0.9


def test_a_model_is_made(tokenizer, tmp_path, monkeypatch, capsys):
    """The command, with two updates in each stage."""
    for name in ("SUBJECT", "HABITS"):
        stage = getattr(make_tiny_models, name)
        config = dataclasses.replace(stage.config, train_batch_size=4)
        stage = dataclasses.replace(stage, config=config, num_updates=2)
        monkeypatch.setattr(make_tiny_models, name, stage)
    monkeypatch.setattr(make_tiny_models, "make_tokenizer", lambda: tokenizer)
    command = ["make_tiny_models.py", "--sizes", "0.1m", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    make_tiny_models.main()
    assert capsys.readouterr().out.startswith("0.1m: 91,920 parameters, loss 5.")
    model, _ = llms.get_llm_tokenizer(str(tmp_path / "0.1m"))
    assert model.num_parameters() == 91_920


@pytest.mark.slow
def test_making_1m_again_begins_with_the_same_losses():
    """The first four updates of its first stage: the whole recipe is in them."""
    tokenizer = make_tiny_models.make_tokenizer()
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(ROOT / "tiny/1m").get_vocab()
    utils.seed_everything(0)
    model = make_tiny_models.make_model("1m", tokenizer)
    updates = make_tiny_models.train_stage(model, tokenizer, make_tiny_models.SUBJECT, seed=0)
    losses = [row["loss"] for row in itertools.islice(updates, 4)]
    # Another processor rounds in another way.
    assert losses == pytest.approx([6.85513, 6.77398, 6.57813, 6.39804], rel=1e-3)
