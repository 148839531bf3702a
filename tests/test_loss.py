"""compute_loss against an independent float64 version, and what must not change it."""

import copy
import math
import random
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    assert_same_gradient,
    completions_of,
    flat_gradient,
    gradients,
    logps_of,
    loss_of,
    ragged_batch,
    unpadded_logps,
)

import main
import utils
from config import LossConfig
from grpo.rollout import Completion, micro_batches
from losses import LENGTH_NORMALIZATIONS, LOSSES, clip_range, estimate_kl


def float64_grpo_loss(
    model,
    base_model,
    batch,
    *,
    loss_type="grpo_clip",
    beta=0.04,
    cliprange_high=0.2,
    length_normalization="masked_mean",
    max_completion_length=None,
    old_logps=None,
    temperature=1.0,
):
    """Equation 3 of the GRPO paper (arXiv:2402.03300) in float64, and its gradient.

    One row at a time, unpadded and without a cache, in plain Python sums. Other losses and
    means are those of the papers that losses.py names.
    """
    model = copy.deepcopy(model).double()
    base_model = copy.deepcopy(base_model).double()
    highest = 1 + cliprange_high
    B, C = batch["completion_ids"].shape
    losses_of_sequences = []  # of each sequence with a reward, the losses of its tokens
    for b in range(B):
        advantage = batch["advantages"][b].double()
        if advantage.isnan():
            continue
        ids = batch["prompt_completion_ids"][b][batch["attention_mask"][b].bool()]
        num_tokens = int(batch["attention_mask"][b, -C:].sum())
        policy_logps = unpadded_logps(model, ids, num_tokens, temperature)
        ref_logps = unpadded_logps(base_model, ids, num_tokens, temperature)
        old = [logp.detach() for logp in policy_logps]
        if old_logps is not None:
            old = old_logps[b, :num_tokens].double()
        ratios = [torch.exp(policy_logps[t] - old[t]) for t in range(num_tokens)]
        if loss_type == "gspo":
            ratios = [torch.prod(torch.stack(ratios)) ** (1 / num_tokens)] * num_tokens
        token_losses = []
        for t, ratio in enumerate(ratios):
            if loss_type in ("grpo_clip", "gspo"):
                clipped_ratio = torch.clamp(ratio, 0.8, highest)
                policy_term = torch.minimum(ratio * advantage, clipped_ratio * advantage)
            elif loss_type == "grpo_no_clip":
                policy_term = ratio * advantage
            elif loss_type == "cispo":
                policy_term = min(ratio.item(), highest) * advantage * policy_logps[t]
            else:  # both REINFORCE losses: advantages holds rewards for "no_baseline"
                policy_term = policy_logps[t] * advantage
            log_ratio = ref_logps[t].detach() - policy_logps[t]
            kl = torch.exp(log_ratio) - log_ratio - 1
            token_losses.append(-(policy_term - beta * kl))
        is_masked = not batch["completion_mask"][b].any()
        losses_of_sequences.append([] if is_masked else token_losses)

    num_sequences = len(losses_of_sequences)
    num_tokens_of_update = sum(len(losses) for losses in losses_of_sequences)
    loss = 0.0
    for losses in losses_of_sequences:
        denominator = {
            "masked_mean": len(losses) * num_sequences,
            "masked_normalize": (max_completion_length or C) * num_sequences,
            "token_mean": num_tokens_of_update,
        }[length_normalization]
        if losses:
            loss = loss + sum(losses) / denominator
    return loss, gradients(model, loss)


def perturbed_old_logps(model, batch, temperature):
    """Old log-probs far enough from the policy's that every branch of the clip is taken."""
    logps = logps_of(model, batch, temperature)
    return logps + 0.4 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(5))


# None of these is a default.
SETTINGS = dict(max_completion_length=9, cliprange_high=0.28, beta=0.1, temperature=0.7)


