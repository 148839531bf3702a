"""Adapters: what they compute and learn, what is saved of them, and who can load it."""

import json
import shutil
import sys

import pytest
import torch
from conftest import (
    ROOT,
    approx,
    as_flags,
    assert_same_run,
    closed_port,
    fixed_sample,
    in_place_of_sample,
    logps_of,
    loss_of,
    ragged_batch,
    random_model,
    relative_distance,
    run_flags,
    run_script,
    start,
    training_rollout,
    update_gradient,
)
from safetensors.torch import load_file
from training import checkpoints, write_logs
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import distributed
import llms
import lora
import main
import sft
from config import GRPOConfig, parse
from grpo import jsonl

sys.path.insert(0, str(ROOT / "experiments"))
import expert_iteration  # noqa: E402

RANK = 3
LINEAR_MAPS = 2 * (4 + 3)  # layers; projections of attention, the MLP
# Warm-up would make an adapter of a few updates so small that a fault in it could be missed.
LEARNS = dict(lora_rank=RANK, learning_rate=1e-2, warmup_steps=0)


def adapted_model(seed=0, is_trained=False, **overrides):
    """A random model with adapters, which are random too if it `is_trained`."""
    model = random_model(seed, **overrides).train()
    lora.add_adapters(model, RANK, seed=0)
    if is_trained:
        torch.manual_seed(1)
        for layer in lora.adapted_layers(model).values():
            torch.nn.init.normal_(layer.lora_B, std=0.01)
    return model


def newest_checkpoint(folder):
    return max((folder / "checkpoints").iterdir())


# --- What it computes -----------------------------------------------------------------------------


def test_a_new_adapter_changes_nothing(model, batch):
    adapted = adapted_model()
    assert len(lora.adapted_layers(adapted)) == LINEAR_MAPS
    assert torch.equal(logps_of(adapted, batch), logps_of(model, batch))
    base_model = llms.get_base_model(adapted)
    loss, metrics = loss_of(adapted, base_model, batch, group_size=4, beta=1.0)
    assert metrics["kl"] == 0
    loss.backward()
    trained = {name for name, weight in adapted.named_parameters() if weight.grad is not None}
    assert trained == lora.adapter_weights(adapted).keys()


def test_the_reference_is_the_model_before_its_adapters_and_holds_no_weight(model, batch):
    adapted = adapted_model(is_trained=True)
    base_model = llms.get_base_model(adapted)
    assert torch.equal(logps_of(base_model, batch), logps_of(model, batch))
    assert not torch.allclose(logps_of(adapted, batch), logps_of(model, batch), atol=1e-3)
    weights = dict(adapted.named_parameters())
    base_weights = dict(base_model.named_parameters())
    assert base_weights.keys() == dict(model.named_parameters()).keys()
    for name, weight in base_weights.items():
        assert weight is weights[name]


@pytest.mark.parametrize("is_trained", [False, True])
def test_the_gradient_is_the_full_one_projected(is_trained, base_model, batch):
    """dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW, which is 0 for a new adapter."""
    adapted = adapted_model(is_trained=is_trained)
    merged = random_model()
    lora.merge_into(merged, adapted)
    for model in (adapted, merged):
        loss, _ = loss_of(model, base_model, batch, group_size=4)
        loss.backward()
    scale = 32 / RANK
    for name, layer in lora.adapted_layers(adapted).items():
        full = merged.get_submodule(name).weight.grad
        expected_B = scale * full @ layer.lora_A.detach().T
        expected_A = scale * layer.lora_B.detach().T @ full
        assert relative_distance(layer.lora_B.grad, expected_B) < 1e-4, name
        if is_trained:
            assert relative_distance(layer.lora_A.grad, expected_A) < 1e-4, name
        else:
            assert layer.lora_A.grad.count_nonzero() == 0, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sampler_has_the_merged_weights(dtype, batch):
    adapted = adapted_model()
    sampler = llms.get_sampler(adapted, dtype)
    before = logps_of(sampler, batch)
    for layer in lora.adapted_layers(adapted).values():
        torch.nn.init.normal_(layer.lora_B, std=0.01)
    assert torch.equal(logps_of(sampler, batch), before), "it shares no weight with the policy"
    llms.refresh_sampler(sampler, adapted)
    assert not any(isinstance(module, lora.LoRALinear) for module in sampler.modules())
    if dtype == "float32":
        torch.testing.assert_close(
            logps_of(sampler, batch), logps_of(adapted, batch), rtol=0, atol=1e-5
        )
    merged = random_model()
    lora.merge_into(merged, adapted)
    for weight, expected in zip(sampler.parameters(), merged.parameters(), strict=True):
        assert torch.equal(weight, expected.to(getattr(torch, dtype)))


