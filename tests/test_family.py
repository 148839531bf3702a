"""GSPO, CISPO, dynamic sampling, learning rate schedules, and the table of docs/family.md.

The table says by which flags each algorithm is made.
"""

import itertools
import math
import re
import shlex
import statistics
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import (
    ROOT,
    FixedDistribution,
    LettersEvaluator,
    as_flags,
    assert_same_gradient,
    assert_same_log_row,
    assert_same_run,
    assert_same_transcript,
    closed_port,
    fixed_sample,
    gradients,
    in_place_of_sample,
    logps_of,
    loss_of,
    make_difficult,
    one_token_batch,
    ragged_batch,
    random_model,
    rollout_of,
    run_flags,
    start,
    training_rollout,
    update_gradient,
)
from sampling.rollout import Rollout
from training.checks import check
from training.run import resolve
from training.schedule import learning_rate_of

import distributed
import evaluator
import llms
import main
import utils
from config import GRPOConfig, LossConfig, parse
from grpo import jsonl
from losses import LOSSES

CLIPRANGE = 0.1
CLIPRANGE_HIGH = 0.15
# (loss_type, length_normalization) as their papers have them, and CISPO with GRPO's mean
PAPERS = [("gspo", "masked_mean"), ("cispo", "masked_mean"), ("cispo", "token_mean")]


def float64_loss_of_paper(model, batch, old_logps, loss_type, length_normalization):
    """GSPO's (arXiv:2507.18071) or CISPO's (arXiv:2506.13585) loss in float64, and its gradient.

    One row at a time, unpadded, in plain Python sums.
    """
    model = model.double()
    C = batch["completion_ids"].shape[1]
    losses_of_sequences = []  # of each sequence with a reward, the losses of its tokens
    for b in range(len(old_logps)):
        advantage = batch["advantages"][b].double()
        if advantage.isnan():
            continue
        num_tokens = int(batch["attention_mask"][b, -C:].sum())
        ids = batch["prompt_completion_ids"][b][batch["attention_mask"][b].bool()]
        log_probs = model(ids[None]).logits[0, -num_tokens - 1 : -1].log_softmax(-1)
        policy = []
        old = []
        for t in range(num_tokens):
            if batch["completion_mask"][b, t]:
                policy.append(log_probs[t][ids[len(ids) - num_tokens + t]])
                old.append(old_logps[b, t].double())
        losses = []
        if loss_type == "gspo" and policy:
            log_ratios = [p - q for p, q in zip(policy, old, strict=True)]
            ratio = torch.exp(sum(log_ratios) / len(log_ratios))
            clipped_ratio = min(max(ratio, 1 - CLIPRANGE), 1 + CLIPRANGE_HIGH)
            losses = [-min(ratio * advantage, clipped_ratio * advantage)] * len(policy)
        elif loss_type == "cispo":
            for policy_logp, old_logp in zip(policy, old, strict=True):
                ratio = math.exp(policy_logp.item() - old_logp)
                losses.append(-min(ratio, 1 + CLIPRANGE_HIGH) * advantage * policy_logp)
        losses_of_sequences.append(losses)

    num_tokens = sum(len(losses) for losses in losses_of_sequences)
    loss = 0.0
    for losses in losses_of_sequences:
        denominator = num_tokens
        if length_normalization == "masked_mean":
            denominator = len(losses) * len(losses_of_sequences)
        if losses:
            loss = loss + sum(losses) / denominator
    gradient = gradients(model, loss)
    model.float()
    return loss.item(), gradient


def off_policy_batch(groups=3):
    """A difficult batch, and old log-probs with ratios below, inside and above the clip range.

    Returns:
        (batch, old log-probs (B, C))
    """
    batch = ragged_batch(groups)
    logps = logps_of(random_model(0), batch)
    old_logps = logps + 0.3 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(5))
    make_difficult(batch)
    old_logps[2] = -30.0  # row 2 is masked: its log-probs must not matter
    return batch, old_logps


def settings_of(loss_type, length_normalization):
    return dict(
        loss_type=loss_type,
        length_normalization=length_normalization,
        cliprange=CLIPRANGE,
        cliprange_high=CLIPRANGE_HIGH,
        beta=0.0,
    )


# --- the losses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss_type", "length_normalization"), PAPERS)
@pytest.mark.parametrize("group_size", [1, 4])  # the prompt shared by its group, and not
def test_loss_and_gradient_equal_the_float64_formula(
    loss_type, length_normalization, group_size, model
):
    batch, old_logps = off_policy_batch()
    expected, expected_gradient = float64_loss_of_paper(
        model, batch, old_logps, loss_type, length_normalization
    )
    loss, metrics = loss_of(
        model,
        None,
        batch,
        old_per_token_logps=old_logps,
        group_size=group_size,
        **settings_of(loss_type, length_normalization),
    )
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert_same_gradient(gradients(model, loss), expected_gradient)
    assert 0.1 < metrics["clip_fraction"] < 0.9


