"""Supervised fine-tuning: its loss and update against float64, and which examples it takes."""

import copy
import itertools
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    as_flags,
    assert_same_gradient,
    flat_gradient,
    small_tokenizer,
    unpadded_logps,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import llms
import main
import sft
from config import FineTuningConfig, parse
from evaluator import get_evaluator
from grpo import jsonl
from grpo.run import Run
from rl_datasets import PROMPTS

PAD = 0
EOS = 1


@pytest.fixture
def solutions(tokenizer):
    """Ten of unequal lengths: one is the EOS alone, and one holds the padding token itself."""
    solutions = [sft.encode(tokenizer, "to " * (1 + i % 4), "word"[:i], {}) for i in range(10)]
    solutions[2].ids[1] = PAD
    return solutions


def accumulate(model, solutions, micro_batch_tokens=1000):
    """The metrics of an update, and its gradient as one vector."""
    model.zero_grad()
    metrics = main.accumulate_gradient(model, None, solutions, sft.SFT_LOSS, micro_batch_tokens)
    return metrics, flat_gradient(model)


def test_an_update_equals_an_independent_float64_computation(model, solutions):
    """Minus the log-prob of each token, averaged over its solution, then over solutions."""
    float64_model = copy.deepcopy(model).double()
    losses = []
    for solution in solutions:
        ids = torch.tensor(solution.prompt_ids + solution.ids)
        losses.append(-unpadded_logps(float64_model, ids, len(solution.ids)).mean())
    expected = torch.stack(losses).mean()
    expected.backward()
    metrics, gradient = accumulate(model, solutions, micro_batch_tokens=40)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradient(gradient, flat_gradient(float64_model))


@pytest.mark.parametrize("end", ["", "<eos>"])
def test_encode_ends_the_completion_with_one_eos_and_leaves_the_prompt_alone(end, tokenizer):
    solution = sft.encode(tokenizer, "2 and 2 is ", "4" + end, {})
    assert tokenizer.decode(solution.prompt_ids) == "2 and 2 is "
    assert tokenizer.decode(solution.ids) == "4<eos>"
    assert solution.ids[-1] == EOS
    assert solution.text == "4"


@pytest.mark.parametrize(
    ("scheme", "prompt", "completion", "expected"),
    [
        ("first", "is it.", "5 is", ["5", "▁", "i", "s"]),
        ("always", "is it.", " 5 is", ["▁", "5", "▁", "i", "s"]),
        ("never", "is it.\n", "\n5", ["\n", "5"]),  # the two line breaks are one token
        ("never", "is i", "t", ["t"]),
    ],
)
def test_a_completion_goes_on_after_its_prompt(scheme, prompt, completion, expected):
    """Alone it began with the space that Llama's tokenizer puts before a text."""
    tokens = ["<eos>", *"▁ist.5\n", "\n\n", "it"]
    merges = [("\n", "\n"), ("i", "t")]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    llama = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")
    solution = sft.encode(llama, prompt, completion, {})
    assert llama.convert_ids_to_tokens(solution.ids) == [*expected, "<eos>"]
    assert solution.prompt_ids == llama(prompt)["input_ids"]


def test_one_update_equals_adamw_by_hand(model, solutions, monkeypatch):
    """The first step of AdamW with bias correction.

    It moves a weight by the clipped gradient over its own absolute value.
    """
    weights_before = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    # This leaves a gradient in the parameters, to which training must not add.
    _, gradient = accumulate(model, solutions)
    norm = gradient.norm().item()
    config = FineTuningConfig(
        train_batch_size=10, learning_rate=0.01, warmup_steps=2, micro_batch_tokens=1024
    )
    monkeypatch.setattr(main, "MAX_GRAD_NORM", norm / 1000)
    optimizer = main.get_optimizer(model)
    row = next(sft.fine_tune(model, solutions, config, num_updates=2, optimizer=optimizer))
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert row["learning_rate"] == pytest.approx(0.005)
    assert row["examples"] == 10
    # Prompts of 3, 6, 9 and 12 tokens; words of 0 to 4 letters, and the EOS after each.
    assert row["tokens"] == (3 * 3 + 3 * 6 + 2 * 9 + 2 * 12) + (0 + 1 + 2 + 3 + 6 * 4) + 10
    clipped = gradient / 1000
    expected = weights_before - 0.005 * clipped / (clipped.abs() + 1e-8)
    weights = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=2e-5)


