"""The record of sampled completions, as it crosses from sampling to the loss.

Shapes: B sequences, P prompt tokens, C completion tokens, T = P + C.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

import distributed
import utils


@dataclass
class Rollout:
    """B sampled completions, by the ids that were sampled: their text is never tokenized again."""

    # (B, P), padded on the left.
    prompt_ids: Tensor
    # (B, C), padded on the right.
    completion_ids: Tensor
    # (B, T): 1 on the tokens of the prompt and of the completion, 0 on padding.
    attention_mask: Tensor
    # (B, C): 1 through the token that ends the completion (an EOS, or the end of a stop string).
    completion_mask: Tensor
    # (B, C) float32 log-probs at the sampling temperature (at 1 for greedy decoding), 0 if masked.
    sampled_logps: Tensor
    # (B,): False where the completion was cut at max_completion_length.
    finished: Tensor
    # B completions as text, without the EOS token and up to the end of a stop string.
    texts: list[str]

    # What training adds:
    # (B,): what multiplies log-probs in the loss; 0 where the reward is missing.
    advantages: Tensor | None = None
    # (B,): False where the reward is missing; such a row counts in no denominator of the loss.
    has_reward: Tensor | None = None
    # (B, C): the tokens of completion_mask that the loss counts.
    loss_mask: Tensor | None = None
    # (B, C) under the policy before an iteration's updates, and under the reference; None where the
    # loss is to compute them.
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None

    @property
    def prompt_completion_ids(self) -> Tensor:
        """(B, T): the prompts' and the completions' ids, side by side."""
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @property
    def lengths(self) -> Tensor:
        """(B,): the number of completion tokens, with the one that ends the completion."""
        return self.completion_mask.sum(1)

    @property
    def prompt_mask(self) -> Tensor:
        """(B, P): 1 on the prompt's tokens, 0 on its padding."""
        return self.attention_mask[:, : self.prompt_ids.shape[1]]

    def select(self, rows: Sequence[int] | Tensor) -> "Rollout":
        """The given rows, without the padding columns on either side that none of them needs."""
        rows = torch.as_tensor(rows, dtype=torch.long, device=self.prompt_ids.device)
        prompt_mask = self.prompt_mask[rows]
        completion_mask = self.completion_mask[rows]
        start = prompt_mask.shape[1] - _largest(prompt_mask.sum(1))  # the first prompt column
        C = max(1, _largest(completion_mask.sum(1)))

        def row_values(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows]

        def token_values(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows, :C]

        return Rollout(
            prompt_ids=self.prompt_ids[rows, start:],
            completion_ids=self.completion_ids[rows, :C],
            attention_mask=torch.cat([prompt_mask[:, start:], completion_mask[:, :C]], dim=1),
            completion_mask=completion_mask[:, :C],
            sampled_logps=self.sampled_logps[rows, :C],
            finished=self.finished[rows],
            texts=[self.texts[i] for i in rows.tolist()],
            advantages=row_values(self.advantages),
            has_reward=row_values(self.has_reward),
            loss_mask=token_values(self.loss_mask),
            old_logps=token_values(self.old_logps),
            ref_logps=token_values(self.ref_logps),
        )

    def replace(self, rows: Sequence[int], new: "Rollout") -> "Rollout":
        """This rollout with the rows of another one in the place of the given rows.

        Both are as the sampler has made them: what training adds is not there yet.
        """
        P = max(self.prompt_ids.shape[1], new.prompt_ids.shape[1])
        C = max(self.completion_ids.shape[1], new.completion_ids.shape[1])
        old_tensors = self._padded_tensors(P, C)
        tensors = {}
        for name, new_tensor in new._padded_tensors(P, C).items():
            tensors[name] = torch.cat([old_tensors[name], new_tensor])
        order = torch.arange(len(self.texts))
        order[rows] = len(self.texts) + torch.arange(len(rows))
        return Rollout(**tensors, texts=self.texts + new.texts).select(order)

    def _padded_tensors(self, P: int, C: int) -> dict[str, Tensor]:
        """The tensors by their names, with P prompt columns and C completion columns."""
        num_left = P - self.prompt_ids.shape[1]
        num_right = C - self.completion_ids.shape[1]
        return {
            "prompt_ids": F.pad(self.prompt_ids, (num_left, 0)),
            "completion_ids": F.pad(self.completion_ids, (0, num_right)),
            "attention_mask": F.pad(self.attention_mask, (num_left, num_right)),
            "completion_mask": F.pad(self.completion_mask, (0, num_right)),
            "sampled_logps": F.pad(self.sampled_logps, (0, num_right)),
            "finished": self.finished,
        }

    def micro_batches(
        self, rows: Sequence[int] | Tensor, group_size: int, max_tokens: int, sharded: bool = False
    ) -> Iterator[tuple[Tensor, "Rollout", bool]]:
        """The given rows in micro-batches of at most max_tokens tokens.

        Args:
            rows: row numbers of whole groups. A micro-batch holds whole groups or a part of one.
            group_size: this many consecutive rows share a prompt, which is counted once for them.
            max_tokens: padded tokens. A single row that is longer gets a micro-batch of its own.
            sharded: whether the model is split over several processes, which must then all make
                equally many passes: a process with fewer micro-batches adds ones that do not count.

        Yields:
            (n,) the numbers of some rows; these rows, without padding that none of them needs; and
            False if the pass only keeps this process in step with others: its loss must be 0.
        """
        rows = torch.as_tensor(rows, dtype=torch.long)  # with a dtype, since there may be no rows
        prompt_lengths = self.prompt_mask.sum(1).cpu()[rows]
        completion_lengths = self.lengths.cpu()[rows]
        micro_batches = utils.split_into_micro_batches(
            prompt_lengths.tolist(), completion_lengths.tolist(), group_size, max_tokens
        )
        rows_of_passes = [rows[indices] for indices in micro_batches]
        if sharded:
            any_row = torch.tensor([0])
            passes = distributed.equal_passes(rows_of_passes, any_row)
        else:
            passes = [(pass_rows, True) for pass_rows in rows_of_passes]
        for pass_rows, is_counted in distributed.progress_bar(
            passes, desc="log-probs", unit="micro-batch"
        ):
            yield pass_rows, self.select(pass_rows), is_counted