def one_update(loss_type, length_normalization, budget, model, batch, old_logps):
    """Loss and gradient of one update through accumulate_gradient, of this process's rows.

    budget: the greatest number of tokens of a micro-batch.
    """
    settings = settings_of(loss_type, length_normalization)
    config = parse(GRPOConfig, run_flags("unused", "unused", **settings, micro_batch_tokens=budget))
    my_rows = distributed.share(range(len(old_logps)))
    rollout = training_rollout(batch, config)
    C = rollout.completion_ids.shape[1]
    rollout = replace(rollout, old_logps=old_logps[my_rows, :C])
    metrics = update_gradient(model, None, rollout, config)
    gradient = [distributed.full_tensor(p.grad).double().flatten() for p in model.parameters()]
    model.zero_grad()
    return float(metrics["loss"]), torch.cat(gradient)


@pytest.mark.parametrize(("loss_type", "length_normalization"), PAPERS)
@pytest.mark.parametrize("budget", [10, 40, 10_000])
def test_micro_batches_change_nothing(budget, loss_type, length_normalization, model):
    batch, old_logps = off_policy_batch()
    expected, expected_gradient = float64_loss_of_paper(
        model, batch, old_logps, loss_type, length_normalization
    )
    loss, gradient = one_update(loss_type, length_normalization, budget, model, batch, old_logps)
    assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert_same_gradient(gradient, expected_gradient)


def gradient_of_policy_loss(loss_type, policy_logps, advantage, mask):
    """Losses (B, C), metadata, and the gradient (B, C) of the losses' sum over the mask.

    The old log-probs are 0, so that a token's ratio is the exponential of its log-prob.
    """
    advantages = torch.full((len(policy_logps), 1), float(advantage))
    old_logps = torch.zeros_like(policy_logps)
    config = main.LossConfig(cliprange=CLIPRANGE, cliprange_high=CLIPRANGE_HIGH)
    losses, metadata = LOSSES[loss_type](advantages, policy_logps, old_logps, mask, config)
    (gradient,) = torch.autograd.grad(utils.masked_sum(losses, mask), policy_logps)
    return losses, metadata, gradient


# Sequences of mean log-ratio log 0.8, log 1.05 and log 1.3, whose tokens' ratios lie on both sides
# of 1. The last token is masked.
MEAN_LOG_RATIOS = torch.tensor([[0.8], [1.05], [1.3]]).log()
LOG_RATIOS = MEAN_LOG_RATIOS + torch.tensor([[0.5, -0.2, -0.3, 7.0]])
QUADRANTS_MASK = torch.tensor([[True, True, True, False]]).expand(3, 4)


@pytest.mark.parametrize(
    ("advantage", "has_gradient"), [(1, [True, True, False]), (-1, [False, True, True])]
)
def test_the_clip_of_gspo_stops_whole_sequences(advantage, has_gradient):
    """has_gradient: of the sequences below, inside and above the clip range."""
    policy_logps = LOG_RATIOS.clone().requires_grad_()
    _, metadata, gradient = gradient_of_policy_loss("gspo", policy_logps, advantage, QUADRANTS_MASK)
    has_gradient = torch.tensor(has_gradient).unsqueeze(1) & QUADRANTS_MASK
    expected = -advantage * MEAN_LOG_RATIOS.exp() * has_gradient
    torch.testing.assert_close(gradient, expected)
    clipped = metadata["clip_fraction"]
    assert torch.equal(clipped[QUADRANTS_MASK], ~has_gradient[QUADRANTS_MASK])
    assert (gradient[:, 3] == 0).all()


@pytest.mark.parametrize("advantage", [1, -1])
def test_cispo_caps_the_weight_and_stops_no_gradient(advantage):
    policy_logps = LOG_RATIOS.clone().requires_grad_()
    _, metadata, gradient = gradient_of_policy_loss(
        "cispo", policy_logps, advantage, QUADRANTS_MASK
    )
    ratio = LOG_RATIOS.exp()
    capped_ratio = ratio.clamp(max=1 + CLIPRANGE_HIGH)
    torch.testing.assert_close(gradient, -advantage * capped_ratio * QUADRANTS_MASK)
    is_capped = ratio > 1 + CLIPRANGE_HIGH
    assert torch.equal(metadata["clip_fraction"][QUADRANTS_MASK], is_capped[QUADRANTS_MASK])
    assert (gradient[QUADRANTS_MASK] != 0).all()
    assert (gradient[:, 3] == 0).all()


