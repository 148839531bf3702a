"""main.py through its command line: what it writes, and that its updates are the algorithm's."""

import itertools
import json
from unittest import mock

import pytest
import torch
from conftest import (
    assert_same_gradient,
    completions_of,
    flat_gradient,
    gradients,
    logps_of,
    loss_of,
    ragged_batch,
    run_flags,
    run_script,
)

import llms
import main
import utils
from config import GRPOConfig, LossConfig, parse
from evaluator import MathEvaluator
from grpo import distributed, generation, jsonl
from grpo.rollout import Completion, make_batch, split_into_groups, split_into_updates
from grpo.run import resolve
from losses import LENGTH_NORMALIZATIONS

LOGGED_OF_AN_ITERATION = """loss kl entropy grad_norm learning_rate reward reward_std accuracy
    zero_std_fraction accuracy_flexible response_length truncated_fraction clip_fraction time/sample
    time/reward time/loss time/update time/total elapsed epoch rewards/vowels""".split()
LOGGED_OF_A_COMPLETION = "id completion gold parsed reward advantage length finished".split()


def test_what_a_run_writes(whole_run):
    args = json.loads((whole_run / "args.json").read_text())
    assert args["args"]["group_size"] == 4
    assert args["parameters"] > 20_000
    assert {"command", "commit", "versions", "hardware"} <= args.keys()

    rows = jsonl.read(whole_run / "train_log.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert set(LOGGED_OF_AN_ITERATION) <= rows[0].keys()
    assert rows[-1]["total_tokens"] == sum(row["sampled_tokens"] for row in rows)
    completions = jsonl.read(whole_run / "rollouts" / "step_000002.jsonl")
    assert len(completions) == 8
    assert len({record["prompt"] for record in completions}) == 2
    assert set(LOGGED_OF_A_COMPLETION) <= completions[0].keys()
    assert sum(record["length"] for record in completions) == rows[1]["sampled_tokens"]

    evaluations = jsonl.read(whole_run / "eval_log.jsonl")
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    assert len(jsonl.read(whole_run / "eval" / "step_000004.jsonl")) == 4
    names = sorted(path.name for path in (whole_run / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000004"]


def iterations_by_hand(run, config):
    """Two iterations of two updates on run.model; returns what must be logged of each update."""
    model = run.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    rows = []
    for _ in range(2):
        completions = run.sample(run.train_loader.next_batch(2), 4, 1.0)
        run.reward(completions)
        rewards = torch.tensor([completion.reward for completion in completions])
        advantages = main.compute_group_normalized_rewards(rewards, 4, normalize_by_std=False)
        for completion, advantage in zip(completions, advantages, strict=True):
            completion.advantage = advantage.item()
        updates = split_into_updates(config, completions)
        batches = [make_batch(split_into_groups(update, 4), "cpu") for update in updates]
        old_logps = [logps_of(model, vars(batch)) for batch in batches]
        for batch, old in zip(batches, old_logps, strict=True):
            loss, metrics = main.compute_loss(
                model,
                run.base_model,
                batch.prompt_completion_ids,
                batch.completion_ids,
                batch.attention_mask,
                batch.completion_mask,
                batch.advantages,
                old_logps=old,
            )
            loss.backward()
            norm = flat_gradient(model).norm()
            for p in model.parameters():
                p.grad *= min(1.0, main.MAX_GRAD_NORM / (norm + 1e-6))
            learning_rate = config.learning_rate * min(1.0, (len(rows) + 1) / 3)
            optimizer.param_groups[0]["lr"] = learning_rate
            optimizer.step()
            optimizer.zero_grad()
            row = dict(loss=loss.item(), grad_norm=norm.item(), learning_rate=learning_rate)
            rows.append(row | {"kl": metrics["kl"], "ratio_mean": metrics["ratio_mean"]})
    return rows


def test_logged_values_are_those_of_the_steps_that_were_taken(model_folder, tmp_path, monkeypatch):
    """The log has the means of each iteration's updates."""
    monkeypatch.setattr(main, "MAX_GRAD_NORM", 0.1)
    sizes = dict(num_train_iters=2, warmup_steps=3, train_batch_size=4, eval_iterations=9)
    flags = [*run_flags(model_folder, tmp_path / "run", **sizes), "--no-use_std_normalization"]
    config = parse(GRPOConfig, flags)
    run = main.setup(resolve(config))
    with utils.isolated_seed(config.seed):
        updates = iterations_by_hand(run, config)
    assert main.main(flags) == 0
    rows = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    for row, first, second in zip(rows, updates[::2], updates[1::2], strict=True):
        for name in first:
            expected = (first[name] + second[name]) / 2
            assert row[name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name
        assert row["grad_norm"] > 0.1, "the gradient is clipped"
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000002"
    trained, _ = llms.get_llm_tokenizer(str(checkpoint))
    for p, expected in zip(trained.parameters(), run.model.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length_normalization", LENGTH_NORMALIZATIONS)
def test_groups_without_gradient_are_skipped_and_change_nothing(length_normalization, model):
    """With beta 0 a group whose advantages are 0 skips its passes."""
    batch = ragged_batch(groups=4)
    batch["advantages"][4:8] = 0
    settings = dict(beta=0.0, length_normalization=length_normalization, max_completion_length=6)
    config = LossConfig(group_size=4, **settings)
    with mock.patch.object(main, "compute_loss", wraps=main.compute_loss) as compute_loss:
        metrics = main.accumulate_gradient(model, None, completions_of(batch), config, 60)
    assert sum(len(call.args[2]) for call in compute_loss.call_args_list) == 12
    assert compute_loss.call_count > 1
    gradient = flat_gradient(model)
    loss, _ = loss_of(model, None, batch, **settings)
    assert_same_gradient(gradient, gradients(model, loss))
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(1.0, rel=1e-6)


def test_updates_cover_every_epoch_in_whole_groups(monkeypatch):
    torch.manual_seed(0)
    completions = [Completion([number]) for number in range(24)]
    one_update = GRPOConfig(group_size=4, train_batch_size=24)
    assert split_into_updates(one_update, completions) == [completions]
    two_epochs = GRPOConfig(group_size=4, train_batch_size=24, epochs_per_rollout_batch=2)
    assert len(split_into_updates(two_epochs, completions)) == 2
    config = GRPOConfig(group_size=4, train_batch_size=8, epochs_per_rollout_batch=2)
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
    monkeypatch.setattr(distributed, "world_size", lambda: 2)  # each has half of the completions
    of_one_process = split_into_updates(config, completions[:12])
    assert [len(update) for update in of_one_process] == [4] * 6


def test_the_command_line_in_a_subprocess(model_folder, tmp_path):
    problem = json.dumps({"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}) + "\n"
    (tmp_path / "train.jsonl").write_text(problem)
    (tmp_path / "test.jsonl").write_text(problem)
    gsm8k = dict(dataset_name="gsm8k", dataset_path=tmp_path, evaluator="gsm8k")
    flags = run_flags(model_folder, tmp_path / "run", **gsm8k, num_train_iters=1)
    run = run_script("main.py", *flags)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].startswith("done: ")


def test_an_evaluation_samples_as_its_flags_and_prompt_say(model_folder, tmp_path):
    flags = dict(eval_only="", eval_samples=2, prompt="r1_zero", evaluator="math")
    flags |= dict(max_concurrent_sequences=3)
    folder = tmp_path / "run"
    with mock.patch.object(generation, "generate", wraps=generation.generate) as generate:
        assert main.main(run_flags(model_folder, folder, **flags)) == 0
    options = generate.call_args.kwargs
    assert options["stop_strings"] == ("</answer>",)
    assert options["temperature"] == 1
    assert options["max_concurrent_sequences"] == 3
    assert len(jsonl.read(folder / "eval" / "step_000000.jsonl")) == 8
    assert "pass@2" in jsonl.read(folder / "eval_log.jsonl")[0]


def test_a_word_among_the_training_answers_is_no_wrong_number(model_folder, tmp_path):
    for split, answer in (("train", "Paris"), ("test", "2")):
        jsonl.write(tmp_path / f"{split}.jsonl", [{"question": "Which?", "answer": answer}])
    data = dict(dataset_name="gsm8k", dataset_path=tmp_path)
    config = parse(GRPOConfig, run_flags(model_folder, tmp_path / "run", **data))
    assert isinstance(main.setup(resolve(config)).evaluator.verdicts, MathEvaluator)
