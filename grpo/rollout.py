"""Completion, the one record of a sampled text, and the micro-batches that the loss sees.

Shapes: B sequences, P prompt tokens, C completion tokens, T = P + C.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel

import distributed
import utils


@dataclass
class Completion:
    """A completion: sampled, then rewarded, then trained on, then written to the transcript.

    It keeps the ids that were sampled. Its text is never tokenized again. The completions of a
    prompt, a group, are consecutive in every list.
    """

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)  # through the token that ends it
    sampled_logps: list[float] = field(default_factory=list)  # of the ids, by the sampler
    finished: bool = False  # False if it was cut at --max_completion_length
    text: str = ""  # without the EOS, and up to the end of a stop string
    example: dict = field(default_factory=dict)  # of the data set

    # What training adds.
    reward: float = math.nan  # the weighted sum of its rewards; NaN if it could not be given
    advantage: float = math.nan  # what multiplies its log-probs in the loss; NaN without a reward
    details: dict = field(default_factory=dict)  # each reward, the verdicts, what was parsed
    old_logps: list[float] | None = None  # under the policy before the iteration's updates
    ref_logps: list[float] | None = None  # under the reference

    def record(self) -> dict:
        """Its row in rollouts/ or eval/."""
        record = {
            "id": self.example["id"],
            "prompt": self.example["prompt"],
            "completion": self.text,
            "gold": self.example["answer"],
        }
        record |= {name: self.example[name] for name in KEPT_COLUMNS if name in self.example}
        record |= self.details
        record |= {"reward": self.reward, "length": len(self.ids), "finished": self.finished}
        return record


# Columns of a data set that a record keeps, where its examples have them.
KEPT_COLUMNS = ("level", "subject")


@dataclass(frozen=True)
class Batch:
    """Completions as tensors, with padding to the left of prompts and to the right of completions.

    Log-probs are float32, and None where the completions have none.
    """

    prompt_completion_ids: Tensor  # (B, T)
    completion_ids: Tensor  # (B, C)
    attention_mask: Tensor  # (B, T): 1 on tokens, 0 on padding
    completion_mask: Tensor  # (B, C): 1 through the token that ends the completion
    advantages: Tensor  # (B,)
    sampled_logps: Tensor  # (B, C)
    old_logps: Tensor | None  # (B, C)
    ref_logps: Tensor | None  # (B, C)


def make_batch(completions: list[Completion], device: torch.device | str) -> Batch:
    """The completions as tensors; a missing advantage is 0."""

    def pad(rows: list[list], side: str) -> Tensor:
        tensors = [torch.tensor(row) for row in rows]
        return pad_sequence(tensors, batch_first=True, padding_side=side).to(device)

    def pad_logps(name: str) -> Tensor | None:
        rows = [getattr(completion, name) for completion in completions]
        return None if rows[0] is None else pad(rows, "right")

    prompts = [completion.prompt_ids for completion in completions]
    completion_ids = [completion.ids for completion in completions]
    prompt_mask = pad([[1] * len(ids) for ids in prompts], "left")
    completion_mask = pad([[1] * len(ids) for ids in completion_ids], "right")
    padded_ids = pad(completion_ids, "right")
    advantages = torch.tensor([completion.advantage for completion in completions])
    return Batch(
        prompt_completion_ids=torch.cat([pad(prompts, "left"), padded_ids], dim=1),
        completion_ids=padded_ids,
        attention_mask=torch.cat([prompt_mask, completion_mask], dim=1),
        completion_mask=completion_mask,
        advantages=advantages.nan_to_num().to(device),
        sampled_logps=pad_logps("sampled_logps"),
        old_logps=pad_logps("old_logps"),
        ref_logps=pad_logps("ref_logps"),
    )


def split_into_groups(completions: list[Completion], group_size: int) -> list[list[Completion]]:
    """The groups of group_size consecutive completions."""
    starts = range(0, len(completions), group_size)
    return [completions[start : start + group_size] for start in starts]


def micro_batches(
    completions: list[Completion], group_size: int, max_tokens: int
) -> list[list[Completion]]:
    """The completions in micro-batches of at most max_tokens tokens, padding included.

    Args:
        completions: whole groups. A micro-batch holds whole groups or a part of one.
        group_size: so many consecutive completions share a prompt, which counts once for them.
        max_tokens: a single completion that is longer gets a micro-batch of its own.
    """
    rows_of_batches = utils.split_into_micro_batches(
        [len(completion.prompt_ids) for completion in completions],
        [len(completion.ids) for completion in completions],
        group_size,
        max_tokens,
    )
    return [[completions[row] for row in rows] for rows in rows_of_batches]


def compute_logps(
    model: PreTrainedModel,
    completions: list[Completion],
    *,
    group_size: int = 1,
    temperature: float = 1.0,
    max_tokens: int = 16384,
    idle: list[Completion] | None = None,
) -> list[list[float]]:
    """All: the log-probs of each completion's tokens under a model, without gradient.

    Args:
        group_size: so many consecutive completions share a prompt, which runs once for them.
        max_tokens: padded tokens that run at once. It bounds memory and changes no result.
        idle: completions, for passes that only keep this process in step with others where the
            model is sharded; None: the first of `completions`.
    """
    batches = micro_batches(completions, group_size, max_tokens)
    passes = [(batch, True) for batch in batches]
    if distributed.is_sharded(model):
        passes = distributed.equal_passes(batches, (idle or completions)[:1])
    logps_of = {}  # by the identity of a completion
    for rows, is_counted in tqdm(passes, desc="log-probs", delay=10, leave=False, disable=None):
        batch = make_batch(rows, model.device)
        with torch.no_grad(), utils.autocast(model.device):
            logps = utils.get_per_token_logps(
                model,
                batch.prompt_completion_ids,
                batch.attention_mask,
                batch.completion_ids.shape[1],
                group_size=group_size,
                temperature=temperature,
            )
        if is_counted:
            for completion, row in zip(rows, logps.tolist(), strict=True):
                logps_of[id(completion)] = row[: len(completion.ids)]
    return [logps_of[id(completion)] for completion in completions]