@pytest.mark.parametrize("advantage", [1, -1])
def test_the_clip_of_grpo_stops_tokens(advantage):
    policy_logps = LOG_RATIOS.clone().requires_grad_()
    _, metadata, gradient = gradient_of_policy_loss(
        "grpo_clip", policy_logps, advantage, QUADRANTS_MASK
    )
    ratio = LOG_RATIOS.exp()
    is_clipped = ratio > 1 + CLIPRANGE_HIGH if advantage > 0 else ratio < 1 - CLIPRANGE
    torch.testing.assert_close(gradient, -advantage * ratio * ~is_clipped * QUADRANTS_MASK)
    assert torch.equal(metadata["clip_fraction"][QUADRANTS_MASK], is_clipped[QUADRANTS_MASK])
    assert (gradient[:, 3] == 0).all()


@pytest.mark.parametrize("loss_type", ["gspo", "cispo"])
def test_a_row_without_tokens_is_finite_and_clips_nothing(loss_type):
    policy_logps = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[True] * 3, [False] * 3])
    losses, metadata, gradient = gradient_of_policy_loss(loss_type, policy_logps, 1, mask)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()
    assert not metadata["clip_fraction"].any()


@pytest.mark.parametrize(
    ("cliprange_high", "weight"), [(None, 1.2), (0.3, 1.3), (4.0, math.exp(0.5))]
)
def test_the_cap_of_cispo_is_one_plus_cliprange_by_default(cliprange_high, weight):
    policy_logps = torch.tensor([[0.5]], requires_grad=True)
    advantages = torch.ones(1, 1)
    old_logps = torch.zeros(1, 1)
    mask = torch.ones(1, 1, dtype=torch.bool)
    config = main.LossConfig(cliprange=0.2, cliprange_high=cliprange_high)
    loss, _ = LOSSES["cispo"](advantages, policy_logps, old_logps, mask, config)
    (gradient,) = torch.autograd.grad(loss.sum(), policy_logps)
    assert gradient.item() == pytest.approx(-weight)
    assert loss.item() == pytest.approx(-0.5 * weight)


@pytest.mark.parametrize(("loss_type", "length_normalization"), PAPERS)
def test_on_policy_gradient_is_that_of_grpo_clip(loss_type, length_normalization, model):
    batch, _ = off_policy_batch()
    loss, _ = loss_of(model, None, batch, **settings_of(loss_type, length_normalization))
    grpo_loss, _ = loss_of(model, None, batch, **settings_of("grpo_clip", length_normalization))
    assert_same_gradient(gradients(model, loss), gradients(model, grpo_loss), 1e-6)


# GRPOTrainer._compute_loss of TRL 1.16.0 made these numbers of these log-probs, and of the
# advantages of 3 sequences, with epsilon 0.1 and epsilon_high 0.15. Its other settings:
#   GRPO            loss_type "grpo", beta 0.04
#   GRPO on-policy  the same, without old log-probs
#   Dr. GRPO        loss_type "dr_grpo", beta 0.04, max_completion_length 4
#   DAPO's mean     loss_type "dapo", beta 0.04
#   GSPO            loss_type "grpo", beta 0, importance_sampling_level "sequence"
#   CISPO           loss_type "cispo", beta 0, epsilon_high 1.28: TRL's is the cap itself, and ours
#                   is what it is above 1
POLICY = [[-1.0, -0.5, -2.0, -0.3], [-0.7, -1.2, -0.4, -9.0], [-0.9, -0.2, -9.0, -9.0]]
OLD = [[-1.4, -0.4, -2.6, -0.5], [-0.2, -1.3, -0.9, -3.0], [-0.6, -0.8, -3.0, -3.0]]
REFERENCE = [[-1.2, -0.3, -1.5, -0.9], [-1.0, -0.9, -0.6, -2.0], [-0.4, -0.5, -2.0, -2.0]]
MASK = [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]
ADVANTAGES = [1.5, -0.5, -1.0]


@dataclass(frozen=True)
class TrlResult:
    """What TRL computed, and the settings under which we must compute it too."""

    settings: dict[str, object]  # fields of LossConfig
    loss: float
    gradient: list[list[float]]  # (B, C)
    on_policy: bool = False


