"""Log-probs and masks, and what they stand on: micro-batches, seeds, precision.

Shapes: B sequences, G group size, P prompt tokens, C completion tokens, T = P + C, H hidden size, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, set_seed

import distributed

Item = TypeVar("Item")

# Logits are made for this many (token, vocabulary) pairs at a time: 32 MiB in float32.
LOGITS_CHUNK = 2**23
# Completions run in this many parts of similar length.
LENGTH_BUCKETS = 4


# --- Log-probabilities ----------------------------------------------------------------------------


def get_per_token_logps(
    model: torch.nn.Module,
    prompt_completion_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    *,
    group_size: int = 1,
    temperature: float = 1.0,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each completion token under softmax(logits / temperature), in float32.

    Args:
        prompt_completion_ids, attention_mask: (B, T), prompts left-padded, completions right-padded.
        logits_to_keep: C, the number of completion columns.
        group_size: G consecutive rows share their prompt, which is then run only once for them. Fewer rows than that
            are a part of one group.
        return_entropy: also return the entropy in nats of each token's distribution, without gradient.

    Returns:
        (B, C) log-probs, exactly 0 where the attention mask is 0; with return_entropy a pair of (B, C).
    """
    compute = (
        model.per_token_logps if distributed.is_sharded(model) else partial(per_token_logps, model)
    )  # llms.shard
    return compute(
        prompt_completion_ids,
        attention_mask,
        logits_to_keep,
        group_size,
        temperature,
        return_entropy,
    )


def per_token_logps(
    model, ids, attention_mask, logits_to_keep, group_size, temperature, return_entropy
):
    """get_per_token_logps of a model whose embedding, norm and output layer are whole."""
    B, T = ids.shape
    group_size = min(group_size, B)
    assert attention_mask.shape == (B, T), (attention_mask.shape, (B, T))
    assert 0 < logits_to_keep < T and B % group_size == 0, (logits_to_keep, T, B, group_size)

    hidden = _completion_hidden_states(model, ids, attention_mask, logits_to_keep, group_size)
    real = attention_mask[:, -logits_to_keep:].bool()  # (B, C)
    states = hidden[real]  # (N, H): padding never meets the output layer
    targets = ids[:, -logits_to_keep:][real]  # (N,)

    layer = model.get_output_embeddings()
    logps, entropy = _ChunkedLogps.apply(
        states, layer.weight, layer.bias, targets, temperature, return_entropy
    )

    def scatter(values):  # (N,) back to (B, C)
        return torch.zeros(real.shape, device=states.device).masked_scatter(real, values)

    return (scatter(logps), scatter(entropy)) if return_entropy else scatter(logps)


class _ChunkedLogps(torch.autograd.Function):
    """Log-probs of targets, and entropies, from states (N, H); only LOGITS_CHUNK logits exist at a time.

    The backward pass makes each chunk's logits again: d log p(target) / d logits = onehot(target) - p. Written out,
    since autograd would hold two gradients of the output layer, (V, H) each, while it adds up the chunks.
    """

    @staticmethod
    @partial(torch.amp.custom_fwd, device_type="cuda")
    def forward(ctx, states, weight, bias, targets, temperature, with_entropy):
        ctx.save_for_backward(states, weight, bias, targets)
        ctx.temperature = temperature
        logps, entropy = (torch.zeros(len(states), device=states.device) for _ in range(2))
        for rows in _chunks(len(states), len(weight)):
            logits = F.linear(states[rows], weight, bias).float() / temperature  # (n, V)
            logps[rows] = logits.gather(-1, targets[rows].unsqueeze(-1)).squeeze(
                -1
            ) - logits.logsumexp(-1)
            if with_entropy:
                entropy[rows] = compute_entropy(logits)
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    @partial(torch.amp.custom_bwd, device_type="cuda")
    def backward(ctx, grad_logps, _):
        states, weight, bias, targets = ctx.saved_tensors
        grad_states = torch.zeros_like(states)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for rows in _chunks(len(states), len(weight)):
            logits = F.linear(states[rows], weight, bias).float() / ctx.temperature
            grad_logits = logits.softmax(-1).neg_()
            grad_logits[torch.arange(len(logits), device=logits.device), targets[rows]] += 1
            grad_logits = grad_logits.mul_((grad_logps[rows] / ctx.temperature).unsqueeze(-1)).to(
                weight.dtype
            )
            grad_states[rows] = (grad_logits @ weight).to(states.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.T, states[rows].to(weight.dtype))
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return grad_states, grad_weight, grad_bias, None, None, None