def test_order_depends_on_the_seed_alone_and_covers_each_epoch():
    def first_20(seed):
        return list(itertools.islice(sft.example_order(10, seed), 20))

    order = first_20(0)
    assert first_20(0) == order
    assert first_20(1) != order
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]


def test_learning_rate_rises_linearly_and_falls_as_a_cosine():
    rates = [sft.learning_rate_factor(update, 10, 4, final_factor=0.2) for update in range(10)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0.2 < rates[-1] < 0.3
    # The decay has 7 intervals, from update 4 to update 11: update 8 is 4/7 of the way.
    assert rates[7] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * 4 / 7)) / 2)
    assert sft.learning_rate_factor(0, num_updates=3, warmup_steps=0) == 1.0
    assert sft.learning_rate_factor(2, num_updates=3, warmup_steps=10) == 1.0


# --- the command line -----------------------------------------------------------------------------


def selected_ids(rows, held_out=(), **flags):
    """Ids of the solutions that sft.py would train on, in order."""
    flags = dict(model_name="unused", train_file="gold", max_completion_length=300) | flags
    config = parse(sft.SFTConfig, as_flags(**flags))
    run = SimpleNamespace(
        train_loader=SimpleNamespace(prompt=PROMPTS["reasoning_answer"], held_out=held_out),
        tokenizer=small_tokenizer(),
        evaluator=get_evaluator("gsm8k"),
    )
    run.reward = partial(Run.reward, run)
    return [solution.example["id"] for solution in sft.choose_solutions(rows, config, run)]


def test_subsets_are_nested_and_drawn_by_the_seed(gold_file):
    rows = jsonl.read(gold_file)
    ten = selected_ids(rows, num_examples=10)
    twenty_five = selected_ids(rows, num_examples=25)
    assert twenty_five[:10] == ten
    assert len(set(twenty_five)) == 25
    assert set(selected_ids(rows, seed=1, num_examples=10)) != set(ten)


def test_rows_that_are_wrong_long_or_held_out_are_left_out(gold_file, capsys):
    """A file without marks is used as it is: every tenth row of this one is wrong."""
    rows = jsonl.read(gold_file)
    ids = [row["id"] for row in rows]
    assert sorted(selected_ids(rows)) == sorted(ids)
    rows[1]["correct"] = "False"  # of a table without booleans
    rows[2]["correct"] = "True"
    rows[3]["completion"] = rows[3]["completion"].replace("\n", "\n" + 300 * "a", 1)
    rows[4]["question"] *= 90
    del rows[5]["id"]  # it is held out by its question
    rows[6]["answer"] = int(rows[6]["answer"])
    held_out = {rows[5]["question"]}
    capsys.readouterr()
    expected = [id for i, id in enumerate(ids) if i % 10 > 0 and i not in (1, 3, 4, 5)]
    assert sorted(selected_ids(rows, held_out, filter_correct="")) == sorted(expected)
    counts = "60 rows, 52 of them correct and not held out, 50 of these short enough, 50 used"
    assert counts in capsys.readouterr().out


def test_a_run_writes_the_files_of_a_run_and_learns(gold_file, model_folder, tmp_path):
    flags = as_flags(
        model_name=model_folder,
        dataset_name="arithmetic",
        train_file=gold_file,
        output_dir=tmp_path / "run",
        evaluator="letters",
        eval_size=4,
        max_completion_length=110,
        train_batch_size=8,
        epochs=1,
        eval_updates=3,
        learning_rate=1e-2,
        warmup_steps=0,
        device="cpu",
        sampling_dtype="bfloat16",
    )
    assert sft.main(flags) == 0
    rows = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]  # of 60 solutions
    assert 0 < rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert rows[0].keys() >= {"entropy", "grad_norm", "time/loss_and_update", "time/total"}
    evaluations = jsonl.read(tmp_path / "run" / "eval_log.jsonl")
    assert [row["step"] for row in evaluations] == [0, 3, 6, 8]
    assert evaluations[0]["reward"] != evaluations[-1]["reward"], "the sampler follows"
    assert max(llms.finished_checkpoints(tmp_path / "run")) == 8
