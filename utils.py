"""Log-prob and mask mathematics, micro-batches, seeds, intervals, log files: what every other room stands on.

Shapes: B sequences, G group size, P prompt tokens, C completion tokens, T = P + C, H hidden size, V vocabulary.
"""

import argparse
import json
import math
import os
import random
import time
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DynamicCache

import distributed

# Logits are made for this many (token, vocabulary) pairs at a time: 32 MiB in float32.
LOGITS_CHUNK = 2**23
# Completions run in this many parts of similar length.
LENGTH_BUCKETS = 4


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities
# ---------------------------------------------------------------------------------------------------------------------


def get_per_token_logps(
    model, prompt_completion_ids, attention_mask, logits_to_keep, *, group_size=1, temperature=1.0, return_entropy=False
):
    """Log-probability of each completion token under softmax(logits / temperature), in float32.

    Args:
        prompt_completion_ids, attention_mask: (B, T), prompts left-padded, completions right-padded.
        logits_to_keep: C, the number of completion columns.
        group_size: that many consecutive rows share their prompt, which is then run only once per group.
        return_entropy: also return the entropy in nats of each token's distribution, without gradient.

    Returns:
        (B, C) log-probs, exactly 0 where the attention mask is 0; with return_entropy a pair of (B, C).
    """
    compute = getattr(model, "per_token_logps", partial(per_token_logps, model))  # a sharded model brings its own
    return compute(prompt_completion_ids, attention_mask, logits_to_keep, group_size, temperature, return_entropy)


def per_token_logps(
    model, prompt_completion_ids, attention_mask, logits_to_keep, group_size, temperature, return_entropy
):
    """get_per_token_logps of a model whose embedding, norm and output layer are whole."""
    B, T = prompt_completion_ids.shape
    assert attention_mask.shape == (B, T), (attention_mask.shape, (B, T))
    assert 0 < logits_to_keep < T and B % group_size == 0, (logits_to_keep, T, B, group_size)

    hidden = _completion_hidden_states(model, prompt_completion_ids, attention_mask, logits_to_keep, group_size)
    real = attention_mask[:, -logits_to_keep:].bool()  # (B, C)
    states = hidden[real]  # (N, H): padding never meets the output layer
    targets = prompt_completion_ids[:, -logits_to_keep:][real]  # (N,)

    layer = model.get_output_embeddings()
    logps, entropy = _ChunkedLogps.apply(states, layer.weight, layer.bias, targets, temperature, return_entropy)

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
            logps[rows] = logits.gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
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
            grad_logits = grad_logits.mul_((grad_logps[rows] / ctx.temperature).unsqueeze(-1)).to(weight.dtype)
            grad_states[rows] = (grad_logits @ weight).to(states.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.T, states[rows].to(weight.dtype))
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return grad_states, grad_weight, grad_bias, None, None, None


