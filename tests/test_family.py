"""GSPO and CISPO, TRL's numbers, and the table of docs/family.md.

The table says by which flags each algorithm is made.
"""

import math
import re
import shlex
from dataclasses import dataclass

import pytest
import torch
from conftest import (
    ROOT,
    FixedDistribution,
    assert_same_gradient,
    completions_of,
    flat_gradient,
    gradients,
    logps_of,
    loss_of,
    make_difficult,
    one_token_batch,
    ragged_batch,
    random_model,
    run_flags,
)

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
        old_logps=old_logps,
        group_size=group_size,
        **settings_of(loss_type, length_normalization),
    )
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert_same_gradient(gradients(model, loss), expected_gradient)
    assert 0.1 < metrics["clip_fraction"] < 0.9


@pytest.mark.parametrize(("loss_type", "length_normalization"), PAPERS)
@pytest.mark.parametrize("budget", [10, 40, 10_000])
def test_micro_batches_change_nothing(budget, loss_type, length_normalization, model):
    """budget: the greatest number of tokens of a micro-batch."""
    batch, old_logps = off_policy_batch()
    expected, expected_gradient = float64_loss_of_paper(
        model, batch, old_logps, loss_type, length_normalization
    )
    settings = settings_of(loss_type, length_normalization)
    config = LossConfig(group_size=4, mask_truncated_completions=True, **settings)
    completions = completions_of(batch)
    for completion, logps in zip(completions, old_logps.tolist(), strict=True):
        completion.old_logps = logps[: len(completion.ids)]
    metrics = main.accumulate_gradient(model, None, completions, config, budget)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert_same_gradient(flat_gradient(model), expected_gradient)


def gradient_of_policy_loss(loss_type, policy_logps, advantage, mask):
    """Losses (B, C), metadata, and the gradient (B, C) of the losses' sum over the mask.

    The old log-probs are 0, so that a token's ratio is the exponential of its log-prob.
    """
    advantages = torch.full((len(policy_logps), 1), float(advantage))
    old_logps = torch.zeros_like(policy_logps)
    config = LossConfig(cliprange=CLIPRANGE, cliprange_high=CLIPRANGE_HIGH)
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
    config = LossConfig(cliprange=0.2, cliprange_high=cliprange_high)
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
        old_logps=None if expected.on_policy else torch.tensor(OLD),
        ref_logps=torch.tensor(REFERENCE),
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
    small = run_flags(
        model_folder,
        tmp_path / "run",
        group_size=min(4, parse(GRPOConfig, table_flags).group_size),
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
    recipes = {
        f"@experiments/recipes/{path.name}" for path in (ROOT / "experiments/recipes").iterdir()
    }
    words = " ".join(rows_of_table().values()).split()
    assert recipes == {word for word in words if word.startswith("@")}
