"""main.py through its command line: what it writes, and that its updates are the algorithm's."""

import itertools
import json
import re
from unittest import mock

import pytest
import torch
from conftest import (
    assert_same_gradient,
    completions_of,
    flat_gradient,
    gradients,
    loss_of,
    ragged_batch,
    run_flags,
    run_script,
    update_gradient,
)

import llms
import main
from config import GRPOConfig, parse
from grpo import jsonl
from grpo.rollout import Completion, make_batch, split_into_groups, split_into_updates
from grpo.run import resolve
from grpo.timer import StageTimer
from losses import LENGTH_NORMALIZATIONS, LOSSES

LOGGED_OF_AN_ITERATION = {
    "loss",
    "kl",
    "entropy",
    "grad_norm",
    "learning_rate",
    "reward",
    "reward_std",
    "zero_std_fraction",
    "accuracy",
    "accuracy_flexible",
    "response_length",
    "truncated_fraction",
    "clip_fraction",
    "time/sample",
    "time/reward",
    "time/loss",
    "time/update",
    "time/total",
    "elapsed",
    "epoch",
}
LOGGED_OF_A_COMPLETION = {
    "id",
    "completion",
    "gold",
    "parsed",
    "reward",
    "advantage",
    "length",
    "finished",
}


def test_a_run_writes_its_arguments(whole_run):
    args = json.loads((whole_run / "args.json").read_text())
    assert args["args"]["group_size"] == 4
    assert args["parameters"] > 20_000
    assert {"command", "commit", "versions", "hardware"} <= args.keys()


