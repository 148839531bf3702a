"""compute_loss against an independent float64 version, and what must not change it.

A test that needs compute_loss has a mark, stage1 to stage3: `make test-exercise` goes by these.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_same_gradient, gradients, ragged_batch, random_model

import main
import utils


def oracle(
    model,
    base_model,
    batch,
    *,
    loss_type="grpo_clip",
    beta=0.04,
    cliprange=0.2,
    cliprange_high=None,
    length_normalization="masked_mean",
    constant=None,
    old=None,
    temperature=1.0,
):
    """The loss of DESIGN's formula in float64: one row at a time, unpadded, no cache, no masks, plain Python sums."""
    model, base = copy.deepcopy(model).double(), copy.deepcopy(base_model).double()
    high = cliprange if cliprange_high is None else cliprange_high
    B, C = batch["completion_ids"].shape
    P = batch["prompt_completion_ids"].shape[1] - C
    per_sequence, tokens, sequences = [], 0, 0
    for b in range(B):
        A = batch["advantages"][b].double()
        if A.isnan():
            continue
        sequences += 1
        n = int(batch["attention_mask"][b, P:].sum())
        prompt = batch["prompt_completion_ids"][b, :P][batch["attention_mask"][b, :P].bool()]
        ids = torch.cat([prompt, batch["completion_ids"][b, :n]])

        policy, reference = (
            [
                row.log_softmax(-1)[i]
                for row, i in zip(
                    m(ids[None]).logits[0, -n - 1 : -1] / temperature, ids[-n:], strict=True
                )
            ]
            for m in (model, base)
        )
        terms = []
        for t in range(n):
            if not batch["completion_mask"][b, t]:
                continue
            before = policy[t].detach() if old is None else old[b, t].double()
            ratio = torch.exp(policy[t] - before)
            if loss_type == "grpo_clip":
                clipped = torch.clamp(ratio, 1 - cliprange, 1 + high)
                term = torch.minimum(ratio * A, clipped * A)
            elif loss_type == "grpo_no_clip":
                term = ratio * A
            else:  # the two REINFORCE forms differ in what is given as advantage
                term = policy[t] * A
            r = reference[t].detach() - policy[t]
            kl = torch.exp(r) - r - 1
            terms.append(-(term - beta * kl))
        tokens += len(terms)
        per_sequence.append(terms)
    if length_normalization == "masked_mean":
        loss = sum(sum(t) / len(t) for t in per_sequence if t) / sequences
    elif length_normalization == "masked_normalize":
        loss = sum(sum(t) / (constant or C) for t in per_sequence if t) / sequences
    else:
        loss = sum(sum(t) for t in per_sequence if t) / tokens
    return loss, gradients(model, loss)


def perturbed_old_logps(model, batch):
    """Old log-probs far enough from the policy's that every clip branch is taken."""
    C = batch["completion_ids"].shape[1]
    with torch.no_grad():
        logps = utils.get_per_token_logps(
            model, batch["prompt_completion_ids"], batch["attention_mask"], C
        )
    return logps + 0.4 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(5))


def difficult(batch):
    """Rows with no token in the loss (a truncated and masked one), and a row whose reward is missing."""
    batch["completion_mask"] = batch["completion_mask"].clone()
    batch["completion_mask"][[2, 9]] = 0
    batch["advantages"] = batch["advantages"].clone()
    batch["advantages"][5] = float("nan")
    return batch


