"""Sampling against a plain loop, and what must not change it."""

import json
from itertools import chain, repeat

import pytest
import torch
from conftest import VOCAB, random_model, sampling_gaps, small_tokenizer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    GraniteConfig,
    MixtralConfig,
)

import llms
import sft
import utils
from grpo import generation, weights
from grpo.rollout import make_batch, micro_batches

PROMPTS = ["a", "hello there", "one two three", "z9"]


def plain_greedy(model, tokenizer, prompt, max_completion_length, eos_ids=(1,)):
    """One unpadded prompt, no cache: the whole text through the model at every step."""
    ids = tokenizer(prompt)["input_ids"]
    completion = []
    while len(completion) < max_completion_length:
        with torch.no_grad():
            completion.append(model(torch.tensor([ids + completion])).logits[0, -1].argmax().item())
        if completion[-1] in eos_ids:
            break
    return completion


def ids_of(completions):
    return [completion.ids for completion in completions]


def test_greedy_equals_a_plain_loop_over_each_prompt(tokenizer):
    """Prompts and ends are unequal.

    Padding, the shared prompt, the cache and rows that leave must change nothing.
    """
    lengths = set()
    eos_ids = [1, 5, 9, 13]
    for seed in range(4):
        model = random_model(seed)
        model.generation_config.eos_token_id = eos_ids
        expected = [plain_greedy(model, tokenizer, prompt, 40, eos_ids) for prompt in PROMPTS]
        lengths |= {len(row) for row in expected}
        for max_concurrent_sequences in (3, 512):
            completions = generation.generate(
                model,
                tokenizer,
                PROMPTS,
                max_completion_length=40,
                temperature=0,
                num_samples=2,
                max_concurrent_sequences=max_concurrent_sequences,
            )
            repeated = utils.repeat_each(expected, 2)
            assert ids_of(completions) == repeated
            for completion in completions:
                assert completion.finished == (completion.ids[-1] in eos_ids)
    assert len(lengths) > 2 and 40 in lengths, "every case should occur: early, late, never"


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_sampled_logps_are_those_that_the_loss_recomputes(temperature, model, tokenizer):
    torch.manual_seed(0)
    completions = generation.generate(
        model,
        tokenizer,
        PROMPTS,
        num_samples=6,
        max_completion_length=70,
        temperature=temperature,
        stop_strings=("</answer>",),
    )
    assert len({len(completion.ids) for completion in completions}) > 5
    for group_size in (1, 6):
        assert sampling_gaps(model, completions, group_size, temperature).max() < 2e-5


def test_a_completion_goes_through_its_first_terminator_whatever_the_pad(tokenizer):
    """If pad equals EOS, a mask by token id would cut the EOS from the loss.

    Stopping would then never be trained.
    """
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(1)
    completions = generation.generate(
        random_model(2), tokenizer, PROMPTS, num_samples=8, max_completion_length=60
    )
    assert {completion.finished for completion in completions} == {True, False}
    for completion in completions:
        assert (completion.ids[-1] == 1) == completion.finished
        assert 1 not in completion.ids[:-1]
        assert completion.finished or len(completion.ids) == 60
    lengths = make_batch([completions], "cpu").completion_mask.sum(1)
    assert lengths.tolist() == [len(completion.ids) for completion in completions]


def test_every_eos_id_of_the_generation_config_ends_a_completion(tokenizer):
    model = random_model(2)
    model.generation_config.eos_token_id = [1, 20, 21]
    torch.manual_seed(0)
    completions = generation.generate(
        model, tokenizer, PROMPTS, num_samples=16, max_completion_length=60
    )
    last_tokens = {completion.ids[-1] for completion in completions if completion.finished}
    assert last_tokens == {1, 20, 21}
    for completion in completions:
        ids = completion.ids
        assert not {1, 20, 21} & set(ids[:-1])
        without_eos = ids[:-1] if completion.finished else ids
        assert completion.text == tokenizer.decode(without_eos)


TWO_TOKENS = ["a", "</answer", ">", "b"]
LAST_TOKEN_GOES_ON = ["a", "</answer", "><", "b"]  # it holds the end and what follows
ONE_CHARACTER_AT_A_TIME = list("x</answer>yz")
INTERRUPTED = ["</answer", "é", ">", "b"]  # this is no stop string


