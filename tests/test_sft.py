"""The supervised loss and update against an independent float64 computation, and what must not change the gradient."""

import copy
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import sft

NORMALIZATIONS = [("masked_mean", None), ("masked_normalize", 7), ("token_mean", None)]
PAD, EOS = 0, 1


@pytest.fixture
def tokenizer():
    """One token per byte, without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        initializer_range=0.3,  # far from uniform predictions, so that a wrong target or mask shows
    )
    return Qwen2ForCausalLM(config)


@pytest.fixture
def batch():
    """(prompt ids, completion ids) of unequal lengths; one completion is the EOS alone, one holds the pad id itself."""
    lengths = [(3, 6), (9, 1), (1, 4), (5, 11), (7, 2)]
    generator = torch.Generator().manual_seed(1)

    def draw(n):
        return torch.randint(2, 258, (n,), generator=generator).tolist()

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


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(model, expected, tolerance):
    for name, p in model.named_parameters():
        error = (p.grad.double() - expected[name].double()).norm() / expected[name].double().norm()
        assert error < tolerance, (name, error.item())


def accumulate(model, batch, length_normalization="masked_mean", constant=None, tokens=1000, **options):
    model.zero_grad()
    return sft.accumulate_gradients(
        model,
        batch,
        PAD,
        micro_batch_tokens=tokens,
        length_normalization=length_normalization,
        normalization_constant=constant,
        **options,
    )


@pytest.mark.parametrize(("length_normalization", "constant"), NORMALIZATIONS)
def test_loss_and_gradients_equal_an_independent_float64_computation(model, batch, length_normalization, constant):
    exact = copy.deepcopy(model).double()
    loss = reference_loss(exact, batch, length_normalization, constant)
    loss.backward()
    metrics = accumulate(model, batch, length_normalization, constant)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_same_gradients(model, gradients(exact), 1e-5)


@pytest.mark.parametrize(("length_normalization", "constant"), NORMALIZATIONS)
@pytest.mark.parametrize("tokens", [1, 20, 40])
def test_micro_batches_do_not_change_loss_and_gradients(model, batch, length_normalization, constant, tokens):
    whole = accumulate(model, batch, length_normalization, constant)["loss"]
    expected = gradients(model)
    parts = accumulate(model, batch, length_normalization, constant, tokens)["loss"]
    assert parts == pytest.approx(whole, rel=1e-5)
    assert_same_gradients(model, expected, 1e-5)


def test_padding_does_not_change_the_gradient_of_a_row(model, batch):
    """A row alone, and beside a longer one whose share of the loss is left out."""
    ids, attention_mask, C = sft.collate(batch, PAD)
    assert ids.shape == attention_mask.shape == (5, 9 + 11) and C == 11
    logps = sft.get_per_token_logps(model, ids, attention_mask, C)
    sft.compute_sft_loss(logps[:1], attention_mask[:1, -C:]).backward()
    padded = gradients(model)
    accumulate(model, batch[:1])
    assert_same_gradients(model, padded, 1e-5)


def test_collate_pads_prompts_left_and_completions_right():
    ids, attention_mask, C = sft.collate([([5, 6], [7, EOS]), ([8], [9, PAD, EOS])], PAD)
    assert C == 3
    assert ids.tolist() == [[5, 6, 7, EOS, PAD], [PAD, 8, 9, PAD, EOS]]
    assert attention_mask.tolist() == [[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]


def test_loss_is_the_mean_worked_by_hand():
    logps = torch.tensor([[-1.0, -2.0, -9.0], [-4.0, -9.0, -9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert sft.compute_sft_loss(logps, mask).item() == pytest.approx((1.5 + 4) / 2)
    normalized = sft.compute_sft_loss(logps, mask, length_normalization="masked_normalize", normalization_constant=10)
    assert normalized.item() == pytest.approx((0.3 + 0.4) / 2)
    assert sft.compute_sft_loss(logps, mask, length_normalization="token_mean").item() == pytest.approx(7 / 3)


def test_entropy_is_the_mean_over_completion_tokens(model, batch):
    total = 0.0
    for prompt, completion in batch:
        log_probs = model(input_ids=torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        total -= (log_probs.exp() * log_probs).sum(-1)[len(prompt) - 1 : -1].sum().item()
    tokens = sum(len(completion) for _, completion in batch)
    metrics = accumulate(model, batch, tokens=20, log_entropy=True)
    assert metrics["entropy"] == pytest.approx(total / tokens, rel=1e-5)


def test_encode_ends_the_completion_with_the_eos_and_leaves_the_prompt_alone(tokenizer):
    prompt, completion = sft.encode(tokenizer, [{"prompt": "2+2=", "completion": "4"}])[0]
    assert tokenizer.decode(prompt) == "2+2="
    assert tokenizer.decode(completion) == "4<eos>"
    assert completion[-1] == tokenizer.eos_token_id == EOS


def test_eos_is_trained_and_prompt_tokens_are_not(model, tokenizer):
    """The loss is made of one log-prob for each completion token, the EOS too, and of none for the prompt's own."""
    prompt, completion = sft.encode(tokenizer, [{"prompt": "ab", "completion": "cd"}])[0]
    ids, attention_mask, C = sft.collate([(prompt, completion)], PAD)
    logps = sft.get_per_token_logps(model, ids, attention_mask, C)
    logps.retain_grad()
    sft.compute_sft_loss(logps, attention_mask[:, -C:], length_normalization="token_mean").backward()
    assert completion[-1] == EOS and C == 3  # c, d and EOS, not b
    expected = model(ids).logits[0, 1:-1].log_softmax(-1)[range(3), completion]
    torch.testing.assert_close(logps[0], expected)
    assert logps.grad[0].tolist() == pytest.approx([-1 / 3] * 3)


