"""Adapters: what they compute and learn beside a plain peft model, and what is saved of them."""

import peft
import pytest
import torch
from conftest import (
    SIZES,
    assert_same_gradient,
    assert_same_run,
    flat_gradient,
    logps_of,
    loss_of,
    plain_logps,
    random_model,
    run_flags,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, MixtralConfig, MixtralForCausalLM

import llms
import main
from config import RunConfig
from grpo import weights
from grpo.jsonl import read
from grpo.sampler import TorchSampler

RANK = 3
LINEAR_MAPS = 2 * (4 + 3)  # layers; projections of attention, the MLP
# Warm-up would make an adapter of a few updates so small that a fault in it could be missed.
LEARNS = dict(lora_rank=RANK, learning_rate=1e-2, warmup_steps=0)


def adapted_model():
    """A random model with random adapters."""
    model = random_model()
    add_random_adapters(model)
    return model


def add_random_adapters(model):
    weights.add_adapters(model, RANK, seed=0)
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.01)


def newest_checkpoint(folder):
    return max((folder / "checkpoints").iterdir())


# --- What it computes -----------------------------------------------------------------------------


def test_loss_and_gradient_are_those_of_a_plain_peft_model(model, batch):
    """By peft's own forward pass, one log-softmax, the paper's loss, and a copy as reference."""
    adapted = adapted_model()
    config = peft.LoraConfig(
        r=RANK, lora_alpha=weights.LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    plain = peft.get_peft_model(random_model(), config)
    own_weights = dict(adapted.named_parameters())
    for name, weight in plain.named_parameters():
        weight.data.copy_(own_weights[name.removeprefix("base_model.model.")])

    ids, attention_mask = batch["prompt_completion_ids"], batch["attention_mask"]
    C = batch["completion_ids"].shape[1]
    logps = plain_logps(plain, ids, attention_mask, C)
    with torch.no_grad():
        log_ratio = plain_logps(model, ids, attention_mask, C) - logps
    log_ratio = log_ratio.detach() + logps.detach() - logps  # ref - policy, with its gradient
    kl = log_ratio.exp() - log_ratio - 1
    per_token = -(logps - logps.detach()).exp() * batch["advantages"].unsqueeze(1) + kl
    mask = batch["completion_mask"]
    expected = ((per_token * mask).sum(1) / mask.sum(1)).mean()
    expected.backward()

    loss, metrics = loss_of(adapted, weights.get_base_model(adapted), batch, group_size=4, beta=1.0)
    loss.backward()
    assert metrics["kl"] > 0
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert sum(weight.requires_grad for weight in adapted.parameters()) == 2 * LINEAR_MAPS
    assert_same_gradient(flat_gradient(adapted), flat_gradient(plain))


def test_the_reference_is_the_model_before_its_adapters_and_holds_no_weight(model, batch):
    adapted = adapted_model()
    base_model = weights.get_base_model(adapted)
    assert torch.equal(logps_of(base_model, batch), logps_of(model, batch))
    assert not torch.allclose(logps_of(adapted, batch), logps_of(model, batch), atol=1e-3)
    ids = batch["prompt_completion_ids"]
    with torch.no_grad():
        assert torch.equal(base_model(ids).logits, model(ids).logits)
        assert not torch.allclose(adapted(ids).logits, model(ids).logits, atol=1e-3)
    greedy = dict(inputs=ids[:, :3], do_sample=False, max_new_tokens=12, pad_token_id=0)
    assert torch.equal(base_model.generate(**greedy), model.generate(**greedy))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sampler_has_the_merged_weights(dtype, batch):
    model = random_model()
    sampler = TorchSampler(model, None, RunConfig(sampling_dtype=dtype, lora_rank=RANK))
    before = logps_of(sampler.model, batch)
    add_random_adapters(model)
    assert torch.equal(logps_of(sampler.model, batch), before), (
        "it shares no weight with the policy"
    )
    sampler.refresh(model)
    merged = dict(weights.merged_weights(model))
    assert merged.keys() == dict(random_model().named_parameters()).keys()
    for name, weight in sampler.model.named_parameters():
        assert torch.equal(weight, merged[name].to(getattr(torch, dtype))), name
    buffer_dtypes = {buffer.dtype for buffer in sampler.model.buffers()}
    assert buffer_dtypes == {torch.float32}, "rounded rotary frequencies are off by 0.1 nats"
    if dtype == "float32":
        expected = logps_of(model, batch)
        torch.testing.assert_close(logps_of(sampler.model, batch), expected, rtol=0, atol=1e-5)


def test_a_run_with_bfloat16_products_holds_the_frozen_layers_in_bfloat16():
    """Autocast rounds them in every pass; adapters, the embedding and the rest stay float32."""
    adapted = random_model()
    adapted.train_dtype = "bfloat16"
    weights.add_adapters(adapted, RANK, seed=0)
    for name, weight in adapted.named_parameters():
        is_rounded = ".base_layer." in name
        assert (weight.dtype == torch.bfloat16) == is_rounded, name


# --- What is saved --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted_run(model_folder, tmp_path_factory):
    """The folder of a run with adapters; tests only read it."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    assert main.main(run_flags(model_folder, folder, **LEARNS)) == 0
    return folder


def test_a_run_trains_adapters_alone(adapted_run, model_folder):
    rows = read(adapted_run / "train_log.jsonl")
    assert rows[0]["kl"] == 0
    assert rows[-1]["kl"] > 0
    assert all(row["sampling_logp_gap"] < 1e-5 for row in rows)
    initial = load_file(model_folder / "model.safetensors")
    trained = load_file(newest_checkpoint(adapted_run) / "model.safetensors")
    assert initial.keys() == trained.keys()
    changed = {name for name in initial if not torch.equal(initial[name], trained[name])}
    assert len(changed) == LINEAR_MAPS
    assert all(name.endswith("_proj.weight") for name in changed)


def test_a_checkpoint_is_the_merged_model_and_peft_loads_the_adapter_beside_it(
    adapted_run, model_folder, batch
):
    folder = newest_checkpoint(adapted_run)
    merged, _ = llms.get_llm_tokenizer(str(folder))
    before = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    ids = batch["prompt_completion_ids"]
    with torch.no_grad():
        initial_logits = before(ids).logits
        logits = peft.PeftModel.from_pretrained(before, folder / "adapter")(ids).logits
        expected = merged(ids).logits
    assert GenerationConfig.from_pretrained(folder).top_k == 0
    assert not torch.allclose(expected, initial_logits, atol=1e-2)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_resumed_run_equals_an_uninterrupted_one(adapted_run, model_folder, tmp_path):
    """The sampler's copy still had the weights that training began with."""
    flags = run_flags(model_folder, tmp_path / "run", **LEARNS)
    assert main.main([*flags, "--num_train_iters", "2"]) == 0
    assert main.main([*flags, "--num_train_iters", "4", "--resume"]) == 0
    assert_same_run(tmp_path / "run", adapted_run)


def test_experts_have_no_adapters_and_the_run_goes_on():
    """Those of "all-linear" had names that merging did not know, after the first iteration."""
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))
    names = dict(model.named_parameters()).keys()
    weights.add_adapters(model, RANK, seed=0)
    assert dict(weights.merged_weights(model)).keys() == names
