"""GSPO, CISPO, dynamic sampling, schedules, and docs/family.md, which says by which flags each algorithm is made."""

import math
import re
import shlex
import zlib
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    ROOT,
    LettersEvaluator,
    as_flags,
    assert_same_gradient,
    assert_same_run,
    closed_port,
    gradients,
    ragged_batch,
    random_model,
    rollout_of,
    run_flags,
    start,
)
from test_distributed import approx, fixed_sample, values

import distributed
import evaluator
import flags
import llms
import main
import utils
from logs import jsonl
from sampling.rollout import Rollout
from training.schedule import learning_rate_factor

LOW, HIGH = 0.1, 0.15
FORMS = [("gspo", "masked_mean"), ("cispo", "masked_mean"), ("cispo", "token_mean")]


def oracle(model, batch, old, loss_type, length_normalization):
    """The losses of the papers in float64: one row at a time, unpadded, in plain Python sums."""
    model, C = model.double(), batch["completion_ids"].shape[1]
    per_sequence = []
    for b in (b for b in range(len(old)) if not batch["advantages"][b].isnan()):
        A, n = batch["advantages"][b].double(), int(batch["attention_mask"][b, -C:].sum())
        ids = batch["prompt_completion_ids"][b][batch["attention_mask"][b].bool()]
        rows = model(ids[None]).logits[0, -n - 1 : -1].log_softmax(-1)
        kept = [t for t in range(n) if batch["completion_mask"][b, t]]
        policy, before = (
            [rows[t][ids[len(ids) - n + t]] for t in kept],
            [old[b, t].double() for t in kept],
        )
        pairs = list(zip(policy, before, strict=True))
        if loss_type == "gspo" and kept:
            s = torch.exp(sum(p - q for p, q in pairs) / len(kept))
            clipped = min(max(s, 1 - LOW), 1 + HIGH)
            per_sequence.append([-min(s * A, clipped * A)] * len(kept))
        else:
            per_sequence.append([-min(math.exp(p.item() - q), 1 + HIGH) * A * p for p, q in pairs])
    tokens = sum(map(len, per_sequence))
    weights = [
        tokens if length_normalization == "token_mean" else len(row) * len(per_sequence)
        for row in per_sequence
    ]
    loss = sum(sum(row) / weight for row, weight in zip(per_sequence, weights, strict=True) if row)
    gradient = gradients(model, loss)
    model.float()
    return loss.item(), gradient


def unlike(groups=3):
    """A ragged batch and old log-probs: clipped and not on both sides, two masked rows, a row without its reward."""
    batch, model = ragged_batch(groups), random_model(0)
    ids, C = batch["prompt_completion_ids"], batch["completion_ids"].shape[1]
    with torch.no_grad():
        logps = utils.get_per_token_logps(model, ids, batch["attention_mask"], C)
    old = logps + 0.3 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(5))
    batch["completion_mask"] = batch["completion_mask"].clone()
    batch["completion_mask"][[2, 9]] = 0
    old[2] = -30.0  # what lies under a mask must not matter
    batch["advantages"][5] = torch.nan
    return batch, old


def settings(loss_type, length_normalization):
    return dict(
        loss_type=loss_type,
        length_normalization=length_normalization,
        cliprange=LOW,
        cliprange_high=HIGH,
        beta=0.0,
    )


# --- the losses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss_type", "length_normalization"), FORMS)
@pytest.mark.parametrize("group_size", [1, 4])  # the prompt shared by its group, and not
def test_loss_and_gradient_equal_the_float64_formula(
    loss_type, length_normalization, group_size, model
):
    batch, old = unlike()
    expected, expected_gradient = oracle(model, batch, old, loss_type, length_normalization)
    loss, metrics = main.compute_loss(
        model,
        None,
        *batch.values(),
        **settings(loss_type, length_normalization),
        group_size=group_size,
        old_per_token_logps=old,
    )
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert_same_gradient(gradients(model, loss), expected_gradient)
    assert 0.1 < metrics["clip_fraction"] < 0.9


