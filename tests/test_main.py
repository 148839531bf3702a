"""The main job through its command line: what it writes, and one clear line for everything a person can get wrong."""

import json
import re
from itertools import chain, repeat

import pytest
import torch
from conftest import ragged_batch, rollout_of, run_flags, run_script

import llms
import main
import utils
from logs import jsonl
from training.write_logs import Stages


def test_a_run_writes_its_logs_transcripts_and_checkpoints(whole_run):
    args = json.loads((whole_run / "args.json").read_text())
    assert args["args"]["group_size"] == 4 and args["parameters"] > 20_000
    assert {"command", "commit", "versions", "hardware"} <= args.keys()
    train = jsonl.read(whole_run / "train_log.jsonl")
    assert [row["step"] for row in train] == [1, 2, 3, 4]
    assert train[-1]["total_tokens"] == sum(row["sampled_tokens"] for row in train)
    expected = {
        "loss",
        "kl",
        "entropy",
        "grad_norm",
        "learning_rate",
        "reward",
        "reward_std",
        "zero_std_fraction",
    }
    expected |= {
        "accuracy",
        "accuracy_flexible",
        "response_length",
        "truncated_fraction",
        "clip_fraction",
        "ratio_min",
    }
    expected |= {
        "time/sample",
        "time/reward",
        "time/loss",
        "time/step",
        "time/total",
        "elapsed",
        "epoch",
    }
    assert expected <= train[0].keys() and any(key.startswith("rewards/") for key in train[0])
    assert not any(isinstance(value, (dict, list)) for row in train for value in row.values())
    evaluations = jsonl.read(whole_run / "eval_log.jsonl")
    assert [row["step"] for row in evaluations] == [0, 2, 4], (
        "the first before the first update, the last after it all"
    )
    assert all(
        row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"] for row in evaluations
    )
    rollouts = jsonl.read(whole_run / "rollouts" / "step_000002.jsonl")
    assert len(rollouts) == 8 and len({row["prompt"] for row in rollouts}) == 2
    assert {
        "id",
        "completion",
        "gold",
        "parsed",
        "reward",
        "advantage",
        "length",
        "finished",
    } <= rollouts[0].keys()
    assert sum(row["length"] for row in rollouts) == train[1]["sampled_tokens"]
    assert len(jsonl.read(whole_run / "eval" / "step_000004.jsonl")) == 4
    assert {path.name for path in (whole_run / "checkpoints").iterdir()} == {
        "step_000002",
        "step_000004",
    }


def test_an_end_between_evaluations_is_evaluated_and_saved(model_folder, tmp_path):
    assert main.main(run_flags(model_folder, tmp_path, num_train_iters=1)) == 0
    assert [row["step"] for row in jsonl.read(tmp_path / "eval_log.jsonl")] == [0, 1]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


