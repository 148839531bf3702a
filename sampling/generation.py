"""Sampling: completions of prompts from the whole distribution of a model, and where each one ends.

Shapes: B sequences, P prompt tokens, C completion tokens, V vocabulary. In one turn of sampling:
R rows of N prompts.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

import utils
from sampling.decoding import ATTENTION, Decoder, decoder_for
from sampling.rollout import Rollout, as_rollout, left_pad


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
    progress: Callable[[int], None] | None = None,
) -> Rollout:
    """Sample num_samples completions of each prompt from softmax(logits / temperature).

    This is the project's one sampler. It samples from the whole distribution: no top-k, top-p or
    penalty, whatever the model's own generation_config says. The log-probs of its samples are
    therefore those that the loss computes again. A prompt runs once for all of its samples, and
    sequences that have ended leave the batch.

    Args:
        prompts: texts to which the chat template has been applied. There may be none.
        max_completion_length: the number of tokens at which a completion is cut.
        temperature: 0 means greedy decoding.
        stop_strings: a completion also ends with the token that completes one of these in its text.
        max_concurrent_sequences: at most this many rows are sampled at once, which bounds the
            memory; the others follow in later turns. It changes no sample.
        progress: called after each turn with the number of completions that it has finished.

    Raises:
        ValueError: a prompt has no tokens.

    Returns:
        A Rollout of len(prompts) * num_samples rows; the samples of a prompt are consecutive.
    """
    pad_token_id = tokenizer.pad_token_id
    if len(prompts) == 0:  # a tokenizer cannot tokenize an empty list
        return as_rollout([], pad_token_id, model.device)

    prompt_ids = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
    if not all(prompt_ids):
        number = prompt_ids.index([])
        raise ValueError(
            f"prompt {number} is {prompts[number]!r}, which has no tokens; a completion needs at"
            " least one token before it"
        )
    stopper = _Stopper(model, tokenizer, stop_strings)
    num_rows = len(prompts) * num_samples
    completions = _Completions.allocate(num_rows, max_completion_length, pad_token_id, model.device)
    prompt_lengths = [len(ids) for ids in prompt_ids]
    # Float32 weights sample under the autocast of the loss; a bfloat16 copy needs none.
    needs_autocast = model.dtype == torch.float32
    autocast = utils.autocast(model.device) if needs_autocast else nullcontext()
    with autocast, _sampling_mode(model):
        for plan in _plan_turns(prompt_lengths, num_samples, max_concurrent_sequences):
            turn_ids = [prompt_ids[i] for i in plan.prompt_indices]
            ids, mask = left_pad(turn_ids, pad_token_id, model.device)
            cache, last_hidden = _run_prompts(model, ids, mask)
            turn = _Turn(model, cache, mask, plan.row_indices, completions)
            turn.decode(model, last_hidden, temperature, stopper)
            del cache, last_hidden, turn  # the next turn needs their memory
            if progress:
                progress(len(plan.row_indices))

    completion_ids = completions.cut_ids()
    prompts_of_rows = utils.repeat_each(prompt_ids, num_samples)
    rows = list(zip(prompts_of_rows, completion_ids, strict=True))
    rollout = as_rollout(rows, pad_token_id, model.device)
    is_sampled = rollout.completion_mask.bool()  # (B, C)
    C = is_sampled.shape[1]
    rollout.sampled_logps = completions.logps[:, :C].where(is_sampled, 0.0)
    rollout.finished = completions.finished
    rollout.texts = stopper.to_texts(completion_ids, completions.finished.tolist())
    return rollout


def sample_tokens(
    model: PreTrainedModel, prompt_ids: Tensor, prompt_mask: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample from the model, whatever ends a completion: R rows for N prompts. For checks.

    Args:
        prompt_ids, prompt_mask: (N, P), padded on the left.
        uniforms: (R, C) random numbers in (0, 1], one for the draw of each token.

    Returns:
        (token ids, their log-probs), (R, C) each.
    """
    R, C = uniforms.shape
    N, P = prompt_ids.shape
    with _sampling_mode(model):
        cache, last_hidden = _run_prompts(model, prompt_ids, prompt_mask)
        decoder = Decoder(model, R, P + C)
        decoder.start(cache, prompt_mask, uniforms)
        decoder.draw(model, last_hidden.repeat_interleave(R // N, dim=0), temperature=1.0)
        for _ in range(C - 1):
            decoder.step(model, temperature=1.0)
    columns = slice(P, P + C)
    return decoder.tokens[:, columns], decoder.logps[:, columns]


@contextmanager
def _sampling_mode(model):
    """Evaluation mode, and attention that takes the decode step's mask.

    Flash-attention would copy the positions of the padding to Python.
    """
    was_training = model.training
    own_attention = model.config._attn_implementation
    # Some models, such as Falcon, have attention of their own that cannot be exchanged.
    attention = ATTENTION if model._can_set_attn_implementation() else own_attention
    try:
        model.eval().set_attn_implementation(attention)
        yield
    finally:
        model.train(was_training).set_attn_implementation(own_attention)


# --- The completions of all rows ------------------------------------------------------------------


@dataclass
class _Completions:
    """What has been sampled for all B rows; each turn fills in its own rows."""

    # (B, C) padded with the pad token. Tokens may follow the one that ends a completion.
    token_ids: Tensor
    # (B, C) float32 log-probs of these tokens.
    logps: Tensor
    # (B, C) float64 random numbers, one for the draw of each token.
    uniforms: Tensor
    # (B,) the number of tokens, including the one that ends the completion; C if there is no end.
    lengths: Tensor
    # (B,) whether the completion has an end.
    finished: Tensor

    @classmethod
    def allocate(
        cls, B: int, C: int, pad_token_id: int, device: torch.device | str
    ) -> "_Completions":
        """B completions of at most C tokens, of which none has been sampled yet.

        All random numbers are drawn here, so that a sample depends neither on the rows that are
        sampled with it nor on those that have ended. torch.rand gives numbers in [0, 1), and a 0
        could draw a token of probability 0; so 1 - torch.rand is used.
        """
        return cls(
            token_ids=torch.full((B, C), pad_token_id, device=device),
            logps=torch.zeros((B, C), device=device),
            uniforms=1 - torch.rand((B, C), dtype=torch.float64, device=device),
            lengths=torch.full((B,), C, device=device),
            finished=torch.zeros(B, dtype=torch.bool, device=device),
        )

    def cut_ids(self) -> list[list[int]]:
        """The B completions as lists of ids, without what was sampled after the end."""
        rows = zip(self.token_ids.tolist(), self.lengths.tolist(), strict=True)
        return [token_ids[:length] for token_ids, length in rows]


# --- One turn of sampling -------------------------------------------------------------------------


@dataclass(frozen=True)
class _TurnPlan:
    """The rows that are sampled together: equally many samples of each of some prompts."""

    # N indexes into the prompts.
    prompt_indices: list[int]
    # R indexes into the B rows, those of one prompt next to each other.
    row_indices: list[int]


def _plan_turns(
    prompt_lengths: list[int], num_samples: int, max_concurrent_sequences: int
) -> list[_TurnPlan]:
    """Divide all rows into turns of at most max_concurrent_sequences rows.

    Prompts of similar length share a turn. The longest come first: if memory is too small, that
    shows at once. If not even the samples of one prompt fit, they are spread over several turns.
    """
    longest_first = sorted(range(len(prompt_lengths)), key=lambda i: -prompt_lengths[i])
    prompts_per_turn = max(1, max_concurrent_sequences // num_samples)
    plans = []
    for i in range(0, len(longest_first), prompts_per_turn):
        prompts = longest_first[i : i + prompts_per_turn]
        for start in range(0, num_samples, max_concurrent_sequences):
            end = min(num_samples, start + max_concurrent_sequences)
            rows = []
            for prompt in prompts:
                rows += range(prompt * num_samples + start, prompt * num_samples + end)
            plans.append(_TurnPlan(prompts, rows))
    return plans


def _run_prompts(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> tuple[DynamicCache, Tensor]:
    """Run N prompts once, from ids and mask (N, P): (their keys and values, last hidden (N, H))."""
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache()  # its layers keep every position, also those beyond a sliding window
    outputs = model.get_decoder()(
        ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache, use_cache=True
    )
    return cache, outputs.last_hidden_state[:, -1]


class _Turn:
    """Rows that are sampled together to their ends, in one decoder.

    Rows that have ended stay in the batch, and are sampled in vain, until so many have ended that
    copying the others into a smaller batch pays.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: DynamicCache,
        prompt_mask: Tensor,
        rows: list[int],
        completions: _Completions,
    ):
        """Begin after N prompts, by their keys and values and their mask (N, P).

        Args:
            rows: R row numbers of `completions`, to which the results are written.
        """
        # (R,) for each row of the decoder, the row of `completions` that it samples.
        self.rows = torch.tensor(rows, device=model.device)
        # (R,) True for a row in which no end has been found yet.
        self.is_open = torch.ones_like(self.rows, dtype=torch.bool)
        # How many tokens of each row have been searched for an end.
        self.num_checked = 0
        self.completions = completions
        self.prompt_length = prompt_mask.shape[1]
        self.max_completion_length = completions.token_ids.shape[1]
        self.decoder = decoder_for(
            model, cache, len(rows), self.prompt_length + self.max_completion_length
        )
        self.decoder.start(cache, prompt_mask, completions.uniforms[self.rows])

    def decode(
        self,
        model: PreTrainedModel,
        last_hidden: Tensor,
        temperature: float,
        stopper: "_Stopper",
    ) -> None:
        """Sample all rows to their ends; last_hidden (N, H) are the prompts' last hidden states."""
        decoder = self.decoder
        num_samples = len(self.rows) // len(last_hidden)
        first_hidden = last_hidden.repeat_interleave(num_samples, dim=0)  # (R, H)
        decoder.draw(model, first_hidden, temperature)
        for num_tokens in range(1, self.max_completion_length + 1):  # the tokens that each row has
            is_last = num_tokens == self.max_completion_length
            if is_last or num_tokens - self.num_checked >= decoder.check_interval:
                # Results are written before rows leave the batch, and at the end. The end is the
                # last token, or when no row is open.
                self.find_ends(stopper, num_tokens)
                size = self.size_to_keep()
                if is_last or size < len(self.rows):
                    self.write(num_tokens)
                if is_last or size == 0:
                    return
                if size < len(self.rows):
                    self.shrink(size, num_tokens)
            num_used_slots = self.prompt_length + num_tokens
            if num_used_slots == decoder.size[1]:  # every slot has a token: make more
                decoder.fit(decoder.cache, num_used_slots)
            decoder.step(model, temperature)

    def find_ends(self, stopper: "_Stopper", num_tokens: int) -> None:
        """Look for ends in the tokens since the last time; note the rows that have ended."""
        tokens = self.decoder.tokens[: len(self.rows), self._columns(num_tokens)]
        lengths = stopper.find_ends(tokens, self.num_checked)  # (R,), 0 where there is no end
        self.num_checked = num_tokens
        has_ended = self.is_open & (lengths > 0)
        # Indexing with a mask would make a GPU wait for Python, so every row is written.
        earlier_lengths = self.completions.lengths[self.rows]
        self.completions.lengths[self.rows] = torch.where(has_ended, lengths, earlier_lengths)
        self.completions.finished[self.rows] |= has_ended
        self.is_open &= ~has_ended

    def size_to_keep(self) -> int:
        """The number of rows to go on with: at least those that are open, 0 if none is.

        The number falls by a quarter at a time. Each fall copies the cache and needs a new CUDA
        graph, so there should be few different numbers.
        """
        num_open = int(self.is_open.sum())
        size = len(self.rows)
        while size > 0 and num_open <= 0.75 * size:
            size = int(0.75 * size)
        return size

    def write(self, num_tokens: int) -> None:
        """Write the first num_tokens tokens of all rows, and their log-probs, to completions."""
        columns = self._columns(num_tokens)
        R = len(self.rows)
        self.completions.token_ids[self.rows, :num_tokens] = self.decoder.tokens[:R, columns]
        self.completions.logps[self.rows, :num_tokens] = self.decoder.logps[:R, columns]

    def shrink(self, size: int, num_tokens: int) -> None:
        """Go on with `size` rows: the open ones, and if need be some that have ended."""
        open_first = (~self.is_open).int().argsort(stable=True)
        kept_rows = open_first[:size]
        num_used_slots = self.prompt_length + num_tokens - 1  # the last token has not run yet
        self.decoder.keep_rows(kept_rows, num_used_slots)
        self.rows = self.rows[kept_rows]
        self.is_open = self.is_open[kept_rows]

    def _columns(self, num_tokens: int) -> slice:
        """The decoder's columns of the first num_tokens completion tokens."""
        return slice(self.prompt_length, self.prompt_length + num_tokens)


# --- Where a completion ends ----------------------------------------------------------------------


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a completion: the tokenizer's EOS and those of the generation_config.

    Qwen2 has two of them.
    """
    config_ids = model.generation_config.eos_token_id
    if not isinstance(config_ids, list):
        config_ids = [config_ids]
    ids = {tokenizer.eos_token_id, *config_ids}
    return sorted(ids - {None})


class _Stopper:
    """Finds where a completion ends: at an EOS, or with the token that completes a stop string."""

    def __init__(self, model, tokenizer, stop_strings):
        self.tokenizer = tokenizer
        self.stop_strings = tuple(stop_strings)
        self.eos_ids = eos_token_ids(model, tokenizer)
        self.eos = torch.tensor(self.eos_ids, device=model.device)
        if self.stop_strings:
            # The model may have more ids than the tokenizer has tokens, or fewer.
            num_ids = model.get_output_embeddings().weight.shape[0]
            of_tokens = _may_complete(tokenizer, self.stop_strings)[:num_ids]
            may_complete = torch.zeros(num_ids, dtype=torch.bool)
            may_complete[: len(of_tokens)] = torch.tensor(of_tokens)
            self.may_complete = may_complete  # (V,), on the CPU
            # Every token adds at least one byte of text, so that a stop string of n bytes lies in
            # the last n tokens. Special tokens may add none, hence 8 more.
            longest = max(len(string.encode()) for string in self.stop_strings)
            self.num_window_tokens = longest + 8

    def find_ends(self, tokens: Tensor, num_checked: int) -> Tensor:
        """How many tokens each row keeps, the one that ends it included.

        Args:
            tokens: (R, n) completion tokens.
            num_checked: how many leading columns have been searched already.

        Returns:
            (R,) the number of tokens, 0 where the row has no end.
        """
        is_end = torch.isin(tokens[:, num_checked:], self.eos)  # (R, n - num_checked)
        if self.stop_strings:
            is_end |= self._completes_stop_string(tokens, num_checked).to(is_end.device)
        first_end = num_checked + is_end.int().argmax(1)
        return torch.where(is_end.any(1), first_end + 1, 0)

    def _completes_stop_string(self, tokens: Tensor, num_checked: int) -> Tensor:
        """(R, n - num_checked) on the CPU: whether a token completes a stop string in its row."""
        # One copy brings every window to the CPU. Each window by itself would make a GPU wait.
        first_column = max(0, num_checked + 1 - self.num_window_tokens)
        tokens = tokens[:, first_column:].cpu()
        num_checked = num_checked - first_column
        candidates = self.may_complete[tokens[:, num_checked:]].nonzero()
        windows = []  # for each candidate, the tokens up to it that can hold a stop string
        for row, column in candidates.tolist():
            window_end = num_checked + column + 1
            window_start = max(0, window_end - self.num_window_tokens)
            windows.append(tokens[row, window_start:window_end])
        window_texts = self.tokenizer.batch_decode(windows)
        completes = torch.zeros(tokens[:, num_checked:].shape, dtype=torch.bool)
        rows, columns = candidates.unbind(1)
        completes[rows, columns] = torch.tensor(
            [self._has_stop_string(text) for text in window_texts], dtype=torch.bool
        )
        return completes

    def to_texts(self, completions: list[list[int]], finished: list[bool]) -> list[str]:
        """Completions as text, without the final EOS and cut at the end of the first stop string.

        Other special tokens stay visible.
        """
        without_eos = [ids[:-1] if ids[-1] in self.eos_ids else ids for ids in completions]
        texts = self.tokenizer.batch_decode(without_eos)
        for i, text in enumerate(texts):
            if finished[i] and self._has_stop_string(text):
                texts[i] = text[: self._first_stop(text)]
        return texts

    def _has_stop_string(self, text: str) -> bool:
        return any(string in text for string in self.stop_strings)

    def _first_stop(self, text: str) -> int:
        """Where the first stop string ends in a text that has one."""
        return min(text.index(s) + len(s) for s in self.stop_strings if s in text)


@lru_cache(maxsize=8)
def _may_complete(tokenizer, stop_strings: tuple[str, ...]) -> list[bool]:
    """For each token, whether its text holds the last character of a stop string.

    Only such a token can complete one, so that most tokens need not be decoded while sampling. A
    character outside ASCII can be split over several tokens: then every token may complete it.

    Each token is decoded twice in a row, because many tokenizers drop a space at the beginning of a
    text: the second time the space is there.
    """
    last_characters = {string[-1] for string in stop_strings}
    if not all(character.isascii() for character in last_characters):
        return [True] * len(tokenizer)
    texts = tokenizer.batch_decode([[i, i] for i in range(len(tokenizer))])
    return [not last_characters.isdisjoint(text) for text in texts]