def one_update(loss_type, length_normalization, budget, model, batch, old):
    """Loss and gradient of one update through accumulate_gradient, of this process's share of the rows."""
    given = run_flags(
        "unused", "unused", **settings(loss_type, length_normalization), micro_batch_tokens=budget
    )
    run, mine = (
        type("Run", (), dict(model=model, base_model=None)),
        distributed.share(torch.arange(len(old))),
    )
    rollout = rollout_of(batch)
    rollout = Rollout(
        **{k: v[mine] if torch.is_tensor(v) else v[: len(mine)] for k, v in vars(rollout).items()}
    )
    rows, signal = list(range(len(mine))), batch["advantages"][mine]
    metrics = main.accumulate_gradient(
        main.parse_args(given), run, rollout, signal, rows, old_logps=old[mine]
    )
    parts = [distributed.full_tensor(p.grad).double().flatten() for p in model.parameters()]
    model.zero_grad()
    return metrics["loss"], torch.cat(parts)


@pytest.mark.parametrize(("loss_type", "length_normalization"), FORMS)
def test_micro_batches_change_nothing(loss_type, length_normalization, model):
    batch, old = unlike()
    expected, expected_gradient = oracle(model, batch, old, loss_type, length_normalization)
    for budget in (10, 40, 10_000):
        loss, gradient = one_update(loss_type, length_normalization, budget, model, batch, old)
        assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert_same_gradient(gradient, expected_gradient)


@pytest.mark.parametrize(("A", "low", "high"), [(1, True, False), (-1, False, True)])
def test_quadrants(A, low, high):
    """Sequences of mean log-ratio log 0.8, log 1.05, log 1.3, whose tokens' ratios lie on both sides of 1.

    (low, high): whether the clip leaves a gradient there. That of cispo is stopped nowhere, only its weight is capped.
    """
    means = torch.tensor([[0.8], [1.05], [1.3]]).log()
    policy = (
        means + torch.tensor([[0.5, -0.2, -0.3, 7.0]])
    ).requires_grad_()  # the last one is masked
    old, mask = torch.zeros(3, 4), torch.tensor([[True] * 3 + [False]]).expand(3, 4)
    arguments = None, torch.full((3, 1), float(A)), old, LOW, HIGH, mask
    for loss_type in ("gspo", "cispo", "grpo_clip"):
        loss, metadata = main.compute_policy_gradient_loss(policy, loss_type, *arguments)
        (gradient,) = torch.autograd.grad(utils.masked_sum(loss, mask), policy)
        ratio = policy.detach().exp()
        if loss_type == "gspo":
            expected = -A * means.exp() * torch.tensor([[low], [True], [high]]) * mask
            stopped = expected == 0
        elif loss_type == "cispo":
            expected, stopped = -A * ratio.clamp(max=1 + HIGH) * mask, ratio > 1 + HIGH
            assert (gradient[mask] != 0).all()
        else:
            stopped = (ratio > 1 + HIGH) if A > 0 else (ratio < 1 - LOW)
            expected = -A * ratio * ~stopped * mask
        torch.testing.assert_close(gradient, expected)
        assert torch.equal(metadata["clip_fraction"][mask], stopped[mask])
        assert (gradient[:, 3] == 0).all()


@pytest.mark.parametrize("loss_type", ["gspo", "cispo"])
def test_a_row_without_tokens_is_finite_and_clips_nothing(loss_type):
    policy, mask = torch.zeros(2, 3, requires_grad=True), torch.tensor([[True] * 3, [False] * 3])
    arguments = None, torch.ones(2, 1), torch.zeros(2, 3), 0.2, None, mask
    loss, metadata = main.compute_policy_gradient_loss(policy, loss_type, *arguments)
    (gradient,) = torch.autograd.grad(utils.masked_sum(loss, mask), policy)
    assert (
        loss.isfinite().all() and gradient.isfinite().all() and not metadata["clip_fraction"].any()
    )


