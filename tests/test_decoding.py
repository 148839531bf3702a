"""The decode step asks the host nothing and samples the exact distribution.

How rows are batched changes no sample.
"""

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
STOP_STRINGS = ("ab", "</answer>")
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


def sample(model, tokenizer, num_samples=6, max_completion_length=70, **options):
    torch.manual_seed(3)
    return generation.generate(
        model,
        tokenizer,
        PROMPTS,
        num_samples=num_samples,
        max_completion_length=max_completion_length,
        **options,
    )


def have_same_samples(a, b):
    same_ids = torch.equal(a.completion_ids, b.completion_ids)
    return same_ids and a.texts == b.texts and torch.equal(a.finished, b.finished)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_asks_the_host_nothing(name):
    """On the meta device tensors have no values: what asks for one raises, as in a CUDA graph.

    That is `.item()`, `.cpu()`, `if tensor` and indexing with a boolean tensor. Not noticed are a
    new tensor made from the host's numbers, and indices that were left on the CPU.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            CONFIGS[name], dtype=torch.float32, attn_implementation="sdpa"
        )
        cache = DynamicCache()
        for layer in range(2):
            keys = torch.zeros(3, 2, 5, 8)
            values = torch.zeros(3, 2, 5, 8)
            cache.update(keys, values, layer)
        decoder = decoding.Decoder(model, 12, 40)
        prompt_mask = torch.ones(3, 5, dtype=torch.long)
        decoder.start(cache, prompt_mask, torch.zeros(12, 9))
    with torch.no_grad(), generation._sampling_mode(model):
        for temperature in (0.0, 0.7):
            decoder.step(model, temperature)
    assert decoder.tokens.shape == (12, 40)


def test_samples_do_not_depend_on_what_is_sampled_with_them(model, tokenizer):
    """Turns, rows that leave and the order of prompts changed samples.

    That was when one stream of random numbers served all rows.
    """
    expected = sample(model, tokenizer, stop_strings=STOP_STRINGS)
    assert len(set(expected.lengths.tolist())) > 5
    for bound in (1, 4, 7, 12):
        rollout = sample(
            model, tokenizer, stop_strings=STOP_STRINGS, max_concurrent_sequences=bound
        )
        assert have_same_samples(rollout, expected)
        torch.testing.assert_close(rollout.sampled_logps, expected.sampled_logps, atol=2e-5, rtol=0)


@pytest.mark.parametrize("max_completion_length", [1, 7, 70, 150])
def test_a_gpus_settings_give_the_same_samples(
    model, tokenizer, max_completion_length, monkeypatch
):
    """On a GPU ends are looked for every eight steps, and slots are added in larger blocks.

    What was sampled after an end is then cut off.
    """
    options = dict(max_completion_length=max_completion_length, stop_strings=STOP_STRINGS)
    expected = sample(model, tokenizer, **options)
    decoders = []

    def decoder_for(model, cache, num_rows, num_slots):
        decoder = decoding.Decoder(model, num_rows, num_slots)
        decoder.check_interval = 8
        decoder.slot_counts = range(128, num_slots + 128, 128)
        decoders.append(decoder)
        return decoder

    monkeypatch.setattr(generation, "decoder_for", decoder_for)
    rollout = sample(model, tokenizer, **options)
    assert have_same_samples(rollout, expected)
    assert decoders, "the sampler should have asked for this decoder"


def test_a_kept_decoder_serves_a_longer_prompt_that_its_slots_hold(model, tokenizer, monkeypatch):
    """It had slots for the longer prompt, but fewer columns for tokens and random numbers."""

    class ModelOnGpu:
        device = torch.device("cuda")
        dtype = torch.bfloat16

    def captured_decoder(model_on_gpu, max_rows, max_slots):
        decoder = decoding.Decoder(model, max_rows, max_slots)
        decoder.slot_counts = range(128, max_slots + 128, 128)
        decoder.reserved_cells = max_rows * decoder.slot_counts[-1]
        return decoder

    monkeypatch.setattr(decoding, "CapturedDecoder", captured_decoder)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**30)
    )
    model_on_gpu = ModelOnGpu()
    decoders = []
    for prompt in ("ab", "abcdefgh"):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        cache, _ = generation._run_prompts(model, ids, torch.ones_like(ids))
        num_slots = ids.shape[1] + 20
        decoders.append(decoding.decoder_for(model_on_gpu, cache, 1, num_slots))
        decoders[-1].start(cache, torch.ones_like(ids), torch.ones(1, 20))
    assert decoders[0] is decoders[1]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.7])
def test_first_and_second_tokens_follow_the_exact_distribution(temperature, tokenizer):
    """Chi-square of 20,000 samples of one prompt, against the plain forward pass."""
    model = random_model(5)
    num_samples = 20_000
    torch.manual_seed(1)
    rollout = generation.generate(
        model,
        tokenizer,
        ["hello"],
        num_samples=num_samples,
        max_completion_length=2,
        temperature=temperature,
        max_concurrent_sequences=num_samples,
    )
    prompt = tokenizer("hello")["input_ids"]
    rows = torch.tensor([prompt + [token] for token in range(VOCAB)])
    with torch.no_grad():
        logits = model(rows).logits[:, -2:].double()  # (first token, position, next token)
    probs = (logits / temperature).softmax(-1)
    first_probs = probs[0, 0]
    # Sequences whose first token ends them have no second one.
    first_goes_on = first_probs.clone()
    first_goes_on[generation.eos_token_ids(model, tokenizer)] = 0
    second_probs = (first_goes_on.unsqueeze(1) * probs[:, 1]).sum(0)
    second_probs = second_probs / second_probs.sum()
    first_tokens = rollout.completion_ids[:, 0]
    second_tokens = rollout.completion_ids[rollout.lengths == 2, 1]
    assert_follows(first_tokens, first_probs)
    assert_follows(second_tokens, second_probs)


def assert_follows(tokens, probs):
    """Chi-square within four standard deviations of its mean; rare tokens are counted together."""
    counts = tokens.bincount(minlength=VOCAB)
    is_rare = probs * len(tokens) < 5
    counts = torch.cat([counts[~is_rare], counts[is_rare].sum().view(1)])
    probs = torch.cat([probs[~is_rare], probs[is_rare].sum().view(1)])
    expected = probs * len(tokens)
    statistic = ((counts - expected).square() / expected.clamp(min=1)).sum().item()
    freedom = len(probs) - 1
    assert freedom > 40
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5, statistic


@pytest.mark.parametrize("name", CONFIGS)
def test_products_equal_sdpa(name, tokenizer, monkeypatch):
    """Groups of heads, windows and padding.

    A name that the registry of masks lacks would mean that there is no mask at all.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIGS[name], dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    by_products = sample(model, tokenizer)
    monkeypatch.setitem(
        decoding.AttentionInterface._global_mapping,
        decoding.ATTENTION,
        decoding.sdpa_attention_forward,
    )
    by_sdpa = sample(model, tokenizer)
    assert have_same_samples(by_products, by_sdpa)
    logps = compute_rollout_logps(
        model, by_products, group_size=6, temperature=1.0, micro_batch_tokens=10_000
    )
    torch.testing.assert_close(by_products.sampled_logps, logps, atol=2e-5, rtol=0)
    torch.testing.assert_close(by_sdpa.sampled_logps, logps, atol=2e-5, rtol=0)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("fails_at", [None, 0, 5])
