"""Supervised fine-tuning: loss and update against an independent float64 computation, and which examples it takes."""

import copy

import pytest
import torch
from conftest import VOCAB, as_flags, assert_same_gradient, small_tokenizer

import sft
import utils
from evaluator import get_evaluator
from logs import jsonl
from rl_datasets import PROMPTS
from sampling.rollout import as_rollout
from training import checkpoints

NORMALIZATIONS = [("masked_mean", None), ("masked_normalize", 7), ("token_mean", None)]
PAD, EOS = 0, 1
EXAMPLES = [{"prompt": f"after {i} comes ", "completion": str(i + 1)} for i in range(10)]


@pytest.fixture
def batch():
    """(prompt ids, completion ids) of unequal lengths; one completion is the EOS alone, one holds the pad id itself."""
    lengths = [(3, 6), (9, 1), (1, 4), (5, 11), (7, 2)]
    generator = torch.Generator().manual_seed(1)

    def draw(n):
        return torch.randint(2, VOCAB, (n,), generator=generator).tolist()

    sequences = [(draw(p), draw(c - 1) + [EOS]) for p, c in lengths]
    sequences[0][1][2] = PAD
    return sequences


def reference_loss(model, batch, length_normalization, constant):
    """Row by row without any padding, in the model's own precision, through the plain forward pass."""
    sums, lengths = [], []
    for prompt, completion in batch:
        ids = torch.tensor([prompt + completion])
        log_probs = model(input_ids=ids).logits[0].log_softmax(-1)
        total = 0.0
        for i, token in enumerate(completion):
            total = total - log_probs[len(prompt) + i - 1, token]
        sums.append(total)
        lengths.append(len(completion))
    if length_normalization == "masked_mean":
        return sum(s / n for s, n in zip(sums, lengths, strict=True)) / len(batch)
    if length_normalization == "masked_normalize":
        return sum(s / constant for s in sums) / len(batch)
    return sum(sums) / sum(lengths)


def accumulate(
    model, batch, length_normalization="masked_mean", constant=None, tokens=1000, **options
):
    """The metrics of an update, and its gradient as one vector."""
    model.zero_grad()
    metrics = sft.accumulate_sft_gradient(
        model,
        batch,
        PAD,
        micro_batch_tokens=tokens,
        length_normalization=length_normalization,
        normalization_constant=constant,
        **options,
    )
    return metrics, gradient_of(model)


def gradient_of(model):
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("length_normalization", "constant"), NORMALIZATIONS)
def test_update_equals_an_independent_float64_computation_whatever_the_micro_batches(
    model, batch, length_normalization, constant
):
    exact = copy.deepcopy(model).double()
    loss = reference_loss(exact, batch, length_normalization, constant)
    loss.backward()
    for tokens in (1, 20, 40, 1000):
        metrics, gradient = accumulate(model, batch, length_normalization, constant, tokens)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert_same_gradient(gradient, gradient_of(exact))


def test_padding_does_not_change_the_gradient_of_a_row(model, batch):
    """A row alone, and beside a longer one whose share of the loss is left out."""
    rollout = as_rollout(batch, PAD, "cpu")
    ids, attention_mask, C = (
        rollout.prompt_completion_ids,
        rollout.attention_mask,
        rollout.completion_ids.shape[1],
    )
    assert ids.shape == attention_mask.shape == (5, 9 + 11) and C == 11
    logps = utils.get_per_token_logps(model, ids, attention_mask, C)
    (-utils.masked_mean(logps[:1], attention_mask[:1, -C:])).backward()
    padded = gradient_of(model)
    assert_same_gradient(accumulate(model, batch[:1])[1], padded)


