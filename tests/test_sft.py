"""Supervised fine-tuning: its loss and update against float64, and which examples it takes."""

import copy
import itertools
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, VOCAB, as_flags, assert_same_gradient, flat_gradient, small_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import main
import sft
from config import FineTuningConfig, SFTConfig, parse
from evaluator import get_evaluator
from grpo import checkpoints, jsonl
from grpo.rollout import Completion, make_batch
from grpo.run import Run
from rl_datasets import PROMPTS

NORMALIZATIONS = [("masked_mean", None), ("masked_normalize", 7), ("token_mean", None)]
PAD = 0
EOS = 1


@pytest.fixture
def solutions(tokenizer):
    return [sft.encode(tokenizer, f"after {i} comes ", str(i + 1), {}) for i in range(10)]


@pytest.fixture
def batch():
    """Solutions of unequal lengths.

    One is the end-of-sequence token alone, and one holds the padding token itself.
    """
    lengths = [(3, 6), (9, 1), (1, 4), (5, 11), (7, 2)]
    generator = torch.Generator().manual_seed(1)

    def draw(num_tokens):
        return torch.randint(2, VOCAB, (num_tokens,), generator=generator).tolist()

    batch = []
    for prompt_length, completion_length in lengths:
        prompt = draw(prompt_length)
        batch.append(solution_of(prompt, draw(completion_length - 1) + [EOS]))
    batch[0].ids[2] = PAD
    return batch


def solution_of(prompt_ids, ids):
    return Completion(prompt_ids, ids, [0.0] * len(ids), finished=True, advantage=1.0)


def reference_loss(model, batch, length_normalization, constant):
    """Row by row, unpadded, in the model's own precision, through the plain forward pass."""
    losses_of_sequences = []
    lengths = []
    for solution in batch:
        ids = torch.tensor([solution.prompt_ids + solution.ids])
        log_probs = model(input_ids=ids).logits[0].log_softmax(-1)
        loss = 0.0
        for i, token in enumerate(solution.ids):
            loss = loss - log_probs[len(solution.prompt_ids) + i - 1, token]
        losses_of_sequences.append(loss)
        lengths.append(len(solution.ids))
    if length_normalization == "token_mean":
        return sum(losses_of_sequences) / sum(lengths)
    if length_normalization == "masked_normalize":
        return sum(losses_of_sequences) / constant / len(batch)
    means = [loss / length for loss, length in zip(losses_of_sequences, lengths, strict=True)]
    return sum(means) / len(batch)


def accumulate(model, batch, length_normalization="masked_mean", constant=512, budget=1000):
    """The metrics of an update, and its gradient as one vector.

    budget: the greatest number of tokens of a micro-batch.
    """
    model.zero_grad()
    loss = replace(
        sft.SFT_LOSS, length_normalization=length_normalization, max_completion_length=constant
    )
    metrics = main.accumulate_gradient(model, None, batch, loss, budget)
    return metrics, flat_gradient(model)


@pytest.mark.parametrize("budget", [1, 20, 40, 1000])
@pytest.mark.parametrize(("length_normalization", "constant"), NORMALIZATIONS)
def test_update_equals_an_independent_float64_computation_whatever_the_micro_batches(
    model, batch, length_normalization, constant, budget
):
    float64_model = copy.deepcopy(model).double()
    expected = reference_loss(float64_model, batch, length_normalization, constant)
    expected.backward()
    metrics, gradient = accumulate(model, batch, length_normalization, constant, budget)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradient(gradient, flat_gradient(float64_model))


def test_prompts_are_padded_left_and_completions_right():
    groups = [[solution_of([5, 6], [7, EOS])], [solution_of([8], [9, PAD, EOS])]]
    batch = make_batch(groups, "cpu")
    assert batch.group_size == 1
    assert batch.completion_ids.shape == (2, 3)
    assert batch.prompt_completion_ids.tolist() == [[5, 6, 7, EOS, PAD], [PAD, 8, 9, PAD, EOS]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]
    assert batch.completion_mask.tolist() == [[1, 1, 0], [1, 1, 1]]


def test_entropy_is_the_mean_over_completion_tokens(model, batch):
    total_entropy = 0.0
    for solution in batch:
        ids = torch.tensor([solution.prompt_ids + solution.ids])
        log_probs = model(input_ids=ids).logits[0].log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        total_entropy += entropy[len(solution.prompt_ids) - 1 : -1].sum().item()
    num_tokens = sum(len(solution.ids) for solution in batch)
    metrics, _ = accumulate(model, batch, budget=20)
    assert metrics["entropy"] == pytest.approx(total_entropy / num_tokens, rel=1e-5)