TRL = {
    "GRPO": TrlResult(
        settings=dict(beta=0.04),
        loss=0.1152011975646019,
        gradient=[
            [0.0006042309105396271, -0.1138426885008812, -0.002162403892725706, 0.001503961160779],
            [0.0011519191320985556, 0.05984345078468323, 0.09240126609802246, 0],
            [-0.004324807785451412, 0.3054143786430359, 0, 0],
        ],
    ),
    "GRPO on-policy": TrlResult(
        settings=dict(beta=0.04),
        on_policy=True,
        loss=0.0028754472732543945,
        gradient=[
            [-0.12439577281475067, -0.1257380098104477, -0.1271623969078064, -0.12349604070186615],
            [0.0567074753344059, 0.054000627249479294, 0.05636119842529297, 0],
            [0.1623418629169464, 0.1683945506811142, 0, 0],
        ],
    ),
    "Dr. GRPO": TrlResult(
        settings=dict(beta=0.04, length_normalization="masked_normalize", max_completion_length=4),
        loss=-0.16314385831356049,
        gradient=[
            [0.0006042309105396271, -0.1138426885008812, -0.002162403892725706, 0.001503961160779],
            [0.0008639392908662558, 0.04488259181380272, 0.06930094957351685, 0],
            [-0.002162403892725706, 0.15270718932151794, 0, 0],
        ],
    ),
    "DAPO's mean": TrlResult(
        settings=dict(beta=0.04, length_normalization="token_mean"),
        loss=-0.2175251543521881,
        gradient=[
            [0.0008056412916630507, -0.15179026126861572, -0.0028832056559622, 0.0020052813924849],
            [0.0011519191320985556, 0.05984345078468323, 0.09240126609802246, 0],
            [-0.0028832056559622288, 0.20360957086086273, 0, 0],
        ],
    ),
    "GSPO": TrlResult(
        settings=dict(beta=0.0, loss_type="gspo"),
        loss=-0.015406052581965923,
        gradient=[
            [0, 0, 0, 0],
            [0.05743861198425293, 0.05743861198425293, 0.05743861198425293, 0],
            [0.19363903999328613, 0.19363903999328613, 0, 0],
        ],
    ),
    "CISPO": TrlResult(
        settings=dict(
            beta=0.0, loss_type="cispo", length_normalization="token_mean", cliprange_high=0.28
        ),
        loss=0.548237144947052,
        gradient=[
            [-0.21333332359790802, -0.1508062481880188, -0.21333332359790802, -0.20356713235378265],
            [0.03369614854454994, 0.061398379504680634, 0.07111111283302307, 0],
            [0.08231314271688461, 0.14222222566604614, 0, 0],
        ],
    ),
}


@pytest.mark.parametrize("algorithm", TRL)
def test_numbers_of_trl(algorithm, monkeypatch):
    expected = TRL[algorithm]
    policy_logps = torch.tensor(POLICY, requires_grad=True)
    mask = torch.tensor(MASK)
    monkeypatch.setattr(
        main,
        "get_per_token_logps",
        lambda model, **kwargs: (policy_logps, torch.zeros_like(policy_logps)),
    )
    clip_range = dict(cliprange=0.1, cliprange_high=0.15)
    loss, _ = main.compute_loss(
        model=None,
        base_model=None,
        prompt_completion_ids=mask,  # there is no prompt
        completion_ids=mask,
        attention_mask=mask,
        completion_mask=mask,
        advantages=torch.tensor(ADVANTAGES),
        config=LossConfig(**(clip_range | expected.settings)),
        old_per_token_logps=None if expected.on_policy else torch.tensor(OLD),
        ref_per_token_logps=torch.tensor(REFERENCE),
    )
    (gradient,) = torch.autograd.grad(loss, policy_logps)
    assert loss.item() == pytest.approx(expected.loss, rel=1e-5)
    torch.testing.assert_close(gradient, torch.tensor(expected.gradient), rtol=1e-5, atol=1e-7)


def test_k3_has_the_value_of_one_kl_and_the_gradient_of_the_other():
    """Over all outcomes, each weighted by its constant probability, as samples weigh them."""
    policy = FixedDistribution(torch.tensor([1.2, 0.4, -0.3, -1.0]).double())
    reference = FixedDistribution(torch.tensor([0.1, 0.9, 0.6, 0.2]).double())
    logits = policy.layer.bias
    probabilities = logits.detach().softmax(-1)
    mean_kl = 0.0
    mean_loss = 0.0
    for outcome, probability in enumerate(probabilities):
        # The advantage is 0, so the loss is the KL alone.
        loss, metrics = loss_of(policy, reference, one_token_batch(outcome), beta=1.0)
        mean_kl += probability * metrics["kl"]
        mean_loss += probability * loss

    log_p = logits.log_softmax(-1)
    log_q = reference.layer.bias.detach().log_softmax(-1)
    kl_from_policy = (log_p.exp() * (log_p - log_q)).sum()  # KL(policy || reference)
    kl_from_reference = (log_q.exp() * (log_q - log_p)).sum()  # KL(reference || policy)

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    assert mean_kl.item() == pytest.approx(kl_from_policy.item(), rel=1e-6)
    torch.testing.assert_close(
        gradient(mean_loss), gradient(kl_from_reference), rtol=1e-5, atol=1e-6
    )
    assert (gradient(kl_from_policy) - gradient(kl_from_reference)).norm() > 0.1

    # Weighted by the ratio, the estimate has the gradient of the KL that it estimates.
    ratio = (log_p - log_p.detach()).exp()
    k3 = (log_q - log_p).exp() - (log_q - log_p) - 1
    weighted_k3 = (probabilities * ratio * k3).sum()
    torch.testing.assert_close(
        gradient(weighted_k3), gradient(kl_from_policy), rtol=1e-5, atol=1e-6
    )


