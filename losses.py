"""The loss of a token, with one function for each paper; the KL estimate; the means over tokens.

The functions of LOSSES have one signature, and so have those of LENGTH_NORMALIZATIONS.

Shapes: B sequences, C completion tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from utils import import_from_file, masked_sum

# --- The loss of each token -----------------------------------------------------------------------
# They leave out the KL and the importance weight, which compute_loss adds.
# advantages are (B, 1). policy_logps, old_logps and mask are (B, C); the mask is true on the tokens
# that count. config has the attributes cliprange and cliprange_high; without a cliprange_high of
# its own (None), the clip is as wide above as below.

# The loss of each token (B, C), and boolean masks (B, C) by name. The fraction of tokens at which a
# mask is true is logged under its name.
TokenLoss = tuple[Tensor, dict[str, Tensor]]


def grpo_clip(advantages, policy_logps, old_logps, mask, config) -> TokenLoss:
    """Minus the ratio times the advantage, with PPO's clip (GRPO, arXiv:2402.03300)."""
    ratio = (policy_logps - old_logps).exp()
    return clipped_loss(ratio, advantages, config)


def grpo_no_clip(advantages, policy_logps, old_logps, mask, config) -> TokenLoss:
    """Like grpo_clip, without the clip (an ablation)."""
    ratio = (policy_logps - old_logps).exp()
    return -ratio * advantages, {}


def reinforce_with_baseline(advantages, policy_logps, old_logps, mask, config) -> TokenLoss:
    """Minus the log-probability times the advantage (REINFORCE with a baseline, Williams 1992).

    The baseline is the group's mean reward.
    """
    return -advantages * policy_logps, {}


def no_baseline(rewards, policy_logps, old_logps, mask, config) -> TokenLoss:
    """Minus the log-probability times the reward (REINFORCE).

    rewards: (B, 1), which the caller passes in the place of advantages.
    """
    return -rewards * policy_logps, {}


def gspo(advantages, policy_logps, old_logps, mask, config) -> TokenLoss:
    """Like grpo_clip, with one ratio for a whole completion (GSPO, arXiv:2507.18071).

    It is the geometric mean of the ratios of the completion's tokens.
    """
    log_ratio = policy_logps - old_logps
    length = mask.sum(1, keepdim=True).clamp(min=1)
    mean_log_ratio = masked_sum(log_ratio, mask, dim=1).unsqueeze(1) / length  # (B, 1)
    ratio = mean_log_ratio.exp().expand_as(log_ratio)  # every token has that of its sequence
    return clipped_loss(ratio, advantages, config)


def cispo(advantages, policy_logps, old_logps, mask, config) -> TokenLoss:
    """Like reinforce_with_baseline, weighted by the capped ratio (CISPO, arXiv:2506.13585).

    The ratio is taken as a constant. It has no gradient, so the cap stops no token's gradient.
    """
    ratio = (policy_logps - old_logps).exp().detach()
    _, cap = clip_range(config)
    loss = -ratio.clamp(max=cap) * advantages * policy_logps
    return loss, {"clip_fraction": ratio > cap}


LOSSES = {
    "grpo_clip": grpo_clip,
    "grpo_no_clip": grpo_no_clip,
    "reinforce_with_baseline": reinforce_with_baseline,
    "no_baseline": no_baseline,
    "gspo": gspo,
    "cispo": cispo,
}

# Those that have no gradient where the advantage is 0, so that groups of equal rewards need not run
# if there is no KL term either. A loss that is not named here gets every group.
ZERO_WITHOUT_ADVANTAGE = (
    "grpo_clip",
    "grpo_no_clip",
    "reinforce_with_baseline",
    "no_baseline",
    "gspo",
    "cispo",
)


