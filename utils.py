"""Log-probs, masked sums and means, seeds, precision and memory.

Shapes: B sequences, G group size, P prompt tokens, C completion tokens, T = P + C, H hidden size,
V vocabulary, N completion tokens of all sequences.
"""

import ctypes
import importlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, set_seed

from grpo import distributed

# At most this many logits (tokens x vocabulary) exist at a time: 128 MiB in float32.
LOGITS_CHUNK = 2**25
# On a GPU 512 MiB: every chunk reads the whole output layer from memory, which would take longer
# than the products if a chunk had few tokens.
LOGITS_CHUNK_ON_GPU = 2**27
# Completions run in at most this many batches of similar length, so that little of them is padding.
LENGTH_BUCKETS = 4
# A GPU waits for Python to launch the kernels of a pass, so there each batch has about this many
# tokens, padding included.
BUCKET_TOKENS_ON_GPU = 8192

if not hasattr(PreTrainedModel, "is_activation_checkpointing"):
    # Before transformers 5.21, which vLLM needs, these have other names.
    PreTrainedModel.is_activation_checkpointing = PreTrainedModel.is_gradient_checkpointing
    PreTrainedModel.activation_checkpointing_enable = PreTrainedModel.gradient_checkpointing_enable

# --- Log-probabilities ----------------------------------------------------------------------------