@pytest.mark.stage1
def test_bare_call_equals_the_float64_formula(model, base_model, batch):
    loss, metrics = main.compute_loss(model, base_model, *batch.values())
    expected, expected_gradient = oracle(model, base_model, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradient(gradients(model, loss), expected_gradient)
    assert (
        metrics["kl"] > 0.01
        and metrics["response_length"] == batch["completion_mask"].sum(1).float().mean()
    )


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("rows", "length_normalization"),
    [pytest.param("plain", "masked_mean", marks=pytest.mark.stage2)]
    + [
        pytest.param("difficult", name, marks=pytest.mark.stage3)
        for name in utils.LENGTH_NORMALIZATIONS
    ],
)
@pytest.mark.parametrize("loss_type", main.LOSS_TYPES[:4])  # the others: tests/test_family.py
def test_every_form_equals_the_float64_formula(
    loss_type, rows, length_normalization, old, model, base_model
):
    """With the prompt shared by its group and without."""
    batch = ragged_batch() if rows == "plain" else difficult(ragged_batch())
    settings = dict(
        loss_type=loss_type,
        length_normalization=length_normalization,
        cliprange_high=0.28,
        beta=0.1,
    )
    settings |= dict(temperature=0.7)
    old_logps = perturbed_old_logps(model, batch) if old else None
    expected, expected_gradient = oracle(
        model, base_model, batch, **settings, old=old_logps, constant=9
    )
    for group_size in (1, 4):
        loss, _ = main.compute_loss(
            model,
            base_model,
            *batch.values(),
            **settings,
            group_size=group_size,
            old_per_token_logps=old_logps,
            normalization_constant=9,
        )
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
        assert_same_gradient(gradients(model, loss), expected_gradient)


@pytest.mark.stage1
def test_kl_uses_the_loss_reduction_and_is_zero_for_equal_models(model, base_model, batch):
    for normalization in utils.LENGTH_NORMALIZATIONS:
        same, metrics = main.compute_loss(
            model, model, *batch.values(), length_normalization=normalization
        )
        assert metrics["kl"] == pytest.approx(0, abs=1e-7)
        # With advantage 0 the loss is beta times the KL, so the KL must have been reduced as the loss was.
        still = batch | {"advantages": torch.zeros(12)}
        loss, metrics = main.compute_loss(
            model, base_model, *still.values(), length_normalization=normalization
        )
        assert loss.item() == pytest.approx(0.04 * metrics["kl"], rel=1e-6)


@pytest.mark.stage2
def test_no_reference_and_no_kl_metric_with_beta_zero(model, batch):
    loss, metrics = main.compute_loss(model, None, *batch.values(), beta=0.0)
    assert "kl" not in metrics and loss.requires_grad


@pytest.mark.stage2
def test_ratio_is_one_for_the_old_self(model, base_model, batch):
    """Given its own log-probs as old ones, the policy has ratio 1 and clips nothing."""
    C = batch["completion_ids"].shape[1]
    with torch.no_grad():
        old = utils.get_per_token_logps(
            model, batch["prompt_completion_ids"], batch["attention_mask"], C
        )
    _, metrics = main.compute_loss(model, base_model, *batch.values(), old_per_token_logps=old)
    for key in ("ratio_mean", "ratio_min", "ratio_max"):
        assert metrics[key] == pytest.approx(1, abs=1e-6)
    assert metrics["clip_fraction"] == 0


@pytest.mark.stage2
@pytest.mark.parametrize("loss_type", ["grpo_clip", "grpo_no_clip"])
@pytest.mark.parametrize("length_normalization", utils.LENGTH_NORMALIZATIONS)
def test_on_policy_gradient_is_reinforce_with_a_group_baseline(
    loss_type, length_normalization, model, batch
):
    settings = dict(beta=0.0, length_normalization=length_normalization)
    loss, _ = main.compute_loss(model, None, *batch.values(), loss_type=loss_type, **settings)
    reinforce, _ = main.compute_loss(
        model, None, *batch.values(), loss_type="reinforce_with_baseline", **settings
    )
    assert_same_gradient(gradients(model, loss), gradients(model, reinforce), 1e-6)


@pytest.mark.parametrize(
    ("A", "ratio", "has_gradient"),
    [
        (1, 1.3, False),
        (-1, 0.7, False),
        (1, 0.7, True),
        (-1, 1.3, True),
        (1, 1.1, True),
        (-1, 0.9, True),
    ],
)
def test_clip_in_all_quadrants(A, ratio, has_gradient):
    """The clip only stops steps that go further in the direction in which they would improve the objective."""
    old = torch.tensor([[-1.0]])
    policy = (old + torch.tensor(ratio).log()).requires_grad_()
    loss, clipped = main.compute_grpo_clip_loss(torch.tensor([[float(A)]]), policy, old, 0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), policy)
    assert (gradient.item() != 0) == has_gradient
    assert clipped["clip_fraction"].item() == (not has_gradient)
    assert loss.item() == pytest.approx(-min(ratio * A, max(0.8, min(1.2, ratio)) * A))
    if has_gradient:
        assert gradient.item() == pytest.approx(-A * ratio)


