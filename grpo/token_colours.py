"""What the updates of an iteration did to each token of a group of completions, for report.html.

In every tenth iteration, each process shows its group with the largest spread of rewards. The
policy scores it once more after the updates, without gradient, as does the reference if it has not
done so before. The transcript (rollouts/step_000010.jsonl) has it as `tokens`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedTokenizerBase

from config import GRPOConfig
from grpo.metrics import reward_std
from grpo.rollout import Completion, compute_logps, split_into_groups
from grpo.run import Run

EVERY = 10  # iterations
MAX_COMPLETIONS = 8  # of a group, since scoring them takes time
REPLACEMENT_CHARACTER = "\ufffd"  # stands in a text for bytes that are no character


@contextmanager
def shown(config: GRPOConfig, run: Run, completions: list[Completion]) -> Iterator[None]:
    """Around an iteration's updates: give the shown completions the detail `tokens`.

    It holds lists with an entry for each token: its text, its log-prob when it was sampled, the
    change of its log-prob by the updates, and, where there is a reference, its log-prob after them
    minus that of the reference.
    """
    if run.iteration % EVERY != 0:
        yield
        return
    rows = choose(completions, config.group_size)

    def score(model) -> list[list[float]]:
        return compute_logps(
            model,
            [rows],
            temperature=config.temperature,
            max_tokens=config.micro_batch_tokens,
        )

    with run.timer("tokens"):
        old_logps = [row.old_logps for row in rows]
        if None in old_logps:
            old_logps = score(run.model)
    yield
    with run.timer("tokens"):
        new_logps = score(run.model)
        ref_logps = [row.ref_logps for row in rows]
        if config.beta > 0 and None in ref_logps:
            # The loss has scored the reference under inference mode. A sharded model whose weights
            # were gathered in this mode cannot be scored outside of it.
            with torch.inference_mode():
                ref_logps = score(run.base_model)
    for row, old, new, ref in zip(rows, old_logps, new_logps, ref_logps, strict=True):
        tokens = {
            "text": split_text(run.tokenizer, row.ids),
            "logp": rounded(row.sampled_logps),
            "change": differences(new, old),
        }
        if ref is not None:
            tokens["log_ratio"] = differences(new, ref)
        row.details["tokens"] = tokens


def choose(completions: list[Completion], group_size: int) -> list[Completion]:
    """The group with the largest spread of rewards; of a large group the largest advantages."""

    def spread(group: list[Completion]) -> float:
        return reward_std([completion.reward for completion in group])

    def size_of_advantage(completion: Completion) -> float:
        return 0.0 if math.isnan(completion.advantage) else abs(completion.advantage)

    group = max(split_into_groups(completions, group_size), key=spread)
    return sorted(group, key=size_of_advantage, reverse=True)[:MAX_COMPLETIONS]


def differences(logps: list[float], others: list[float]) -> list[float]:
    return rounded([logp - other for logp, other in zip(logps, others, strict=True)])


def rounded(values: list[float]) -> list[float]:
    return [round(value, 4) + 0.0 for value in values]  # the sum turns -0.0 into 0.0


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
