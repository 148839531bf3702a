"""GSPO and CISPO, TRL's numbers, and the table of losses in docs/tuning.md."""

import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_flags

import main
from config import GRPOConfig, LossConfig, parse
from grpo import jsonl
from losses import LOSSES

CLIPRANGE = 0.1
CLIPRANGE_HIGH = 0.15


def gradient_of_policy_loss(loss_type, policy_logps, advantage, mask):
    """The clip mask, and the gradient of the sum of the losses, (B, C) each.

    The old log-probs are 0, so that a token's ratio is the exponential of its log-prob.
    """
    advantages = torch.full((len(policy_logps), 1), float(advantage))
    old_logps = torch.zeros_like(policy_logps)
    config = LossConfig(cliprange=CLIPRANGE, cliprange_high=CLIPRANGE_HIGH)
    policy_logps = policy_logps.clone().requires_grad_()
    losses, masks = LOSSES[loss_type](advantages, policy_logps, old_logps, mask, config)
    (gradient,) = torch.autograd.grad(losses[mask].sum(), policy_logps)
    return masks["clip_fraction"], gradient


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
    clipped, gradient = gradient_of_policy_loss("gspo", LOG_RATIOS, advantage, QUADRANTS_MASK)
    has_gradient = torch.tensor(has_gradient).unsqueeze(1) & QUADRANTS_MASK
    expected = -advantage * MEAN_LOG_RATIOS.exp() * has_gradient
    torch.testing.assert_close(gradient, expected)
    assert torch.equal(clipped[QUADRANTS_MASK], ~has_gradient[QUADRANTS_MASK])


@pytest.mark.parametrize("advantage", [1, -1])
def test_cispo_caps_the_weight_and_stops_no_gradient(advantage):
    capped, gradient = gradient_of_policy_loss("cispo", LOG_RATIOS, advantage, QUADRANTS_MASK)
    ratio = LOG_RATIOS.exp()
    capped_ratio = ratio.clamp(max=1 + CLIPRANGE_HIGH)
    torch.testing.assert_close(gradient, -advantage * capped_ratio * QUADRANTS_MASK)
    assert torch.equal(capped, ratio > 1 + CLIPRANGE_HIGH)


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


# --- the table ------------------------------------------------------------------------------------


def table_of_algorithms():
    """{name: its flags as a list of text} of each row of the table in docs/tuning.md."""
    page = (ROOT / "docs" / "tuning.md").read_text("utf-8")
    section = page.partition("## The family of losses")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \|.*\| `([@-].+?)`", section, re.M)
    return {name: command_line.split() for name, command_line in rows}


@pytest.mark.parametrize("name", table_of_algorithms())
def test_the_flags_of_each_algorithm_train_off_policy(name, model_folder, tmp_path, monkeypatch):
    """As they stand, but on a small model and with its sizes."""
    monkeypatch.chdir(ROOT)  # where recipes are
    table_flags = table_of_algorithms()[name]
    small = run_flags(
        model_folder,
        tmp_path / "run",
        group_size=min(4, parse(GRPOConfig, table_flags).group_size),
        train_batch_size=4,
        num_train_iters=1,
        max_completion_length=40,  # DAPO masks what is cut off
        warmup_steps=0,
        eval_iterations=100,
        save_iterations=100,
    )
    assert main.main([*table_flags, *small]) == 0
    (row,) = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert row["grad_norm"] > 0
    assert row["ratio_mean"] != 1
    assert row["skipped_updates"] == 0


def test_every_loss_and_every_recipe_is_in_the_table(monkeypatch):
    """One that is not there would not be tried."""
    monkeypatch.chdir(ROOT)
    table = table_of_algorithms()
    losses = {parse(GRPOConfig, table_flags).loss_type for table_flags in table.values()}
    assert losses == set(LOSSES)
    recipes = {f"@{path}" for path in Path("experiments/recipes").iterdir()}
    words = set(chain(*table.values()))
    assert recipes == {word for word in words if word.startswith("@")}