def test_the_upper_range_of_cispo_is_the_lower_ones_by_default():
    policy = torch.tensor([[0.5]], requires_grad=True)
    for high, cap in ((None, 1.2), (0.3, 1.3), (4.0, math.exp(0.5))):
        arguments = None, torch.ones(1, 1), torch.zeros(1, 1), 0.2, high
        loss, _ = main.compute_policy_gradient_loss(policy, "cispo", *arguments)
        (gradient,) = torch.autograd.grad(loss.sum(), policy)
        assert gradient.item() == pytest.approx(-cap) and loss.item() == pytest.approx(-0.5 * cap)


@pytest.mark.parametrize(("loss_type", "length_normalization"), FORMS)
def test_on_policy_gradient_is_that_of_grpo_clip(loss_type, length_normalization, model):
    batch, _ = unlike()
    results = {}
    for name in (loss_type, "grpo_clip"):
        loss, _ = main.compute_loss(
            model, None, *batch.values(), **settings(name, length_normalization)
        )
        results[name] = gradients(model, loss)
    assert_same_gradient(results[loss_type], results["grpo_clip"], 1e-6)


# GRPOTrainer._compute_loss of TRL 1.16.0, given these log-probs and the weights of 3 sequences:
#   gspo   importance_sampling_level "sequence", loss_type "grpo", epsilon 0.1, epsilon_high 0.15
#   cispo  loss_type "cispo", epsilon_high 1.28: TRL's is the cap itself, ours what it is above 1
POLICY = [[-1.0, -0.5, -2.0, -0.3], [-0.7, -1.2, -0.4, -9.0], [-0.9, -0.2, -9.0, -9.0]]
OLD = [[-1.4, -0.4, -2.6, -0.5], [-0.2, -1.3, -0.9, -3.0], [-0.6, -0.8, -3.0, -3.0]]
MASK, ADVANTAGES = [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]], [1.5, -0.5, -1.0]
TRL = {
    "gspo": (
        "masked_mean",
        0.15,
        -0.015406052581965923,
        [[0, 0, 0, 0], [0.05743861198425293] * 3 + [0], [0.19363903999328613] * 2 + [0, 0]],
    ),
    "cispo": (
        "token_mean",
        0.28,
        0.548237144947052,
        [
            [-0.21333332359790802, -0.1508062481880188, -0.21333332359790802, -0.20356713235378265],
            [0.03369614854454994, 0.061398379504680634, 0.07111111283302307, 0],
            [0.08231314271688461, 0.14222222566604614, 0, 0],
        ],
    ),
}


@pytest.mark.parametrize("loss_type", TRL)
def test_numbers_of_trl(loss_type):
    length_normalization, high, expected, expected_gradient = TRL[loss_type]
    policy, mask = torch.tensor(POLICY, requires_grad=True), torch.tensor(MASK)
    advantages = torch.tensor(ADVANTAGES).unsqueeze(1)
    per_token, _ = main.compute_policy_gradient_loss(
        policy, loss_type, None, advantages, torch.tensor(OLD), 0.1, high, mask
    )
    loss = utils.aggregate_tokens(per_token, mask, length_normalization, None, 3, 9)
    (gradient,) = torch.autograd.grad(loss, policy)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradient, torch.tensor(expected_gradient), rtol=1e-5, atol=1e-7)


class Fixed(torch.nn.Module):
    """A model whose next token has the same distribution everywhere: its output layer's bias."""

    is_activation_checkpointing = False

    def __init__(self, logits):
        super().__init__()
        self.layer = torch.nn.Linear(1, len(logits)).double()
        self.layer.weight.data.zero_()
        self.layer.bias.data = logits

    def get_output_embeddings(self):
        return self.layer

    def get_decoder(self):
        return lambda ids, **_: SimpleNamespace(
            last_hidden_state=torch.ones(*ids.shape, 1, dtype=torch.float64)
        )