@pytest.mark.parametrize("length_normalization", LENGTH_NORMALIZATIONS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_equals_the_float64_formula(loss_type, length_normalization, model, base_model):
    """An off-policy update, of which two rows are masked and one has no reward.

    The update is split at four budgets, so that rows get more or less padding, the least of which
    shares no prompt; and its groups come in another order.
    """
    batch = ragged_batch(groups=4)
    batch["completion_mask"][[2, 9]] = 0
    batch["advantages"][5] = torch.nan
    batch["advantages"][12:] = 0  # equal rewards: such a group has its KL still
    settings = SETTINGS | dict(loss_type=loss_type, length_normalization=length_normalization)
    old_logps = perturbed_old_logps(model, batch, SETTINGS["temperature"])
    expected, expected_gradient = float64_grpo_loss(
        model, base_model, batch, old_logps=old_logps, **settings
    )
    completions = completions_of(batch)
    for completion, logps in zip(completions, old_logps.tolist(), strict=True):
        completion.old_logps = logps[: len(completion.ids)]
    expected_metrics, _ = one_update(model, base_model, completions, 10_000, **settings)
    if "clip_fraction" in expected_metrics:
        assert 0.1 < expected_metrics["clip_fraction"] < 0.9
    in_another_order = completions[8:] + completions[:8]
    for budget in (10, 20, 40, 10_000):
        metrics, gradient = one_update(model, base_model, in_another_order, budget, **settings)
        assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
        assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6), budget
        assert_same_gradient(gradient, expected_gradient)


def one_update(model, base_model, completions, budget, **settings):
    """(metrics, gradient) of an update in groups of 4, in which truncated rows are masked.

    budget: the greatest number of tokens of a micro-batch.
    """
    config = LossConfig(group_size=4, mask_truncated_completions=True, **settings)
    metrics = main.accumulate_gradient(model, base_model, completions, config, budget)
    gradient = flat_gradient(model)
    model.zero_grad()
    return metrics, gradient


def test_kl_uses_the_loss_reduction(model, base_model, batch):
    # With advantage 0 the loss is beta times the KL, reduced as the loss is.
    kl_alone = batch | {"advantages": torch.zeros(12)}
    for normalization in LENGTH_NORMALIZATIONS:
        loss, metrics = loss_of(model, base_model, kl_alone, length_normalization=normalization)
        assert loss.item() == pytest.approx(0.04 * metrics["kl"], rel=1e-6)


def test_ratio_is_one_for_the_old_self(model, base_model, batch):
    """Given its own log-probs as old ones, the policy has ratio 1 and clips nothing."""
    old_logps = logps_of(model, batch)
    _, metrics = loss_of(model, base_model, batch, old_logps=old_logps)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["clip_fraction"] == 0


@pytest.mark.parametrize("loss_type", ["grpo_clip", "grpo_no_clip", "gspo", "cispo"])
def test_on_policy_gradient_is_reinforce_with_a_group_baseline(loss_type, model, batch):
    loss, metrics = loss_of(model, None, batch, loss_type=loss_type, beta=0.0)
    reinforce, _ = loss_of(model, None, batch, loss_type="reinforce_with_baseline", beta=0.0)
    assert_same_gradient(gradients(model, loss), gradients(model, reinforce), 1e-6)
    assert "kl" not in metrics