@pytest.mark.parametrize("end", ["", "<eos>", "<eos>\n", "<eos><eos>"])
def test_encode_ends_the_completion_with_one_eos_and_leaves_the_prompt_alone(end, tokenizer):
    solution = sft.encode(tokenizer, "2 and 2 is ", "4" + end, {})
    assert tokenizer.decode(solution.prompt_ids) == "2 and 2 is "
    assert tokenizer.decode(solution.ids) == "4<eos>"
    assert solution.ids[-1] == EOS
    assert solution.text == "4"


@pytest.mark.parametrize("scheme", ["first", "always"])
@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("is it.", "5 is", ["5", "▁", "i", "s"]),
        ("is it.", " 5 is", ["▁", "5", "▁", "i", "s"]),
        ("is it.\n", "\n5", ["\n", "5"]),  # the two line breaks are one token
        ("is i", "t", ["t"]),
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
    assert llama.convert_ids_to_tokens(solution.prompt_ids)[0] == "▁"


@pytest.mark.parametrize("folder", ["tiny/1m", "models/qwen2"])
def test_a_completion_has_the_tokens_that_it_has_alone(folder, request):
    """So it is for byte-level tokenizers, which put nothing before a text."""
    root = ROOT if folder == "tiny/1m" else request.getfixturevalue("data_folder")
    byte_level = AutoTokenizer.from_pretrained(root / folder)
    for prompt in PROMPTS.values():
        for solution in ("5 + 2 = 7.", "\nIt is\n\n 7", " 7", "  7", "'s", "\n\n", "12", ""):
            completion = prompt.format_solution(solution, "7")
            for question in ("How many?", "It is 1", "12 \n"):
                texts = (prompt.render(byte_level, question), completion)
                encoded = sft.encode(byte_level, *texts, {})
                alone = [byte_level(text, add_special_tokens=False) for text in texts]
                assert encoded.prompt_ids == alone[0]["input_ids"]
                assert encoded.ids == alone[1]["input_ids"] + [byte_level.eos_token_id]


def test_training_learns_to_answer_and_to_stop(model, tokenizer, solutions):
    config = FineTuningConfig(train_batch_size=10, learning_rate=0.02)
    log = list(sft.fine_tune(model, solutions, config, num_updates=60))
    assert log[-1]["loss"] < 0.05 < 2 < log[0]["loss"]
    prompt = torch.tensor([tokenizer("after 3 comes ")["input_ids"]])
    completion = model.generate(
        prompt, max_new_tokens=5, do_sample=False, eos_token_id=EOS, pad_token_id=PAD
    )
    assert tokenizer.decode(completion[0]) == "after 3 comes 4<eos>"


def test_one_update_equals_adamw_by_hand(model, solutions, monkeypatch):
    """The first step of AdamW with bias correction.

    It moves a weight by the clipped gradient over its own absolute value.
    """
    weights_before = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    # This leaves a gradient in the parameters, to which training must not add.
    _, gradient = accumulate(model, solutions)
    norm = gradient.norm().item()
    config = FineTuningConfig(
        train_batch_size=10,
        learning_rate=0.01,
        warmup_steps=2,
    )
    monkeypatch.setattr(main, "MAX_GRAD_NORM", norm / 1000)
    optimizer = main.get_optimizer(model)
    row = next(sft.fine_tune(model, solutions, config, num_updates=2, optimizer=optimizer))
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert row["learning_rate"] == pytest.approx(0.005)
    assert row["examples"] == 10
    # The answer and the EOS, and one digit more in the answer 10.
    assert row["tokens"] == 10 * (len("after 1 comes ") + 2) + 1
    clipped = gradient / 1000
    expected = weights_before - 0.005 * clipped / (clipped.abs() + 1e-8)
    weights = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda")])
def test_optimiser_state_of_another_device_continues(devices, model):
    """On CUDA AdamW is fused, as its state says. PyTorch has a fused AdamW on the CPU as well."""
    by_hand = copy.deepcopy(model)
    optimizer_without_a_break = main.get_optimizer(by_hand)
    state = None
    for step, device in enumerate(devices):
        on_device = SimpleNamespace(device=torch.device(device), parameters=model.parameters)
        optimizer = main.get_optimizer(on_device)
        assert bool(optimizer.param_groups[0]["fused"]) == (device == "cuda")
        if state is not None:
            optimizer.load_state_dict(state)
        for weights, updating in ((model, optimizer), (by_hand, optimizer_without_a_break)):
            updating.param_groups[0]["lr"] = 0.01
            generator = torch.Generator().manual_seed(step)
            for weight in weights.parameters():
                weight.grad = torch.randn(weight.shape, generator=generator)
            updating.step()
        state = copy.deepcopy(optimizer.state_dict())
    for weight, expected in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


