"""Completion, the one record of a sampled text, and the micro-batches that the loss sees.

Shapes: B sequences, P prompt tokens, C completion tokens, T = P + C.
"""

import math
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

import utils
from config import GRPOConfig
from grpo import distributed


@dataclass
class Completion:
    """A completion: sampled, then rewarded, then trained on, then written to the transcript.

    The ids that are trained on are those that were sampled: its text is never tokenized again. The
    completions of a prompt, a group, are consecutive in every list.
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
        record |= self.details
        record |= {"reward": self.reward, "length": len(self.ids), "finished": self.finished}
        return record


Group = list[Completion]  # completions of one prompt, or some of them


def split_into_groups(completions: list[Completion], group_size: int) -> list[Group]:
    """The groups of group_size consecutive completions."""
    starts = range(0, len(completions), group_size)
    return [completions[start : start + group_size] for start in starts]


def split_into_updates(config: GRPOConfig, completions: list[Completion]) -> list[list[Completion]]:
    """This process's completions of each update: whole groups, shuffled anew in every epoch.

    A single update over the whole batch keeps their order.
    """
    size = config.train_batch_size // distributed.world_size()
    if config.epochs_per_rollout_batch == 1 and size == len(completions):
        return [completions]
    groups = split_into_groups(completions, config.group_size)
    updates = []
    for _ in range(config.epochs_per_rollout_batch):
        shuffled = []
        for i in torch.randperm(len(groups)).tolist():
            shuffled += groups[i]
        updates += [shuffled[start : start + size] for start in range(0, len(shuffled), size)]
    return updates


def micro_batches(groups: list[Group], max_tokens: int) -> list[list[Group]]:
    """Micro-batches of equally large groups, each of at most max_tokens tokens, padding included.

    Those are the tokens of completions. Prompts, which run once for each group, may have as many on
    top of that: they are a pass of their own. In groups of one nothing is shared, and prompts
    count. Groups of similar length go together, so that little is padded. A group that is too long
    is split into several, down to single completions.
    """
    parts = []  # (completions, tokens of the longest, tokens of the prompt, the completions)
    for group in groups:
        longest = max(len(completion.ids) for completion in group)
        for part in split_into_groups(group, max(1, max_tokens // longest)):
            longest = max(len(completion.ids) for completion in part)
            parts.append((len(part), longest, len(part[0].prompt_ids), part))
    batches = []
    longest_prompt = 0  # of the last batch
    for size, longest, prompt_length, part in sorted(parts, key=lambda part: part[:3]):
        longest_prompt = max(longest_prompt, prompt_length)
        if size == 1:
            tokens_of_group = longest_prompt + longest
        else:
            tokens_of_group = max(longest_prompt, size * longest)  # all are padded to one length
        has_size = batches and len(batches[-1][0]) == size
        if not has_size or (len(batches[-1]) + 1) * tokens_of_group > max_tokens:
            batches.append([])
            longest_prompt = prompt_length
        batches[-1].append(part)
    return batches


def passes_in_lockstep(
    batches: list[list[Group]], completions: list[Completion], model: PreTrainedModel
) -> list[tuple[list[Group], bool]]:
    """All: (micro-batch, whether it counts), equally many in every process.

    A pass through a sharded model gathers its weights from all processes. So a process with fewer
    micro-batches than another makes passes that do not count, with one of its completions, or with
    any token if it has none.
    """
    passes = [(batch, True) for batch in batches]
    if distributed.is_sharded(model):
        idle_group = completions[:1] or [Completion([0], [0], [0.0])]
        num_passes = max(distributed.gather([len(batches)]))
        num_idle = num_passes - len(batches)
        passes += [([idle_group], False)] * num_idle
    return passes


@dataclass(frozen=True)
class Batch:
    """A micro-batch as tensors, with padding to the left of prompts and right of completions."""

    group_size: int  # so many consecutive rows share a prompt
    prompt_completion_ids: Tensor  # (B, T)
    completion_ids: Tensor  # (B, C)
    attention_mask: Tensor  # (B, T): 1 on tokens, 0 on padding
    completion_mask: Tensor  # (B, C): 1 through the token that ends the completion
    advantages: Tensor  # (B,)
    sampled_logps: Tensor  # (B, C)
    old_logps: Tensor | None  # (B, C); None if the completions have none
    ref_logps: Tensor | None  # (B, C)


def make_batch(groups: list[Group], device: torch.device | str) -> Batch:
    """Equally large groups as tensors; a missing advantage is 0."""
    completions = list(chain.from_iterable(groups))

    def pad(rows: list[list], side: str) -> Tensor:
        tensors = [torch.tensor(row) for row in rows]
        return pad_sequence(tensors, batch_first=True, padding_side=side).to(device)

    def pad_logps(name: str) -> Tensor | None:
        rows = [getattr(completion, name) for completion in completions]
        return None if rows[0] is None else pad(rows, "right")

    prompts = [completion.prompt_ids for completion in completions]
    ids = [completion.ids for completion in completions]
    prompt_mask = pad([[1] * len(row) for row in prompts], "left")
    completion_mask = pad([[1] * len(row) for row in ids], "right")
    completion_ids = pad(ids, "right")
    advantages = torch.tensor([completion.advantage for completion in completions])
    return Batch(
        group_size=len(groups[0]),
        prompt_completion_ids=torch.cat([pad(prompts, "left"), completion_ids], dim=1),
        completion_ids=completion_ids,
        attention_mask=torch.cat([prompt_mask, completion_mask], dim=1),
        completion_mask=completion_mask,
        advantages=advantages.nan_to_num().to(device),
        sampled_logps=pad_logps("sampled_logps"),
        old_logps=pad_logps("old_logps"),
        ref_logps=pad_logps("ref_logps"),
    )


@torch.no_grad()
def compute_logps(
    model: PreTrainedModel,
    groups: list[Group],
    *,
    temperature: float = 1.0,
    max_tokens: int = 16384,
) -> list[list[float]]:
    """All: the log-probs of every completion's tokens under a model, in the groups' order.

    At most max_tokens padded tokens run at once, which bounds memory and changes no result.
    """
    logps_of = {}  # {id of a completion: its log-probs}
    passes = passes_in_lockstep(micro_batches(groups, max_tokens), list(chain(*groups)), model)
    for batch_groups, is_real in passes:
        batch = make_batch(batch_groups, model.device)
        with utils.autocast(model):
            logps = utils.get_per_token_logps(
                model,
                batch.prompt_completion_ids,
                batch.attention_mask,
                batch.completion_ids.shape[1],
                group_size=batch.group_size,
                temperature=temperature,
            )
        if is_real:
            for completion, row in zip(chain(*batch_groups), logps.tolist(), strict=True):
                logps_of[id(completion)] = row[: len(completion.ids)]
    return [logps_of[id(completion)] for completion in chain(*groups)]


def keep_logps(model, completions: list[Completion], config: GRPOConfig, name: str) -> None:
    """All: give completions their log-probs under a model, as "old_logps" or "ref_logps"."""
    logps = compute_logps(
        model,
        split_into_groups(completions, config.group_size),
        temperature=config.temperature,
        max_tokens=config.micro_batch_tokens,
    )
    for completion, completion_logps in zip(completions, logps, strict=True):
        setattr(completion, name, completion_logps)