def test_logged_values_are_those_of_the_steps_that_were_taken(model_folder, tmp_path):
    """Two iterations repeated by hand: the logged loss, gradient norm and rate, and the weights after AdamW."""
    flags = run_flags(
        model_folder, tmp_path / "run", num_train_iters=2, warmup_steps=4, max_grad_norm=0.1
    )
    args = main.parse_args(flags)
    run = main.setup(args)
    optimizer = torch.optim.AdamW(
        run.model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0
    )
    expected = []
    for step in (1, 2):
        examples = run.train_loader.next_batch(2)
        rollout = main.sample(args, run, examples, 4, 1.0)
        rewards = main.reward(run.evaluator, [e for e in examples for _ in range(4)], rollout)
        advantages, _ = main.compute_group_normalized_rewards(run.evaluator.total(rewards), 4)
        loss, _ = main.compute_loss(
            run.model,
            run.base_model,
            rollout.prompt_completion_ids,
            rollout.completion_ids,
            rollout.attention_mask,
            rollout.completion_mask,
            advantages,
        )
        loss.backward()
        norm = torch.stack([p.grad.square().sum() for p in run.model.parameters()]).sum().sqrt()
        for p in run.model.parameters():
            p.grad *= min(1.0, 0.1 / (norm + 1e-6))
        optimizer.param_groups[0]["lr"] = 1e-3 * step / 4
        optimizer.step()
        optimizer.zero_grad()
        expected.append((loss.item(), norm.item(), 1e-3 * step / 4))
    model = run.model
    assert main.main(flags) == 0
    rows = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    for row, (loss, norm, rate) in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-4) and norm > 0.1
        assert row["learning_rate"] == pytest.approx(rate)
    trained, _ = llms.get_llm_tokenizer(str(tmp_path / "run" / "checkpoints" / "step_000002"))
    for p, q in zip(model.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("loss_type", "length_normalization", "use_std_normalization"),
    [
        ("grpo_clip", "masked_mean", True),
        ("grpo_clip", "token_mean", False),
        ("grpo_no_clip", "masked_normalize", True),
        ("reinforce_with_baseline", "token_mean", True),
        ("no_baseline", "masked_mean", True),
        ("no_baseline", "masked_normalize", False),
    ],
)
def test_gradient_does_not_depend_on_the_token_budget(
    loss_type, length_normalization, use_std_normalization, model, base_model, tmp_path
):
    """From rewards to gradient, with a missing reward and truncated completions masked."""
    batch = ragged_batch(groups=4)
    rewards = torch.randn(16, generator=torch.Generator().manual_seed(1))
    rewards[6] = torch.nan
    advantages, _ = main.compute_group_normalized_rewards(
        rewards, 4, normalize_by_std=use_std_normalization
    )
    signal = rewards if loss_type == "no_baseline" else advantages
    run = type("Run", (), dict(model=model, base_model=base_model))
    results = {}
    for budget in (10, 40, 100, 10_000):
        flags = run_flags(
            "unused", tmp_path, loss_type=loss_type, length_normalization=length_normalization
        )
        args = main.parse_args(
            [*flags, "--micro_batch_tokens", str(budget), "--mask_truncated_completions"]
        )
        metrics = main.accumulate_gradient(args, run, rollout_of(batch), signal, list(range(16)))
        gradient = torch.cat([p.grad.double().flatten() for p in model.parameters()])
        model.zero_grad()
        results[budget] = metrics, gradient
    metrics, gradient = results[10_000]
    assert gradient.norm() > 0
    for other_metrics, other in results.values():
        assert ((other - gradient).norm() / gradient.norm()).item() < 1e-5
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_groups_without_gradient_are_skipped_and_change_nothing(model, tmp_path, monkeypatch):
    """beta 0: a group of equal rewards skips its passes; the gradient and the means over tokens are as with it."""
    batch, run = ragged_batch(groups=4), type("Run", (), dict(model=model, base_model=None))
    signal = torch.randn(16, generator=torch.Generator().manual_seed(1))
    signal[4:8] = 0
    rows_seen, original = [], main.compute_loss

    def counting(*args, **kwargs):
        rows_seen.append(len(args[2]))
        return original(*args, **kwargs)

    monkeypatch.setattr(main, "compute_loss", counting)
    for normalization in utils.LENGTH_NORMALIZATIONS:
        args = main.parse_args(
            run_flags("unused", tmp_path, beta=0.0, length_normalization=normalization)
        )
        rows_seen.clear()
        metrics = main.accumulate_gradient(args, run, rollout_of(batch), signal, list(range(16)))
        skipped = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert sum(rows_seen) == 12
        model.zero_grad()
        loss, _ = original(
            model,
            None,
            *dict(batch, advantages=signal).values(),
            beta=0.0,
            length_normalization=normalization,
            normalization_constant=args.max_completion_length,
        )
        loss.backward()
        full = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
        assert ((full - skipped).norm() / full.norm()).item() < 1e-5
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["ratio_mean"] == pytest.approx(1.0, rel=1e-6)
    nothing = main.accumulate_gradient(
        args, run, rollout_of(batch), torch.zeros(16), list(range(16))
    )
    assert nothing == {"loss": 0.0} and all(p.grad is None for p in model.parameters())


