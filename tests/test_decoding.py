"""The decode step: it asks the host nothing, samples the exact law, and how rows are batched changes no sample."""

from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, random_model
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.cache_utils import DynamicCache

from sampling import decoding, generation
from sampling.rollout import compute_rollout_logps

PROMPTS = ["a", "hello there", "one two three", "z9"]
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    sliding_window=6,
)
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "llama": LlamaConfig(**SIZES),
    "one window": MistralConfig(**SIZES),
    "two kinds of layers": Gemma3TextConfig(
        **SIZES, layer_types=["sliding_attention", "full_attention"]
    ),
}


def sample(model, tokenizer, **options):
    torch.manual_seed(3)
    return generation.generate(
        model, tokenizer, PROMPTS, **dict(num_samples=6, max_new_tokens=70) | options
    )


def same(a, b):
    return (
        torch.equal(a.completion_ids, b.completion_ids)
        and a.texts == b.texts
        and a.finished.equal(b.finished)
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_asks_the_host_nothing(name):
    """On the meta device there are no numbers, so `.item()`, `.cpu()`, `if tensor` and boolean indexing raise, as they
    would stop a CUDA graph. Not seen here: a new tensor from numbers of the host, or indices left on the CPU."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            CONFIGS[name], dtype=torch.float32, attn_implementation="sdpa"
        )
        cache = DynamicCache()
        for layer in range(2):
            cache.update(*torch.zeros(2, 3, 2, 5, 8), layer)
        decoder = decoding.Decoder(model, 12, 40)
        decoder.start(cache, torch.ones(3, 5, dtype=torch.long), torch.zeros(12, 9))
    with torch.no_grad(), generation._sampling(model):
        for temperature in (0.0, 0.7):
            decoder.step(model, temperature)
    assert decoder.tokens.shape == (12, 40)


def test_samples_do_not_depend_on_what_is_sampled_with_them(model, tokenizer):
    """Turns, rows that leave, the order of prompts: with one stream of random numbers for all, each changed samples."""
    expected = sample(model, tokenizer, stop_strings=("ab", "</answer>"))
    assert len(set(expected.lengths.tolist())) > 5
    for most in (1, 4, 7, 12):
        rollout = sample(
            model, tokenizer, stop_strings=("ab", "</answer>"), max_concurrent_sequences=most
        )
        assert same(rollout, expected)
        torch.testing.assert_close(rollout.sampled_logps, expected.sampled_logps, atol=2e-5, rtol=0)


@pytest.mark.parametrize("max_new_tokens", [1, 7, 70, 150])
def test_what_a_gpu_does_gives_the_same_samples(model, tokenizer, max_new_tokens, monkeypatch):
    """There the host looks every eight steps, room comes in larger blocks, and what came after an end is cut off."""
    options = dict(max_new_tokens=max_new_tokens, stop_strings=("ab", "</answer>"))
    expected, made = sample(model, tokenizer, **options), []

    def decoder_for(model, cache, rows, room):
        made.append(decoding.Decoder(model, rows, room))
        made[-1].look, made[-1].rooms = 8, range(128, room + 128, 128)
        return made[-1]

    monkeypatch.setattr(generation, "decoder_for", decoder_for)
    assert same(sample(model, tokenizer, **options), expected) and made


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.7])
def test_first_and_second_tokens_follow_the_exact_law(temperature, tokenizer):
    """Chi-square of 20,000 samples of one prompt, against the plain forward pass."""
    model, n = random_model(5), 20_000
    torch.manual_seed(1)
    options = dict(
        num_samples=n, max_new_tokens=2, temperature=temperature, max_concurrent_sequences=n
    )
    rollout = generation.generate(model, tokenizer, ["hello"], **options)
    prompt = tokenizer("hello")["input_ids"]
    rows = torch.tensor([prompt + [token] for token in range(VOCAB)])
    with torch.no_grad():
        laws = (model(rows).logits[:, -2:].double() / temperature).softmax(-1)
    first = laws[0, 0]
    ends = (
        torch.zeros(VOCAB)
        .index_fill(0, torch.tensor(generation.eos_token_ids(model, tokenizer)), 1)
        .bool()
    )
    second = (first.masked_fill(ends, 0).unsqueeze(1) * laws[:, 1]).sum(
        0
    )  # of the sequences that go on
    drawn = (
        rollout.completion_ids[:, 0].bincount(minlength=VOCAB),
        rollout.completion_ids[rollout.lengths == 2, 1],
    )
    for counts, law in (
        (drawn[0], first),
        (drawn[1].bincount(minlength=VOCAB), second / second.sum()),
    ):
        rare = law * counts.sum() < 5  # counted together
        counts, law = (torch.cat([x[~rare], x[rare].sum().view(1)]) for x in (counts, law))
        expected = law * counts.sum()
        statistic = ((counts - expected).square() / expected.clamp(min=1)).sum().item()
        freedom = len(law) - 1
        assert freedom > 40 and abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5, statistic


@pytest.mark.parametrize("name", CONFIGS)
def test_products_equal_sdpa(name, tokenizer):
    """Groups of heads, windows and padding; a name that the mask registry lacks would mean no mask at all."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIGS[name], dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    expected = sample(model, tokenizer)
    products, decoding.AttentionInterface._global_mapping[decoding.ATTENTION] = (
        decoding.attention,
        decoding.sdpa_attention_forward,
    )
    try:
        rollout = sample(model, tokenizer)
    finally:
        decoding.AttentionInterface.register(decoding.ATTENTION, products)
    assert same(rollout, expected)
    logps = compute_rollout_logps(
        model, expected, group_size=6, temperature=1.0, micro_batch_tokens=10_000
    )
    for sampled in (expected.sampled_logps, rollout.sampled_logps):
        torch.testing.assert_close(sampled, logps, atol=2e-5, rtol=0)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("fails_at", [None, 0, 5])
def test_a_step_that_cannot_be_captured_is_taken_without_and_said_once(
    fails_at, model, tokenizer, monkeypatch, capsys
):
    """Samples are the same with captured steps, without, and where the capture fails halfway through a rollout."""
    expected, captures, places = sample(model, tokenizer), [], set()

    def capture(self, model, temperature, before):
        decoding.Decoder.step(self, model, temperature)  # the warm-up moves on by one slot
        if len(captures) == fails_at:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        self.slot.copy_(before)
        captures.append(self.size)
        places.add(
            tuple(
                x.data_ptr()
                for slots in self.cache.layers
                for x in (slots.keys, slots.values, self.tokens)
            )
        )
        return SimpleNamespace(replay=lambda: decoding.Decoder.step(self, model, temperature))

    monkeypatch.setattr(decoding.Captured, "_capture", capture)
    decoder = decoding.Captured(model, 24, 90)  # kept for all turns and calls, as decoder_for does
    monkeypatch.setattr(generation, "decoder_for", lambda *_: decoder)
    for most in (24, 7):
        assert same(sample(model, tokenizer, max_concurrent_sequences=most), expected)
    said = capsys.readouterr().out
    assert len(places) == (fails_at != 0), "what a graph reads and writes must stay where it is"
    assert (
        len(set(captures)) == len(captures) > 3 if fails_at is None else len(captures) == fails_at
    )
    assert said.count("without CUDA graphs") == (fails_at is not None) and said.count("\n") == (
        fails_at is not None
    )
