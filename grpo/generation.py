"""The sampler: completions of prompts from the whole distribution of a model.

`generate` divides the completions into batches. The prompts of a batch run once, and each sequence
gets a copy of its prompt's KV cache. Then a `Decoder` gives every sequence one token a step, and
finished sequences leave the batch. On CUDA the steps may be replayed as CUDA graphs.

Shapes: in a batch, R sequences of N prompts, C completion tokens, H hidden size.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import utils
from grpo.decoding import ATTENTION, Decoder, draw
from grpo.rollout import Completion


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    num_samples: int = 1,
    max_completion_length: int = 512,
    temperature: float = 1.0,
    stop_strings: Sequence[str] = (),
    max_concurrent_sequences: int = 512,
    progress: Callable[[int], object] = lambda num_ended: None,
) -> list[Completion]:
    """Sample num_samples completions of each prompt from softmax(logits / temperature).

    There is no top-k, top-p or penalty, whatever the model's own generation_config says. The
    log-probs of the samples are therefore those that the loss computes again.

    Args:
        prompts: texts to which the chat template has been applied. There may be none.
        max_completion_length: the number of tokens at which a completion is cut.
        temperature: 0 means greedy decoding.
        stop_strings: a completion also ends with the token that completes one of these in its text.
        max_concurrent_sequences: the most sequences in a batch, which bounds the memory. It changes
            no sample.
        progress: called every few tokens with the number of completions that have ended since.

    Returns:
        len(prompts) * num_samples completions; those of a prompt are consecutive.
    """
    if len(prompts) == 0:  # a tokenizer cannot tokenize an empty list
        return []

    prompt_ids = tokenize(tokenizer, prompts)
    end_finder = EndFinder(model, tokenizer, stop_strings)
    completions = [Completion(ids) for ids in prompt_ids for _ in range(num_samples)]
    # All random numbers are drawn here, so that a sample depends neither on the sequences in its
    # batch nor on those that have finished. torch.rand gives numbers in [0, 1), and a 0 could draw
    # a token of probability 0; so 1 - torch.rand is used.
    shape = (len(completions), max_completion_length)
    uniforms = 1 - torch.rand(shape, dtype=torch.float64, device=model.device)
    prompt_lengths = torch.tensor([len(ids) for ids in prompt_ids])
    prompt_length_of_row = prompt_lengths.repeat_interleave(num_samples)
    # The longest prompts come first: if memory is too small, that shows at once.
    row_order = prompt_length_of_row.argsort(descending=True, stable=True)
    with _sampling_mode(model):
        max_rows = min(len(completions), max_concurrent_sequences)
        max_columns = int(prompt_lengths.max()) + max_completion_length
        decoder = decoder_for(model, max_rows, max_columns)
        for rows in row_order.split(decoder.max_rows):
            batch_prompts, prompt_of_row = (rows // num_samples).unique(return_inverse=True)
            batch_prompt_ids = [prompt_ids[i] for i in batch_prompts.tolist()]
            hidden = decoder.start(model, batch_prompt_ids, prompt_of_row.to(model.device))
            _decode(
                model,
                decoder,
                hidden,
                [completions[row] for row in rows.tolist()],
                uniforms[rows.to(model.device)],
                temperature,
                end_finder,
                progress,
            )

    end_finder.give_texts(completions)
    return completions


def tokenize(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[list[int]]:
    """The token ids of each prompt. Raises ValueError if one has none."""
    prompt_ids = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
    if not all(prompt_ids):
        raise ValueError("a prompt has no tokens, and a completion needs one before it")
    return prompt_ids


def decoder_for(model: PreTrainedModel, max_rows: int, max_columns: int) -> Decoder:
    """A decoder for batches of this size; for a bfloat16 copy on CUDA one with CUDA graphs."""
    is_for_graphs = model.device.type == "cuda" and model.dtype == torch.bfloat16
    if is_for_graphs and find_spec("grpo.cuda_graphs"):
        from grpo import cuda_graphs

        return cuda_graphs.captured_decoder_for(model, max_rows, max_columns)
    return Decoder(model.device, max_rows)


@contextmanager
def _sampling_mode(model: PreTrainedModel):
    """Evaluation mode, with the sampler's own attention and the autocast of the loss."""
    was_training = model.training
    own_attention = model.config._attn_implementation
    # A bfloat16 copy of the weights needs no autocast.
    autocast = utils.autocast(model) if model.dtype == torch.float32 else nullcontext()
    model.eval()
    # Some models, such as Falcon, have attention of their own that cannot be exchanged.
    if model._can_set_attn_implementation():
        model.set_attn_implementation(ATTENTION)
    try:
        with autocast:
            yield
    finally:
        model.train(was_training).set_attn_implementation(own_attention)


# --- One batch ------------------------------------------------------------------------------------

# Ends are looked for every so many steps, since that makes a GPU wait for Python.
CHECK_INTERVAL = 8
# A batch shrinks to the least of these sizes that holds its unfinished sequences: 1, 2, 3, 4, 6, 8,
# 12, 16, 24 and so on. Each time the KV cache is copied, and a new size may need a new CUDA graph.
# So there are few sizes, and they are the same for all batches.
POWERS_OF_TWO = [2**n for n in range(20)]
BATCH_SIZES = sorted([*POWERS_OF_TWO, *[3 * power for power in POWERS_OF_TWO]])