# --- dynamic sampling -----------------------------------------------------------------------------


def has_equal_rewards(question):
    return zlib.crc32(question.encode()) % 2 == 0


class HalfEqual(LettersEvaluator):
    """Half of the questions reward all completions equally; some rewards are missing."""

    def compute_rewards(self, prompts, completions, answers):
        rewards = super().compute_rewards(prompts, completions, answers)
        is_equal = torch.tensor([[has_equal_rewards(prompt)] for prompt in prompts])
        is_missing = torch.tensor([[len(text) % 5 == 2] for text in completions])
        values = rewards.per_function.masked_fill(is_equal, 0.25).masked_fill(is_missing, torch.nan)
        return evaluator.Rewards(values, rewards.details)


class AllEqual(LettersEvaluator):
    """Every completion has the same reward."""

    def compute_rewards(self, prompts, completions, answers):
        rewards = super().compute_rewards(prompts, completions, answers)
        return evaluator.Rewards(torch.full_like(rewards.per_function, 0.25), rewards.details)


evaluator.EVALUATORS["half equal"] = HalfEqual
evaluator.EVALUATORS["all equal"] = AllEqual
DYNAMIC = dict(
    rollout_batch_size=32,
    group_size=4,
    evaluator="half equal",
    dynamic_sampling=3,
    num_train_iters=3,
)


def run_dynamic(model_folder, output, **flags):
    with in_place_of_sample(fixed_sample):
        return main.main(run_flags(model_folder, output, **DYNAMIC | flags))


def is_flat(records):
    """Whether the rewards of a group that are not missing are all equal, or fewer than two."""
    rewards = {record["reward"] for record in records if record["reward"] is not None}
    return len(rewards) < 2


def groups_of(records):
    """The records of a transcript in groups of 4."""
    return [records[i : i + 4] for i in range(0, len(records), 4)]


def flat_fraction(records):
    groups = groups_of(records)
    return sum(is_flat(group) for group in groups) / len(groups)


@dataclass
class DynamicRun:
    """A run with dynamic sampling, and what each of its updates was given."""

    folder: Path
    rollouts: list[Rollout]


@pytest.fixture(scope="module")
def dynamic_run(model_folder, tmp_path_factory):
    run = DynamicRun(tmp_path_factory.mktemp("dynamic") / "run", [])
    original = main.accumulate_gradient

    def record_update(model, base_model, rollout, *options):
        run.rollouts.append(rollout)
        return original(model, base_model, rollout, *options)

    with mock.patch.object(main, "accumulate_gradient", record_update):
        assert run_dynamic(model_folder, run.folder) == 0
    return run


def records_to_train_on(records):
    """The completions that an update must train on, worked out from its transcript.

    The first 8 groups are the first round. Of each later round, the groups follow in the order of
    those that they replace.
    """
    groups = groups_of(records[:32])
    new_groups = iter(groups_of(records[32:]))
    for _ in range(3):
        for i in [i for i, group in enumerate(groups) if is_flat(group)]:
            groups[i] = next(new_groups)
    assert next(new_groups, None) is None
    return list(itertools.chain(*groups))


def test_new_prompts_replace_groups_of_equal_rewards(dynamic_run):
    assert len(dynamic_run.rollouts) == 3
    for step, rollout in enumerate(dynamic_run.rollouts, start=1):
        records = jsonl.read(dynamic_run.folder / "rollouts" / f"step_{step:06d}.jsonl")
        trained = records_to_train_on(records)
        assert rollout.texts == [record["completion"] for record in trained]
        assert rollout.lengths.tolist() == [record["length"] for record in trained]
        assert rollout.has_reward.tolist() == [r["reward"] is not None for r in trained]
        advantages = torch.tensor([record["advantage"] or 0.0 for record in trained])
        assert torch.equal(rollout.advantages, advantages)
        flat_groups = [group for group in groups_of(records) if is_flat(group)]
        assert flat_groups
        for group in flat_groups:
            assert {record["advantage"] for record in group} <= {0, None}


