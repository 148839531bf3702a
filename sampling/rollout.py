"""The record of sampled completions, as it crosses from sampling to the loss.

Shapes: B sequences, P prompt tokens, C completion tokens, T = P + C.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

import distributed
import utils


@dataclass
class Rollout:
    """B sampled completions, by the ids that were sampled, never re-tokenized."""

    prompt_ids: Tensor  # (B, P) left-padded
    completion_ids: Tensor  # (B, C) right-padded
    attention_mask: Tensor  # (B, T) 1 on the prompt's and the completion's own tokens
    completion_mask: (
        Tensor  # (B, C) 1 through the first terminator (an EOS, or the end of a stop string)
    )
    sampled_logps: Tensor  # (B, C) float32 log-probs at the sampling temperature (at 1 if greedy), 0 where masked
    finished: Tensor  # (B,) False where the completion was cut at max_new_tokens
    texts: list[
        str
    ]  # B completions as text, without the EOS token and up to the end of a stop string

    @property
    def prompt_completion_ids(self) -> Tensor:  # (B, T)
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @property
    def lengths(self) -> Tensor:  # (B,) completion tokens, the terminator included
        return self.completion_mask.sum(1)

    def select(self, rows: Sequence[int] | Tensor) -> "Rollout":
        """The given rows, with the padding columns that none of them needs cut off on both sides."""
        rows = torch.as_tensor(rows, device=self.prompt_ids.device)
        prompt_mask = self.attention_mask[rows, : self.prompt_ids.shape[1]]
        P, C = int(prompt_mask.sum(1).max()), max(1, int(self.lengths[rows].max()))
        return Rollout(
            prompt_ids=self.prompt_ids[rows, -P:],
            completion_ids=self.completion_ids[rows, :C],
            attention_mask=torch.cat([prompt_mask[:, -P:], self.completion_mask[rows, :C]], dim=1),
            completion_mask=self.completion_mask[rows, :C],
            sampled_logps=self.sampled_logps[rows, :C],
            finished=self.finished[rows],
            texts=[self.texts[i] for i in rows.tolist()],
        )

    def replace(self, rows: Sequence[int], new: "Rollout") -> "Rollout":
        """These rows but for the given ones, whose place those of another Rollout take."""
        P = max(self.prompt_ids.shape[1], new.prompt_ids.shape[1])
        C = max(self.completion_ids.shape[1], new.completion_ids.shape[1])
        order = torch.arange(len(self.texts))
        order[rows] = len(self.texts) + torch.arange(len(rows))

        def padded(rollout):
            p, c = (
                P - rollout.prompt_ids.shape[1],
                C - rollout.completion_ids.shape[1],
            )  # on the left, on the right
            sides = dict(
                prompt_ids=(p, 0),
                completion_ids=(0, c),
                attention_mask=(p, c),
                completion_mask=(0, c),
            )
            sides |= dict(sampled_logps=(0, c), finished=(0, 0))
            return {
                name: torch.nn.functional.pad(getattr(rollout, name), by)
                for name, by in sides.items()
            }

        both, others = padded(self), padded(new)
        joined = {name: torch.cat([columns, others[name]]) for name, columns in both.items()}
        return Rollout(**joined, texts=self.texts + new.texts).select(order)

    def micro_batches(
        self, rows: Sequence[int] | Tensor, group_size: int, max_tokens: int, sharded: bool = False
    ) -> Iterator[tuple[Tensor, "Rollout", bool]]:
        """The given rows (whole groups) in pieces of at most max_tokens tokens: (rows, their Rollout, counts) each.

        A piece is whole groups or a part of one. For a sharded model all processes make equally many passes: one with
        fewer pieces than another goes on with a piece that does not count.
        """
        rows = torch.as_tensor(rows, dtype=torch.long)  # maybe none
        prompt_lengths = self.attention_mask[:, : self.prompt_ids.shape[1]].sum(1).cpu()
        lengths = prompt_lengths[rows].tolist(), self.lengths.cpu()[rows].tolist()
        pieces = [
            rows[piece]
            for piece in utils.split_into_micro_batches(*lengths, group_size, max_tokens)
        ]
        idle = torch.tensor([len(self.texts) - 1])  # any row
        passes = (
            distributed.equal_passes(pieces, idle)
            if sharded
            else [(piece, True) for piece in pieces]
        )
        for piece, counts in passes:
            yield piece, self.select(piece), counts


@torch.no_grad()
def compute_rollout_logps(
    model: PreTrainedModel,
    rollout: Rollout,
    *,
    group_size: int,
    temperature: float,
    micro_batch_tokens: int,
) -> Tensor:
    """(B, C) log-probs of a whole rollout's completions under a model, without gradient; 0 where masked."""
    logps = torch.zeros_like(rollout.sampled_logps)
    everything, sharded = range(len(logps)), distributed.is_sharded(model)
    for rows, batch, _ in rollout.micro_batches(
        everything, group_size, micro_batch_tokens, sharded
    ):
        C = batch.completion_ids.shape[1]
        with utils.autocast(model.device):
            logps[rows, :C] = utils.get_per_token_logps(
                model,
                batch.prompt_completion_ids,
                batch.attention_mask,
                C,
                group_size=group_size,
                temperature=temperature,
            )
    return logps


def as_rollout(rows: list[tuple[list[int], list[int]]], pad_token_id: int, device) -> Rollout:
    """Given text as a Rollout, to be scored or learnt: rows of (prompt ids, completion ids), no prompt without any."""
    prompt_ids, prompt_mask = left_pad([prompt for prompt, _ in rows], pad_token_id, device)
    lengths = torch.tensor([len(completion) for _, completion in rows], device=device)
    C = max(1, int(lengths.max()))
    ids = torch.tensor(
        [completion + [pad_token_id] * (C - len(completion)) for _, completion in rows],
        device=device,
    )
    mask = (torch.arange(C, device=device) < lengths.unsqueeze(1)).long()
    return Rollout(
        prompt_ids=prompt_ids,
        completion_ids=ids,
        attention_mask=torch.cat([prompt_mask, mask], dim=1),
        completion_mask=mask,
        sampled_logps=torch.zeros(ids.shape, device=device),
        finished=torch.ones(len(rows), dtype=torch.bool, device=device),
        texts=[""] * len(rows),
    )


def left_pad(sequences: list[list[int]], pad_token_id: int, device) -> tuple[Tensor, Tensor]:
    """(N, P) ids and mask from lists of unequal length."""
    P = max(len(s) for s in sequences)
    ids = torch.tensor([[pad_token_id] * (P - len(s)) + s for s in sequences], device=device)
    mask = torch.tensor([[0] * (P - len(s)) + [1] * len(s) for s in sequences], device=device)
    return ids, mask