def test_clip_range_high_moves_only_the_upper_bound():
    old, A = torch.zeros(1, 2), torch.tensor([[1.0]])
    policy = torch.tensor([[1.25, 0.75]]).log()
    _, narrow = main.compute_grpo_clip_loss(A, policy, old, 0.2)
    loss, wide = main.compute_grpo_clip_loss(A, policy, old, 0.2, 0.28)
    assert (
        narrow["clip_fraction_high"].tolist() == [[True, False]] and not wide["clip_fraction"].any()
    )
    assert loss.tolist() == [[pytest.approx(-1.25), pytest.approx(-0.75)]]


@pytest.mark.stage1
def test_expected_k3_is_the_true_kl():
    """Over all outcomes of a small distribution, weighted by the policy, the k3 estimates average to KL(p || q)."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    q = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    true_kl = (p * (p / q).log()).sum().item()

    class Fixed(
        torch.nn.Module
    ):  # hidden states are one-hot of nothing: the output layer's bias is the distribution
        is_activation_checkpointing = False

        def __init__(self, probabilities):
            super().__init__()
            self.layer = torch.nn.Linear(1, 4).double()
            self.layer.weight.data.zero_()
            self.layer.bias.data = probabilities.log()

        def get_output_embeddings(self):
            return self.layer

        def get_decoder(self):
            return lambda ids, **_: SimpleNamespace(
                last_hidden_state=torch.ones(*ids.shape, 1, dtype=torch.float64)
            )

    estimates = []
    for outcome in range(4):
        ids, ones = torch.tensor([[0, outcome]]), torch.ones(1, 2, dtype=torch.long)
        batch = ids, ids[:, 1:], ones, ones[:, 1:], torch.zeros(1)
        estimates.append(main.compute_loss(Fixed(p), Fixed(q), *batch)[1]["kl"])
    assert (p * torch.tensor(estimates, dtype=torch.float64)).sum().item() == pytest.approx(
        true_kl, rel=1e-6
    )
    assert min(estimates) >= 0


def shares(model, base_model, batch, pieces, group_size, **settings):
    """Sum of losses, gradients and metrics of compute_loss over pieces of a batch, as one update."""
    counted = ~batch["advantages"].isnan()
    denominators = dict(
        num_sequences=int(counted.sum()), num_tokens=int(batch["completion_mask"][counted].sum())
    )
    losses, total, metrics = [], 0, {}
    for rows, size in pieces:
        piece = {key: value[rows] for key, value in batch.items()}
        loss, part = main.compute_loss(
            model,
            base_model,
            *piece.values(),
            group_size=size,
            normalization_constant=9,
            **denominators,
            **settings,
        )
        losses.append(loss.item())
        total = total + gradients(model, loss)
        for key, value in part.items():
            metrics[key] = metrics.get(key, 0) + value
    return sum(losses), total, metrics


@pytest.mark.stage3
@pytest.mark.parametrize(
    ("loss_type", "length_normalization"),
    [
        ("grpo_clip", "masked_mean"),
        ("grpo_clip", "masked_normalize"),
        ("no_baseline", "token_mean"),
    ],
)
def test_gradient_and_metrics_do_not_depend_on_micro_batches_or_order(
    loss_type, length_normalization, model, base_model
):
    batch = difficult(ragged_batch())
    settings = dict(loss_type=loss_type, length_normalization=length_normalization)
    whole = shares(model, base_model, batch, [(list(range(12)), 4)], 4, **settings)
    splits = {
        "row by row": [([i], 1) for i in range(12)],
        "parts of groups": [(list(range(i, i + 2)), 2) for i in range(0, 12, 2)],
        "groups in another order": [([8, 9, 10, 11, 0, 1, 2, 3], 4), ([4, 5, 6, 7], 4)],
        "uneven": [([0, 1, 2], 3), ([3], 1), ([4, 5, 6, 7, 8, 9, 10, 11], 4)],
    }
    for name, pieces in splits.items():
        loss, gradient, metrics = shares(model, base_model, batch, pieces, 4, **settings)
        assert loss == pytest.approx(whole[0], rel=1e-5, abs=1e-7), name
        assert_same_gradient(gradient, whole[1])
        for key in ("kl", "entropy", "response_length", "ratio_mean"):
            assert metrics[key] == pytest.approx(whole[2][key], rel=1e-5), (name, key)


@pytest.mark.stage1
@pytest.mark.parametrize("group_size", [1, 4])
def test_padding_changes_nothing(group_size, model, base_model, batch):
    B = 12
    padded = dict(
        prompt_completion_ids=torch.nn.functional.pad(batch["prompt_completion_ids"], (5, 3)),
        completion_ids=torch.nn.functional.pad(batch["completion_ids"], (0, 3)),
        attention_mask=torch.nn.functional.pad(batch["attention_mask"], (5, 3)),
        completion_mask=torch.nn.functional.pad(batch["completion_mask"], (0, 3)),
        advantages=batch["advantages"],
    )
    garbage = torch.randint(2, 40, (B, 21))  # what lies under the mask must not matter either
    padded["prompt_completion_ids"] = torch.where(
        padded["attention_mask"].bool(), padded["prompt_completion_ids"], garbage
    )
    expected, _ = main.compute_loss(model, base_model, *batch.values(), group_size=group_size)
    actual, _ = main.compute_loss(model, base_model, *padded.values(), group_size=group_size)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradient(gradients(model, actual), gradients(model, expected))


@pytest.mark.stage3
def test_masked_rows_add_exactly_zero_even_with_nan_inside(model, base_model, batch):
    """A masked row whose log-probs overflow must not poison the batch: 0 * inf is NaN, a `where` is 0."""
    batch["completion_mask"][3] = 0
    old = torch.zeros(12, 7)
    old[3] = -torch.inf
    loss, _ = main.compute_loss(
        model, base_model, *batch.values(), old_per_token_logps=old, loss_type="grpo_no_clip"
    )
    assert loss.isfinite()
    everything_masked = batch | {"completion_mask": torch.zeros(12, 7, dtype=torch.long)}
    loss, metrics = main.compute_loss(model, base_model, *everything_masked.values())
    assert loss.item() == 0 and gradients(model, loss).abs().max() == 0
    assert metrics["response_length"] == 0


@pytest.mark.stage3
def test_masked_and_empty_rows_stay_in_the_denominator_and_missing_rewards_leave_it(
    model, base_model, batch
):
    full, _ = main.compute_loss(model, base_model, *batch.values())
    only = {key: value[:6] for key, value in batch.items()}
    first, _ = main.compute_loss(model, base_model, *only.values())
    masked = batch | {"completion_mask": batch["completion_mask"].clone()}
    masked["completion_mask"][6:] = 0
    half, _ = main.compute_loss(model, base_model, *masked.values())
    assert half.item() == pytest.approx(first.item() / 2, rel=1e-5)
    missing = batch | {"advantages": batch["advantages"].clone()}
    missing["advantages"][6:] = float("nan")
    alone, _ = main.compute_loss(model, base_model, *missing.values())
    assert alone.item() == pytest.approx(first.item(), rel=1e-5) and full.item() != first.item()


@pytest.mark.stage3
def test_importance_cap_weights_the_policy_term_by_the_truncated_ratio(model, batch):
    C = batch["completion_ids"].shape[1]
    with torch.no_grad():
        policy = utils.get_per_token_logps(
            model, batch["prompt_completion_ids"], batch["attention_mask"], C
        )
    settings = dict(beta=0.0, loss_type="reinforce_with_baseline")
    plain, _ = main.compute_loss(model, None, *batch.values(), **settings)
    for gap, weight in (
        (-0.3, torch.tensor(0.3).exp().item()),
        (-5.0, 2.0),
        (0.3, torch.tensor(-0.3).exp().item()),
    ):
        loss, metrics = main.compute_loss(
            model,
            None,
            *batch.values(),
            **settings,
            sampled_per_token_logps=policy + gap,
            importance_cap=2.0,
        )
        assert loss.item() == pytest.approx(plain.item() * weight, rel=1e-5)
        assert metrics["sampling_logp_gap"] == pytest.approx(abs(gap), rel=1e-5)


# --- advantages -----------------------------------------------------------------------------------


def test_group_normalization_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 4.0, 6.0, 8.0])
    advantages, metadata = main.compute_group_normalized_rewards(rewards, 4, 0.0, True)
    # mean 1/2, unbiased variance 1/3; mean 5, unbiased variance 20/3
    expected = [0.5 * 3**0.5, -0.5 * 3**0.5] + [-0.5 * 3**0.5, 0.5 * 3**0.5]
    expected += [x / (20 / 3) ** 0.5 for x in (-3, -1, 1, 3)]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-6)
    assert metadata["reward"] == pytest.approx(22 / 8) and metadata["zero_std_fraction"] == 0
    assert metadata["reward_std"] == pytest.approx(((1 / 3) ** 0.5 + (20 / 3) ** 0.5) / 2)
    centred, _ = main.compute_group_normalized_rewards(rewards, 4, 0.0, False)
    assert centred.tolist() == [0.5, -0.5, -0.5, 0.5, -3, -1, 1, 3]
    with_eps, _ = main.compute_group_normalized_rewards(rewards[:4], 4, 1.0, True)
    assert with_eps[0].item() == pytest.approx(0.5 / ((1 / 3) ** 0.5 + 1))


def test_equal_rewards_have_advantage_exactly_zero():
    """Six float32 rewards of 2.35 have a rounding residue in mean and std: eps 1e-6 turned it into -0.189."""
    advantages, metadata = main.compute_group_normalized_rewards(
        torch.full((6,), 2.35), 6, 1e-6, True
    )
    assert advantages.tolist() == [0.0] * 6 and metadata["zero_std_fraction"] == 1


def test_missing_rewards_leave_the_mean_and_std():
    nan = float("nan")
    rewards = torch.tensor([1.0, nan, 3.0, nan, nan, nan, 5.0, nan, nan, nan, nan, nan])
    advantages, metadata = main.compute_group_normalized_rewards(rewards, 4, 0.0, True)
    root = 0.5**0.5  # (1, 3): mean 2, unbiased std sqrt 2
    assert advantages[[0, 2, 6]].tolist() == pytest.approx([-root, root, 0.0])
    assert advantages.isnan().tolist() == rewards.isnan().tolist()
    assert metadata["reward"] == pytest.approx(3.0)


def test_advantages_do_not_depend_on_the_order_of_groups():
    rewards = torch.randn(20, generator=torch.Generator().manual_seed(0))
    order = [3, 0, 4, 1, 2]
    shuffled = rewards.view(5, 4)[order].reshape(-1)
    expected = main.compute_group_normalized_rewards(rewards, 4)[0].view(5, 4)[order].reshape(-1)
    assert torch.equal(main.compute_group_normalized_rewards(shuffled, 4)[0], expected)


# --- log-probs and micro-batches ------------------------------------------------------------------


def test_logps_are_float32_log_softmax_of_the_plain_forward(model, batch):
    ids, mask = batch["prompt_completion_ids"], batch["attention_mask"]
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    logits = (
        model(ids, attention_mask=mask, position_ids=position_ids).logits[:, -8:-1].double() / 0.5
    )
    expected = (
        logits.log_softmax(-1).gather(-1, ids[:, -7:, None]).squeeze(-1) * batch["completion_mask"]
    )
    probabilities = logits.softmax(-1)
    entropy = -(probabilities * probabilities.log()).sum(-1) * batch["completion_mask"]
    for group_size in (1, 4):
        actual, actual_entropy = utils.get_per_token_logps(
            model, ids, mask, 7, group_size=group_size, temperature=0.5, return_entropy=True
        )
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(actual_entropy.double(), entropy, rtol=1e-5, atol=2e-5)


@pytest.mark.stage3
@pytest.mark.parametrize("chunk", [1, 200, 2**24])
def test_chunks_of_logits_change_nothing(chunk, model, base_model, batch, monkeypatch):
    expected, _ = main.compute_loss(model, base_model, *batch.values())
    expected_gradient = gradients(model, expected)
    monkeypatch.setattr(utils, "LOGITS_CHUNK", chunk)
    loss, _ = main.compute_loss(model, base_model, *batch.values(), group_size=4)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradient(gradients(model, loss), expected_gradient)


@pytest.mark.stage3
def test_gradient_checkpointing_changes_nothing(model, base_model, batch):
    """Transformers drops the cache of a checkpointed model with only a warning, so its prompt must not be shared."""
    expected, _ = main.compute_loss(model, base_model, *batch.values(), group_size=4)
    expected_gradient = gradients(model, expected)
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    loss, _ = main.compute_loss(model, base_model, *batch.values(), group_size=4)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradient(gradients(model, loss), expected_gradient)


def test_entropy_by_hand_and_stable():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1000.0, 0.0, 0.0, 0.0], [1e4, 1e4, -1e4, -1e4]])
    expected = torch.tensor([4.0, 1.0, 2.0]).log()
    torch.testing.assert_close(utils.compute_entropy(logits), expected)


def test_micro_batches_hold_every_row_once_within_budget():
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 30, (10,), generator=generator).repeat_interleave(4).tolist()
    completions = torch.randint(1, 20, (40,), generator=generator).tolist()
    for budget in (1, 25, 60, 150, 10_000):
        pieces = utils.split_into_micro_batches(prompts, completions, 4, budget)
        assert sorted(sum(pieces, [])) == list(range(40))
        for rows in pieces:
            groups = sorted({i // 4 for i in rows}, key=[i // 4 for i in rows].index)
            whole = [4 * g + i for g in groups for i in range(4)]
            assert rows == whole or len(groups) == 1, "whole groups, or a part of one"
            P, C = max(prompts[i] for i in rows), max(completions[i] for i in rows)
            tokens = len(groups) * P + len(rows) * C
            assert tokens <= budget or len(rows) == 1, (budget, tokens, rows)
    assert len(pieces) == 1


def test_masked_reductions_by_hand():
    values = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert utils.masked_mean(values, mask).item() == 1.5
    assert utils.masked_mean(values, mask, dim=1).tolist()[0] == 1.5
    assert utils.masked_mean(values, mask, dim=1)[1].isnan()
    assert utils.masked_normalize(values, mask, 7.0, dim=1).tolist() == pytest.approx([3 / 7, 0])


def test_handout_example_of_length_normalization():
    """CS336 A5, section 7: ratios 1, advantage 2, masks of 4 and 7 ones, constant 7."""
    ratio = torch.ones(2, 7, requires_grad=True)
    advantages = torch.tensor([[2.0], [2.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1] * 7])
    mean = utils.masked_mean(ratio * advantages, mask, dim=1)
    normalized = utils.masked_normalize(ratio * advantages, mask, 7, dim=1)
    assert mean.tolist() == [2.0, 2.0] and normalized.tolist() == pytest.approx([8 / 7, 2.0])
    (gradient,) = torch.autograd.grad(mean.mean(), ratio)
    assert gradient[0].tolist() == pytest.approx([0.25] * 4 + [0] * 3)
    assert gradient[1].tolist() == pytest.approx([1 / 7] * 7)
    (gradient,) = torch.autograd.grad(normalized.mean(), ratio)
    assert gradient[0].tolist() == pytest.approx([1 / 7] * 4 + [0] * 3)
    assert gradient[1].tolist() == pytest.approx([1 / 7] * 7)


def test_random_model_is_not_uniform():
    """The other tests would prove little on a model whose every distribution is the same."""
    logits = random_model()(torch.tensor([[3, 4, 5]])).logits
    assert utils.compute_entropy(logits).max() < 3.6  # log 48 = 3.87