def test_without_a_capture_steps_are_ordinary_and_one_line_says_so(
    fails_at, model, tokenizer, monkeypatch, capsys
):
    """Samples are the same with captured steps, without, and if a capture fails in mid-rollout."""
    expected = sample(model, tokenizer)
    captured_sizes = []
    addresses = set()

    def addresses_of(decoder):
        tensors = [decoder.tokens]
        for layer in decoder.cache.layers:
            tensors += [layer.keys, layer.values]
        return tuple(tensor.data_ptr() for tensor in tensors)

    def capture(self, model, temperature, start_slot):
        decoding.Decoder.step(self, model, temperature)  # the trial run moves on by one slot
        if len(captured_sizes) == fails_at:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        self.slot.copy_(start_slot)
        captured_sizes.append(self.size)
        addresses.add(addresses_of(self))
        return SimpleNamespace(replay=lambda: decoding.Decoder.step(self, model, temperature))

    monkeypatch.setattr(decoding.CapturedDecoder, "_capture", capture)
    # It is kept for all turns and calls, as decoder_for keeps it.
    decoder = decoding.CapturedDecoder(model, 24, 90)
    monkeypatch.setattr(generation, "decoder_for", lambda *_: decoder)
    for bound in (24, 7):
        rollout = sample(model, tokenizer, max_concurrent_sequences=bound)
        assert have_same_samples(rollout, expected)
    printed = capsys.readouterr().out
    num_failures = 0 if fails_at is None else 1
    assert printed.count("without CUDA graphs") == num_failures
    assert printed.count("\n") == num_failures
    num_addresses = 0 if fails_at == 0 else 1
    assert len(addresses) == num_addresses, "a graph's memory must stay where it is"
    if fails_at is None:
        assert len(captured_sizes) > 3
        assert len(set(captured_sizes)) == len(captured_sizes), "each size is captured once"
    else:
        assert len(captured_sizes) == fails_at