@pytest.mark.parametrize(
    ("tokens", "cut_text"),
    [
        (TWO_TOKENS, "a</answer>"),
        (LAST_TOKEN_GOES_ON, "a</answer>"),
        (ONE_CHARACTER_AT_A_TIME, "x</answer>"),
        (INTERRUPTED, None),
    ],
)
def test_stop_strings_are_found_in_decoded_text(tokens, cut_text, tokenizer, monkeypatch):
    """The ids are kept as they were sampled; the text is cut at the end of the stop string."""
    vocabulary = tokenizer.get_vocab()
    script = [vocabulary[token] for token in tokens] + [1]
    model = random_model()
    monkeypatch.setattr(utils, "compute_logits", scripted_logits(script))
    (completion,) = generation.generate(
        model,
        tokenizer,
        ["q"],
        max_completion_length=30,
        temperature=1.0,
        stop_strings=("</answer>", "###"),
    )
    length = len(completion.ids)
    assert completion.ids == script[:length]
    assert completion.finished
    if cut_text is None:
        assert length == len(script)
        assert completion.text == "".join(tokens)
    else:
        assert completion.text == cut_text
        assert cut_text not in "".join(tokens[: length - 1])
        assert cut_text in "".join(tokens[:length])


def test_a_prompt_without_tokens_is_refused(model, tokenizer):
    """Nothing predicts the first token of a completion then."""
    with pytest.raises(ValueError, match="a prompt has no tokens"):
        generation.generate(model, tokenizer, ["a", ""], max_completion_length=4)


def scripted_logits(script):
    """In place of utils.compute_logits: all probability for the next token of a script.

    After its end come pads, since ends are looked for every few tokens only.
    """
    script_ids = chain(script, repeat(0))

    def compute_logits(states, weight, bias, temperature):
        logits = torch.full((len(states), 48), -1e4)
        logits[:, next(script_ids)] = 0
        return logits

    return compute_logits


def test_samples_of_a_prompt_are_consecutive_and_in_the_order_of_prompts(model, tokenizer):
    completions = generation.generate(
        model,
        tokenizer,
        PROMPTS,
        num_samples=3,
        max_completion_length=5,
        max_concurrent_sequences=6,
    )
    prompts = [completion.prompt_ids for completion in completions]
    assert prompts == utils.repeat_each(tokenizer(PROMPTS)["input_ids"], 3)


def test_no_prompts_give_no_completions(model, tokenizer):
    """The tokenizer raises IndexError for an empty list; a share of the examples can be empty."""
    random_state = torch.get_rng_state()
    assert generation.generate(model, tokenizer, [], num_samples=4) == []
    assert torch.equal(torch.get_rng_state(), random_state)
    assert micro_batches([], max_tokens=100) == []


def test_generation_config_is_not_inherited(tokenizer):
    """Qwen2 ships top_k 20, top_p 0.8 and repetition_penalty 1.1.

    Samples that are drawn so would be scored by the plain softmax.
    """

    def sample(model):
        torch.manual_seed(0)
        return ids_of(
            generation.generate(model, tokenizer, PROMPTS, num_samples=4, max_completion_length=20)
        )

    configured = random_model()
    configured.generation_config.update(
        do_sample=True, top_k=1, top_p=0.1, repetition_penalty=5.0, temperature=0.1
    )
    assert configured.generation_config.top_k == 1
    assert sample(configured) == sample(random_model())


def test_same_seed_same_samples_and_mode_is_restored(model, tokenizer):
    results = []
    for training in (True, False):
        model.train(training)
        torch.manual_seed(3)
        results.append(
            generation.generate(model, tokenizer, PROMPTS, num_samples=4, max_completion_length=20)
        )
        assert model.training == training
    assert ids_of(results[0]) == ids_of(results[1])


def test_special_tokens_stay_visible_in_text(tokenizer, monkeypatch):
    """A completion can hold anything; what a reward or a reader sees must not hide it."""
    vocabulary = tokenizer.get_vocab()
    script = [vocabulary[token] for token in ("a", "<end>", "b", "<eos>")]
    model = random_model()
    monkeypatch.setattr(utils, "compute_logits", scripted_logits(script))
    (completion,) = generation.generate(model, tokenizer, ["q"], max_completion_length=9)
    assert completion.text == "a<end>b"


