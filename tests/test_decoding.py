"""Sampling against a plain loop, from the exact distribution, and where completions end.

How rows are batched changes no sample, and a step asks the host nothing.
"""

import math
from itertools import chain, repeat
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    SIZES,
    VOCAB,
    assert_same_gradient,
    gradients,
    ragged_batch,
    random_model,
    sampled_logps_of,
    sampling_gaps,
)
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.cache_utils import DynamicCache

import utils
from grpo import cuda_graphs, decoding, generation
from grpo.rollout import make_batch

PROMPTS = ["a", "hello there", "one two three", "z9"]
STOP_STRINGS = ("ab", "</answer>")
WITH_WINDOW = SIZES | dict(head_dim=8, max_position_embeddings=256, sliding_window=6)
CONFIGS = {
    "qwen2": Qwen2Config(**WITH_WINDOW),
    "one window": MistralConfig(**WITH_WINDOW),
    "two kinds of layers": Gemma3TextConfig(
        **WITH_WINDOW, layer_types=["sliding_attention", "full_attention"]
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


def samples_of(completions):
    """What must be equal bit by bit, without the log-probs."""
    return [(row.prompt_ids, row.ids, row.text, row.finished) for row in completions]


# --- Completions ----------------------------------------------------------------------------------


def plain_greedy(model, tokenizer, prompt, max_completion_length, eos_ids):
    """One unpadded prompt, no cache: the whole text through the model at every step."""
    ids = tokenizer(prompt)["input_ids"]
    completion = []
    while len(completion) < max_completion_length:
        with torch.no_grad():
            completion.append(model(torch.tensor([ids + completion])).logits[0, -1].argmax().item())
        if completion[-1] in eos_ids:
            break
    return completion


def test_greedy_equals_a_plain_loop_over_each_prompt(tokenizer):
    """Padding, the shared prompt, the cache and rows that leave must change nothing."""
    lengths = set()
    eos_ids = [1, 5, 9, 13]
    prompt_ids = tokenizer(PROMPTS)["input_ids"]
    for seed in range(4):
        model = random_model(seed)
        model.generation_config.eos_token_id = eos_ids
        expected = [plain_greedy(model, tokenizer, prompt, 40, eos_ids) for prompt in PROMPTS]
        lengths |= {len(row) for row in expected}
        completions = sample(model, tokenizer, 2, max_completion_length=40, temperature=0)
        assert [completion.ids for completion in completions] == [
            ids for ids in expected for _ in range(2)
        ]
        for row, completion in enumerate(completions):
            assert completion.finished == (completion.ids[-1] in eos_ids)
            assert completion.prompt_ids == prompt_ids[row // 2]
    assert len(lengths) > 2 and 40 in lengths, "every case should occur: early, late, never"


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_sampled_logps_are_those_that_the_loss_recomputes(temperature, model, tokenizer):
    completions = sample(model, tokenizer, temperature=temperature)
    assert len({len(completion.ids) for completion in completions}) > 5
    for group_size in (1, 6):
        assert sampling_gaps(model, completions, group_size, temperature).max() < 2e-5


def test_a_completion_goes_through_its_first_end_whatever_the_pad(tokenizer):
    """If pad equals EOS, a mask by token id would cut the EOS from the loss.

    Stopping would then never be trained.
    """
    tokenizer.pad_token = tokenizer.eos_token
    model = random_model(2)
    eos_ids = {1, 20, 21}
    model.generation_config.eos_token_id = [20, 21]
    completions = sample(model, tokenizer, 16, max_completion_length=60)
    assert {completion.ids[-1] for completion in completions if completion.finished} == eos_ids
    assert not all(completion.finished for completion in completions)
    for completion in completions:
        ids = completion.ids
        assert (ids[-1] in eos_ids) == completion.finished
        assert not eos_ids & set(ids[:-1])
        assert completion.finished or len(ids) == 60
        assert completion.text == tokenizer.decode(ids[:-1] if completion.finished else ids)
    lengths = make_batch([completions], "cpu").completion_mask.sum(1)
    assert lengths.tolist() == [len(completion.ids) for completion in completions]


@pytest.mark.parametrize(
    ("tokens", "num_kept", "text"),
    [
        (["a", "</answer", "><", "b"], 3, "a</answer>"),  # the last token goes on after the end
        (list("ab</answer>"), 2, "ab"),  # the first of two stop strings counts
        (["</answer", "<end>", ">", "b"], 5, "</answer<end>>b"),  # special tokens stay visible
    ],
)
def test_stop_strings_are_found_in_decoded_text(tokens, num_kept, text, tokenizer, monkeypatch):
    """The ids are kept as they were sampled; the text is cut at the end of the stop string."""
    vocabulary = tokenizer.get_vocab()
    script = [vocabulary[token] for token in tokens] + [1]
    next_ids = chain(script, repeat(0))  # then pads, since ends are looked for every few tokens

    def scripted_logits(states, weight, bias, temperature):
        logits = torch.full((len(states), VOCAB), -1e4)
        logits[:, next(next_ids)] = 0
        return logits

    monkeypatch.setattr(utils, "compute_logits", scripted_logits)
    (completion,) = generation.generate(
        random_model(), tokenizer, ["q"], max_completion_length=30, stop_strings=STOP_STRINGS
    )
    assert completion.ids == script[:num_kept]
    assert completion.text == text
    assert completion.finished


def test_a_prompt_gets_no_special_tokens(tokenizer):
    """Its chat template has written them already, and Llama's tokenizer would add a second BOS."""
    with_bos = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    tokenizer.backend_tokenizer.post_processor = with_bos
    assert tokenizer("a")["input_ids"][0] == 1
    assert generation.tokenize(tokenizer, ["a"]) == [[tokenizer.convert_tokens_to_ids("a")]]


# --- Batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_asks_the_host_nothing(name, monkeypatch):
    """On the meta device tensors have no values: what asks for one raises, as in a CUDA graph."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            CONFIGS[name], dtype=torch.float32, attn_implementation="sdpa"
        )
        layers = [(torch.zeros(3, 2, 5, 8), torch.zeros(3, 2, 5, 8)) for _ in range(2)]
        monkeypatch.setattr(decoding, "run_prompts", lambda *_: (layers, torch.zeros(3, 32)))
        token = torch.zeros(12, dtype=torch.long)
        uniforms = torch.zeros(12, dtype=torch.float64)
    decoder = decoding.Decoder(model.device, 12)
    with torch.no_grad(), generation._sampling_mode(model):
        decoder.start(model, [[1] * 5] * 3, token)
        for temperature in (0.0, 0.7):
            next_token, logps = decoder.step(model, token, uniforms, temperature)
            assert next_token.shape == logps.shape == (12,)


def test_samples_do_not_depend_on_what_is_sampled_with_them(model, tokenizer, monkeypatch):
    """Turns, rows that leave and chunks of prompts change no sample."""
    expected = sample(model, tokenizer, stop_strings=STOP_STRINGS)
    assert len({len(completion.ids) for completion in expected}) > 5
    for bound, chunk_tokens in ((1, 10**6), (7, 10**6), (24, 15)):  # 15: one or two prompts
        monkeypatch.setattr(decoding, "CHUNK_TOKENS", chunk_tokens)
        num_ended = []
        with mock.patch.object(generation, "_decode", wraps=generation._decode) as decode:
            completions = sample(
                model,
                tokenizer,
                stop_strings=STOP_STRINGS,
                max_concurrent_sequences=bound,
                progress=num_ended.append,
            )
        assert max(len(call.args[3]) for call in decode.call_args_list) == bound
        assert samples_of(completions) == samples_of(expected)
        torch.testing.assert_close(
            sampled_logps_of(completions), sampled_logps_of(expected), atol=2e-5, rtol=0
        )
        assert sum(num_ended) == 24


def test_float32_weights_sample_under_autocast(model, tokenizer, monkeypatch):
    """As on a GPU with --sampling_dtype float32: keys are float32 there, and values bfloat16."""
    monkeypatch.setattr(model, "train_dtype", "bfloat16", raising=False)
    completions = sample(model, tokenizer, max_completion_length=20)
    gaps = sampling_gaps(model, completions, group_size=6)
    assert 1e-5 < gaps.mean() < 0.05  # bfloat16's rounding


# --- Drawing tokens -------------------------------------------------------------------------------


def test_first_and_second_tokens_follow_the_exact_distribution(tokenizer):
    """Chi-square of 20,000 samples of one prompt, against the plain forward pass."""
    model = random_model(5)
    num_samples = 20_000
    temperature = 1.7
    torch.manual_seed(1)
    completions = generation.generate(
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
    first_tokens = [row.ids[0] for row in completions]
    second_tokens = [row.ids[1] for row in completions if len(row.ids) == 2]
    assert_follows(torch.tensor(first_tokens), first_probs)
    assert_follows(torch.tensor(second_tokens), second_probs)


def assert_follows(tokens, probs):
    """Chi-square within four standard deviations of its mean."""
    is_frequent = probs * len(tokens) >= 5
    expected = probs[is_frequent] * len(tokens)
    counts = tokens.bincount(minlength=VOCAB)[is_frequent]
    statistic = ((counts - expected).square() / expected).sum().item()
    freedom = len(expected) - 1
    assert freedom > 40
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5, statistic


def test_draws_equal_a_naive_search():
    """The first token up to which the float64 sum of probabilities reaches the random number."""
    V = 500
    logits = 4 * torch.randn(64, V, generator=torch.Generator().manual_seed(0))
    logits[:, 100:400] = -torch.inf
    logits[:8, 300:] = -torch.inf
    probs = logits.softmax(-1)
    generator = torch.Generator().manual_seed(1)
    uniforms = 1 - torch.rand(64, generator=generator, dtype=torch.float64)
    uniforms[::8] = 1.0
    uniforms[1::8] = 2**-53  # the least one that can be drawn
    expected = []
    for row_probs, uniform in zip(probs.tolist(), uniforms.tolist(), strict=True):
        target = uniform * math.fsum(row_probs)
        last_token = max(token for token in range(V) if row_probs[token] > 0)
        cumulative = 0.0
        for token in range(last_token + 1):
            cumulative += row_probs[token]
            if cumulative >= target:
                break
        expected.append(token)
    assert decoding.draw_tokens(probs, uniforms).tolist() == expected
    not_numbers = torch.full((64, V), torch.nan)
    assert decoding.draw_tokens(not_numbers, uniforms).max() < V


@pytest.fixture
def byte_tokenizer():
    """As Llama's: what its vocabulary lacks is spelt in bytes, here even a line's end."""
    tokens = ["<pad>", "<eos>", "a", "b", *(f"<0x{byte:02X}>" for byte in "\n語😀".encode())]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def test_ends_among_cut_characters_equal_a_naive_search(byte_tokenizer, model):
    """A character that is cut hid the line's end beside it."""
    model.generation_config.eos_token_id = None
    end_finder = generation.EndFinder(model, byte_tokenizer, ("\n",))
    generator = torch.Generator().manual_seed(0)
    num_ends = 0
    for row in torch.randint(2, len(byte_tokenizer), (400, 24), generator=generator).tolist():
        length = None
        for start in range(0, 24, 8):
            length = length or end_finder.find(row[: start + 8], start)
        assert length == naive_length(row, model, ("\n",), byte_tokenizer), row
        num_ends += length is not None
    assert 50 < num_ends < 350


@pytest.mark.parametrize("stop_strings", [("ab",), ("1 2", "</answer>")])
@pytest.mark.parametrize("check_interval", [1, 8])
def test_ends_equal_a_naive_search(check_interval, stop_strings, model, tokenizer):
    """Each row ends with its first EOS, or where its text first holds a stop string."""
    end_finder = generation.EndFinder(model, tokenizer, stop_strings)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(len(tokenizer), (40, 64), generator=generator)
    for row in range(20):  # random tokens complete a long stop string too seldom
        ids = tokenizer(stop_strings[-1], add_special_tokens=False)["input_ids"]
        tokens[row, 30 + row : 30 + row + len(ids)] = torch.tensor(ids)
    lengths = []
    for ids in tokens.tolist():
        length = None
        for start in range(0, 64, check_interval):
            length = length or end_finder.find(ids[: start + check_interval], start)
        lengths.append(length)
    expected = [naive_length(row, model, stop_strings, tokenizer) for row in tokens.tolist()]
    assert lengths == expected
    assert len(set(expected)) > 5


def naive_length(token_ids, model, stop_strings, tokenizer):
    """The tokens that a row keeps, the one that ends it included; None if there is no end."""
    eos_ids = generation.eos_token_ids(model, tokenizer)
    for length in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:length])
        if token_ids[length - 1] in eos_ids or any(s in text for s in stop_strings):
            return length
    return None


# --- Attention and prompts ------------------------------------------------------------------------


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
    assert samples_of(by_products) == samples_of(by_sdpa)
    for completions in (by_products, by_sdpa):
        assert sampling_gaps(model, completions, group_size=6).max() < 2e-5
    assert model.config._attn_implementation == "sdpa"
    assert not model.training


@pytest.mark.parametrize("name", ["qwen2", "two kinds of layers"])
@pytest.mark.parametrize(
    ("chunk_tokens", "chunks"), [(1_000, [(3, 4)]), (14, [(1, 4), (1, 2), (1, 1)])]
)
def test_what_all_prompts_begin_with_runs_once(name, chunk_tokens, chunks, monkeypatch):
    """And a chunk is as wide as its own longest prompt."""
    monkeypatch.setattr(decoding, "CHUNK_TOKENS", chunk_tokens)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    system_prompt = list(range(10, 20))  # longer than a sliding window
    prompts = [[*system_prompt, *question] for question in ([1], [1, 2, 3, 4], [5, 6])]
    passes = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda _, args: passes.append(args[0].shape)
    )
    with torch.no_grad():
        layers, hidden = decoding.run_prompts(model, prompts)
        hook.remove()
        assert passes == [(1, 10), *chunks]
        for row, prompt in enumerate(prompts):
            cache = DynamicCache()
            alone = model.get_decoder()(torch.tensor([prompt]), past_key_values=cache)
            torch.testing.assert_close(hidden[row], alone.last_hidden_state[0, -1])
            for states, layer in zip(layers, cache.layers, strict=True):
                for padded, expected in zip(states, (layer.keys, layer.values), strict=True):
                    torch.testing.assert_close(padded[row, :, -len(prompt) :], expected[0])