def test_an_update_does_not_add_to_the_gradient_of_the_one_before(model, solutions):
    """At learning rate 0 every update over all examples has the same gradient."""
    config = FineTuningConfig(train_batch_size=10, learning_rate=0)
    log = list(sft.fine_tune(model, solutions, config, num_updates=3))
    assert [row["grad_norm"] for row in log] == pytest.approx([log[0]["grad_norm"]] * 3, rel=1e-4)


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
    assert sft.learning_rate_factor(2, num_updates=3, warmup_steps=3) == 1.0


# --- the command line -----------------------------------------------------------------------------


def selected_ids(gold_file, **flags):
    """Ids of the solutions that sft.py would train on, in order."""
    flags = dict(model_name="unused", train_file=gold_file, max_completion_length=300) | flags
    config = parse(SFTConfig, as_flags(**flags))
    run = SimpleNamespace(
        train_loader=SimpleNamespace(prompt=PROMPTS["reasoning_answer"]),
        eval_loader=[],
        tokenizer=small_tokenizer(),
        evaluator=get_evaluator("gsm8k"),
    )
    run.reward = partial(Run.reward, run)
    return [solution.example["id"] for solution in sft.read_solutions(config, run)]


def test_subsets_are_nested_and_drawn_by_the_seed(gold_file):
    ten = selected_ids(gold_file, num_examples=10)
    twenty_five = selected_ids(gold_file, num_examples=25)
    assert twenty_five[:10] == ten
    assert len(set(twenty_five)) == 25
    assert set(selected_ids(gold_file, seed=1, num_examples=10)) != set(ten)


def test_filter_correct_leaves_out_wrong_answers_and_says_how_many(gold_file, capsys):
    assert len(selected_ids(gold_file)) == 60
    capsys.readouterr()
    correct = selected_ids(gold_file, filter_correct="")
    assert len(correct) == 54
    assert (
        "60 rows, 54 of them correct, 54 of these short enough, 54 used" in capsys.readouterr().out
    )
    wrong = {row["id"] for row in jsonl.read(gold_file)[::10]}
    assert not wrong & set(correct)


def test_a_prompt_of_the_train_file_must_fit_into_the_positions(
    gold_file, model_folder, tmp_path, capsys
):
    """Only the prompts of the data set were checked."""
    rows = jsonl.read(gold_file)[:2]
    rows[1]["question"] *= 8
    jsonl.write(tmp_path / "gold.jsonl", rows)
    flags = as_flags(
        model_name=model_folder,
        dataset_name="arithmetic",
        train_file=tmp_path / "gold.jsonl",
        output_dir=tmp_path / "run",
        eval_size=1,
        max_prompt_length=2000,
        max_completion_length=300,
        num_updates=1,
        device="cpu",
    )
    assert sft.main(flags) == 2
    assert "1,024 positions, and the longest prompt takes" in capsys.readouterr().err


def test_empty_and_long_rows_are_counted_and_left_out(gold_file, tmp_path, capsys):
    rows = jsonl.read(gold_file)[:5]
    rows[1]["completion"] = " \n"
    rows[2]["completion"] *= 9
    rows[3]["question"] *= 90
    jsonl.write(tmp_path / "gold.jsonl", rows)
    assert len(selected_ids(tmp_path / "gold.jsonl")) == 2
    counts = "5 rows, 4 of them correct, 2 of these short enough, 2 used"
    assert counts in capsys.readouterr().out


def test_rows_that_are_marked_as_incorrect_are_left_out(gold_file, tmp_path):
    """generate_gold.py writes them too. A file without marks is used as it is."""
    rows = jsonl.read(gold_file)[:5]
    rows[1]["correct"] = False
    rows[2]["correct"] = True
    jsonl.write(tmp_path / "gold.jsonl", rows)
    chosen = selected_ids(tmp_path / "gold.jsonl")
    assert set(chosen) == {rows[i]["id"] for i in (0, 2, 3, 4)}


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
        num_updates=8,
        eval_updates=3,
        learning_rate=1e-2,
        warmup_steps=0,
        device="cpu",
    )
    assert sft.main(flags) == 0
    rows = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rows[-1]["examples"] == 64
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert rows[0]["entropy"] > 0
    assert {"grad_norm", "time/loss_and_update", "time/total", "elapsed"} <= rows[0].keys()
    evaluations = jsonl.read(tmp_path / "run" / "eval_log.jsonl")
    assert [row["step"] for row in evaluations] == [0, 3, 6, 8]
    assert max(checkpoints.finished(tmp_path / "run")) == 8