def test_a_reference_with_layers_in_bfloat16_has_the_same_logps(monkeypatch):
    """Autocast rounds the same weights in every pass. All others must stay float32."""
    model = random_model(attention_dropout=0.0)
    monkeypatch.setattr(utils, "has_autocast", lambda device: True)
    reference = weights.get_base_model(model)
    assert not any(weight.requires_grad for weight in reference.parameters())
    rounded = [name for name, weight in reference.named_parameters() if weight.dtype != torch.float]
    assert len(rounded) == 2 * (4 + 3 + 3)  # layers; projections and biases of attention, the MLP
    ids = torch.randint(VOCAB, (4, 20))
    with torch.autocast("cpu", torch.bfloat16):
        logps = [
            utils.get_per_token_logps(scored, ids, torch.ones_like(ids), 8, group_size=2)
            for scored in (model, reference)
        ]
    assert torch.equal(*logps)


@pytest.mark.parametrize(
    "num_tokens, is_cuda, expected",
    [(4_000, True, 1), (15_000, True, 2), (10**6, True, 4), (4_000, False, 4)],
)
def test_a_gpu_runs_large_batches_of_completions(num_tokens, is_cuda, expected):
    """On a GPU four small batches took as long as one: launches by Python took the time."""
    assert utils.num_length_buckets(num_tokens, is_cuda) == expected


def test_bfloat16_sampling_copy_follows_the_policy(model, tokenizer):
    sampler = weights.get_sampler(model, "bfloat16")
    assert sampler is not model
    assert sampler.dtype == next(sampler.parameters()).dtype == torch.bfloat16
    buffer_dtypes = {buffer.dtype for buffer in sampler.buffers()}
    assert buffer_dtypes == {torch.float32}, "rounded rotary frequencies are off by 0.1 nats"
    assert weights.get_sampler(model) is model  # on CPU the policy itself samples
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1)
    weights.refresh_sampler(sampler, model)
    for copied, weight in zip(sampler.parameters(), model.parameters(), strict=True):
        assert torch.equal(copied, weight.to(torch.bfloat16))
    generation.generate(sampler, tokenizer, PROMPTS, max_completion_length=3)


def test_loading_round_trip(tmp_path, tokenizer, capsys):
    model = random_model()
    model.save_pretrained(tmp_path / "good")
    tokenizer.save_pretrained(tmp_path / "good")
    loaded, loaded_tokenizer = llms.get_llm_tokenizer(str(tmp_path / "good"))
    for saved, weight in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(saved, weight)
    assert loaded_tokenizer("hello")["input_ids"] == tokenizer("hello")["input_ids"]
    assert f"{model.num_parameters():,} parameters, on cpu" in capsys.readouterr().out
    loaded.save_pretrained(tmp_path / "again")
    saved_again = load_file(tmp_path / "again" / "model.safetensors")
    saved = load_file(tmp_path / "good" / "model.safetensors")
    assert saved_again.keys() == saved.keys()
    for name, weight in saved.items():
        assert saved_again[name].dtype == weight.dtype
        assert torch.equal(saved_again[name], weight)


def save(model, folder):
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)