def get_per_token_logps(
    model: PreTrainedModel,
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
        prompt_completion_ids, attention_mask: (B, T), with prompts padded on the left and
            completions on the right.
        logits_to_keep: C, the number of completion columns.
        group_size: G consecutive rows share their prompt, which then runs only once for them.
        return_entropy: also return the entropy of each token's distribution in nats, without
            gradient.

    Returns:
        (B, C) log-probs, exactly 0 where the attention mask is 0; with return_entropy a pair of
        (B, C).
    """
    B, T = prompt_completion_ids.shape
    C = logits_to_keep
    assert attention_mask.shape == (B, T), (attention_mask.shape, (B, T))
    assert 0 < C < T and B % group_size == 0, (C, T, B, group_size)
    arguments = (prompt_completion_ids, attention_mask, C, group_size, temperature, return_entropy)
    if distributed.is_sharded(model):
        return model.per_token_logps(*arguments)  # FSDP2 gathers the weights for it (weights.shard)
    return per_token_logps_of_unsharded(model, *arguments)


def per_token_logps_of_unsharded(
    model, ids: Tensor, attention_mask: Tensor, C: int, group_size, temperature, return_entropy
) -> Tensor | tuple[Tensor, Tensor]:
    """get_per_token_logps for a model whose embedding, norm and output layer are not sharded."""
    is_token = attention_mask[:, -C:].bool()  # (B, C)
    hidden_states = _completion_hidden_states(model, ids, attention_mask, C, group_size)
    token_states = hidden_states[is_token]  # (N, H): padding never meets the output layer
    token_ids = ids[:, -C:][is_token]  # (N,)

    output_layer = model.get_output_embeddings()
    logps, entropy = _ChunkedLogps.apply(
        token_states,
        output_layer.weight,
        output_layer.bias,
        token_ids,
        temperature,
        return_entropy,
    )

    def scatter(values: Tensor) -> Tensor:  # (N,) back to (B, C)
        return torch.zeros(is_token.shape, device=values.device).masked_scatter(is_token, values)

    return (scatter(logps), scatter(entropy)) if return_entropy else scatter(logps)


class _ChunkedLogps(torch.autograd.Function):
    """Log-probs of tokens, and entropies, from their hidden states (N, H).

    Only LOGITS_CHUNK logits exist at a time. Derivatives are written by hand, since autograd would
    hold two gradients of the output layer W, (V, H) each, while it adds up the chunks:

        d log p(token) / d logits = onehot(token) - p
        d log p(token) / d state  = W[token] - sum_v p_v W[v]

    and each divided by the temperature. With a frozen output layer (LoRA) the second is all that is
    needed, and the forward pass has p at hand. Otherwise the backward pass computes each chunk's
    logits again.
    """

    @staticmethod
    def forward(ctx, states, weight, bias, token_ids, temperature, with_entropy):
        ctx.temperature = temperature
        ctx.has_autocast = torch.is_autocast_enabled(states.device.type)
        needs_derivative = ctx.needs_input_grad[0] and not any(ctx.needs_input_grad[1:3])
        factor = _backward_factor(weight)
        derivative = torch.empty_like(states) if needs_derivative else None
        logps = torch.zeros(len(states), device=states.device)
        entropy = torch.zeros(len(states), device=states.device)
        for rows in _chunks(len(states), weight):
            logits = compute_logits(states[rows], weight, bias, temperature)  # (n, V)
            token_logits = logits.gather(-1, token_ids[rows].unsqueeze(-1)).squeeze(-1)
            highest = logits.amax(-1, keepdim=True)
            z = logits.sub_(highest)
            unnormalised = z.exp()  # p times their sum
            total = unnormalised.sum(-1)
            logps[rows] = token_logits - (total.log() + highest.squeeze(-1))
            if needs_derivative:
                with _float32_products():
                    mean_weight = unnormalised.to(factor.dtype) @ factor
                mean_weight = mean_weight / total.unsqueeze(-1)
                derivative[rows] = (weight[token_ids[rows]] - mean_weight).to(states.dtype)
            if with_entropy:  # logsumexp(z) - sum_v p_v z_v
                # Where z is minus infinity p is 0, and their product NaN.
                entropy[rows] = total.log() - z.mul_(unnormalised).nansum(-1) / total
        if needs_derivative:
            ctx.save_for_backward(derivative)
        else:
            ctx.save_for_backward(states, weight, bias, token_ids)
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, grad_logps, _):
        grad_logits_of_token = (grad_logps / ctx.temperature).unsqueeze(-1)  # (N, 1)
        if len(ctx.saved_tensors) == 1:
            (derivative,) = ctx.saved_tensors
            return derivative * grad_logits_of_token, None, None, None, None, None
        states, weight, bias, token_ids = ctx.saved_tensors
        grad_states = torch.zeros_like(states)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        has_bias_grad = bias is not None and ctx.needs_input_grad[2]
        grad_bias = torch.zeros_like(bias) if has_bias_grad else None
        with torch.autocast(states.device.type, torch.bfloat16, enabled=ctx.has_autocast):
            factor = _backward_factor(weight)
            for rows in _chunks(len(states), weight):
                logits = compute_logits(states[rows], weight, bias, ctx.temperature)
                grad_logits = logits.softmax(-1)
                grad_logits[torch.arange(len(logits), device=logits.device), token_ids[rows]] -= 1
                grad_logits.mul_(-grad_logits_of_token[rows])
                grad_logits = grad_logits.to(factor.dtype)
                with _float32_products():
                    grad_states[rows] = (grad_logits @ factor).to(states.dtype)
                    if grad_weight is not None and factor is weight:
                        grad_weight.addmm_(grad_logits.T, states[rows].to(weight.dtype))
                    elif grad_weight is not None:  # the sum stays float32
                        grad_weight += grad_logits.T @ states[rows].to(factor.dtype)
                if grad_bias is not None:
                    grad_bias += grad_logits.sum(0)
        return grad_states, grad_weight, grad_bias, None, None, None


def _backward_factor(weight: Tensor) -> Tensor:
    """The output layer as it multiplies gradients: rounded where a CPU has bfloat16 autocast."""
    return weight.bfloat16() if torch.is_autocast_enabled("cpu") else weight


def _chunks(num_tokens: int, weight: Tensor) -> list[slice]:
    """Slices of the tokens whose logits have at most as many elements as LOGITS_CHUNK allows."""
    max_logits = LOGITS_CHUNK_ON_GPU if weight.is_cuda else LOGITS_CHUNK
    vocabulary = len(weight)
    size = max(1, max_logits // vocabulary)
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def compute_logits(
    states: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> Tensor:
    """(n, V): the float32 logits / temperature of hidden states (n, H), by the output layer.

    On a GPU a bfloat16 copy's logits are not rounded to bfloat16, in which the two greatest are
    often equal. A CPU has no such product, and float32 weights would have to be made in every step.
    """
    states = states.to(weight.dtype)
    with _float32_products():
        if weight.dtype == torch.bfloat16 and weight.is_cuda:
            logits = torch.mm(states, weight.T, out_dtype=torch.float32)
            logits = logits if bias is None else logits + bias
        else:
            logits = F.linear(states, weight, bias).float()
    if temperature != 1:
        logits /= temperature
    return logits


@contextmanager
def _float32_products() -> Iterator[None]:
    """Replace bfloat16 autocast by TensorFloat-32 for the products of float32 matrices.

    Its factors have 11 bits of mantissa instead of 8, and autocast would cast the whole weight
    again for every chunk. It is for the output layer only: rotary frequencies would be wrong in it.
    A CPU multiplies them in float32.
    """
    if not torch.is_autocast_enabled("cuda"):
        with torch.autocast("cpu", enabled=False):
            yield
        return
    settings = torch.backends.cuda.matmul
    precision = settings.fp32_precision
    settings.fp32_precision = "tf32"
    try:
        with torch.autocast("cuda", enabled=False):
            yield
    finally:
        settings.fp32_precision = precision


def _completion_hidden_states(
    model: PreTrainedModel, ids: Tensor, attention_mask: Tensor, C: int, group_size: int
) -> Tensor:
    """(B, C, H): the last hidden state before each completion token, which predicts that token."""
    P = ids.shape[1] - C
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids}
    if not getattr(model.config.get_text_config(), "hidden_size_per_layer_input", None):
        # One lookup for all passes: the gradient of each is as large as the whole embedding.
        inputs = {"inputs_embeds": model.get_input_embeddings()(ids)}  # (B, T, H)

    def forward(rows: Tensor | slice, start: int, end: int, cache: DynamicCache | None) -> Tensor:
        """Run these columns of these rows, on top of the columns that are in the cache."""
        output = model.get_decoder()(
            **{name: values[rows, start:end] for name, values in inputs.items()},
            attention_mask=attention_mask[rows, :end],
            position_ids=position_ids[rows, start:end],
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return output.last_hidden_state

    # Gradient checkpointing drops the cache, so that nothing can be shared. An unsharded model may
    # also take one pass where no prompt is shared. A sharded one takes two passes in any case,
    # since all processes must make equally many.
    is_sharded = distributed.is_sharded(model)
    if model.is_activation_checkpointing or (group_size == 1 and not is_sharded):
        every_row = slice(None)
        return forward(every_row, 0, P + C, None)[:, P - 1 : -1]

    # The prompt runs once for each group, and its keys and values stay in the graph; then the
    # completions run on top of it. DynamicCache() keeps every position of the prompt, and not only
    # the last sliding window as a cache of the model's own class would; the mask has the window.
    prompt_cache = DynamicCache()
    one_row_per_group = slice(None, None, group_size)
    prompt_states = forward(one_row_per_group, 0, P, prompt_cache)
    assert prompt_cache.get_seq_length() == P, "the prompt pass filled no cache to share"
    hidden_states = prompt_states.new_zeros(len(ids), C, prompt_states.shape[-1])
    # The prompt's last state predicts the first token.
    hidden_states[:, 0] = prompt_states[:, -1].repeat_interleave(group_size, dim=0)

    lengths = attention_mask[:, P:].sum(1)  # (B,)
    num_buckets = 1 if is_sharded else num_length_buckets(len(ids) * C, ids.is_cuda)
    for rows in lengths.argsort().chunk(num_buckets):
        # The last token need not run, since nothing follows it. If no column is left, one still
        # runs: with a sharded model every process must make this pass.
        num_columns = max(1, int(lengths[rows].max()) - 1)
        cache = DynamicCache()
        for i, layer in enumerate(prompt_cache.layers):
            # The backward of keys[rows] would add gradients up in varying order on several threads.
            keys = layer.keys.index_select(0, rows // group_size)
            values = layer.values.index_select(0, rows // group_size)
            cache.update(keys, values, i)
        states = forward(rows, P, P + num_columns, cache)
        hidden_states[rows, 1 : num_columns + 1] = states[:, : C - 1]  # if C is 1, no column
    return hidden_states


def num_length_buckets(num_tokens: int, is_cuda: bool) -> int:
    """In how many batches so many tokens of completions, padding included, run best."""
    if not is_cuda:
        return LENGTH_BUCKETS
    return min(LENGTH_BUCKETS, max(1, round(num_tokens / BUCKET_TOKENS_ON_GPU)))


# --- Masked reductions ----------------------------------------------------------------------------


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum where the mask is true, by `where` and not a product: a NaN or inf times 0 is NaN."""
    return torch.where(mask.bool(), values, 0.0).sum(dim)


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean where the mask is true, over the number of true entries; NaN where there is none."""
    return masked_sum(tensor, mask, dim) / mask.sum(dim)


# --- Seeds and precision --------------------------------------------------------------------------


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch on every device. Each process draws its own random numbers."""
    set_seed(distributed.process_seed(seed) % 2**32)  # NumPy takes no larger one


@contextmanager
def isolated_seed(seed: int) -> Iterator[None]:
    """Seed every generator inside the block, in all processes alike, and restore them after it."""
    state = distributed.get_rng_state()
    set_seed(seed % 2**32)
    try:
        yield
    finally:
        distributed.set_rng_state(state)


def autocast(model: PreTrainedModel) -> AbstractContextManager:
    """bfloat16 autocast over float32 weights, where the model trains in bfloat16; else nothing."""
    has_bfloat16 = trains_in_bfloat16(model)
    return torch.autocast(model.device.type, torch.bfloat16) if has_bfloat16 else nullcontext()


def trains_in_bfloat16(model: PreTrainedModel) -> bool:
    """Whether products of this model are bfloat16: by --train_dtype, or else on a GPU that can."""
    dtype = getattr(model, "train_dtype", None)  # llms.get_llm_tokenizer sets it
    if dtype is None:
        return model.device.type == "cuda" and has_bfloat16_products(model.device)
    return dtype == "bfloat16"


def has_bfloat16_products(device: str | torch.device) -> bool:
    """Whether a device multiplies bfloat16. An emulation would be slower than float32."""
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


C_LIBRARY = ctypes.CDLL(None)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # as glibc's malloc.h has them
IS_GLIBC = hasattr(C_LIBRARY, "mallopt") and hasattr(C_LIBRARY, "malloc_trim")


def share_freed_memory() -> None:
    """Let all threads of this process use one heap, before they begin; without glibc, nothing.

    The backward pass runs in a thread of its own. With a heap of its own it could not use what the
    forward pass has freed.
    """
    if IS_GLIBC:
        C_LIBRARY.mallopt(M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Let the C library keep what is freed from here on, and use it again; without glibc, nothing.

    By default glibc gives every tensor of over 32 MiB back to the kernel when it is freed, and asks
    for zeroed pages the next time, which takes longer than many an operation on them.
    """
    if IS_GLIBC:
        for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            C_LIBRARY.mallopt(parameter, 2**31 - 1)


@contextmanager
def freed_memory_given_back(device: torch.device) -> Iterator[None]:
    """Give what a CPU keeps back to the kernel, and keep nothing that is freed inside the block."""
    if device.type != "cpu" or not IS_GLIBC:
        yield
        return
    C_LIBRARY.mallopt(M_MMAP_THRESHOLD, 2**20)
    C_LIBRARY.malloc_trim(0)
    yield
    keep_freed_memory()


def use_fastest_exact_products() -> None:
    """On a CPU, let oneDNN multiply float32 matrices, if it does so in float32.

    PyTorch's default is MKL, which on AMD's processors leaves half of each core's arithmetic
    unused. The setting permits oneDNN to round factors to bfloat16; where it does (Intel's AMX), a
    small product shows it, and MKL stays.
    """
    settings = torch.backends.mkldnn.matmul
    factor = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    expected = factor.double() @ factor.double()
    settings.fp32_precision = "bf16"
    error = (factor @ factor - expected).abs().max() / expected.abs().max()
    if error > 1e-5:
        settings.fp32_precision = "none"


def has_onednn_products() -> bool:
    """Whether use_fastest_exact_products has switched them on."""
    return torch.backends.mkldnn.matmul.fp32_precision == "bf16"


# --- How a run ends ------------------------------------------------------------------------------


class RunEnds(Exception):
    """A run ends before its last iteration. The message is a line for the user."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


# --- What a user brings in a file of their own ----------------------------------------------------


@cache  # every micro-batch asks for its loss
def import_from_file(reference: str, flag: str) -> Any:
    """What FILE.py:NAME names, in a module that a process pool can import too.

    Raises:
        ValueError: in one line, where there is no such thing.
        Exception: whatever the user's code raises.
    """
    path, _, name = reference.rpartition(":")
    file = Path(path).expanduser().resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"{flag} {reference}: there is no file {path} with Python code")
    if "." in file.stem:
        raise ValueError(f"{flag} {reference}: a module has no dot in its name; rename the file")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    with isolated_seed(0):  # a user's file may seed
        module = importlib.import_module(file.stem)
    if Path(module.__spec__.origin or "").resolve() != file:
        raise ValueError(f"{path} has the name of another module: rename the file")
    if not hasattr(module, name):
        raise ValueError(f"{flag} {reference}: there is no {name} in {path}")
    return getattr(module, name)