def _decode(
    model: PreTrainedModel,
    decoder: Decoder,
    hidden: Tensor,
    completions: list[Completion],
    uniforms: Tensor,
    temperature: float,
    end_finder: "EndFinder",
    progress: Callable[[int], object],
) -> None:
    """Fill in R empty completions, until each has an end or C tokens.

    The decoder has started with these sequences, and hidden (R, H) are their last states. uniforms
    (R, C) has a random number in (0, 1] for the draw of each token.
    """
    num_unfinished = len(completions)
    C = uniforms.shape[1]
    token, logp = draw(model, hidden, uniforms[:, 0], temperature)
    new_tokens = [token]  # those that are not in the completions yet, (R,) each
    new_logps = [logp]
    for num_tokens in range(1, C + 1):
        if num_tokens == C or num_tokens % CHECK_INTERVAL == 0:
            _extend(completions, new_tokens, new_logps, end_finder)
            new_tokens = []
            new_logps = []
            num_before = num_unfinished
            num_unfinished = sum(not completion.finished for completion in completions)
            if num_tokens == C:
                num_unfinished = 0  # the rest is cut off
            progress(num_before - num_unfinished)
            if num_unfinished == 0:
                return
            batch_size = next(size for size in BATCH_SIZES if size >= num_unfinished)
            R = len(completions)
            if batch_size < R:
                unfinished_first = sorted(range(R), key=lambda row: completions[row].finished)
                staying = unfinished_first[:batch_size]
                completions = [completions[row] for row in staying]
                rows = torch.tensor(staying, device=token.device)
                uniforms = uniforms[rows]
                token = token[rows]
                decoder.select(rows)
        token, logp = decoder.step(model, token, uniforms[:, num_tokens], temperature)
        new_tokens.append(token)
        new_logps.append(logp)


def _extend(completions, new_tokens: list[Tensor], new_logps: list[Tensor], end_finder) -> None:
    """Append new tokens and their log-probs, (R,) each, to completions, through the first end."""
    ids_of_rows = torch.stack(new_tokens, dim=1).tolist()
    logps_of_rows = torch.stack(new_logps, dim=1).tolist()
    for completion, ids, logps in zip(completions, ids_of_rows, logps_of_rows, strict=True):
        if completion.finished:
            continue
        num_checked = len(completion.ids)
        completion.ids += ids
        completion.sampled_logps += logps
        length = end_finder.find(completion.ids, num_checked)
        if length is not None:
            completion.finished = True
            del completion.ids[length:]
            del completion.sampled_logps[length:]


# --- Where a completion ends ----------------------------------------------------------------------


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a completion: the tokenizer's EOS and those of the generation_config."""
    config_ids = model.generation_config.eos_token_id
    if not isinstance(config_ids, list):
        config_ids = [config_ids]
    return sorted({tokenizer.eos_token_id, *config_ids} - {None})


# What is decoded of a part of a character. Some tokenizers also decode what stands beside it so.
CUT_CHARACTER = "\ufffd"


class EndFinder:
    """Finds where a completion ends: at an EOS, or with the token that completes a stop string."""

    def __init__(self, model, tokenizer, stop_strings):
        self.tokenizer = tokenizer
        self.stop_strings = tuple(stop_strings)
        self.eos_ids = set(eos_token_ids(model, tokenizer))
        # Every token adds at least one byte of text, so that a stop string of n bytes is in the
        # text of the last n tokens. Special tokens may add none, hence 8 more.
        self.window = 8 + max((len(string.encode()) for string in self.stop_strings), default=0)

    def find(self, ids: list[int], start: int) -> int | None:
        """The number of tokens through the first end at or after position start; None without."""
        may_stop = False
        if self.stop_strings:
            recent_text = self.tokenizer.decode(ids[max(0, start - self.window) :])
            may_stop = self._has_stop(recent_text) or CUT_CHARACTER in recent_text
        for length in range(start + 1, len(ids) + 1):
            if ids[length - 1] in self.eos_ids or (may_stop and self._stops(ids[:length])):
                return length
        return None

    def _stops(self, ids: list[int]) -> bool:
        """Whether the text of these tokens has a stop string, which would be near its end."""
        text = self.tokenizer.decode(ids[-self.window :])
        if self._has_stop(text) or CUT_CHARACTER in text:
            text = self.tokenizer.decode(ids)  # the window may have begun within a character
        return self._has_stop(text)

    def _has_stop(self, text: str) -> bool:
        return self._first_stop(text) is not None

    def give_texts(self, completions: list[Completion]) -> None:
        """Give completions their texts, without the final EOS and up to the first stop string.

        Other special tokens stay visible.
        """
        ids_of_texts = []
        for completion in completions:
            has_eos = completion.ids[-1] in self.eos_ids
            ids_of_texts.append(completion.ids[:-1] if has_eos else completion.ids)
        texts = self.tokenizer.batch_decode(ids_of_texts)
        for completion, text in zip(completions, texts, strict=True):
            completion.text = text[: self._first_stop(text)]

    def _first_stop(self, text: str) -> int | None:
        """Where the first stop string in a text ends; None if there is none."""
        ends = [text.index(string) + len(string) for string in self.stop_strings if string in text]
        return min(ends, default=None)