def test_prompts_are_padded_left_and_completions_right():
    rollout = as_rollout([([5, 6], [7, EOS]), ([8], [9, PAD, EOS])], PAD, "cpu")
    assert rollout.completion_ids.shape == (2, 3)
    assert rollout.prompt_completion_ids.tolist() == [[5, 6, 7, EOS, PAD], [PAD, 8, 9, PAD, EOS]]
    assert rollout.attention_mask.tolist() == [[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]
    assert rollout.completion_mask.tolist() == [[1, 1, 0], [1, 1, 1]]


def test_entropy_is_the_mean_over_completion_tokens(model, batch):
    total = 0.0
    for prompt, completion in batch:
        log_probs = model(input_ids=torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        total -= (log_probs.exp() * log_probs).sum(-1)[len(prompt) - 1 : -1].sum().item()
    tokens = sum(len(completion) for _, completion in batch)
    metrics, _ = accumulate(model, batch, tokens=20, log_entropy=True)
    assert metrics["entropy"] == pytest.approx(total / tokens, rel=1e-5)


def test_encode_ends_the_completion_with_the_eos_and_leaves_the_prompt_alone(tokenizer):
    prompt, completion = sft.encode(tokenizer, [{"prompt": "2 and 2 is ", "completion": "4"}])[0]
    assert tokenizer.decode(prompt) == "2 and 2 is "
    assert tokenizer.decode(completion) == "4<eos>" and completion[-1] == EOS


def test_eos_is_trained_and_prompt_tokens_are_not(model, tokenizer):
    """The loss is made of one log-prob for each completion token, the EOS too, and of none for the prompt's own."""
    prompt, completion = sft.encode(tokenizer, [{"prompt": "ab", "completion": "cd"}])[0]
    rollout = as_rollout([(prompt, completion)], PAD, "cpu")
    ids, C = rollout.prompt_completion_ids, rollout.completion_ids.shape[1]
    logps = utils.get_per_token_logps(model, ids, rollout.attention_mask, C)
    assert completion[-1] == EOS and C == 3  # c, d and EOS, not b
    expected = model(ids).logits[0, 1:-1].log_softmax(-1)[range(3), completion]
    torch.testing.assert_close(logps[0], expected)


def test_training_learns_to_answer_and_to_stop(model, tokenizer):
    log = sft.fine_tune(
        model, tokenizer, EXAMPLES, num_updates=60, train_batch_size=10, learning_rate=0.02
    )
    assert log[-1]["loss"] < 0.05 < 2 < log[0]["loss"]
    prompt = torch.tensor([tokenizer("after 3 comes ")["input_ids"]])
    completion = model.generate(
        prompt, max_new_tokens=5, do_sample=False, eos_token_id=EOS, pad_token_id=PAD
    )
    assert tokenizer.decode(completion[0]) == "after 3 comes 4<eos>"


def test_one_update_equals_adamw_by_hand(model, tokenizer):
    """First step of AdamW with bias correction: the clipped gradient over its own absolute value, plus weight decay."""
    before = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    # Its gradient stays in the parameters: training must not add to what it finds there.
    _, gradient = accumulate(model, sft.encode(tokenizer, EXAMPLES))
    norm = gradient.norm().item()
    (row,) = sft.fine_tune(
        model,
        tokenizer,
        EXAMPLES,
        num_updates=1,
        train_batch_size=10,
        learning_rate=0.01,
        warmup_steps=2,
        optimizer=sft.get_optimizer(model, weight_decay=10.0),
        max_grad_norm=norm / 1000,
    )
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-4) and row[
        "learning_rate"
    ] == pytest.approx(0.005)
    assert row["examples"] == 10 and row["total_tokens"] == 10 * (len("after 1 comes ") + 2) + 1
    gradient = gradient / 1000
    expected = before * (1 - 0.005 * 10) - 0.005 * gradient / (gradient.abs() + 1e-8)
    after = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    torch.testing.assert_close(after, expected, rtol=1e-3, atol=2e-5)


def test_an_update_does_not_add_to_the_gradient_of_the_one_before(model, tokenizer):
    """At learning rate 0 every update over all examples has the same gradient."""
    settings = dict(num_updates=3, train_batch_size=10, learning_rate=0, max_grad_norm=1e9)
    log = sft.fine_tune(model, tokenizer, EXAMPLES, **settings)
    assert [row["grad_norm"] for row in log] == pytest.approx([log[0]["grad_norm"]] * 3, rel=1e-4)


def test_order_depends_on_the_seed_alone_and_covers_each_epoch():
    def first(seed, n=20):
        order = sft.example_order(10, seed)
        return [next(order) for _ in range(n)]

    assert first(0) == first(0) != first(1)
    assert sorted(first(0)[:10]) == sorted(first(0)[10:]) == list(range(10))
    assert first(0)[:10] != first(0)[10:]


def test_learning_rate_rises_linearly_and_falls_as_a_cosine():
    rates = [sft.learning_rate_at(step, 10, 4, 1.0, 0.2) for step in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True) and 0.2 < rates[-1] < 0.3
    # A decay of 7 intervals (updates 4 to 11): update 8 is 4/7 of the way.
    assert rates[7] == pytest.approx(
        0.2 + 0.8 * (1 + torch.cos(torch.tensor(torch.pi * 4 / 7))).item() / 2
    )
    assert sft.learning_rate_at(1, 3, 0, 1.0, 0.0) < 1.0
    assert sft.learning_rate_at(3, 3, 3, 1.0, 0.0) == 1.0


@pytest.mark.parametrize(
    ("examples", "options", "message"),
    [
        ([], {}, "no examples"),
        (EXAMPLES, {"length_normalization": "mean"}, "unknown length_normalization"),
    ],
)
def test_bad_input_is_refused_in_one_line(model, tokenizer, examples, options, message):
    with pytest.raises(ValueError, match=message):
        sft.fine_tune(model, tokenizer, examples, num_updates=1, **options)


# --- the command line -----------------------------------------------------------------------------


def chosen(gold_file, **flags):
    """Ids of the examples that sft.py would train on, in order."""
    flags = dict(model_name="unused", train_file=gold_file, max_completion_length=300) | flags
    prompt, args = PROMPTS["reasoning_answer"], sft.parse_args(as_flags(**flags))
    rows, evaluator = (
        sft.read_gold(gold_file, prompt.name),
        get_evaluator("gsm8k", prompt=prompt.name),
    )
    return [
        example["id"]
        for example in sft.select_examples(rows, args, prompt, small_tokenizer(), evaluator)
    ]


def test_subsets_are_nested_and_drawn_by_the_seed(gold_file):
    small, large = chosen(gold_file, num_examples=10), chosen(gold_file, num_examples=25)
    assert large[:10] == small and len(set(large)) == 25
    assert set(chosen(gold_file, seed=1, num_examples=10)) != set(small)


def test_filter_correct_leaves_out_wrong_answers_and_says_how_many(gold_file, capsys):
    everything, right = chosen(gold_file), chosen(gold_file, filter_correct="")
    assert len(everything) == 60 and len(right) == 54
    assert "6 incorrect, left out" in capsys.readouterr().out
    assert not {row["id"] for row in jsonl.read(gold_file)[::10]} & set(right)


def test_empty_and_long_rows_are_counted_and_left_out(gold_file, tmp_path, capsys):
    rows = jsonl.read(gold_file)[:5]
    rows[1]["completion"] = " \n"
    rows[2]["completion"] *= 9
    rows[3]["question"] *= 90
    jsonl.write(tmp_path / "gold.jsonl", rows)
    assert len(chosen(tmp_path / "gold.jsonl")) == 2
    assert "5 read, 1 empty, left out, 2 too long, left out, 2 used" in capsys.readouterr().out


def test_a_run_writes_the_files_of_a_run_and_learns(gold_file, model_folder, tmp_path):
    flags = dict(
        model_name=model_folder,
        dataset_name="arithmetic",
        train_file=gold_file,
        output_dir=tmp_path / "run",
    )
    flags |= dict(
        evaluator="letters",
        eval_size=4,
        max_completion_length=300,
        train_batch_size=8,
        num_updates=8,
    )
    flags |= dict(eval_updates=3, log_entropy="", learning_rate=1e-2, warmup_steps=0, device="cpu")
    assert sft.main(as_flags(**flags)) == 0
    train, evaluations = (
        jsonl.read(tmp_path / "run" / f"{name}_log.jsonl") for name in ("train", "eval")
    )
    assert [row["step"] for row in train] == list(range(1, 9)) and train[-1]["examples"] == 64
    assert train[-1]["loss"] < 0.8 * train[0]["loss"] and train[0]["entropy"] > 0
    assert {"grad_norm", "time/loss", "time/step", "time/total", "elapsed"} <= train[0].keys()
    assert [row["step"] for row in evaluations] == [0, 3, 6, 8]
    assert checkpoints.find(tmp_path / "run")[1]["step"] == 8
