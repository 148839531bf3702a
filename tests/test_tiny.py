"""The demo models: what the rest of the project, and its users, rely on."""

import dataclasses
import itertools
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from transformers import AutoTokenizer

import llms
import utils
from evaluator import get_evaluator
from rl_datasets import PROMPTS, get_dataloaders

sys.path.insert(0, str(ROOT / "tiny"))

import make_tiny_models

from grpo import generation

SIZES = ["0.1m", "0.3m", "1m"]  # those in the repository


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "tiny" / "1m")


def test_the_models_load_as_qwen2_with_their_end_token():
    models = [llms.get_llm_tokenizer(str(ROOT / "tiny" / size)) for size in SIZES]
    parameters = [model.num_parameters() for model, _ in models]
    assert parameters == [91_920, 271_680, 1_018_496]
    for model, tokenizer in models:
        assert model.config.architectures == ["Qwen2ForCausalLM"]
        assert model.config.max_position_embeddings >= 1024
        assert generation.eos_token_ids(model, tokenizer) == [tokenizer.eos_token_id]
        assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_files_are_small_safe_and_share_one_tokenizer():
    files = [path for size in SIZES for path in (ROOT / "tiny" / size).iterdir()]
    assert sum(path.stat().st_size for path in files) < 7e6
    pickles = [path for path in files if path.suffix in (".bin", ".pt", ".pth")]
    assert not pickles
    tokenizer_files = {path.read_text() for path in files if path.name == "tokenizer.json"}
    assert len(tokenizer_files) == 1


def test_the_tokenizer_keeps_every_text_and_gives_digits_tokens_of_their_own(tokenizer):
    for text in (
        "12 + 345 = 357\n#### 357",
        "“naïve” 数学 \x00 tab\t  two  spaces",
        "</answer>\n<think>",
        "a ,b .c 's",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    for number in ("7", "42", "365", "1234567"):
        assert len(tokenizer(number)["input_ids"]) == len(number)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token != tokenizer.eos_token


def test_the_chat_template_opens_the_assistants_turn(tokenizer):
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
    examples = utils.repeat_each(eval_loader.examples, 8)
    rewards = evaluator.compute_rewards(
        [example["question"] for example in examples],
        [completion.text for completion in completions],
        [example["answer"] for example in examples],
    )
    totals = evaluator.total(rewards).view(-1, 8)
    has_spread = totals.amax(1) > totals.amin(1)
    assert has_spread.float().mean() > 0.25, "a quarter of the groups has something to learn from"
    num_correct = sum(detail["correct_strict"] for detail in rewards.details)
    assert 0 < num_correct < len(examples)
    assert sum(completion.finished for completion in completions) / len(completions) > 0.9


@pytest.mark.parametrize(
    ("stage", "careful_share"), [(make_tiny_models.SUBJECT, 0.6), (make_tiny_models.HABITS, 0.12)]
)
def test_habits_seldom_take_the_careful_way_and_drills_often_do(stage, careful_share, tokenizer):
    """Of the steps that could be careful, as the recipe plants it, counted in the texts."""
    drill_steps = []
    problem_steps = []
    for example in make_tiny_models.make_examples(tokenizer, 2_000, stage, seed=5):
        is_drill = example["prompt"] == make_tiny_models.DRILL_PROMPT
        steps = drill_steps if is_drill else problem_steps
        steps += [line for line in example["completion"].split("\n") if " = " in line]
    assert share_of_careful(drill_steps) == pytest.approx(0.9, abs=0.05)
    assert share_of_careful(problem_steps) == pytest.approx(careful_share, abs=0.05)


def share_of_careful(steps):
    """The share of careful steps, of the 77 % or so that have a careful way at all."""
    num_careful = sum(step.count(" = ") > 1 for step in steps)
    return num_careful / len(steps) / 0.77


@pytest.mark.slow
def test_making_a_model_again_begins_with_its_recorded_losses():
    """The first 4 updates of its first stage."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tokenizer = make_tiny_models.make_tokenizer()
        stage = make_tiny_models.SUBJECT
        num_examples = stage.num_updates * stage.config.train_batch_size
        examples = make_tiny_models.make_examples(tokenizer, num_examples, stage, seed=0)
        utils.seed_everything(0)
        model = make_tiny_models.make_model("1m", tokenizer)
        updates = make_tiny_models.train_stage(model, tokenizer, stage, examples, seed=0)
        log = list(itertools.islice(updates, 4))
    finally:
        torch.set_num_threads(num_threads)
    recorded_losses = json.loads((ROOT / "tiny" / "1m" / "losses.json").read_text())
    # Another processor rounds in another way.
    assert [row["loss"] for row in log] == pytest.approx(recorded_losses[:4], rel=1e-3)


def make_models(folder, *flags):
    """Run the script, with a stage of the subject and one of habits of two updates each."""
    num_threads = torch.get_num_threads()
    command = ["make_tiny_models.py", "--sizes", "0.1m", "--output_dir", str(folder), *flags]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SUBJECT", "HABITS"):
            stage = getattr(make_tiny_models, name)
            config = dataclasses.replace(stage.config, train_batch_size=4)
            stage = dataclasses.replace(stage, config=config, num_updates=2)
            patch.setattr(make_tiny_models, name, stage)
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "1m")
        patch.setattr(make_tiny_models, "make_tokenizer", lambda: tokenizer)
        patch.setattr(sys, "argv", command)
        try:
            make_tiny_models.main()
        finally:
            torch.set_num_threads(num_threads)
    weights = {}
    for path in folder.iterdir():
        model, _ = llms.get_llm_tokenizer(str(path))
        weights[path.name] = torch.cat([tensor.flatten() for tensor in model.parameters()])
    return weights


def test_models_that_use_the_careful_way_more_or_less_often(tmp_path):
    """Each has its habits on top of the same subject, as if it had been made alone."""
    several = make_models(tmp_path / "several", "--careful_shares", "0.9", "0.12")
    assert several.keys() == {"0.1m_careful0.9", "0.1m_careful0.12"}
    assert not torch.equal(several["0.1m_careful0.9"], several["0.1m_careful0.12"])
    alone = make_models(tmp_path / "alone")
    assert torch.equal(alone["0.1m"], several["0.1m_careful0.12"])


def test_answer_styles_by_hand():
    def constant_rng(value):
        """A random.Random whose every draw is `value`, and whose choice is the first option."""
        return SimpleNamespace(random=lambda: value, choice=lambda options: options[0])

    def write(value, style):
        prompt = PROMPTS["reasoning_answer"]
        return make_tiny_models.write_completion(
            constant_rng(value), style, prompt, "1 + 1 = 2", "2"
        )

    exact = "<reasoning>\n1 + 1 = 2\n</reasoning>\n<answer>\n2\n</answer>"
    assert write(0.0, "format") == exact
    assert write(0.99, "format") == exact.removesuffix("\n</answer>")
    assert write(0.0, "steps") == "1 + 1 = 2\nThe answer is 2."
    assert write(0.0, "at once") == "The answer is 2."