# --- CUDA graphs ----------------------------------------------------------------------------------


def captures_in_python(monkeypatch, fails_at=None):
    """Let CapturedDecoder record steps that Python replays; after fails_at captures one fails.

    Returns:
        lists of what was captured, as (number of sequences, of columns) and as addresses of memory.
    """
    sizes = []
    addresses = []

    def capture(self, model, *inputs):
        results = decoding.Decoder._run(self, model, *inputs)  # the trial step
        if len(sizes) == fails_at:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        sizes.append(self.size)
        tensors = [self.padding, *inputs[:2]]
        for layer in self.cache.layers:
            tensors += [layer.keys, layer.values]
        addresses.append([tensor.data_ptr() for tensor in tensors])

        def replay():
            for result, new_result in zip(
                results, decoding.Decoder._run(self, model, *inputs), strict=True
            ):
                result.copy_(new_result)

        return SimpleNamespace(replay=replay), results

    monkeypatch.setattr(cuda_graphs.CapturedDecoder, "_capture", capture)
    return sizes, addresses


@pytest.mark.parametrize("fails_at", [None, 0, 5])
def test_steps_are_the_same_with_graphs_without_and_if_a_capture_fails(
    fails_at, model, tokenizer, monkeypatch, capsys
):
    sizes, addresses = captures_in_python(monkeypatch, fails_at)
    # It is kept for all calls, and just large enough for this one.
    decoder = cuda_graphs.CapturedDecoder(model.device, 24, 128)
    longest_prompt = max(len(prompt) for prompt in PROMPTS)  # one token for each character
    for temperature in (1.0, 0.0):
        options = dict(temperature=temperature, max_completion_length=128 - longest_prompt)
        expected = sample(model, tokenizer, **options)
        with monkeypatch.context() as patch:
            patch.setattr(generation, "decoder_for", lambda *_: decoder)
            assert samples_of(sample(model, tokenizer, **options)) == samples_of(expected)
    printed = capsys.readouterr().out
    num_failures = 0 if fails_at is None else 1
    assert printed.count("without CUDA graphs") == printed.count("\n") == num_failures
    assert all(tensors == addresses[0] for tensors in addresses), "a graph's memory must not move"
    assert len(sizes) == fails_at if num_failures else len(sizes) > 6
    # Each size of a batch would otherwise have its own series of smaller sizes, all captured.
    assert {rows for rows, _ in sizes} <= {24, 16, 12, 8, 6, 4, 3, 2, 1}