@torch.no_grad()
def compute_rollout_logps(
    model: PreTrainedModel,
    rollout: Rollout,
    *,
    group_size: int,
    temperature: float,
    micro_batch_tokens: int,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Log-probs of the completions of a rollout under a model, without gradient.

    Args:
        group_size: this many consecutive rows share a prompt, which runs once for them.
        micro_batch_tokens: padded tokens that run at once. It bounds memory and changes no result.
        rows: row numbers, where not all completions are needed; group_size consecutive ones share a
            prompt.

    Returns:
        (B, C) float32, exactly 0 where the completion is masked. Rows that are not needed may hold
        zeros.
    """
    logps = torch.zeros_like(rollout.sampled_logps)
    if rows is None:
        rows = range(len(logps))
    sharded = distributed.is_sharded(model)
    micro_batches = rollout.micro_batches(rows, group_size, micro_batch_tokens, sharded)
    for batch_rows, batch, _ in micro_batches:
        C = batch.completion_ids.shape[1]
        with utils.autocast(model.device):
            logps[batch_rows, :C] = utils.get_per_token_logps(
                model,
                batch.prompt_completion_ids,
                batch.attention_mask,
                C,
                group_size=group_size,
                temperature=temperature,
            )
    return logps


def as_rollout(rows: list[tuple[list[int], list[int]]], pad_token_id: int, device) -> Rollout:
    """A Rollout of the given token ids, as B rows.

    Its log-probs are 0, its rows all finished and its texts empty; the sampler fills these in.

    Args:
        rows: B pairs of (prompt ids, completion ids). Every prompt has at least one token. There
            may be no rows at all.
    """
    prompt_ids, prompt_mask = left_pad([prompt for prompt, _ in rows], pad_token_id, device)
    completions = [completion for _, completion in rows]
    lengths = [len(completion) for completion in completions]
    C = max([1, *lengths])
    padded = [completion + [pad_token_id] * (C - len(completion)) for completion in completions]
    completion_ids = torch.tensor(padded, dtype=torch.long, device=device).view(len(rows), C)
    column_numbers = torch.arange(C, device=device)
    completion_mask = (column_numbers < torch.tensor(lengths, device=device).unsqueeze(1)).long()
    return Rollout(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        attention_mask=torch.cat([prompt_mask, completion_mask], dim=1),
        completion_mask=completion_mask,
        sampled_logps=torch.zeros(completion_ids.shape, device=device),
        finished=torch.ones(len(rows), dtype=torch.bool, device=device),
        texts=[""] * len(rows),
    )


def left_pad(sequences: list[list[int]], pad_token_id: int, device) -> tuple[Tensor, Tensor]:
    """Ids and mask, (N, P) each, of N sequences of unequal length; P is 0 if there are none."""
    lengths = [len(sequence) for sequence in sequences]
    P = max(lengths, default=0)
    padded = [[pad_token_id] * (P - len(sequence)) + sequence for sequence in sequences]
    ids = torch.tensor(padded, dtype=torch.long, device=device).view(len(sequences), P)
    mask_rows = [[0] * (P - length) + [1] * length for length in lengths]
    mask = torch.tensor(mask_rows, dtype=torch.long, device=device).view(len(sequences), P)
    return ids, mask


def _largest(lengths: Tensor) -> int:
    """The largest of some lengths, 0 if there are none."""
    return int(lengths.max()) if len(lengths) else 0