def test_a_run_on_a_gpu_holds_the_frozen_layers_in_bfloat16(monkeypatch):
    """Autocast rounds them in every pass; adapters, the embedding and the rest stay float32."""
    monkeypatch.setattr(lora.utils, "has_autocast", lambda device: True)
    adapted = adapted_model()
    rounded = {
        name for name, weight in adapted.named_parameters() if weight.dtype == torch.bfloat16
    }
    layers = lora.adapted_layers(adapted)
    assert {name.rpartition(".")[0] for name in rounded} == layers.keys()
    assert not any("lora" in name for name in rounded)
    assert llms.get_sampler(adapted, "float32").dtype == torch.float32
    assert {weight.dtype for weight in lora.gather_weights(adapted).values()} == {torch.float32}


def test_a_model_without_linear_maps_is_refused():
    config = GPT2Config(vocab_size=48, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match="--lora_rank 3: .* no linear maps"):
        lora.add_adapters(GPT2LMHeadModel(config), RANK, seed=0)


# --- What is saved --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted_run(model_folder, tmp_path_factory):
    """The folder of a run with adapters; tests only read it."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    assert main.main(run_flags(model_folder, folder, **LEARNS)) == 0
    return folder


def test_a_run_trains_adapters_alone(adapted_run, model_folder):
    rows = jsonl.read(adapted_run / "train_log.jsonl")
    assert rows[0]["kl"] == 0
    assert rows[-1]["kl"] > 0
    assert all(row["sampling_logp_gap"] < 1e-5 for row in rows)
    initial = load_file(model_folder / "model.safetensors")
    trained = load_file(newest_checkpoint(adapted_run) / "model.safetensors")
    assert initial.keys() == trained.keys()
    changed = {name for name in initial if not torch.equal(initial[name], trained[name])}
    assert len(changed) == LINEAR_MAPS
    assert all(name.endswith("_proj.weight") for name in changed)


def test_a_checkpoint_is_the_merged_model(adapted_run, model_folder, batch):
    """It loads as any other does. The adapter beside it must not be taken for the model."""
    model, _ = llms.get_llm_tokenizer(str(newest_checkpoint(adapted_run)))
    adapted, _ = llms.get_llm_tokenizer(str(model_folder))
    lora.add_adapters(adapted, RANK, seed=0)
    weights = lora.read_adapter(newest_checkpoint(adapted_run), adapted)
    adapted.load_state_dict(weights, strict=False)
    torch.testing.assert_close(logps_of(model, batch), logps_of(adapted, batch), rtol=0, atol=1e-5)


def test_peft_loads_the_adapter(adapted_run, model_folder, batch):
    peft = pytest.importorskip("peft", reason="pip install peft to test that it loads our adapters")
    folder = newest_checkpoint(adapted_run)
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model_folder)
    base_model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    initial_logits = base_model(batch["prompt_completion_ids"]).logits
    model = peft.PeftModel.from_pretrained(base_model, folder / "adapter")
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected_logits = expected(batch["prompt_completion_ids"]).logits
    logits = model(batch["prompt_completion_ids"]).logits
    assert not torch.allclose(expected_logits, initial_logits, atol=1e-2)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-4)
    # Nothing that peft would save is missing.
    saved = peft.get_peft_model_state_dict(model)
    assert saved.keys() == load_file(folder / "adapter" / "adapter_model.safetensors").keys()


def test_a_resumed_run_equals_an_uninterrupted_one(adapted_run, model_folder, tmp_path):
    flags = run_flags(model_folder, tmp_path / "run", **LEARNS)
    assert main.main([*flags, "--num_train_iters", "2"]) == 0
    assert main.main([*flags, "--num_train_iters", "4", "--resume"]) == 0
    assert_same_run(tmp_path / "run", adapted_run)
    adapters = [newest_checkpoint(folder) / "adapter" for folder in (tmp_path / "run", adapted_run)]
    weights, expected = [path / "adapter_model.safetensors" for path in adapters]
    assert weights.read_bytes() == expected.read_bytes()


def test_a_run_is_resumed_only_with_its_rank_and_its_model(model_folder, tmp_path, capsys):
    """Without a reference, too: the frozen weights are not in the adapter."""
    model = shutil.copytree(model_folder, tmp_path / "model")
    flags = run_flags(model, tmp_path / "run", **LEARNS, num_train_iters=1, beta=0)
    assert main.main(flags) == 0
    assert main.main([*flags, "--resume", "--lora_rank", "2"]) == 2
    assert "--lora_rank was 3, not 2" in capsys.readouterr().err
    random_model(1, max_position_embeddings=1024).save_pretrained(model)
    assert main.main([*flags, "--resume"]) == 2
    assert f"the model {model} changed since" in capsys.readouterr().err


# --- Other scripts --------------------------------------------------------------------------------


def sft_flags(model_folder, gold_file, output_dir, **flags):
    small = dict(
        model_name=model_folder,
        dataset_name="arithmetic",
        train_file=gold_file,
        output_dir=output_dir,
        evaluator="letters",
        eval_size=4,
        max_completion_length=110,
        train_batch_size=8,
        num_updates=6,
        eval_updates=3,
        save_updates=3,
        device="cpu",
    )
    return as_flags(**small | LEARNS | flags)


@pytest.mark.slow
def test_sft_trains_adapters_and_is_resumed(model_folder, gold_file, tmp_path, monkeypatch):
    assert sft.main(sft_flags(model_folder, gold_file, tmp_path / "whole")) == 0
    rows = jsonl.read(tmp_path / "whole" / "train_log.jsonl")
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]

    flags = sft_flags(model_folder, gold_file, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(sft.write_logs, "append", fail_at_step_5)
        assert sft.main(flags) == 1
    assert max(checkpoints.finished(tmp_path / "run")) == 3
    assert sft.main([*flags, "--resume"]) == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def fail_at_step_5(config, name, row, append=write_logs.append):
    if row["step"] == 5:
        raise OSError("no space left")
    append(config, name, row)


@pytest.mark.slow
def test_expert_iteration_trains_adapters(model_folder, tmp_path):
    flags = as_flags(
        model_name=model_folder,
        dataset_name="arithmetic",
        evaluator="letters",
        output_dir=tmp_path / "run",
        n_ei_steps=1,
        num_questions=8,
        group_size=4,
        max_completion_length=20,
        eval_size=4,
        device="cpu",
    )
    assert expert_iteration.main([*flags, *as_flags(**LEARNS)]) == 0
    initial = load_file(model_folder / "model.safetensors")
    trained = load_file(newest_checkpoint(tmp_path / "run") / "model.safetensors")
    changed = {name for name in initial if not torch.equal(initial[name], trained[name])}
    assert len(changed) == LINEAR_MAPS
    assert (newest_checkpoint(tmp_path / "run") / "adapter" / "adapter_config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["main.py", "sft.py"])
def test_the_command_line(script, model_folder, gold_file, tmp_path):
    if script == "main.py":
        flags = run_flags(model_folder, tmp_path / "run", evaluator="gsm8k", lora_rank=2)
    else:
        flags = sft_flags(model_folder, gold_file, tmp_path / "run", evaluator="gsm8k", lora_rank=2)
    result = run_script(script, *flags)
    assert result.returncode == 0, result.stderr
    # 2 layers; attention has 32, 32, 16 and 16 outputs of 32, and the MLP 64, 64 and 32 of 64.
    num_trained = 2 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    assert f"LoRA of rank 2: {num_trained:,} weights are trained" in result.stdout


# --- Several processes ----------------------------------------------------------------------------


def make_updates(folder):
    """Two updates, and a run of which half is made; the first process saves what they gave."""
    model = adapted_model(is_trained=True)
    base_model = llms.get_base_model(model)
    sampler = llms.get_sampler(model, "float32")
    llms.shard(model)
    config = parse(GRPOConfig, run_flags("unused", "unused", micro_batch_tokens=50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = []
    for seed in range(2):
        batch = ragged_batch(groups=8, seed=seed)
        metrics = update_gradient(model, base_model, training_rollout(batch, config), config)
        rows.append(metrics | main.take_step(model, optimizer, config, 0.1, metrics["loss"]))
        llms.refresh_sampler(sampler, model)
    weights = lora.gather_weights(model)
    for name, weight in sampler.named_parameters():
        assert torch.equal(weight, weights[name]), name
    if distributed.is_main():
        torch.save({"metrics": rows, "weights": weights}, folder / "updates.pt")


def make_run(model_folder, folder, num_iterations, *switches):
    flags = run_flags(model_folder, folder, **LEARNS, num_train_iters=num_iterations)
    with in_place_of_sample(fixed_sample):
        assert main.main([*flags, *switches]) == 0


def as_one_of_several(model_folder, folder):
    distributed.init("cpu")
    distributed.finish = lambda code: code  # several training runs in one set of processes
    make_updates(folder)
    make_run(model_folder, folder / "begun", 2)
    make_run(model_folder, folder / "continued", 4, "--resume")


def assert_same_adapter(folder, expected_folder):
    adapter, expected = [
        load_file(newest_checkpoint(path) / "adapter" / "adapter_model.safetensors")
        for path in (folder, expected_folder)
    ]
    for name, weight in expected.items():
        assert relative_distance(adapter[name], weight) < 1e-4, name


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(model_folder, tmp_path):
    """Metrics, adapters and merged weights. Each continues the other's checkpoint."""
    one = tmp_path / "one"
    two = tmp_path / "two"
    for folder in (one, two):
        make_run(model_folder, folder / "continued", 2)
    job = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(closed_port()))
    started = [start(as_one_of_several, model_folder, two, RANK=str(i), **job) for i in range(2)]
    outputs = [output.read() for _, output in started]
    for process, _ in started:
        process.join()
        assert process.exitcode == 0, outputs

    make_updates(one)
    updates, expected = [torch.load(folder / "updates.pt") for folder in (two, one)]
    for row, expected_row in zip(updates["metrics"], expected["metrics"], strict=True):
        assert row == approx(expected_row)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(updates["weights"][name], weight, rtol=1e-5, atol=1e-6)

    make_run(model_folder, one / "whole", 4)
    make_run(model_folder, two / "begun", 4, "--resume")
    for folder in (two / "begun", two / "continued"):
        assert max(checkpoints.finished(folder)) == 4
        assert_same_adapter(folder, one / "whole")