def test_a_run_logs_each_iteration_and_its_completions(whole_run):
    rows = jsonl.read(whole_run / "train_log.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["total_tokens"] == sum(row["sampled_tokens"] for row in rows)
    assert LOGGED_OF_AN_ITERATION <= rows[0].keys()
    assert any(key.startswith("rewards/") for key in rows[0])
    for row in rows:
        assert not any(isinstance(value, dict | list) for value in row.values())
    completions = jsonl.read(whole_run / "rollouts" / "step_000002.jsonl")
    assert len(completions) == 8
    assert len({record["prompt"] for record in completions}) == 2
    assert LOGGED_OF_A_COMPLETION <= completions[0].keys()
    assert sum(record["length"] for record in completions) == rows[1]["sampled_tokens"]


def test_a_run_evaluates_before_the_first_update_and_after_the_last(whole_run):
    evaluations = jsonl.read(whole_run / "eval_log.jsonl")
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    for row in evaluations:
        assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"]
    assert len(jsonl.read(whole_run / "eval" / "step_000004.jsonl")) == 4


def test_a_run_writes_its_checkpoints(whole_run):
    names = sorted(path.name for path in (whole_run / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000004"]


def test_an_end_between_evaluations_is_evaluated_and_saved(model_folder, tmp_path):
    assert main.main(run_flags(model_folder, tmp_path, num_train_iters=1)) == 0
    assert [row["step"] for row in jsonl.read(tmp_path / "eval_log.jsonl")] == [0, 1]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


def updates_by_hand(run, args):
    """Two iterations of GRPO on run.model, with AdamW; returns what must be logged of each."""
    model = run.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    rows = []
    for step in (1, 2):
        examples = run.train_loader.next_batch(2)
        completions = run.sample(examples, 4, 1.0)
        run.reward(completions)
        rewards = torch.tensor([completion.reward for completion in completions])
        batch = make_batch(split_into_groups(completions, 4), "cpu")
        loss, _ = main.compute_loss(
            model,
            run.base_model,
            batch.prompt_completion_ids,
            batch.completion_ids,
            batch.attention_mask,
            batch.completion_mask,
            main.compute_group_normalized_rewards(rewards, 4),
        )
        loss.backward()
        norm = flat_gradient(model).norm()
        for p in model.parameters():
            p.grad *= min(1.0, main.MAX_GRAD_NORM / (norm + 1e-6))
        learning_rate = args.learning_rate * step / args.warmup_steps
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()
        row = dict(loss=loss.item(), grad_norm=norm.item(), learning_rate=learning_rate)
        rows.append(row)
    return rows


def test_logged_values_are_those_of_the_steps_that_were_taken(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(main, "MAX_GRAD_NORM", 0.1)
    flags = run_flags(model_folder, tmp_path / "run", num_train_iters=2, warmup_steps=4)
    args = parse(GRPOConfig, flags)
    run = main.setup(resolve(args))
    expected_rows = updates_by_hand(run, args)
    assert main.main(flags) == 0
    rows = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    for row, expected in zip(rows, expected_rows, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert row["grad_norm"] > 0.1, "the gradient is clipped"
        assert row["learning_rate"] == pytest.approx(expected["learning_rate"])
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000002"
    trained, _ = llms.get_llm_tokenizer(str(checkpoint))
    for p, expected in zip(trained.parameters(), run.model.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length_normalization", LENGTH_NORMALIZATIONS)
def test_groups_without_gradient_are_skipped_and_change_nothing(length_normalization, model):
    """With beta 0 a group whose advantages are 0 skips its passes.

    The gradient and the means over tokens are as if it had not been skipped.
    """
    batch = ragged_batch(groups=4)
    batch["advantages"] = torch.randn(16, generator=torch.Generator().manual_seed(1))
    batch["advantages"][4:8] = 0
    settings = dict(beta=0.0, length_normalization=length_normalization, max_completion_length=6)
    config = GRPOConfig(group_size=4, **settings)
    with mock.patch.object(main, "compute_loss", wraps=main.compute_loss) as compute_loss:
        metrics = update_gradient(model, None, completions_of(batch), config)
    assert sum(len(call.args[2]) for call in compute_loss.call_args_list) == 12
    gradient = flat_gradient(model)
    loss, _ = loss_of(model, None, batch, **settings)
    assert_same_gradient(gradient, gradients(model, loss))
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(1.0, rel=1e-6)


def test_an_update_without_any_gradient_makes_no_pass(model):
    batch = ragged_batch(groups=4) | {"advantages": torch.zeros(16)}
    config = GRPOConfig(group_size=4, beta=0.0)
    assert update_gradient(model, None, completions_of(batch), config) == {"loss": 0.0}
    assert all(p.grad is None for p in model.parameters())


def test_updates_cover_every_epoch_in_whole_groups():
    torch.manual_seed(0)
    config = GRPOConfig(group_size=4, train_batch_size=8, epochs_per_rollout_batch=2)
    completions = [Completion([number]) for number in range(24)]
    updates = []
    for update in split_into_updates(config, completions):
        updates.append([completion.prompt_ids[0] for completion in update])
    assert [len(rows) for rows in updates] == [8] * 6
    for epoch in (updates[:3], updates[3:]):
        assert sorted(itertools.chain(*epoch)) == list(range(24))
    for rows in updates:
        for group in (rows[:4], rows[4:]):
            assert len({row // 4 for row in group}) == 1, "4 rows of one group"
    assert updates[:3] != updates[3:]


def test_one_update_is_the_whole_rollout_batch_by_default():
    config = parse(GRPOConfig, run_flags("unused", "unused"))
    completions = [Completion([number]) for number in range(8)]
    assert split_into_updates(config, completions) == [completions]


def test_the_learning_rate_rises_over_optimiser_steps_and_stays(model_folder, tmp_path):
    """The log has the mean rate of the four updates of each iteration."""
    assert [main.warm_up(1, 4, update) for update in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert [main.warm_up(1, 0, update) for update in range(6)] == [1] * 6
    four_updates = dict(num_train_iters=2, epochs_per_rollout_batch=2, train_batch_size=4)
    assert main.main(run_flags(model_folder, tmp_path, **four_updates, warmup_steps=5)) == 0
    logged = [row["learning_rate"] for row in jsonl.read(tmp_path / "train_log.jsonl")]
    assert logged == pytest.approx([1e-3 * (1 + 2 + 3 + 4) / 4 / 5, 1e-3])


# Every loss type and every length normalization at least once.
EVERY_LOSS = itertools.zip_longest(LOSSES, LENGTH_NORMALIZATIONS, fillvalue="masked_mean")


@pytest.mark.parametrize(("loss_type", "length_normalization"), EVERY_LOSS)
def test_every_loss_trains_off_policy(loss_type, length_normalization, model_folder, tmp_path):
    has_clip = loss_type in ("grpo_clip", "gspo", "cispo")
    flags = run_flags(
        model_folder,
        tmp_path / "run",
        num_train_iters=1,
        loss_type=loss_type,
        length_normalization=length_normalization,
        learning_rate=0.01,
        epochs_per_rollout_batch=3,
        train_batch_size=4,
        eval_iterations=9,
        warmup_steps=0,
        **(dict(cliprange=0.01) if has_clip else {}),
    )
    assert main.main(flags) == 0
    (row,) = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert row["skipped_updates"] == 0
    assert row["loss"] is not None
    assert row["grad_norm"] > 0
    assert row["ratio_mean"] != 1, "later updates are off-policy"
    if has_clip:
        assert row["clip_fraction"] > 0


def test_the_command_line_in_a_subprocess(model_folder, tmp_path):
    problem = json.dumps({"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}) + "\n"
    (tmp_path / "train.jsonl").write_text(problem)
    (tmp_path / "test.jsonl").write_text(problem)
    gsm8k = dict(dataset_name="gsm8k", dataset_path=tmp_path, evaluator="gsm8k")
    flags = run_flags(model_folder, tmp_path / "run", **gsm8k, num_train_iters=1)
    run = run_script("main.py", *flags)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].startswith("done: ")


def test_help_says_what_a_flag_counts(capsys):
    with pytest.raises(SystemExit, match="0"):
        main.main(["--help"])
    assert "completions per prompt" in capsys.readouterr().out


@pytest.mark.slow
def test_real_gsm8k_drops_long_prompts_and_says_so(data_folder, model_folder, tmp_path, capsys):
    flags = run_flags(
        model_folder,
        tmp_path / "run",
        dataset_name="gsm8k",
        dataset_path=data_folder / "data" / "gsm8k",
        eval_only="",
        max_prompt_length=400,
    )
    assert main.main(flags) == 0
    counts = re.findall(
        r"gsm8k: ([\d,]+) (?:training|test) problems, (\d+) dropped as too long",
        capsys.readouterr().out,
    )
    assert counts
    assert all(int(dropped) > 0 for _, dropped in counts)
    num_training, num_dropped = counts[0]
    assert int(num_training.replace(",", "")) + int(num_dropped) == 7473


def test_on_cuda_a_stage_has_its_peak_memory(monkeypatch):
    """The greatest peak of the stage's turns, without those that were logged before."""
    peaks = iter([3e9, 5e9, 4e9, 1e9, 2e9])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
    timer = StageTimer("cuda")
    for stage in ("loss", "loss", "loss", "update"):
        with timer(stage):
            pass
    logged = timer.flush()
    assert logged["memory/loss"] == 5
    assert logged["memory/update"] == 1
    assert logged["time/total"] > 0
    with timer("loss"):
        pass
    assert timer.flush().keys() == {"time/loss", "time/total", "memory/loss"}