def test_k3_has_the_value_of_one_kl_and_the_gradient_of_the_other():
    """Over all outcomes of a policy, each with its share: the samples stand still, as compute_loss sees them."""
    policy, base = (
        Fixed(torch.tensor([1.2, 0.4, -0.3, -1.0]).double()),
        Fixed(torch.tensor([0.1, 0.9, 0.6, 0.2]).double()),
    )
    share, value, k3 = policy.layer.bias.detach().softmax(-1), 0, 0
    for outcome in range(4):
        ids, ones = torch.tensor([[0, outcome]]), torch.ones(1, 2, dtype=torch.long)
        batch = ids, ids[:, 1:], ones, ones[:, 1:], torch.zeros(1)
        loss, metrics = main.compute_loss(policy, base, *batch, beta=1.0)  # nothing but the KL
        value, k3 = value + share[outcome] * metrics["kl"], k3 + share[outcome] * loss
    log_p, log_q = policy.layer.bias.log_softmax(-1), base.layer.bias.detach().log_softmax(-1)
    forward, reverse = (log_p.exp() * (log_p - log_q)).sum(), (log_q.exp() * (log_q - log_p)).sum()
    ratio, estimates = (log_p - log_p.detach()).exp(), (log_q - log_p).exp() - (log_q - log_p) - 1

    def gradient(value):
        return torch.autograd.grad(value, policy.layer.bias, retain_graph=True)[0]

    assert value.item() == pytest.approx(forward.item(), rel=1e-6)  # KL(policy || reference)
    torch.testing.assert_close(gradient(k3), gradient(reverse), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        gradient((share * ratio * estimates).sum()), gradient(forward), rtol=1e-5, atol=1e-6
    )
    assert (gradient(forward) - gradient(reverse)).norm() > 0.1


# --- dynamic sampling -----------------------------------------------------------------------------


def is_flat(question):
    return zlib.crc32(question.encode()) % 2 == 0


class HalfFlat(LettersEvaluator):
    """Half of the questions reward all completions equally; some rewards are missing."""

    def compute_rewards(self, prompts, completions, answers):
        rewards = super().compute_rewards(prompts, completions, answers)
        flat = torch.tensor([[is_flat(prompt)] for prompt in prompts])
        missing = torch.tensor([[len(text) % 5 == 2] for text in completions])
        values = rewards.per_function.masked_fill(flat, 0.25).masked_fill(missing, torch.nan)
        return evaluator.Rewards(values, rewards.details)


class AllFlat(LettersEvaluator):
    def compute_rewards(self, prompts, completions, answers):
        rewards = super().compute_rewards(prompts, completions, answers)
        return evaluator.Rewards(torch.full_like(rewards.per_function, 0.25), rewards.details)


evaluator.EVALUATORS |= {"half flat": HalfFlat, "all flat": AllFlat}
DYNAMIC = dict(
    rollout_batch_size=32,
    group_size=4,
    evaluator="half flat",
    dynamic_sampling=3,
    num_train_iters=3,
)


def run_dynamic(model_folder, output, **more):
    main.sample, original = fixed_sample, main.sample
    try:
        return main.main(run_flags(model_folder, output, **DYNAMIC | more))
    finally:
        main.sample = original


def flat(rows, key="reward"):
    """Of each group of 4 rows, whether the rewards that are there are all equal or fewer than two."""
    groups = [
        [row[key] for row in rows[i : i + 4] if row[key] is not None]
        for i in range(0, len(rows), 4)
    ]
    return [len(set(group)) < 2 for group in groups]


@pytest.fixture(scope="module")
def dynamic_run(model_folder, tmp_path_factory):
    """(its folder, [(rollout, signal) of each update])"""
    folder, seen, original = (
        tmp_path_factory.mktemp("dynamic") / "run",
        [],
        main.accumulate_gradient,
    )

    def noting(args, run, rollout, signal, *rest):
        seen.append((rollout, signal))
        return original(args, run, rollout, signal, *rest)

    main.accumulate_gradient = noting
    try:
        assert run_dynamic(model_folder, folder) == 0
    finally:
        main.accumulate_gradient = original
    return folder, seen