def test_updates_cover_every_epoch_in_whole_groups():
    flags = run_flags(
        "m", "o", rollout_batch_size=24, train_batch_size=8, epochs_per_rollout_batch=2
    )
    torch.manual_seed(0)
    updates = main.split_into_updates(main.parse_args(flags))
    assert [len(rows) for rows in updates] == [8] * 6
    for epoch in (updates[:3], updates[3:]):
        assert sorted(sum(epoch, [])) == list(range(24))
    assert all(rows[i] // 4 == rows[i - i % 4] // 4 for rows in updates for i in range(8))
    assert updates[:3] != updates[3:]
    assert main.split_into_updates(main.parse_args(run_flags("m", "o"))) == [list(range(8))]


@pytest.mark.parametrize(
    ("loss_type", "length_normalization"),
    zip(main.LOSS_TYPES, chain(utils.LENGTH_NORMALIZATIONS, repeat("masked_mean")), strict=False),
)
def test_every_form_of_the_loss_trains_off_policy(
    loss_type, length_normalization, model_folder, tmp_path
):
    flags = dict(
        num_train_iters=2,
        loss_type=loss_type,
        length_normalization=length_normalization,
        learning_rate=0.01,
    )
    flags |= dict(
        epochs_per_rollout_batch=3,
        train_batch_size=4,
        cliprange=0.01,
        eval_iterations=9,
        warmup_steps=0,
    )
    assert main.main(run_flags(model_folder, tmp_path / "run", **flags)) == 0
    rows = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert all(row["skipped_updates"] == 0 and row["loss"] is not None for row in rows)
    assert rows[-1]["ratio_min"] < 1 < rows[-1]["ratio_max"], "later updates are off-policy"
    if loss_type in ("grpo_clip", "gspo", "cispo"):
        assert max(row["clip_fraction"] for row in rows) > 0


def test_the_command_line_in_a_subprocess(model_folder, tmp_path):
    row = json.dumps({"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}) + "\n"
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(row)
    flags = dict(dataset_name="gsm8k", dataset_path=tmp_path, evaluator="gsm8k", num_train_iters=1)
    run = run_script("main.py", *run_flags(model_folder, tmp_path / "run", **flags))
    assert (
        run.returncode == 0 and "done: logs and checkpoints are in" in run.stdout.splitlines()[-1]
    ), run.stderr


def test_help_says_every_default_and_unit(capsys):
    with pytest.raises(SystemExit, match="0"):
        main.main(["--help"])
    assert "completions per prompt" in capsys.readouterr().out


def test_real_gsm8k_drops_long_prompts_and_says_so(data_folder, model_folder, tmp_path, capsys):
    flags = dict(
        dataset_name="gsm8k",
        dataset_path=data_folder / "data" / "gsm8k",
        eval_only="",
        max_prompt_length=400,
    )
    assert main.main(run_flags(model_folder, tmp_path / "run", **flags)) == 0
    out = capsys.readouterr().out
    counts = re.findall(
        r"gsm8k: ([\d,]+) (?:training|test) problems \((\d+) dropped: longer than 400 tokens\)", out
    )
    assert counts and all(int(dropped) > 0 for _, dropped in counts)
    assert int(counts[0][0].replace(",", "")) + int(counts[0][1]) == 7473


def test_on_cuda_a_stage_has_its_peak_memory(monkeypatch):
    """The greatest of its turns, and nothing of those that were logged before."""
    peaks = iter([3e9, 5e9, 4e9, 1e9, 2e9])
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
    stages = Stages("cuda")
    for name in ("loss", "loss", "loss", "step"):
        with stages(name):
            pass
    logged = stages.flush()
    assert logged["memory/loss"] == 5 and logged["memory/step"] == 1 and logged["time/total"] > 0
    with stages("loss"):
        pass
    assert stages.flush().keys() == {"time/loss", "time/total", "memory/loss"}