def find_loss(name: str) -> Callable[..., TokenLoss]:
    """A function of LOSSES, or one of your own, by FILE.py:NAME. Raises ValueError."""
    if ":" in name:
        return import_from_file(name, "--loss_type")
    if name not in LOSSES:
        raise ValueError(f"--loss_type {name}: choose from {', '.join(LOSSES)}, or FILE.py:NAME")
    return LOSSES[name]


def try_loss(config) -> None:
    """Call a loss of your own once. Raises ValueError, in one line, for one that cannot be used."""
    if ":" not in config.loss_type:
        find_loss(config.loss_type)
        return
    logps = torch.zeros(2, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)
    try:
        loss, _ = find_loss(config.loss_type)(torch.ones(2, 1), logps, logps, mask, config)
    except Exception as error:  # whatever the user's code raises
        raise ValueError(f"--loss_type {config.loss_type} fails with {error!r}") from error
    if loss.shape != logps.shape:
        raise ValueError(
            f"--loss_type {config.loss_type} must return a value for each token, (B, C), not"
            f" {tuple(loss.shape)} for (2, 3)"
        )


def clipped_loss(ratio: Tensor, advantages: Tensor, config) -> TokenLoss:
    """PPO's clipped objective (arXiv:1707.06347): -min(ratio A, clip(ratio, lowest, highest) A).

    The clip stops the gradient of a token whose ratio has already left the range in the direction
    in which the advantage pushes it.
    """
    lowest, highest = clip_range(config)
    clipped_ratio = ratio.clamp(lowest, highest)
    loss = -torch.min(ratio * advantages, clipped_ratio * advantages)
    stopped_low = (ratio < lowest) & (advantages < 0)
    stopped_high = (ratio > highest) & (advantages > 0)
    return loss, {
        "clip_fraction": stopped_low | stopped_high,
        "clip_fraction_low": stopped_low,
        "clip_fraction_high": stopped_high,
    }


def clip_range(config) -> tuple[float, float]:
    """The lowest and the highest ratio that the clip leaves as it is."""
    high = config.cliprange if config.cliprange_high is None else config.cliprange_high
    return 1 - config.cliprange, 1 + high


def estimate_kl(policy_logps: Tensor, ref_logps: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference) for each token, in nats. (B, C) -> (B, C).

    It is never negative, but for rounding, and its mean over samples of the policy is the KL
    (http://joschu.net/blog/kl-approx.html). Its gradient is (1 - p_ref / p) grad log p. Over
    samples of the policy the mean of that is -E_ref[grad log p], the gradient of KL(reference ||
    policy).
    """
    log_ratio = ref_logps - policy_logps
    return log_ratio.exp() - log_ratio - 1


# --- The mean over tokens -------------------------------------------------------------------------
# --length_normalization chooses one. Each averages per_token (B, C) over its batch, to a scalar.
# Where an update has several batches, main.accumulate_gradient weights each by its share of the
# update's sequences, or for token_mean of its tokens.


def mean_over_each_sequence(per_token, mask, config) -> Tensor:
    """The mean over each completion's tokens, then over completions (GRPO, arXiv:2402.03300)."""
    lengths = mask.sum(1).clamp(min=1)
    return (masked_sum(per_token, mask, dim=1) / lengths).mean()


def sum_over_constant(per_token, mask, config) -> Tensor:
    """Like mean_over_each_sequence, but divided by a constant (Dr. GRPO, arXiv:2503.20783).

    --max_completion_length takes the place of each completion's length, so that every token has the
    same weight.
    """
    return (masked_sum(per_token, mask, dim=1) / config.max_completion_length).mean()


def mean_over_all_tokens(per_token, mask, config) -> Tensor:
    """The mean over all tokens at once (DAPO, arXiv:2503.14476)."""
    return masked_sum(per_token, mask) / mask.sum().clamp(min=1)


LENGTH_NORMALIZATIONS = {
    "masked_mean": mean_over_each_sequence,
    "masked_normalize": sum_over_constant,
    "token_mean": mean_over_all_tokens,
}