def change_weights(folder, change):
    """Write the weights anew that change({name: weight}) returns."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def change_json(file, **settings):
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def change_config(folder, **settings):
    change_json(folder / "config.json", **settings)


NORM = "model.layers.1.input_layernorm.weight"
OTHER = "belong to another model, such as"
DAMAGES = {
    "prefix": (lambda w: {f"_orig_mod.{name}": w[name] for name in w}, f"{OTHER} _orig_mod.model"),
    "lost": (lambda w: {name: w[name] for name in w if name != NORM}, f"missing, such as {NORM}"),
    "extra": (lambda w: w | {"model.layers.2.x": w[NORM].clone()}, f"{OTHER} model.layers.2"),
    "shape": (lambda w: w | {NORM: torch.ones(3)}, f"1 weights have another shape, such as {NORM}"),
    "nan": (lambda w: w | {NORM: w[NORM] * torch.nan}, f"are not finite, such as {NORM}"),
    "infinite": (lambda w: w | {NORM: w[NORM] / 0}, f"are not finite, such as {NORM}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_other_than_the_models_are_refused_by_name(damage, tmp_path):
    """Random weights took the place of those that were missing, and were trained."""
    save(random_model(), tmp_path)
    change, message = DAMAGES[damage]
    change_weights(tmp_path, change)
    with pytest.raises(ValueError, match=message) as refusal:
        llms.get_llm_tokenizer(str(tmp_path))
    assert "\n" not in str(refusal.value)


def test_an_output_layer_is_missing_only_where_it_is_not_tied(tmp_path):
    """A tied model's files may hold it or leave it out."""
    save(random_model(), tmp_path)
    change_weights(
        tmp_path, lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"].clone()}
    )
    model, _ = llms.get_llm_tokenizer(str(tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    save(model, tmp_path)
    change_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="1 weights are missing, such as lm_head.weight"):
        llms.get_llm_tokenizer(str(tmp_path))


def test_a_quantized_model_is_refused(tmp_path):
    """Its checkpoints were quantized again, and read as raw numbers."""
    save(random_model(), tmp_path)
    change_config(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="weights are quantized"):
        llms.get_llm_tokenizer(str(tmp_path))


def test_an_adapter_beside_whole_weights_is_refused(tmp_path):
    """transformers loads it where peft is installed, and then it would be part of the policy."""
    save(random_model(), tmp_path)
    adapted = random_model()
    weights.add_adapters(adapted, rank=2, seed=0)
    adapted.save_pretrained(tmp_path / "adapter")
    for file in (tmp_path / "adapter").glob("adapter*"):
        file.rename(tmp_path / file.name)
    change_json(tmp_path / "adapter_config.json", base_model_name_or_path=str(tmp_path))
    with pytest.raises(ValueError, match="adapter"):
        llms.get_llm_tokenizer(str(tmp_path))


def test_a_lost_expert_is_refused(tmp_path):
    """transformers makes one tensor of all experts of a layer."""
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    save(AutoModelForCausalLM.from_config(config), tmp_path)
    lost = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    change_weights(tmp_path, lambda w: {name: w[name] for name in w if name != lost})
    with pytest.raises(ValueError, match=f"--model_name {tmp_path}: cannot be loaded"):
        llms.get_llm_tokenizer(str(tmp_path))


def test_a_vocabulary_may_have_gaps(tmp_path):
    """Tokens with an id beyond the number of tokens seemed to complete no stop string."""
    folder = tmp_path / "model"
    save(random_model(), folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"][">"] = VOCAB + 10
    file.write_text(json.dumps(content))
    random_model(vocab_size=VOCAB + 20).save_pretrained(folder)
    model, tokenizer = llms.get_llm_tokenizer(str(folder))
    end_finder = generation.EndFinder(model, tokenizer, ("</answer>",))
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("a", "</answer", ">", "b")]
    assert end_finder.find(ids, 0) == 3


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(logit_scale=0.5),
        Gemma3TextConfig(final_logit_softcapping=9.0),
        GraniteConfig(logits_scaling=2.0),
    ],
)
def test_models_whose_logits_are_not_those_of_the_output_layer_are_refused(
    config, tmp_path, tokenizer
):
    """Log-probs here come from the output layer itself.

    A factor or a cap that follows it would be left out, and nobody would notice.
    """
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        layer_types=None,
    )
    config = type(config)(**{**config.to_dict(), **sizes})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="it rescales its logits"):
        llms.get_llm_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("after_reply", "end"),
    [
        ("<eos>", "<eos>"),
        (" <end>\n<eos>", "<end>"),
        ("\n", None),
        ("</turn>\n", None),
    ],
)
def test_the_end_of_a_turn_in_the_chat_template(after_reply, end, tokenizer):
    assert llms.end_of_turn(tokenizer) is None, "it has no template"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}" + after_reply + "{% endfor %}"
    )
    assert llms.end_of_turn(tokenizer) == end


def test_a_completion_ends_where_the_chat_template_ends_a_turn(tmp_path, tokenizer, capsys):
    """If that was not the EOS, as in Qwen2.5's base models, every completion was cut."""
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    random_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, loaded_tokenizer = llms.get_llm_tokenizer(str(tmp_path))
    eos = tokenizer.eos_token_id
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert "completions end with <end>" in capsys.readouterr().out
    assert generation.eos_token_ids(model, loaded_tokenizer) == [eos, end]
    assert sft.encode(loaded_tokenizer, "a", "b", {}).ids[-1] == end