def test_tokens_are_shown_of_the_group_that_is_trained_on(dynamic_run):
    """After replacements the rows of a rollout and the records of a transcript differ."""
    for step in (1, 2, 3):
        records = jsonl.read(dynamic_run.folder / "rollouts" / f"step_{step:06d}.jsonl")
        shown = [record for record in records if "tokens" in record]
        spreads = []
        for group in groups_of(records_to_train_on(records)):
            rewards = [record["reward"] for record in group if record["reward"] is not None]
            spreads.append(statistics.stdev(rewards) if len(rewards) > 1 else 0)
            if group == shown:
                shown_spread = spreads[-1]
        assert shown_spread == max(spreads)
        for record in shown:
            assert "".join(record["tokens"]["text"]) == record["completion"]
            assert len(record["tokens"]["change"]) == record["length"]


def test_rewards_are_logged_of_the_first_round_and_counts_of_all_rounds(dynamic_run):
    log = jsonl.read(dynamic_run.folder / "train_log.jsonl")
    assert len(log) == 3
    num_prompts = 0
    for row in log:
        records = jsonl.read(dynamic_run.folder / "rollouts" / f"step_{row['step']:06d}.jsonl")
        first_round = records[:32]
        rewards = [r["reward"] for r in first_round if r["reward"] is not None]
        mean_length = sum(record["length"] for record in first_round) / 32
        assert row["reward"] == pytest.approx(sum(rewards) / len(rewards))
        assert row["response_length"] == pytest.approx(mean_length)
        assert row["accuracy"] == sum(record["correct_strict"] for record in first_round) / 32
        assert row["zero_std_fraction"] == flat_fraction(first_round)

        trained = records_to_train_on(records)
        assert row["zero_std_fraction_trained"] == flat_fraction(trained)
        assert row["zero_std_fraction_trained"] < row["zero_std_fraction"]

        assert row["sampled_tokens"] == sum(record["length"] for record in records)
        assert row["sampled_tokens"] > 32 * row["response_length"]
        assert row["sampled_prompts"] == len(records) / 4
        assert row["sampled_prompts"] == len({record["id"] for record in records})
        num_prompts += row["sampled_prompts"]
    assert log[-1]["total_tokens"] == sum(row["sampled_tokens"] for row in log)
    checkpoint = dynamic_run.folder / "checkpoints" / "step_000003"
    state = torch.load(checkpoint / "trainer.pt", weights_only=True)
    assert state["train_loader"] == {"epoch": 0, "position": num_prompts}


def test_flat_groups_by_hand():
    nan = math.nan
    rewards = [
        [2.35, 2.35, 2.35],
        [1, 1, nan],
        [nan, 1, nan],
        [nan, nan, nan],
        [1, 2, nan],
        [-1, -1, 0],
    ]
    is_flat = main.flat_groups(torch.tensor(rewards).flatten(), 3)
    assert is_flat.tolist() == [True, True, True, True, False, False]


def test_rounds_are_bounded(model_folder, tmp_path):
    assert run_dynamic(model_folder, tmp_path, evaluator="all equal", num_train_iters=1) == 0
    (row,) = jsonl.read(tmp_path / "train_log.jsonl")
    assert row["sampled_prompts"] == (1 + 3) * 8
    assert row["zero_std_fraction_trained"] == 1


def test_without_dynamic_sampling_flat_groups_stay(model_folder, tmp_path):
    assert run_dynamic(model_folder, tmp_path, dynamic_sampling=0, num_train_iters=1) == 0
    (row,) = jsonl.read(tmp_path / "train_log.jsonl")
    assert "sampled_prompts" not in row
    assert "zero_std_fraction_trained" not in row
    assert row["zero_std_fraction"] > 0
    assert len(jsonl.read(tmp_path / "rollouts" / "step_000001.jsonl")) == 32


def test_rewards_without_a_baseline_are_replaced_too(model_folder, tmp_path, monkeypatch):
    rewards_of_updates = []

    def record_update(model, base_model, rollout, *options):
        rewards_of_updates.append(rollout.advantages.masked_fill(~rollout.has_reward, torch.nan))
        return {"loss": 0.0}

    monkeypatch.setattr(main, "split_into_updates", lambda args: [list(range(32))])
    monkeypatch.setattr(main, "accumulate_gradient", record_update)
    no_baseline = dict(loss_type="no_baseline", num_train_iters=1)
    run_dynamic(model_folder, tmp_path, **no_baseline, save_iterations=9, eval_iterations=9)
    (row,) = jsonl.read(tmp_path / "train_log.jsonl")
    (rewards,) = rewards_of_updates
    records = jsonl.read(tmp_path / "rollouts" / "step_000001.jsonl")
    logged_rewards = {record["reward"] for record in records}  # null where one is missing
    assert {None if math.isnan(r) else r for r in rewards.tolist()} <= logged_rewards
    flat_fraction_trained = main.flat_groups(rewards, 4).float().mean()
    assert flat_fraction_trained == row["zero_std_fraction_trained"]
    assert flat_fraction_trained < row["zero_std_fraction"]


