"""Copies of the policy, where a turn ends, and what is refused at load."""

import json

import pytest
import torch
from conftest import VOCAB, random_model
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

import llms
import sft
import utils
from grpo import generation, weights

# --- Copies of the policy -------------------------------------------------------------------------


def test_a_reference_with_layers_in_bfloat16_has_the_same_logps():
    """Autocast rounds the same weights in every pass. All others must stay float32."""
    model = random_model(attention_dropout=0.0)
    model.train_dtype = "bfloat16"
    reference = weights.get_base_model(model)
    assert not any(weight.requires_grad for weight in reference.parameters())
    assert not reference.training
    rounded = [name for name, weight in reference.named_parameters() if weight.dtype != torch.float]
    assert len(rounded) == 2 * (4 + 3)  # layers; projections of attention, the MLP
    ids = torch.randint(VOCAB, (4, 20))
    with utils.autocast(model):
        logps = [
            utils.get_per_token_logps(scored, ids, torch.ones_like(ids), 8, group_size=2)
            for scored in (model, reference)
        ]
    assert torch.equal(*logps)


@pytest.mark.parametrize("has_onednn_products", [True, False])
def test_bfloat16_leaves_keys_with_large_biases_apart(
    tmp_path, tokenizer, monkeypatch, has_onednn_products
):
    """Qwen2's reach 200: rounded together with them, the keys of two tokens became alike."""
    monkeypatch.setattr(utils, "has_onednn_products", lambda: has_onednn_products)
    sizes = dict(hidden_size=512, intermediate_size=32, initializer_range=0.05)
    model = random_model(**sizes)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=20)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = torch.randint(VOCAB, (4, 20))
    gradients = []
    for dtype in ("float32", "bfloat16"):
        model, _ = llms.get_llm_tokenizer(tmp_path, train_dtype=dtype)
        with utils.autocast(model):
            utils.get_per_token_logps(model, ids, torch.ones_like(ids), 8).mean().backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    reference = weights.get_base_model(model)  # of its own, also where queries and keys are made
    assert reference.model.layers[0].self_attn.k_proj.forward.__self__ in list(reference.modules())
    assert torch.cosine_similarity(*gradients, dim=0) > 0.999


# --- Loading --------------------------------------------------------------------------------------


@pytest.fixture
def saved_model(tmp_path, tokenizer):
    """The folder of a random model and its tokenizer."""
    random_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def change_weights(folder, change):
    """Write the weights anew that change({name: weight}) returns."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def change_json(file, **settings):
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_loading_round_trip(saved_model, tokenizer, capsys):
    """Qwen2 ships top_k 20, top_p 0.8 and repetition_penalty 1.1, which scoring does not know."""
    own_config = GenerationConfig(do_sample=True, top_k=20, top_p=0.8, repetition_penalty=1.1)
    own_config.save_pretrained(saved_model)
    model, loaded_tokenizer = llms.get_llm_tokenizer(str(saved_model), gradient_checkpointing=True)
    saved = load_file(saved_model / "model.safetensors")
    for name, weight in saved.items():
        assert weight.dtype == torch.float32
        assert torch.equal(model.state_dict()[name], weight)
    assert model.training and model.is_activation_checkpointing
    assert model.generation_config.top_k == 0 and model.generation_config.top_p == 1
    assert model.generation_config.repetition_penalty is None
    assert loaded_tokenizer("hello")["input_ids"] == tokenizer("hello")["input_ids"]
    assert f"{model.num_parameters():,} parameters, on cpu" in capsys.readouterr().out
    llms.check_positions(model, 32_700, 68)
    with pytest.raises(ValueError, match="this model has 32,768 positions"):
        llms.check_positions(model, 32_700, 69)


NORM = "model.layers.1.input_layernorm.weight"
OTHER = "belong to another model, such as"
DAMAGES = {
    "lost": (lambda w: {name: w[name] for name in w if name != NORM}, f"missing, such as {NORM}"),
    "extra": (lambda w: w | {"model.layers.2.x": w[NORM].clone()}, f"{OTHER} model.layers.2"),
    "shape": (lambda w: w | {NORM: torch.ones(3)}, f"1 weights have another shape, such as {NORM}"),
    "nan": (lambda w: w | {NORM: w[NORM] * torch.nan}, f"are not finite, such as {NORM}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_other_than_the_models_are_refused_by_name(damage, saved_model):
    """Random weights took the place of those that were missing, and were trained."""
    change, message = DAMAGES[damage]
    change_weights(saved_model, change)
    with pytest.raises(ValueError, match=message) as refusal:
        llms.get_llm_tokenizer(str(saved_model))
    assert "\n" not in str(refusal.value)


def test_loading_a_model_seeds_no_gpu(saved_model, monkeypatch):
    """The check at load draws samples. After it, --seed must still decide what a GPU draws."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", pytest.fail)
    before = torch.get_rng_state()
    llms.get_llm_tokenizer(saved_model, "cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_quantized_weights_are_refused(saved_model):
    change_json(saved_model / "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="weights are quantized"):
        llms.get_llm_tokenizer(str(saved_model))


def test_an_adapter_beside_whole_weights_is_refused(saved_model):
    """transformers loads it where peft is installed, and then it would be part of the policy."""
    adapted = random_model()
    weights.add_adapters(adapted, rank=2, seed=0)
    adapted.save_pretrained(saved_model)
    change_json(saved_model / "adapter_config.json", base_model_name_or_path=str(saved_model))
    with pytest.raises(ValueError, match="weights belong to an adapter"):
        llms.get_llm_tokenizer(str(saved_model))


@pytest.mark.parametrize("error", [0.01, torch.nan])
@pytest.mark.parametrize("module, name", [(llms, "compute_logps"), (generation, "generate")])
def test_log_probs_that_are_off_are_noticed_at_load(
    module, name, error, model, tokenizer, monkeypatch
):
    """Of the loss or of the sampler, where the plain forward pass has others."""
    assert llms.why_not_supported(model, tokenizer) is None
    function = getattr(module, name)

    def wrong(*arguments, **options):
        rows = function(*arguments, **options)
        last_row = rows[-1] if name == "compute_logps" else rows[-1].sampled_logps
        last_row[-1] += error
        return rows

    monkeypatch.setattr(module, name, wrong)
    assert llms.why_not_supported(model, tokenizer).startswith("its log-probs are off by")


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


def test_a_completion_ends_where_the_chat_template_ends_a_turn(saved_model, tokenizer, capsys):
    """If that was not the EOS, as in Qwen2.5's base models, every completion was cut."""
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    tokenizer.save_pretrained(saved_model)
    model, loaded_tokenizer = llms.get_llm_tokenizer(str(saved_model))
    eos = tokenizer.eos_token_id
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert "completions end with <end>" in capsys.readouterr().out
    assert generation.eos_token_ids(model, loaded_tokenizer) == [eos, end]
    assert sft.encode(loaded_tokenizer, "a", "b", {}).ids[-1] == end
