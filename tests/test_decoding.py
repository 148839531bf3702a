"""The decode step asks the host nothing and samples the exact distribution.

How rows are batched changes no sample.
"""

import math
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

import utils
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
    R, S = decoder.size
    assert R == 12
    assert decoder.tokens.shape == (12, decoder.max_slots)
    assert 5 < S <= decoder.max_slots


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


def test_a_decoder_that_is_kept_holds_as_many_slots_as_it_says(model, tokenizer, monkeypatch):
    """A later turn with longer prompts was accepted by the rounded size, and then overflowed."""
    decoder = decoding.Decoder(model, max_rows=24, max_slots=40)
    longest_prompt = max(len(prompt) for prompt in PROMPTS)  # one token for each character
    max_completion_length = decoder.max_slots - longest_prompt
    expected = sample(model, tokenizer, max_completion_length=max_completion_length)
    monkeypatch.setattr(generation, "decoder_for", lambda *_: decoder)
    rollout = sample(model, tokenizer, max_completion_length=max_completion_length)
    assert decoder.max_slots > 40
    assert expected.lengths.max() == max_completion_length
    assert have_same_samples(rollout, expected)


def test_float32_weights_sample_under_autocast(model, tokenizer, monkeypatch):
    """As on a GPU with --sampling_dtype float32: keys are float32 there, and values bfloat16."""
    monkeypatch.setattr(utils, "autocast", lambda device: torch.autocast("cpu", torch.bfloat16))
    rollout = sample(model, tokenizer, max_completion_length=20)
    with utils.autocast("cpu"):
        logps = compute_rollout_logps(
            model, rollout, group_size=6, temperature=1.0, micro_batch_tokens=10_000
        )
    gaps = (logps - rollout.sampled_logps).abs()[rollout.completion_mask.bool()]
    assert gaps.mean() < 0.05  # the rounding of bfloat16


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


# Sizes of one level, of whole blocks, and with a last block that is not full.
@pytest.mark.parametrize("V", [500, 2**13 + 128, 9001])
def test_draws_equal_a_naive_search(V):
    """The first token up to which the float64 sum of probabilities reaches the random number."""
    logits = 4 * torch.randn(64, V, generator=torch.Generator().manual_seed(0))
    logits[:, 100:400] = -torch.inf  # whole blocks of probability 0, and parts of blocks
    logits[:8, 300:] = -torch.inf  # the last blocks
    probs = logits.softmax(-1)
    generator = torch.Generator().manual_seed(1)
    uniforms = 1 - torch.rand(64, 1, generator=generator, dtype=torch.float64)
    uniforms[::8] = 1.0
    uniforms[1::8] = 2**-53  # the least one that can be drawn
    expected = []
    for row_probs, uniform in zip(probs.tolist(), uniforms.flatten().tolist(), strict=True):
        target = uniform * math.fsum(row_probs)
        last_token = max(token for token in range(V) if row_probs[token] > 0)
        cumulative = 0.0
        for token in range(last_token + 1):
            cumulative += row_probs[token]
            if cumulative >= target:
                break
        expected.append(token)
    assert decoding.draw_tokens(probs, uniforms).flatten().tolist() == expected


def test_no_token_of_probability_0_is_drawn_at_a_boundary(monkeypatch):
    """A GPU's cumulative sum may rise or fall by a rounding error where the probability is 0."""
    V = 2**13 + 256
    probs = torch.zeros(1, V)
    possible_tokens = [130, 1000, 1001, 4095, 4096, 8000]
    probs[0, possible_tokens] = torch.tensor([0.1, 0.2, 0.05, 0.3, 0.25, 0.1])
    boundaries = probs.cumsum(-1, dtype=torch.float64)[:, possible_tokens]
    exact_cumsum = torch.Tensor.cumsum

    def rounded_cumsum(tensor, *args, **kwargs):
        exact = exact_cumsum(tensor, *args, **kwargs)
        noise = torch.rand(exact.shape, generator=generator, dtype=exact.dtype) - 0.5
        return exact + 1e-9 * noise

    monkeypatch.setattr(torch.Tensor, "cumsum", rounded_cumsum)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        for gap in (-1e-10, 0.0, 1e-10):
            uniforms = (boundaries.T / boundaries.amax() + gap).clamp(max=1)
            tokens = decoding.draw_tokens(probs.expand(len(uniforms), -1), uniforms)
            assert set(tokens.flatten().tolist()) <= set(possible_tokens)


def test_a_draw_from_a_large_vocabulary_asks_the_host_nothing():
    """The models of the first test have a vocabulary that is searched in one level."""
    probs = torch.zeros(3, 9001, device="meta")
    uniforms = torch.zeros(3, 1, dtype=torch.float64, device="meta")
    assert decoding.draw_tokens(probs, uniforms).shape == (3, 1)


@pytest.mark.parametrize("V", [500, 9001])
def test_probabilities_of_nan_draw_some_token_of_the_vocabulary(V):
    probs = torch.full((3, V), torch.nan)
    tokens = decoding.draw_tokens(probs, torch.full((3, 1), 0.5, dtype=torch.float64))
    assert tokens.shape == (3, 1)
    assert 0 <= tokens.min() and tokens.max() < V


def test_looking_for_ends_asks_the_host_nothing(model, tokenizer):
    """On the meta device, as above. Indexing with a mask made a GPU wait twice for each check."""
    turn = object.__new__(generation._Turn)
    turn.num_checked = 8
    turn.prompt_length = 5
    turn.max_completion_length = 40
    stopper = generation._Stopper(model, tokenizer, ())
    stopper.eos = stopper.eos.to("meta")
    with torch.device("meta"):
        turn.rows = torch.zeros(12, dtype=torch.long)
        turn.is_open = torch.ones(12, dtype=torch.bool)
        turn.completions = generation._Completions.allocate(12, 40, 0, "meta")
        turn.decoder = SimpleNamespace(tokens=torch.zeros(12, 60, dtype=torch.long))
    turn.find_ends(stopper, 16)
    assert turn.num_checked == 16


@pytest.mark.parametrize("stop_strings", [("ab",), ("1 2", "</answer>"), ("é",)])
@pytest.mark.parametrize("check_interval", [1, 8])
def test_ends_equal_a_naive_search(check_interval, stop_strings, model, tokenizer):
    """Each row ends with its first EOS, or where its text first holds a stop string."""
    stopper = generation._Stopper(model, tokenizer, stop_strings)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(len(tokenizer), (40, 64), generator=generator)
    for row in range(20):  # random tokens complete a long stop string too seldom
        ids = tokenizer(stop_strings[-1], add_special_tokens=False)["input_ids"]
        tokens[row, 30 + row : 30 + row + len(ids)] = torch.tensor(ids)
    expected = [naive_length(row, stopper, stop_strings, tokenizer) for row in tokens.tolist()]
    found = torch.zeros(40, dtype=torch.long)
    for num_checked in range(0, 64, check_interval):
        lengths = stopper.find_ends(tokens[:, : num_checked + check_interval], num_checked)
        found = torch.where(found == 0, lengths, found)
    assert found.tolist() == expected
    assert len(set(expected)) > 5


def naive_length(token_ids, stopper, stop_strings, tokenizer):
    """The tokens that a row keeps, the one that ends it included; 0 if there is no end."""
    for length in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:length])
        if token_ids[length - 1] in stopper.eos_ids or any(s in text for s in stop_strings):
            return length
    return 0


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