def test_new_prompts_replace_groups_of_equal_rewards(dynamic_run):
    """Worked out from the transcript: the first 32 rows are the first round, then come the rounds that replace."""
    folder, seen = dynamic_run
    drawn, log = 0, jsonl.read(folder / "train_log.jsonl")
    for row, (rollout, signal) in zip(log, seen, strict=True):
        records = jsonl.read(folder / "rollouts" / f"step_{row['step']:06d}.jsonl")
        places, rest = [records[i : i + 4] for i in range(0, 32, 4)], records[32:]
        for _ in range(3):
            for place in [i for i, group in enumerate(places) if flat(group)[0]]:
                places[place], rest = rest[:4], rest[4:]
        assert not rest and len(places) == 8
        trained = [record for group in places for record in group]
        assert rollout.texts == [record["completion"] for record in trained]
        expected = torch.tensor(
            [torch.nan if r["advantage"] is None else r["advantage"] for r in trained]
        )
        torch.testing.assert_close(signal, expected, equal_nan=True, rtol=0, atol=0)
        assert rollout.lengths.tolist() == [record["length"] for record in trained]
        lost = [
            r for i, group in enumerate(flat(records)) if group for r in records[4 * i : 4 * i + 4]
        ]
        assert lost and all(not record["advantage"] for record in lost), "exactly 0, or missing"
        # what is logged of the rewards is of the first round, what is counted is of all
        first = [r["reward"] for r in records[:32] if r["reward"] is not None]
        assert row["reward"] == pytest.approx(sum(first) / len(first))
        assert row["zero_std_fraction"] == sum(flat(records[:32])) / 8
        assert row["zero_std_fraction_trained"] == sum(flat(trained)) / 8 < row["zero_std_fraction"]
        assert row["response_length"] == pytest.approx(sum(r["length"] for r in records[:32]) / 32)
        assert row["accuracy"] == sum(r["correct_strict"] for r in records[:32]) / 32
        assert (
            row["sampled_tokens"] == sum(r["length"] for r in records) > 32 * row["response_length"]
        )
        assert (
            row["sampled_prompts"] == len(records) / 4 == len({record["id"] for record in records})
        )
        drawn += row["sampled_prompts"]
    assert log[-1]["total_tokens"] == sum(row["sampled_tokens"] for row in log)
    state = torch.load(folder / "checkpoints" / "step_000003" / "trainer.pt", weights_only=True)
    assert state["train_loader"] == {"epoch": 0, "position": drawn}


def test_flat_groups_by_hand():
    nan = math.nan
    rewards = torch.tensor(
        [2.35, 2.35, 2.35, 1, 1, nan, nan, 1, nan, nan, nan, nan, 1, 2, nan, -1, -1, 0]
    )
    assert main.flat_groups(rewards, 3).tolist() == [True, True, True, True, False, False]


def test_rounds_are_bounded_and_off_by_default(model_folder, tmp_path):
    assert (
        run_dynamic(model_folder, tmp_path / "flat", evaluator="all flat", num_train_iters=1) == 0
    )
    (row,) = jsonl.read(tmp_path / "flat" / "train_log.jsonl")
    assert row["sampled_prompts"] == (1 + 3) * 8 and row["zero_std_fraction_trained"] == 1
    assert run_dynamic(model_folder, tmp_path / "off", dynamic_sampling=0, num_train_iters=1) == 0
    (row,) = jsonl.read(tmp_path / "off" / "train_log.jsonl")
    assert (
        not row.keys() & {"sampled_prompts", "zero_std_fraction_trained"}
        and row["zero_std_fraction"] > 0
    )
    assert len(jsonl.read(tmp_path / "off" / "rollouts" / "step_000001.jsonl")) == 32


