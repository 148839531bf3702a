"""What the updates of an iteration did to each token of a few groups of completions.

The transcript of an iteration (rollouts/step_000010.jsonl) has this of the group whose rewards have
the largest standard deviation. The policy scores it once more after the updates, without gradient,
as does the reference if it has not done so before.

Shapes: B completions of this process, C completion tokens, N completions of all processes.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import distributed
from config import GRPOConfig
from sampling.rollout import Rollout, compute_rollout_logps
from training.run import Run

# Only so many completions of a group are shown, since scoring them takes time: all 16 of the demo's
# groups would add 3.7 % to an iteration.
MAX_COMPLETIONS = 8
NUM_GROUPS = 1
REPLACEMENT_CHARACTER = "\ufffd"  # stands in a text for bytes that are no character


@dataclass(frozen=True)
class ShownGroups:
    """The completions whose tokens are shown, and how the policy scored them before its updates."""

    records: list[dict]  # of these completions of all processes, as the transcript has them
    my_rows: list[int]  # those of this process, by their rows in its rollout
    old_logps: Tensor  # (B, C) under the policy before the updates; other rows may hold anything


def before_updates(
    config: GRPOConfig, run: Run, rollout: Rollout, records: list[dict], old_logps: Tensor | None
) -> ShownGroups:
    """Choose the groups that are shown, and score them before the updates if that is needed.

    Args:
        records: (N,) of the completions that are trained on.
        old_logps: (B, C) under the policy before the updates, where several updates share them.
    """
    shown_rows = choose_rows(records, config.group_size, NUM_GROUPS)
    all_my_rows = distributed.share(range(len(records)))
    # Row 0 of the rollout is row all_my_rows[0] of all processes together.
    my_rows = [row - all_my_rows[0] for row in shown_rows if row in all_my_rows]
    shown_records = [records[row] for row in shown_rows]

    # A float32 sampler on the CPU computes the policy's own log-probs, up to some 5e-7
    # (`sampling_logp_gap`), and four decimals are logged. In bfloat16 the gap is larger than what
    # an update changes. On CUDA the gap remains even with a float32 sampler: autocast rounds the
    # products of a decode step otherwise than those of a whole sequence.
    on_cpu = run.model.device.type == "cpu"
    sampler_is_exact = on_cpu and run.sampler.dtype == torch.float32
    if old_logps is None and (sampler_is_exact or not shown_records):
        old_logps = rollout.sampled_logps
    if old_logps is None:
        old_logps = compute_logps(config, run, rollout, run.model, my_rows)
    return ShownGroups(shown_records, my_rows, old_logps)


def add_to_records(
    config: GRPOConfig,
    run: Run,
    rollout: Rollout,
    shown_groups: ShownGroups,
    ref_logps: Tensor | None,
) -> None:
    """After the updates, give the shown completions' records the key `tokens`.

    It holds lists with an entry for each completion token: its text, its log-prob when it was
    sampled, the change of its log-prob by the iteration's updates, and, where there is a reference,
    its log-prob after them minus that of the reference. docs/metrics.md describes them.

    Args:
        ref_logps: (B, C) under the reference, where several updates share them.
    """
    if not shown_groups.records:
        return
    logps = compute_logps(config, run, rollout, run.model, shown_groups.my_rows)
    columns = {"logp": rollout.sampled_logps, "change": logps - shown_groups.old_logps}
    if config.beta > 0:
        if ref_logps is None:
            # The loss has scored the reference under inference mode. A sharded model whose weights
            # were gathered in this mode cannot be scored outside of it.
            with torch.inference_mode():
                ref_logps = compute_logps(
                    config, run, rollout, run.base_model, shown_groups.my_rows
                )
        columns["log_ratio"] = logps - ref_logps

    my_tokens = []
    for row in shown_groups.my_rows:
        is_token = rollout.completion_mask[row].bool()
        tokens = {"text": split_text(run.tokenizer, rollout.completion_ids[row, is_token].tolist())}
        for name, values in columns.items():
            # The sum turns -0.0 into 0.0.
            tokens[name] = (values[row, is_token].double().round(decimals=4) + 0.0).tolist()
        my_tokens.append(tokens)
    for record, tokens in zip(shown_groups.records, distributed.gather(my_tokens), strict=True):
        record["tokens"] = tokens


def choose_rows(records: Sequence[dict], group_size: int, num_groups: int) -> list[int]:
    """The rows of the completions that are shown, in their order.

    They belong to the num_groups groups whose rewards have the largest standard deviation. Of each
    group they are the MAX_COMPLETIONS with the largest advantages, whatever their sign. Where
    numbers are equal, the first groups and the first completions are chosen.
    """

    def spread(rows: range) -> float:
        rewards = [records[row]["reward"] for row in rows]
        rewards = [reward for reward in rewards if not math.isnan(reward)]
        # stdev computes in fractions. So it is exactly 0 for equal rewards, and does not depend on
        # their order.
        return statistics.stdev(rewards) if len(rewards) > 1 else 0.0

    def size_of_advantage(row: int) -> float:
        advantage = records[row]["advantage"]
        return 0.0 if math.isnan(advantage) else abs(advantage)

    groups = [range(row, row + group_size) for row in range(0, len(records), group_size)]
    shown_rows = []
    for rows in sorted(groups, key=spread, reverse=True)[:num_groups]:
        shown_rows += sorted(rows, key=size_of_advantage, reverse=True)[:MAX_COMPLETIONS]
    return sorted(shown_rows)


def compute_logps(
    config: GRPOConfig, run: Run, rollout: Rollout, model: PreTrainedModel, rows: list[int]
) -> Tensor:
    """(B, C) log-probs of these rows under a model, 0 in other rows."""
    return compute_rollout_logps(
        model,
        rollout,
        group_size=min(config.group_size, MAX_COMPLETIONS),
        temperature=config.temperature,
        micro_batch_tokens=config.micro_batch_tokens,
        rows=rows,
    )


def split_text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> list[str]:
    """The text of each of these tokens; joined, they are the text of all.

    A character may be split over several tokens. The last of them then has it, and the others have
    "". Bytes that are no character are shown as U+FFFD, as in the whole text.

    Many tokenizers drop a space at the beginning of a text. So a token is decoded together with the
    tokens before it, from the last one on whose text is known to consist of whole characters.
    """
    text = tokenizer.decode(token_ids)
    texts = []
    end = 0  # where the texts so far end in the whole text
    first_token = 0  # the tokens from this one on are decoded together
    start = 0  # where their text starts in the whole text
    for i, token_id in enumerate(token_ids):
        previous_end = end
        decoded = tokenizer.decode(token_ids[first_token : i + 1])
        is_whole = text.startswith(decoded, start)  # no character waits for its other bytes
        if i == len(token_ids) - 1:
            end = len(text)
        elif is_whole:
            end = max(end, start + len(decoded))
        texts.append(text[previous_end:end])
        text_alone = tokenizer.decode([token_id])
        is_whole_alone = text_alone and REPLACEMENT_CHARACTER not in text_alone
        if is_whole and is_whole_alone and decoded.endswith(text_alone):
            first_token = i
            start += len(decoded) - len(text_alone)
    return texts
