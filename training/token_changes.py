"""What the updates of an iteration did to each token of a group of completions.

The transcript of an iteration (rollouts/step_000010.jsonl) has this of the group whose rewards have
the largest standard deviation. The policy scores it once more after the updates, without gradient,
as does the reference if it has not done so before.

Shapes: B completions of this process, C completion tokens, N completions of all processes.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import distributed
from config import GRPOConfig
from sampling.rollout import Rollout, compute_rollout_logps
from training.records import Record
from training.run import Run

# Only so many completions of a group are shown, since scoring them takes time: all 16 of the demo's
# groups would add 3.7 % to an iteration.
MAX_COMPLETIONS = 8
REPLACEMENT_CHARACTER = "\ufffd"  # stands in a text for bytes that are no character


@contextmanager
def shown(config: GRPOConfig, run: Run, rollout: Rollout, records: list[Record]) -> Iterator[None]:
    """Around an iteration's updates: give the records of the shown completions the key `tokens`.

    It holds lists with an entry for each completion token: its text, its log-prob when it was
    sampled, the change of its log-prob by the updates, and, where there is a reference, its
    log-prob after them minus that of the reference. docs/metrics.md describes them.

    Args:
        rollout: of this process, with the log-probs that several updates share.
        records: (N,) of the completions that are trained on.
    """
    shown_rows = choose_rows(records, config.group_size)
    all_my_rows = distributed.share(range(len(records)))
    # Row 0 of the rollout is row all_my_rows[0] of all processes together.
    my_rows = [row - all_my_rows[0] for row in shown_rows if row in all_my_rows]
    compute_logps = partial(
        compute_rollout_logps,
        rollout=rollout,
        group_size=min(config.group_size, MAX_COMPLETIONS),
        temperature=config.temperature,
        micro_batch_tokens=config.micro_batch_tokens,
        rows=my_rows,
    )
    with run.timer("tokens"):
        old_logps = rollout.old_logps
        if old_logps is None and sampler_is_exact(run):
            old_logps = rollout.sampled_logps
        if old_logps is None:
            old_logps = compute_logps(run.model)
    yield
    with run.timer("tokens"):
        logps = compute_logps(run.model)
        columns = {"logp": rollout.sampled_logps, "change": logps - old_logps}
        if config.beta > 0:
            ref_logps = rollout.ref_logps
            if ref_logps is None:
                # The loss has scored the reference under inference mode. A sharded model whose
                # weights were gathered in this mode cannot be scored outside of it.
                with torch.inference_mode():
                    ref_logps = compute_logps(run.base_model)
            columns["log_ratio"] = logps - ref_logps
        my_tokens = [describe_tokens(run, rollout, row, columns) for row in my_rows]
        all_tokens = distributed.gather(my_tokens)
    for row, tokens in zip(shown_rows, all_tokens, strict=True):
        records[row]["tokens"] = tokens


def sampler_is_exact(run: Run) -> bool:
    """Whether the log-probs of sampling are the policy's own, up to some 1e-5.

    They are for a float32 sampler on the CPU (`sampling_logp_gap`), and four decimals are logged.
    In bfloat16 the gap is larger than what an update changes. On CUDA it remains even with a
    float32 sampler: autocast rounds the products of a decode step otherwise than those of a whole
    sequence.
    """
    return run.model.device.type == "cpu" and run.sampler.dtype == torch.float32


def describe_tokens(run: Run, rollout: Rollout, row: int, columns: dict[str, Tensor]) -> dict:
    """A completion's tokens: lists of their texts and of the values (B, C) of each column."""
    is_token = rollout.completion_mask[row].bool()
    tokens = {"text": split_text(run.tokenizer, rollout.completion_ids[row, is_token].tolist())}
    for name, values in columns.items():
        # The sum turns -0.0 into 0.0.
        tokens[name] = (values[row, is_token].double().round(decimals=4) + 0.0).tolist()
    return tokens


def choose_rows(records: Sequence[Record], group_size: int) -> list[int]:
    """The rows of the completions that are shown, in their order.

    They belong to the group whose rewards have the largest standard deviation, and are the
    MAX_COMPLETIONS with the largest advantages, whatever their sign. Where numbers are equal, the
    first group and the first completions are chosen.
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
    group = max(groups, key=spread)
    shown_rows = sorted(group, key=size_of_advantage, reverse=True)[:MAX_COMPLETIONS]
    return sorted(shown_rows)


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