@pytest.mark.parametrize(
    ("advantage", "ratio", "stopped"),
    [
        (1, 1.3, "high"),
        (-1, 0.7, "low"),
        (1, 0.7, None),
        (-1, 1.3, None),
        (1, 1.22, None),  # the range is 0.8 to 1.25
        (-1, 0.81, None),
        (-1, 0.78, "low"),
    ],
)
def test_clip_in_all_quadrants(advantage, ratio, stopped):
    """The clip only stops steps that go further in the direction that improves the objective."""
    old_logps = torch.tensor([[-1.0]])
    policy_logps = (old_logps + torch.tensor(ratio).log()).requires_grad_()
    advantages = torch.tensor([[float(advantage)]])
    mask = torch.ones(1, 1, dtype=torch.bool)
    config = LossConfig(cliprange=0.2, cliprange_high=0.25)
    loss, clipped = LOSSES["grpo_clip"](advantages, policy_logps, old_logps, mask, config)
    (gradient,) = torch.autograd.grad(loss.sum(), policy_logps)
    clipped_ratio = max(0.8, min(1.25, ratio))
    assert loss.item() == pytest.approx(-min(ratio * advantage, clipped_ratio * advantage))
    assert gradient.item() == pytest.approx(0.0 if stopped else -advantage * ratio)
    assert clipped["clip_fraction"].item() == (stopped is not None)
    assert clipped["clip_fraction_low"].item() == (stopped == "low")
    assert clipped["clip_fraction_high"].item() == (stopped == "high")
    assert clip_range(LossConfig(cliprange=0.3)) == pytest.approx((0.7, 1.3))


