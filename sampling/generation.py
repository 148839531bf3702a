"""Sampling: completions of prompts from the whole distribution of a model, and where each of them ends.

Shapes: B sequences, P prompt tokens, C completion tokens, T = P + C, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

import utils
from sampling.decoding import ATTENTION, decoder_for
from sampling.rollout import Rollout, as_rollout, left_pad


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    num_samples: int = 1,
    max_new_tokens: int = 512,
    temperature: float = 1.0,
    stop_strings: Sequence[str] = (),
    max_concurrent_sequences: int = 512,
    progress: Callable[[int], None] | None = None,
) -> Rollout:
    """Sample num_samples completions of each prompt from softmax(logits / temperature): the project's one sampler.

    The whole distribution is sampled (no top-k, top-p or penalties, whatever the model's own generation_config says),
    so that its log-probs are those that the loss recomputes. Each prompt runs once, for all of its samples;
    sequences that have ended leave the batch.

    Args:
        prompts: texts, chat template already applied.
        temperature: 0 is greedy.
        stop_strings: a completion also ends with the token that completes one of these in its text.
        max_concurrent_sequences: the memory bound; more than these are sampled in turns.
        progress: called with a number of completions each time so many are done.

    Returns:
        A Rollout of len(prompts) * num_samples rows; the samples of a prompt are consecutive.
    """
    device = model.device
    prompt_ids = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
    stop = _Stopper(model, tokenizer, stop_strings)
    B = len(prompts) * num_samples
    out = SimpleNamespace(
        completion_ids=torch.full((B, max_new_tokens), tokenizer.pad_token_id, device=device),
        sampled_logps=torch.zeros((B, max_new_tokens), device=device),
        # Drawn at once, so that a sample depends neither on who else is sampled with it nor on who has left.
        uniforms=1
        - torch.rand(
            (B, max_new_tokens), dtype=torch.float64, device=device
        ),  # never 0, which p = 0 meets
        lengths=torch.full((B,), max_new_tokens, device=device),
        finished=torch.zeros(B, dtype=torch.bool, device=device),
    )
    # Prompts of similar length share a turn, the longest first: if memory runs out, it does so at once. Where not even
    # the samples of one prompt fit, they are sampled in several turns.
    order = sorted(range(len(prompts)), key=lambda i: -len(prompt_ids[i]))
    numbers, most = range(num_samples), max_concurrent_sequences
    parts = [numbers[j : j + most] for j in range(0, num_samples, most)]
    per_turn = max(1, most // num_samples)
    turns = [
        (order[i : i + per_turn], part) for i in range(0, len(order), per_turn) for part in parts
    ]
    # Float32 weights sample under the autocast of the loss; a bfloat16 copy needs none.
    with utils.autocast(device if model.dtype == torch.float32 else "cpu"), _sampling(model):
        for turn, part in turns:
            ids, mask = left_pad([prompt_ids[i] for i in turn], tokenizer.pad_token_id, device)
            rows = torch.tensor([i * num_samples + j for i in turn for j in part], device=device)
            _decode(model, ids, mask, rows, len(part), temperature, stop, out)
            if progress:
                progress(len(rows))

    # What was sampled past a stop is cut off.
    completions = [
        row[:n] for row, n in zip(out.completion_ids.tolist(), out.lengths.tolist(), strict=True)
    ]
    rows = [(prompt_ids[i // num_samples], completion) for i, completion in enumerate(completions)]
    rollout = as_rollout(rows, tokenizer.pad_token_id, device)
    own = rollout.completion_mask.bool()
    rollout.sampled_logps = out.sampled_logps[:, : own.shape[1]].where(own, 0.0)
    rollout.finished, rollout.texts = out.finished, stop.texts(completions, out.finished.tolist())
    return rollout


@contextmanager
def _sampling(model):
    """Evaluation mode, and attention that takes the decode step's mask: flash-attention's would ask the host."""
    was_training, before = model.training, model.config._attn_implementation
    chosen = ATTENTION if model._can_set_attn_implementation() else before  # Falcon has its own
    try:
        model.eval().set_attn_implementation(chosen)
        yield
    finally:
        model.train(was_training).set_attn_implementation(before)


def _decode(model, ids, mask, rows, num_samples, temperature, stop, out):
    """Sample num_samples completions of each prompt in ids (N, P) to their end, writing `rows` of out."""
    position_ids, cache = (
        (mask.cumsum(1) - 1).clamp(min=0),
        DynamicCache(),
    )  # plain layers, as in utils
    prefill = model.get_decoder()(
        ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache, use_cache=True
    )
    P, max_new_tokens = ids.shape[1], out.completion_ids.shape[1]
    decoder = decoder_for(model, cache, len(rows), P + max_new_tokens)
    decoder.start(cache, mask, out.uniforms[rows])
    decoder.draw(
        model, prefill.last_hidden_state[:, -1].repeat_interleave(num_samples, dim=0), temperature
    )
    alive, looked = torch.ones_like(rows, dtype=torch.bool), 0
    for n in range(1, max_new_tokens + 1):  # tokens that each row has
        last = n == max_new_tokens
        if last or n - looked >= decoder.look:
            end, looked = stop(decoder.tokens[: len(rows), P : P + n], looked), n
            done = alive & (end > 0)
            out.lengths[rows[done]], out.finished[rows[done]] = end[done], True
            alive &= ~done
            left, size = int(alive.sum()), len(rows)
            while (
                left <= 0.75 * size > 0
            ):  # leaving copies the cache: in quarters, so that graphs are of few sizes
                size = int(0.75 * size)
            if last or size < len(rows):
                for mine, whole in (
                    (decoder.tokens, out.completion_ids),
                    (decoder.logps, out.sampled_logps),
                ):
                    whole[rows, :n] = mine[: len(rows), P : P + n]
                if last or not size:
                    return
                keep = (~alive).int().argsort(stable=True)[:size]
                decoder.keep(keep, P + n - 1)
                rows, alive = rows[keep], alive[keep]
        if P + n == decoder.size[1]:  # the room is full
            decoder.fit(decoder.cache, P + n)
        decoder.step(model, temperature)


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a completion: the tokenizer's EOS and the generation_config's (Qwen2 has two)."""
    listed = model.generation_config.eos_token_id
    listed = listed if isinstance(listed, list) else [listed]
    return sorted({tokenizer.eos_token_id, *(i for i in listed if i is not None)})


class _Stopper:
    """Knows where a completion ends: at an EOS id, or with the token that completes a stop string in its text."""

    def __init__(self, model, tokenizer, stop_strings):
        self.tokenizer, self.stop_strings = tokenizer, tuple(stop_strings)
        self.eos_ids = eos_token_ids(model, tokenizer)
        self.eos = torch.tensor(self.eos_ids, device=model.device)
        if self.stop_strings:
            table = torch.zeros(model.get_output_embeddings().weight.shape[0], dtype=torch.bool)
            known = _may_complete(tokenizer, self.stop_strings)[
                : len(table)
            ]  # the tokenizer's tokens may be more
            table[: len(known)] = torch.tensor(known)
            self.may_complete = table.to(model.device)  # (V,)
            # Every token adds at least one byte of text, save special ones: a little room for these.
            self.window = max(len(s.encode()) for s in self.stop_strings) + 8

    def __call__(self, tokens, since):
        """(rows,) how many of its tokens (rows, n) each row keeps, ends looked for from column `since` on; 0: none."""
        recent = tokens[:, since:]
        ends = torch.isin(recent, self.eos)
        if self.stop_strings:
            candidates = self.may_complete[recent].nonzero()
            windows = [
                tokens[i, max(0, since + j + 1 - self.window) : since + j + 1]
                for i, j in candidates.tolist()
            ]
            texts = self.tokenizer.batch_decode(windows)
            hits = [any(s in text for s in self.stop_strings) for text in texts]
            ends[candidates.unbind(1)] |= torch.tensor(hits, dtype=torch.bool, device=ends.device)
        return torch.where(ends.any(1), since + 1 + ends.int().argmax(1), 0)

    def texts(self, completions, finished):
        """Completions as text: without the final EOS, up to the end of the stop string; other special tokens stay."""
        texts = self.tokenizer.batch_decode(
            [ids[:-1] if ids[-1] in self.eos_ids else ids for ids in completions]
        )
        for i, text in enumerate(texts):
            ends = [text.index(s) + len(s) for s in self.stop_strings if s in text]
            texts[i] = text[: min(ends)] if ends and finished[i] else text
        return texts


@lru_cache(maxsize=8)
def _may_complete(tokenizer, stop_strings):
    """For each token id, whether its text holds the last character of a stop string: only then is decoding needed.

    A character outside ASCII can be split over several tokens, so then every token may complete the string.
    """
    last = [s[-1] for s in stop_strings]
    if not all(c.isascii() for c in last):
        return [True] * len(tokenizer)
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    return [any(c in text for c in last) for text in texts]