@pytest.mark.parametrize("window", [{}, {"use_sliding_window": True, "sliding_window": 3}])
def test_attention_by_products_equals_sdpa(window, monkeypatch):
    """As large models on a CPU have it in the loss: log-probs and gradient, with padding."""
    monkeypatch.setattr(utils, "has_onednn_products", lambda: True)
    model = random_model(0, **window)
    batch = ragged_batch()
    logps = {}
    gradient = {}
    for attention in ("sdpa", decoding.ATTENTION):
        model.set_attn_implementation(attention)
        logps[attention] = utils.get_per_token_logps(
            model, batch["prompt_completion_ids"], batch["attention_mask"], 7, group_size=4
        )
        gradient[attention] = gradients(model, logps[attention].square().sum())
    torch.testing.assert_close(logps[decoding.ATTENTION], logps["sdpa"], atol=1e-5, rtol=0)
    assert_same_gradient(gradient[decoding.ATTENTION], gradient["sdpa"])


def test_a_boolean_mask_hides_keys():
    """transformers gives one where there is no padding; it once was added to the scores."""
    query, key, value = torch.randn(3, 1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
    module = SimpleNamespace(num_key_value_groups=1, is_causal=False, training=False)
    with mock.patch.object(decoding, "prefers_products", lambda *_: True):
        actual, _ = decoding.sdpa_or_products(module, query, key, value, mask)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(actual, expected)