def test_k3_has_the_value_of_one_kl_and_the_gradient_of_the_other():
    """Over all outcomes, each weighted by its constant probability, as samples weigh them."""
    logits = torch.tensor([1.2, 0.4, -0.3, -1.0], dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(-1)
    log_q = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64).log()
    kl_from_policy = (log_p.exp() * (log_p - log_q)).sum()  # KL(policy || reference)
    kl_from_reference = (log_q.exp() * (log_q - log_p)).sum()  # KL(reference || policy)
    estimates = estimate_kl(log_p, log_q)
    mean_estimate = (log_p.exp().detach() * estimates).sum()
    assert estimates.min() >= 0
    assert mean_estimate.item() == pytest.approx(kl_from_policy.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(mean_estimate, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(kl_from_reference, logits)
    torch.testing.assert_close(gradient, expected)


def loss_of_the_task_sheet(
    model,
    base_model,
    prompt_completion_ids,
    completion_ids,
    attention_mask,
    completion_mask,
    advantages,
):
    """The steps of the interview's first task, with the default settings."""
    C = completion_ids.shape[1]
    policy_logps = utils.get_per_token_logps(model, prompt_completion_ids, attention_mask, C)
    with torch.inference_mode():
        ref_logps = utils.get_per_token_logps(base_model, prompt_completion_ids, attention_mask, C)
    kl = torch.exp(ref_logps - policy_logps) - (ref_logps - policy_logps) - 1
    ratio = torch.exp(policy_logps - policy_logps.detach())
    per_token_loss = -ratio * advantages.unsqueeze(1) + 0.04 * kl
    lengths = completion_mask.sum(1)
    loss = ((per_token_loss * completion_mask).sum(1) / lengths).mean()
    mean_kl = ((kl * completion_mask).sum(1) / lengths).mean()
    return loss, {"kl": mean_kl.item(), "response_length": lengths.float().mean().item()}


def test_the_task_sheets_loss_trains_with_the_same_gradient(model, base_model):
    """In several micro-batches. Rows without a reward and masked rows must not give 0 / 0."""
    batch = ragged_batch(groups=4)
    batch["advantages"][[5, 12, 13, 14, 15]] = torch.nan
    batch["completion_mask"][[2, 9]] = 0
    completions = completions_of(batch)
    expected_metrics, expected_gradient = one_update(model, base_model, completions, 10_000)

    def call(*arguments, **_):
        return loss_of_the_task_sheet(*arguments[:7])

    for budget in (10, 40, 10_000):
        with mock.patch.object(main, "compute_loss", call):
            metrics, gradient = one_update(model, base_model, completions, budget)
        assert gradient.isfinite().all()
        assert_same_gradient(gradient, expected_gradient)
        for name in ("loss", "kl"):
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5), name


def test_a_loss_that_adds_to_the_advantage_keeps_its_gradient(model, batch):
    """Groups of equal rewards are left out only for the losses in ZERO_WITHOUT_ADVANTAGE."""

    def with_bonus(advantages, policy_logps, old_logps, mask, config):
        return -(advantages + 0.1) * policy_logps, {}

    batch["advantages"][:8] = 0
    settings = dict(loss_type="with_bonus", beta=0.0)
    with mock.patch.dict(LOSSES, with_bonus=with_bonus):
        loss, _ = loss_of(model, None, batch, **settings)
        metrics, gradient = one_update(model, None, completions_of(batch), 40, **settings)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_same_gradient(gradient, gradients(model, loss))


@pytest.mark.parametrize("loss_type", LOSSES)
def test_masked_rows_add_exactly_zero_even_with_nan_inside(loss_type, model, base_model, batch):
    """A masked row whose ratio overflows must not spoil the batch: 0 * inf is NaN."""
    batch["completion_mask"][:] = 0
    loss, metrics = loss_of(model, base_model, batch, loss_type=loss_type)
    assert gradients(model, loss).abs().max() == 0
    assert metrics["response_length"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
    old_logps = torch.full((12, 7), -torch.inf)
    loss, _ = loss_of(model, base_model, batch, old_logps=old_logps, loss_type=loss_type)
    assert loss.item() == 0


@pytest.mark.parametrize(
    ("gap", "weight"), [(-0.3, math.exp(0.3)), (-5.0, 2.0), (0.3, math.exp(-0.3))]
)
def test_importance_cap_weights_the_policy_term_by_the_truncated_ratio(
    gap, weight, model, base_model, batch
):
    """The ratio has no gradient, and the KL no weight.

    gap: by how much the sampler's log-probs exceed the policy's.
    """
    settings = dict(loss_type="reinforce_with_baseline")
    plain, _ = loss_of(model, None, batch, beta=0.0, **settings)
    kl, _ = loss_of(model, base_model, batch | {"advantages": torch.zeros(12)}, **settings)
    settings |= dict(sampled_logps=logps_of(model, batch) + gap, importance_cap=2.0)
    loss, metrics = loss_of(model, base_model, batch, **settings)
    assert loss.item() == pytest.approx(plain.item() * weight + kl.item(), rel=1e-5)
    expected_gradient = weight * gradients(model, plain) + gradients(model, kl)
    assert_same_gradient(gradients(model, loss), expected_gradient)
    assert metrics["sampling_logp_gap"] == pytest.approx(abs(gap), rel=1e-5)


# --- log-probs and micro-batches ------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [1, 4])
def test_logps_are_float32_log_softmax_of_the_plain_forward(group_size, model, batch):
    ids = batch["prompt_completion_ids"]
    attention_mask = batch["attention_mask"]
    completion_mask = batch["completion_mask"]
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    output = model(ids, attention_mask=attention_mask, position_ids=position_ids)
    log_probs = (output.logits[:, -8:-1].double() / 0.5).log_softmax(-1)  # (B, C, V)
    targets = ids[:, -7:].unsqueeze(-1)  # (B, C, 1)
    expected = log_probs.gather(-1, targets).squeeze(-1) * completion_mask
    expected_entropy = -(log_probs.exp() * log_probs).sum(-1) * completion_mask
    settings = dict(group_size=group_size, temperature=0.5, return_entropy=True)
    logps, entropy = utils.get_per_token_logps(model, ids, attention_mask, 7, **settings)
    assert logps.dtype == torch.float32
    torch.testing.assert_close(logps.double(), expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=2e-5)


def test_gradient_checkpointing_changes_nothing(model, base_model, batch):
    """Transformers drops a checkpointed model's cache with only a warning.

    The prompt must not be shared then.
    """
    expected, _ = loss_of(model, base_model, batch)
    expected_gradient = gradients(model, expected)
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    loss, _ = loss_of(model, base_model, batch, group_size=4)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradient(gradients(model, loss), expected_gradient)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_gradient_of_the_output_layer_is_that_of_plain_log_softmax(is_frozen, monkeypatch):
    """With a frozen output layer it comes out of the forward pass; both in several chunks."""
    monkeypatch.setattr(utils, "LOGITS_CHUNK", 3 * 11)
    torch.manual_seed(0)
    states = torch.randn(8, 5, requires_grad=True)
    weight = torch.randn(11, 5, requires_grad=not is_frozen)
    bias = torch.randn(11, requires_grad=not is_frozen)
    token_ids = torch.randint(11, (8,))
    grad_logps = torch.randn(8)

    logps, entropy = utils._ChunkedLogps.apply(states, weight, bias, token_ids, 0.7, True)
    plain_logps = (F.linear(states, weight, bias) / 0.7).log_softmax(-1)
    expected = plain_logps[torch.arange(8), token_ids]
    torch.testing.assert_close(logps, expected)
    torch.testing.assert_close(entropy, -(plain_logps.exp() * plain_logps).sum(-1).detach())
    inputs = [states] if is_frozen else [states, weight, bias]
    torch.testing.assert_close(
        torch.autograd.grad(logps, inputs, grad_logps),
        torch.autograd.grad(expected, inputs, grad_logps),
    )


def test_output_layer_leaves_autocast_and_tensorfloat_as_they_were():
    """TensorFloat-32 must end with the output layer: it would round the rotary frequencies."""
    settings = torch.backends.cuda.matmul
    precision = settings.fp32_precision
    torch.set_autocast_enabled("cuda", True)  # torch.autocast would do nothing without a GPU
    try:
        with utils._float32_products():
            assert settings.fp32_precision == "tf32"
            assert not torch.is_autocast_enabled("cuda")
        assert settings.fp32_precision == precision
        assert torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_logits_are_float32_under_autocast():
    states, weight = torch.randn(3, 8), torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        logits = utils.compute_logits(states, weight, None, 0.5)
    torch.testing.assert_close(logits, F.linear(states, weight) / 0.5)


@pytest.mark.parametrize("budget", [1, 25, 60, 150, 10_000])
def test_micro_batches_hold_every_completion_once_within_budget(budget):
    generator = random.Random(0)
    groups = []
    for size in [4] * 10 + [3]:
        prompt = [0] * generator.randint(3, 30)
        lengths = [generator.randint(1, 20) for _ in range(size)]
        groups.append([Completion(prompt, [0] * length) for length in lengths])
    batches = micro_batches(groups, budget)
    held = sorted(id(completion) for batch in batches for part in batch for completion in part)
    assert held == sorted(id(completion) for group in groups for completion in group)
    for batch in batches:
        assert len({len(part) for part in batch}) == 1
        C = max(len(completion.ids) for part in batch for completion in part)
        P = max(len(part[0].prompt_ids) for part in batch)
        num_completions = len(batch) * len(batch[0])
        assert num_completions * C <= budget or num_completions == 1
        assert len(batch) * P <= budget or len(batch) == 1
    assert budget < 10_000 or len(batches) == 2


def test_prompts_count_in_micro_batches_where_none_is_shared():
    """They once came on top of the budget, in groups of one as well."""
    groups = [[Completion([0] * P, [0] * C)] for P, C in [(30, 5), (20, 6), (10, 7)]]
    assert micro_batches(groups, max_tokens=72) == [groups[:2], groups[2:]]
    assert micro_batches(groups, max_tokens=111) == [groups]


def test_a_token_that_cannot_come_leaves_the_entropy_finite():
    """Its logit is minus infinity; the others have probabilities 1/2."""
    bias = torch.tensor([0.0, 0.0, -torch.inf])
    arguments = (torch.zeros(1, 4), torch.zeros(3, 4), bias, torch.tensor([1]), 1.0, True)
    logps, entropy = utils._ChunkedLogps.apply(*arguments)
    assert logps.item() == pytest.approx(-math.log(2))
    assert entropy.item() == pytest.approx(math.log(2))