def test_rewards_without_a_baseline_are_replaced_too(model_folder, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        main, "split_into_updates", lambda args: seen.append(args) or [list(range(32))]
    )
    monkeypatch.setattr(main, "accumulate_gradient", lambda *a: seen.append(a[3]) or {"loss": 0.0})
    more = dict(num_train_iters=1, loss_type="no_baseline", save_iterations=9, eval_iterations=9)
    run_dynamic(model_folder, tmp_path / "run", **more)
    (row,) = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    records, signal = jsonl.read(tmp_path / "run" / "rollouts" / "step_000001.jsonl"), seen[1]
    rewards = {record["reward"] for record in records}
    assert {None if value != value else value for value in signal.tolist()} <= rewards
    assert (
        main.flat_groups(signal, 4).float().mean()
        == row["zero_std_fraction_trained"]
        < row["zero_std_fraction"]
    )


def test_a_run_that_ended_amid_replacements_goes_on_bit_for_bit(
    model_folder, tmp_path, monkeypatch
):
    """An exception after the third iteration's prompts are drawn: the loader and the random state go back."""
    given = DYNAMIC | dict(
        num_train_iters=4, save_iterations=2, max_completion_length=9, lr_schedule="cosine"
    )
    whole, stopped = (
        run_flags(model_folder, tmp_path / name, **given) for name in ("whole", "stopped")
    )
    assert main.main(whole) == 0
    original, calls = main.replace_flat_groups, []

    def failing(*arguments):
        calls.append(original(*arguments))
        if len(calls) == 3:
            raise RuntimeError("a moment in the third iteration")
        return calls[-1]

    monkeypatch.setattr(main, "replace_flat_groups", failing)
    assert main.main(stopped) == 1 and len(calls[-1][2]) > 0
    monkeypatch.undo()
    assert main.main([*stopped, "--resume"]) == 0
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_merged_rollouts_keep_every_row():
    """Of other widths on both sides; padding goes where it belongs."""
    wide, narrow = rollout_of(ragged_batch(seed=0)), rollout_of(ragged_batch(seed=1))
    for rollout in (wide, narrow):
        rollout.sampled_logps = -rollout.completion_ids.float()
    narrow = narrow.select([0, 1, 7])
    wide.texts, narrow.texts = list("abcdefghijkl"), list("xyz")
    for ours, new, rows in ((wide, narrow, [1, 5, 6]), (narrow, wide.select([3, 4]), [2, 0])):
        merged = ours.replace(rows, new)
        assert len(merged.texts) == len(ours.texts)
        for i in range(len(ours.texts)):
            one = merged.select([i])
            expected = new.select([rows.index(i)]) if i in rows else ours.select([i])
            for name, value in vars(expected).items():
                assert (
                    torch.equal(getattr(one, name), value)
                    if torch.is_tensor(value)
                    else one.texts == value
                )


# --- two processes --------------------------------------------------------------------------------


def of_two(model_folder, folder):
    """As one of two processes: an update of each form, and a run in which each replaces its own groups."""
    distributed.init("cpu")
    distributed.finish = lambda code: code
    batch, old = unlike(groups=4)
    results = []
    for form in FORMS:
        model = random_model(0)
        llms.shard(model)
        results.append(one_update(*form, 40, model, batch, old))
    if distributed.is_main():
        torch.save(results, folder / "updates.pt")
    assert run_dynamic(model_folder, folder / "run") == 0


def test_two_processes_give_the_numbers_of_one(dynamic_run, model, model_folder, tmp_path):
    job = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(closed_port()))
    started = [start(of_two, model_folder, tmp_path, RANK=str(rank), **job) for rank in range(2)]
    output = [output.read() for _, output in started]
    for process, _ in started:
        process.join()
        assert process.exitcode == 0, output
    batch, old = unlike(groups=4)
    for form, (loss, gradient) in zip(FORMS, torch.load(tmp_path / "updates.pt"), strict=True):
        expected, expected_gradient = oracle(model, batch, old, *form)
        assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert_same_gradient(gradient, expected_gradient)
    logs = [jsonl.read(folder / "train_log.jsonl") for folder in (tmp_path / "run", dynamic_run[0])]
    for row, expected in zip(*logs, strict=True):
        assert values(row) == approx(values(expected))
    uneven = 0
    for path in sorted((dynamic_run[0] / "rollouts").iterdir()):
        records = jsonl.read(path)
        assert jsonl.read(tmp_path / "run" / "rollouts" / path.name) == records
        first = flat(records[:32])
        uneven += sum(first[:4]) != sum(first[4:])
    assert uneven, "the processes had different numbers of groups to replace"