def _chunks(n, vocabulary):
    """Slices of range(n) of so many rows that their logits have at most LOGITS_CHUNK elements."""
    size = max(1, LOGITS_CHUNK // vocabulary)
    return [slice(start, start + size) for start in range(0, n, size)]


def _completion_hidden_states(model, ids, attention_mask, C, group_size):
    """(B, C, H): the last hidden state before each completion token, which predicts that token."""
    body = model.get_decoder()
    P = ids.shape[1] - C
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    # Checkpointing drops the cache, so nothing can be shared. Sharded, all processes must make equally many passes,
    # whatever the size of their groups: always two.
    alone = group_size == 1 and not hasattr(model, "per_token_logps")
    if alone or model.is_activation_checkpointing:
        hidden = body(ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False).last_hidden_state
        return hidden[:, P - 1 : -1]

    # The prompt once per group, with its keys and values kept in the graph; then only the completions, on top of it.
    prompt = body(
        ids[::group_size, :P],
        attention_mask=attention_mask[::group_size, :P],
        position_ids=position_ids[::group_size, :P],
        use_cache=True,
    )
    cache = prompt.past_key_values
    assert cache is not None and cache.get_seq_length() == P, "the prompt pass returned no cache to share"
    hidden = prompt.last_hidden_state.new_zeros(len(ids), C, prompt.last_hidden_state.shape[-1])
    hidden[:, 0] = prompt.last_hidden_state[:, -1].repeat_interleave(group_size, dim=0)  # predicts the first token

    # Completions of similar length run together, so that little is padded.
    lengths = attention_mask[:, P:].sum(1)  # (B,)
    buckets = 1 if hasattr(model, "per_token_logps") else LENGTH_BUCKETS
    for rows in lengths.argsort().chunk(buckets):
        end = max(1, int(lengths[rows].max()) - 1)  # the last token predicts nothing; one at least: a pass for everyone
        own = DynamicCache()  # index_select: plain indexing adds gradients up in no fixed order on several threads
        for i, layer in enumerate(cache.layers):
            own.update(*(x.index_select(0, rows // group_size) for x in (layer.keys, layer.values)), i)
        states = body(
            ids[rows, P : P + end],
            attention_mask=attention_mask[rows, : P + end],
            position_ids=position_ids[rows, P : P + end],
            past_key_values=own,
            use_cache=True,
        ).last_hidden_state
        hidden[rows, 1 : end + 1] = states[:, : C - 1]
    return hidden


def compute_entropy(logits):
    """Entropy in nats of softmax(logits), (..., V) -> (...): logsumexp(z) - sum_v p_v z_v, stable for any shift."""
    z = logits - logits.amax(-1, keepdim=True)
    return z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)


def tokenize_prompt_and_output(prompt_strs, output_strs, tokenizer):
    """Tokenize prompts and outputs apart and join them, so that no token spans the border (CS336 A5, section 4.2).

    Returns:
        dict of input_ids (B, L - 1), labels (B, L - 1: input_ids shifted by one) and response_mask (B, L - 1: True
        where the label is an output token), right-padded; L is the longest prompt plus output.
    """
    prompts = tokenizer(list(prompt_strs), add_special_tokens=False)["input_ids"]
    outputs = tokenizer(list(output_strs), add_special_tokens=False)["input_ids"]
    L = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    ids = torch.full((len(prompts), L), tokenizer.pad_token_id)
    mask = torch.zeros((len(prompts), L), dtype=torch.bool)
    for i, (p, o) in enumerate(zip(prompts, outputs, strict=True)):
        ids[i, : len(p) + len(o)] = torch.tensor(p + o)
        mask[i, len(p) : len(p) + len(o)] = True
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}


# ---------------------------------------------------------------------------------------------------------------------
# Masked reductions
# ---------------------------------------------------------------------------------------------------------------------


def masked_sum(values, mask, dim=None):
    """Sum of values where mask is true. `where`, not multiplication: a NaN or inf times 0 would be NaN."""
    return torch.where(mask.bool(), values, 0.0).sum(dim)


def masked_mean(values, mask, dim=None):
    """Mean of values where mask is true, over the number of true entries; NaN where there is none."""
    return masked_sum(values, mask, dim) / mask.sum(dim)


def masked_normalize(values, mask, constant, dim=None):
    """Sum of values where mask is true, over a constant (Dr. GRPO, arXiv:2503.20783)."""
    return masked_sum(values, mask, dim) / constant


def aggregate_tokens(per_token, mask, length_normalization, constant, num_sequences, num_tokens):
    """Sum of a per-token loss (B, C) over this call's tokens, divided as the update's mean asks; shares simply add.

    "masked_mean": mean over each sequence's own tokens, then over sequences (GRPO, arXiv:2402.03300).
    "masked_normalize": sum over tokens by a constant, then mean over sequences (Dr. GRPO, arXiv:2503.20783).
    "token_mean": mean over all tokens of the update (DAPO, arXiv:2503.14476).

    Args:
        num_sequences, num_tokens: those of the whole update, over all its micro-batches.
    """
    if length_normalization == "masked_mean":
        return (masked_sum(per_token, mask, dim=1) / mask.sum(1).clamp(min=1)).sum() / max(1, num_sequences)
    if length_normalization == "masked_normalize":
        return masked_normalize(per_token, mask, constant, dim=1).sum() / max(1, num_sequences)
    if length_normalization == "token_mean":
        return masked_sum(per_token, mask) / max(1, num_tokens)
    raise ValueError(f"unknown length_normalization {length_normalization!r}; known: {LENGTH_NORMALIZATIONS}")


LENGTH_NORMALIZATIONS = ("masked_mean", "masked_normalize", "token_mean")


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batches
# ---------------------------------------------------------------------------------------------------------------------


def split_into_micro_batches(prompt_lengths, completion_lengths, group_size, max_tokens):
    """Group rows into micro-batches of at most max_tokens padded tokens, with a shared prompt counted once per group.

    Groups of similar length go together, so that little is padded; a group too long for the budget is cut into parts.

    Args:
        prompt_lengths, completion_lengths: one number per row; each group is group_size consecutive rows.

    Returns:
        list of (rows, group_size): row numbers, and how many consecutive ones of them share a prompt.
    """
    groups = [list(range(i, i + group_size)) for i in range(0, len(prompt_lengths), group_size)]
    longest = {g[0]: max(1, max(completion_lengths[i] for i in g)) for g in groups}
    micro_batches, current, P, C = [], [], 0, 0
    for group in sorted(groups, key=lambda g: (longest[g[0]], prompt_lengths[g[0]])):
        p, c = prompt_lengths[group[0]], longest[group[0]]
        fitting = min(group_size, max(1, (max_tokens - p) // c))
        if fitting < group_size:
            parts = [group[i : i + fitting] for i in range(0, group_size, fitting)]
            micro_batches += [(part, len(part)) for part in parts]
            continue
        if current and (len(current) // group_size + 1) * (max(P, p) + group_size * max(C, c)) > max_tokens:
            micro_batches.append((current, group_size))
            current, P, C = [], 0, 0
        current, P, C = current + group, max(P, p), max(C, c)
    return micro_batches + ([(current, group_size)] if current else [])


# ---------------------------------------------------------------------------------------------------------------------
# Statistics and seeds
# ---------------------------------------------------------------------------------------------------------------------


def wilson_interval(successes, n, z=1.959963984540054):
    """Wilson's 95 % score interval (low, high) for a proportion; unlike p +- 1.96 s it holds near 0 and 1."""
    if n == 0:
        return math.nan, math.nan
    p, denominator = successes / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / denominator
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / denominator
    return max(0.0, centre - half), min(1.0, centre + half)


def seed_everything(seed):
    """Seed Python, NumPy and torch (every device), each process with a stream of its own."""
    seed = _own_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def isolated_seed(seed):
    """Seed torch inside the block and restore its random state after it: evaluation must not disturb training."""
    with torch.random.fork_rng(devices=_own_gpus()):
        torch.manual_seed(_own_seed(seed))
        yield


def _own_seed(seed):
    return seed + 1_000_003 * distributed.rank()  # the seed itself on one process


def _own_gpus():
    """Numbers of the GPUs that this process may use: of several processes each has one."""
    several = distributed.world_size() > 1 and torch.cuda.is_available()
    return [torch.cuda.current_device()] if several else list(range(torch.cuda.device_count()))


def get_rng_state():
    """Every random state that a run draws from, in types that a checkpoint may hold."""
    return {"torch": torch.get_rng_state(), "cuda": [torch.cuda.get_rng_state(gpu) for gpu in _own_gpus()]}


def set_rng_state(state):
    """Put back what get_rng_state returned; CUDA states only where there are as many devices as before."""
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == len(_own_gpus()):
        for gpu, cuda_state in zip(_own_gpus(), state["cuda"], strict=True):
            torch.cuda.set_rng_state(cuda_state, gpu)


def pass_at_k(correct, n, k):
    """Mean over problems of the chance that k of its n samples, drawn without repeats, hold a correct one.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of arXiv:2107.03374; correct: c of each problem.
    """
    return sum(1 - math.comb(n - c, k) / math.comb(n, k) for c in correct) / len(correct)


# ---------------------------------------------------------------------------------------------------------------------
# Devices and time
# ---------------------------------------------------------------------------------------------------------------------


def autocast(device):
    """bfloat16 autocast on CUDA, over float32 master weights; nothing elsewhere."""
    return torch.autocast("cuda", torch.bfloat16) if torch.device(device).type == "cuda" else nullcontext()


class Stages:
    """Seconds spent per named stage: `with stages("sample"): ...`, then `stages.flush()` -> {"time/sample": 1.2}."""

    def __init__(self, device="cpu"):
        self.cuda, self.seconds = torch.device(device).type == "cuda", defaultdict(float)

    def _now(self):
        if self.cuda:
            torch.cuda.synchronize()  # kernels run behind Python: wait, or the next stage pays for this one
        return time.perf_counter()

    @contextmanager
    def __call__(self, name):
        start = self._now()
        yield
        self.seconds[f"time/{name}"] += self._now() - start

    def flush(self):
        seconds = dict(self.seconds, **{"time/total": sum(self.seconds.values())})
        self.seconds.clear()
        return seconds


# ---------------------------------------------------------------------------------------------------------------------
# Logs: of several processes only the first one writes
# ---------------------------------------------------------------------------------------------------------------------


class Halted(OSError):
    """What the run depends on has failed, not the run: it is saved and ends with this message; --resume continues."""


def _jsonable(value):
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None  # NaN is no JSON: a missing number is null
    if isinstance(value, dict):
        return {k: _jsonable(v) for k, v in value.items()}
    return [_jsonable(v) for v in value] if isinstance(value, (list, tuple)) else value


def append_jsonl(path, row):
    """Append one row to a log in a single write and flush it: a killed run tears at most its last line."""
    if not distributed.is_main():
        return
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(_jsonable(row), ensure_ascii=True) + "\n")


def read_jsonl(path):
    """The rows of a complete log; none where there is no such file."""
    path = Path(path)
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def write_jsonl(path, rows):
    """Write a whole file of rows under a temporary name and rename it: it is complete or absent."""
    if not distributed.is_main():
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(_jsonable(row), ensure_ascii=True) + "\n" for row in rows), "utf-8")
    os.replace(temporary, path)


def sum_metrics(shares):
    """Metrics of one update from its shares: sums, but the least _min and the greatest _max."""
    merged = {}
    for key in dict.fromkeys(key for share in shares for key in share):
        pick = min if key.endswith("_min") else max if key.endswith("_max") else sum
        merged[key] = pick(share[key] for share in shares if key in share)
    return merged


def average_metrics(updates):
    """Metrics of one iteration from those of its updates: means, but the least _min and the greatest _max."""
    merged = {}
    for key in dict.fromkeys(key for update in updates for key in update):
        values = [update[key] for update in updates if key in update]
        pick = min if key.endswith("_min") else max if key.endswith("_max") else lambda v: sum(v) / len(v)
        merged[key] = pick(values)
    return merged


def write_json(path, value):
    """Write one JSON file, complete or not at all."""
    if not distributed.is_main():
        return
    temporary = Path(path).with_suffix(".tmp")
    temporary.write_text(json.dumps(_jsonable(value), indent=2, default=str) + "\n", "utf-8")
    os.replace(temporary, path)


class _DefaultsOnce(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a flag's default, unless its help says what happens without it."""

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


class ArgumentParser(argparse.ArgumentParser):
    """Flags whose --help shows the defaults, and whose errors are one line with exit code 2."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=_DefaultsOnce, allow_abbrev=False, **kwargs)

    def error(self, message):
        self.exit(2, f"error: {message} (--help lists every flag)\n")