def _chunks(n: int, vocabulary: int) -> list[slice]:
    """Slices of range(n) of so many rows that their logits have at most LOGITS_CHUNK elements."""
    size = max(1, LOGITS_CHUNK // vocabulary)
    return [slice(start, start + size) for start in range(0, n, size)]


def _completion_hidden_states(
    model, ids: Tensor, attention_mask: Tensor, C: int, group_size: int
) -> Tensor:
    """(B, C, H): the last hidden state before each completion token, which predicts that token."""
    P = ids.shape[1] - C
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)

    def run(rows, start, end, cache):  # the given columns, on top of those in the cache
        return model.get_decoder()(
            ids[rows, start:end],
            attention_mask=attention_mask[rows, :end],
            position_ids=position_ids[rows, start:end],
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state

    # Checkpointing drops the cache, so nothing can be shared. Sharded, every process runs a prompt and its completions
    # apart, in two passes whatever the size of its groups, since all must make equally many.
    sharded = distributed.is_sharded(model)
    if model.is_activation_checkpointing or (group_size == 1 and not sharded):
        return run(slice(None), 0, P + C, None)[:, P - 1 : -1]

    # The prompt once per group, with its keys and values kept in the graph; then only the completions, on top of it.
    # The cache has plain layers: a model's own would keep no more of a prompt than a sliding window, which begins
    # elsewhere for another token. Who is inside the window, the mask says.
    cache = DynamicCache()
    prompt = run(slice(None, None, group_size), 0, P, cache)
    assert cache.get_seq_length() == P, "the prompt pass filled no cache to share"
    hidden = prompt.new_zeros(len(ids), C, prompt.shape[-1])
    hidden[:, 0] = prompt[:, -1].repeat_interleave(group_size, dim=0)  # predicts the first token

    # Completions of similar length run together, so that little is padded.
    lengths = attention_mask[:, P:].sum(1)  # (B,)
    for rows in lengths.argsort().chunk(1 if sharded else LENGTH_BUCKETS):
        end = max(
            1, int(lengths[rows].max()) - 1
        )  # the last token predicts nothing; one at least: a pass for everyone
        own = (
            DynamicCache()
        )  # index_select: plain indexing adds gradients up in no fixed order on several threads
        for i, layer in enumerate(cache.layers):
            own.update(
                *(x.index_select(0, rows // group_size) for x in (layer.keys, layer.values)), i
            )
        hidden[rows, 1 : end + 1] = run(rows, P, P + end, own)[:, : C - 1]
    return hidden


def compute_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits), (..., V) -> (...): logsumexp(z) - sum_v p_v z_v, stable for any shift."""
    z = logits - logits.amax(-1, keepdim=True)
    return z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)


# --- Masked reductions ----------------------------------------------------------------------------


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of values where mask is true. `where`, not multiplication: a NaN or inf times 0 would be NaN."""
    return torch.where(mask.bool(), values, 0.0).sum(dim)


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean where mask is true, over the number of true entries; NaN where there is none."""
    return masked_sum(tensor, mask, dim) / mask.sum(dim)


def masked_normalize(
    tensor: Tensor, mask: Tensor, normalize_constant: float, dim: int | None = None
) -> Tensor:
    """Sum where mask is true, over a constant (Dr. GRPO, arXiv:2503.20783)."""
    return masked_sum(tensor, mask, dim) / normalize_constant


def aggregate_tokens(
    per_token: Tensor,
    mask: Tensor,
    length_normalization: str,
    constant: float,
    num_sequences: int,
    num_tokens: int,
) -> Tensor:
    """Sum of a per-token loss (B, C) over this call's tokens, divided as the update's mean asks; shares simply add.

    "masked_mean": mean over each sequence's own tokens, then over sequences (GRPO, arXiv:2402.03300).
    "masked_normalize": sum over tokens by a constant, then mean over sequences (Dr. GRPO, arXiv:2503.20783).
    "token_mean": mean over all tokens of the update (DAPO, arXiv:2503.14476).

    Args:
        num_sequences, num_tokens: those of the whole update, over all its micro-batches.
    """
    if length_normalization == "masked_mean":
        return (masked_sum(per_token, mask, dim=1) / mask.sum(1).clamp(min=1)).sum() / max(
            1, num_sequences
        )
    if length_normalization == "masked_normalize":
        return masked_normalize(per_token, mask, constant, dim=1).sum() / max(1, num_sequences)
    if length_normalization == "token_mean":
        return masked_sum(per_token, mask) / max(1, num_tokens)
    raise ValueError(
        f"unknown length_normalization {length_normalization!r}; known: {LENGTH_NORMALIZATIONS}"
    )


LENGTH_NORMALIZATIONS = ("masked_mean", "masked_normalize", "token_mean")


# --- Repeating examples ---------------------------------------------------------------------------


def repeat_each(items: Sequence[Item], times: int) -> list[Item]:
    """Every item as often as it has completions: [a, b] repeated twice is [a, a, b, b]."""
    return [item for item in items for _ in range(times)]


# --- Micro-batches --------------------------------------------------------------------------------


def split_into_micro_batches(
    prompt_lengths: list[int], completion_lengths: list[int], group_size: int, max_tokens: int
) -> list[list[int]]:
    """Group rows into micro-batches of at most max_tokens padded tokens, with a shared prompt counted once per group.

    Groups of similar length go together, so that little is padded; a group too long for the budget is cut into parts.

    Args:
        prompt_lengths, completion_lengths: one number per row; each group is group_size consecutive rows.

    Returns:
        lists of row numbers: whole groups, or a part of one.
    """
    groups = [list(range(i, i + group_size)) for i in range(0, len(prompt_lengths), group_size)]
    longest = {g[0]: max(1, max(completion_lengths[i] for i in g)) for g in groups}
    micro_batches, current, P, C = [], [], 0, 0
    for group in sorted(groups, key=lambda g: (longest[g[0]], prompt_lengths[g[0]])):
        p, c = prompt_lengths[group[0]], longest[group[0]]
        fitting = min(group_size, max(1, (max_tokens - p) // c))
        if fitting < group_size:
            micro_batches += [group[i : i + fitting] for i in range(0, group_size, fitting)]
            continue
        if (
            current
            and (len(current) // group_size + 1) * (max(P, p) + group_size * max(C, c)) > max_tokens
        ):
            micro_batches.append(current)
            current, P, C = [], 0, 0
        current, P, C = current + group, max(P, p), max(C, c)
    return [*micro_batches, current] if current else micro_batches


# --- Seeds and precision --------------------------------------------------------------------------


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (every device), each process with a stream of its own."""
    set_seed(distributed.process_seed(seed) % 2**32)  # NumPy takes no more


@contextmanager
def isolated_seed(seed: int) -> Iterator[None]:
    """Seed torch inside the block and restore its random state after it: evaluation must not disturb training."""
    with torch.random.fork_rng(devices=distributed.process_gpus()):
        torch.manual_seed(distributed.process_seed(seed))
        yield


def autocast(device: str | torch.device) -> AbstractContextManager:
    """bfloat16 autocast on CUDA, over float32 master weights; nothing elsewhere, or on a GPU without bfloat16."""
    half = torch.device(device).type == "cuda" and has_bfloat16()
    return torch.autocast("cuda", torch.bfloat16) if half else nullcontext()


def has_bfloat16() -> bool:
    """Whether the GPU computes in bfloat16 itself: an emulation is slower than float32."""
    return torch.cuda.is_bf16_supported(including_emulation=False)