@pytest.mark.slow
def test_a_run_that_ended_amid_replacements_goes_on_bit_for_bit(
    model_folder, tmp_path, monkeypatch
):
    """After an exception in the third iteration the loader and the random state go back."""
    settings = DYNAMIC | dict(
        num_train_iters=4, save_iterations=2, max_completion_length=9, lr_schedule="cosine"
    )
    undisturbed = run_flags(model_folder, tmp_path / "undisturbed", **settings)
    stopped = run_flags(model_folder, tmp_path / "stopped", **settings)
    assert main.main(undisturbed) == 0
    original = main.replace_flat_groups
    results = []

    def raise_after_the_third(*arguments):
        results.append(original(*arguments))
        if len(results) == 3:
            raise RuntimeError("a moment in the third iteration")
        return results[-1]

    monkeypatch.setattr(main, "replace_flat_groups", raise_after_the_third)
    assert main.main(stopped) == 1
    num_records = len(results[-1].records)
    assert num_records > 32, "the third iteration has drawn new prompts"
    monkeypatch.undo()
    assert main.main([*stopped, "--resume"]) == 0
    assert_same_run(tmp_path / "stopped", tmp_path / "undisturbed")


def assert_rows_replaced(rollout, rows, new):
    """rollout.replace(rows, new) has the new rows in those places and its own everywhere else."""
    merged = rollout.replace(rows, new)
    assert len(merged.texts) == len(rollout.texts)
    for i in range(len(rollout.texts)):
        expected = new.select([rows.index(i)]) if i in rows else rollout.select([i])
        row = merged.select([i])
        assert row.texts == expected.texts
        for name, column in vars(expected).items():
            if torch.is_tensor(column):
                assert torch.equal(getattr(row, name), column), name


def test_merged_rollouts_keep_every_row():
    """The replaced rows have fewer padding columns on both sides, or more."""
    wide = rollout_of(ragged_batch(seed=0))
    narrow = rollout_of(ragged_batch(seed=1))
    for rollout in (wide, narrow):
        rollout.sampled_logps = -rollout.completion_ids.float()
    narrow = narrow.select([0, 1, 7])
    wide.texts = list("abcdefghijkl")
    narrow.texts = list("xyz")
    assert_rows_replaced(wide, [1, 5, 6], narrow)
    assert_rows_replaced(narrow, [2, 0], wide.select([3, 4]))


# --- two processes --------------------------------------------------------------------------------


def run_as_one_of_two(model_folder, folder):
    """One of two processes: an update of each loss, and a run in which each replaces its groups."""
    distributed.init("cpu")
    distributed.finish = lambda code: code
    batch, old_logps = off_policy_batch(groups=4)
    results = []
    for loss_type, length_normalization in PAPERS:
        model = random_model(0)
        llms.shard(model)
        results.append(one_update(loss_type, length_normalization, 40, model, batch, old_logps))
    if distributed.is_main():
        torch.save(results, folder / "updates.pt")
    assert run_dynamic(model_folder, folder / "run") == 0


@pytest.fixture(scope="module")
def folder_of_two_processes(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    job = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(closed_port()))
    processes = []
    outputs = []
    for rank in range(2):
        process, output = start(run_as_one_of_two, model_folder, folder, RANK=str(rank), **job)
        processes.append(process)
        outputs.append(output)
    printed = [output.read() for output in outputs]
    for process in processes:
        process.join()
        assert process.exitcode == 0, printed
    return folder


@pytest.mark.slow
def test_two_processes_have_the_loss_and_gradient_of_one(folder_of_two_processes, model):
    batch, old_logps = off_policy_batch(groups=4)
    results = torch.load(folder_of_two_processes / "updates.pt")
    for (loss_type, length_normalization), result in zip(PAPERS, results, strict=True):
        loss, gradient = result
        expected, expected_gradient = float64_loss_of_paper(
            model, batch, old_logps, loss_type, length_normalization
        )
        assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert_same_gradient(gradient, expected_gradient)


@pytest.mark.slow
def test_two_processes_replace_the_groups_that_one_does(folder_of_two_processes, dynamic_run):
    folder = folder_of_two_processes / "run"
    log = jsonl.read(folder / "train_log.jsonl")
    expected_log = jsonl.read(dynamic_run.folder / "train_log.jsonl")
    for row, expected in zip(log, expected_log, strict=True):
        assert_same_log_row(row, expected)
    num_uneven = 0  # iterations in which the processes have different numbers of groups to replace
    for step in (1, 2, 3):
        transcript = f"rollouts/step_{step:06d}.jsonl"
        assert_same_transcript(folder / transcript, dynamic_run.folder / transcript)
        records = jsonl.read(dynamic_run.folder / transcript)
        num_uneven += flat_fraction(records[:16]) != flat_fraction(records[16:32])
    assert num_uneven > 0