EXAMPLES = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(10)]


def test_training_learns_to_answer_and_to_stop(model, tokenizer):
    log = sft.train(model, tokenizer, EXAMPLES, num_updates=60, train_batch_size=10, learning_rate=0.02)
    assert log[-1]["loss"] < 0.05 < 2 < log[0]["loss"]
    prompt = torch.tensor([tokenizer("3+1=")["input_ids"]])
    completion = model.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=EOS, pad_token_id=PAD)
    assert tokenizer.decode(completion[0]) == "3+1=4<eos>"


def test_one_update_equals_adamw_by_hand(model, tokenizer):
    """First step of AdamW with bias correction: the clipped gradient over its own absolute value, plus weight decay."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    # Its gradient stays in the parameters: training must not add to what it finds there.
    accumulate(model, sft.encode(tokenizer, EXAMPLES))
    grads = gradients(model)
    norm = torch.stack([g.norm() for g in grads.values()]).norm().item()
    row = sft.train(
        model,
        tokenizer,
        EXAMPLES,
        num_updates=1,
        train_batch_size=10,
        learning_rate=0.01,
        warmup_steps=2,
        weight_decay=10.0,
        max_grad_norm=norm / 1000,
    )[0]
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-4) and row["learning_rate"] == pytest.approx(0.005)
    for name, p in model.named_parameters():
        g = grads[name] / 1000
        expected = before[name] * (1 - 0.005 * 10) - 0.005 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-3, atol=2e-5)


def test_an_update_does_not_add_to_the_gradient_of_the_one_before(model, tokenizer):
    """At learning rate 0 every update over all examples has the same gradient."""
    log = sft.train(model, tokenizer, EXAMPLES, num_updates=3, train_batch_size=10, learning_rate=0, max_grad_norm=1e9)
    assert [row["grad_norm"] for row in log] == pytest.approx([log[0]["grad_norm"]] * 3, rel=1e-4)


def test_order_depends_on_the_seed_alone_and_covers_each_epoch():
    def first(seed, n=20):
        order = sft.example_order(10, seed)
        return [next(order) for _ in range(n)]

    assert first(0) == first(0) != first(1)
    assert sorted(first(0)[:10]) == sorted(first(0)[10:]) == list(range(10))
    assert first(0)[:10] != first(0)[10:]


def test_two_runs_are_identical_and_write_the_same_log(model, tokenizer, tmp_path):
    copies = [copy.deepcopy(model) for _ in range(2)]
    steps = []
    for i, other in enumerate(copies):
        sft.train(
            other,
            tokenizer,
            EXAMPLES,
            num_updates=3,
            train_batch_size=4,
            log_entropy=True,
            output_dir=tmp_path / str(i),
            after_update=lambda row: steps.append(row["step"]),
        )
    assert steps == [1, 2, 3] * 2
    for p, q in zip(*(other.parameters() for other in copies), strict=True):
        assert torch.equal(p, q)
    rows = [
        [json.loads(line) for line in (tmp_path / str(i) / "train_log.jsonl").read_text().splitlines()]
        for i in range(2)
    ]
    keys = ["step", "loss", "entropy", "grad_norm", "learning_rate", "examples", "tokens"]
    for one, two in zip(*rows, strict=True):
        assert [one[key] for key in keys] == [two[key] for key in keys]
        assert {"time/loss", "time/step", "time/total", "elapsed"} <= one.keys()
    assert [row["examples"] for row in rows[0]] == [4, 8, 12]


def test_learning_rate_rises_linearly_and_falls_as_a_cosine():
    rates = [sft.learning_rate_at(step, 10, 4, 1.0, 0.2) for step in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True) and 0.2 < rates[-1] < 0.3
    # A decay of 7 intervals (updates 4 to 11): update 8 is 4/7 of the way.
    assert rates[7] == pytest.approx(0.2 + 0.8 * (1 + torch.cos(torch.tensor(torch.pi * 4 / 7))).item() / 2)
    assert sft.learning_rate_at(1, 3, 0, 1.0, 0.0) < 1.0
    assert sft.learning_rate_at(3, 3, 3, 1.0, 0.0) == 1.0


@pytest.mark.parametrize(
    ("examples", "options", "message"),
    [
        ([], {}, "no examples"),
        (EXAMPLES, {"length_normalization": "mean"}, "masked_mean, masked_normalize, token_mean"),
        (EXAMPLES, {"length_normalization": "masked_normalize"}, "needs normalization_constant"),
    ],
)
def test_bad_input_is_refused_in_one_line(model, tokenizer, examples, options, message):
    with pytest.raises(ValueError, match=message):
        sft.train(model, tokenizer, examples, num_updates=1, **options)