# --- learning rates -------------------------------------------------------------------------------


def rates(steps, **given):
    args = main.parse_args(as_flags(num_train_iters=steps, **given))
    return [learning_rate_factor(args, n) for n in range(steps)]


def test_schedules_by_hand():
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert rates(6, warmup_steps=0) == [1] * 6
    assert rates(6, warmup_steps=2, lr_schedule="linear") == pytest.approx(
        [0.5, 1, 0.8, 0.6, 0.4, 0.2]
    )
    cosine = [0.5, 1, *((1 + math.cos(math.pi * done / 5)) / 2 for done in (1, 2, 3, 4))]
    assert rates(6, warmup_steps=2, lr_schedule="cosine") == pytest.approx(cosine)
    assert rates(3, warmup_steps=9, lr_schedule="linear") == pytest.approx([1 / 9, 2 / 9, 3 / 9])


def test_a_schedule_counts_optimiser_steps(model_folder, tmp_path):
    more = dict(
        num_train_iters=2,
        epochs_per_rollout_batch=2,
        train_batch_size=4,
        warmup_steps=1,
        lr_schedule="linear",
    )
    assert main.main(run_flags(model_folder, tmp_path, **more)) == 0
    logged = [row["learning_rate"] for row in jsonl.read(tmp_path / "train_log.jsonl")]
    assert logged == pytest.approx([1e-3 * (8 + 7 + 6 + 5) / 4 / 8, 1e-3 * (4 + 3 + 2 + 1) / 4 / 8])


def test_the_end_of_a_decay_may_not_move(model_folder, tmp_path, capsys):
    for schedule, code in (("cosine", 2), ("constant", 0)):
        folder = tmp_path / schedule
        assert (
            main.main(run_flags(model_folder, folder, num_train_iters=1, lr_schedule=schedule)) == 0
        )
        assert main.main(as_flags(output_dir=folder, resume="", num_train_iters=2)) == code
        assert ("--num_train_iters was 1, not 2" in capsys.readouterr().err) == (
            schedule == "cosine"
        )


# --- the table ------------------------------------------------------------------------------------


def table():
    """(name, flags) of each row of docs/family.md."""
    rows = re.findall(
        r"^\| (.+?) \|.*?\| `(--.+?)` \|", (ROOT / "docs" / "family.md").read_text("utf-8"), re.M
    )
    return [(name, shlex.split(flags)) for name, flags in rows]


@pytest.mark.parametrize(("name", "given"), table(), ids=[name for name, _ in table()])
def test_the_flags_of_each_algorithm_train(name, given, model_folder, tmp_path):
    """As they stand, but on a small model and with its sizes."""
    args = main.parse_args(
        [*given, "--model_name", str(model_folder), "--dataset_name", "arithmetic"]
    )
    flags.check(args)
    sizes = dict(
        group_size=min(4, args.group_size),
        rollout_batch_size=8,
        train_batch_size=4,
        num_train_iters=1,
    )
    sizes |= dict(
        max_completion_length=6,
        eval_size=4,
        evaluator="letters",
        warmup_steps=0,
        learning_rate=1e-3,
    )
    sizes |= dict(
        model_name=model_folder,
        dataset_name="arithmetic",
        output_dir=tmp_path / "run",
        device="cpu",
    )
    assert main.main([*given, *as_flags(**sizes)]) == 0
    (row,) = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert row["grad_norm"] > 0 and row["skipped_updates"] == 0


def test_every_loss_is_in_the_table():
    losses = {main.parse_args(given).loss_type for _, given in table()}
    assert losses == set(flags.LOSS_TYPES) and len(table()) >= 9