# --- learning rates -------------------------------------------------------------------------------


def rates(num_steps, **flags):
    """The learning rate of each optimiser step, as a fraction of --learning_rate."""
    args = parse(GRPOConfig, as_flags(num_train_iters=num_steps, learning_rate=1, **flags))
    return [learning_rate_of(args, update) for update in range(num_steps)]


def test_schedules_by_hand():
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert rates(6, warmup_steps=0) == [1] * 6
    linear = [0.5, 1, 0.8, 0.6, 0.4, 0.2]
    assert rates(6, warmup_steps=2, lr_schedule="linear") == pytest.approx(linear)
    cosine = [0.5, 1] + [(1 + math.cos(math.pi * i / 5)) / 2 for i in (1, 2, 3, 4)]
    assert rates(6, warmup_steps=2, lr_schedule="cosine") == pytest.approx(cosine)
    assert rates(3, warmup_steps=9, lr_schedule="linear") == pytest.approx([1 / 9, 2 / 9, 3 / 9])


def test_a_schedule_counts_optimiser_steps(model_folder, tmp_path):
    """Two iterations of four updates; the log has the mean learning rate of an iteration."""
    four_updates = dict(num_train_iters=2, epochs_per_rollout_batch=2, train_batch_size=4)
    schedule = dict(warmup_steps=1, lr_schedule="linear")
    assert main.main(run_flags(model_folder, tmp_path, **four_updates, **schedule)) == 0
    logged = [row["learning_rate"] for row in jsonl.read(tmp_path / "train_log.jsonl")]
    first = (8 + 7 + 6 + 5) / 4 / 8
    second = (4 + 3 + 2 + 1) / 4 / 8
    assert logged == pytest.approx([1e-3 * first, 1e-3 * second])


def test_the_end_of_a_decay_may_not_move(model_folder, tmp_path, capsys):
    flags = run_flags(model_folder, tmp_path, num_train_iters=1, lr_schedule="cosine")
    assert main.main(flags) == 0
    assert main.main(["--output_dir", str(tmp_path), "--resume", "--num_train_iters", "2"]) == 2
    assert "--num_train_iters was 1, not 2" in capsys.readouterr().err


# --- the table ------------------------------------------------------------------------------------


def rows_of_table():
    """{name: its flags as the page has them} of each row of docs/family.md."""
    page = (ROOT / "docs" / "family.md").read_text("utf-8")
    return dict(re.findall(r"^\| ([^|]+) \|.*\| \[?`([@-].+?)`", page, re.M))


def table_of_algorithms():
    """{name: its flags as a list of text} of each row, with a recipe's flags in its place."""
    table = {}
    for name, command_line in rows_of_table().items():
        table[name] = []
        for word in command_line.split():
            if word.startswith("@"):
                recipe = (ROOT / word.removeprefix("@")).read_text("utf-8")
                table[name] += shlex.split(recipe, comments=True)
            else:
                table[name].append(word)
    return table


@pytest.mark.parametrize("name", table_of_algorithms())
def test_the_flags_of_each_algorithm_train(name, model_folder, tmp_path):
    """As they stand, but on a small model and with its sizes."""
    table_flags = table_of_algorithms()[name]
    model_and_data = as_flags(model_name=model_folder, dataset_name="arithmetic")
    args = parse(GRPOConfig, [*table_flags, *model_and_data])
    check(resolve(args))
    small = run_flags(
        model_folder,
        tmp_path / "run",
        group_size=min(4, args.group_size),
        train_batch_size=4,
        num_train_iters=1,
        warmup_steps=0,
        eval_iterations=100,
        save_iterations=100,
    )
    assert main.main([*table_flags, *small]) == 0
    (row,) = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert row["grad_norm"] > 0
    assert row["skipped_updates"] == 0


def test_every_loss_is_in_the_table():
    table = table_of_algorithms()
    losses = {parse(GRPOConfig, table_flags).loss_type for table_flags in table.values()}
    assert losses == set(LOSSES)
    assert len(table) >= 9


def test_every_recipe_is_in_the_table():
    """A recipe that is not there would not be tried either."""
    recipes = {f"@recipes/{path.name}" for path in (ROOT / "recipes").iterdir()}
    words = " ".join(rows_of_table().values()).split()
    assert recipes == {word for word in words if word.startswith("@")}
