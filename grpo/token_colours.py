"""What the updates of an iteration did to each token of a group of completions, for report.html.

In every tenth iteration, each process shows its group with the largest spread of rewards. The
policy scores it once more after the updates, without gradient, as does the reference if it has not
done so before. The transcript (rollouts/step_000010.jsonl) has it as `tokens`.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedTokenizerBase

from grpo.metrics import reward_std
from grpo.rollout import Completion, compute_logps, split_into_groups

EVERY = 10  # iterations
MAX_COMPLETIONS = 8  # of a group, since scoring them takes time


@contextmanager
def shown(run, completions: list[Completion]) -> Iterator[None]:
    """Around an iteration's updates: give the shown completions the detail `tokens`.

    It holds lists with an entry for each token: its text, its log-prob when it was sampled, the
    change of its log-prob by the updates, and, where there is a reference, its log-prob after them
    minus that of the reference.
    """
    config = run.config
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
    groups = split_into_groups(completions, group_size)
    group = max(groups, key=lambda group: reward_std([row.reward for row in group]))

    def size(row: Completion) -> float:  # of its advantage; those without one come last
        return -1.0 if math.isnan(row.advantage) else abs(row.advantage)

    return sorted(group, key=size, reverse=True)[:MAX_COMPLETIONS]


def differences(logps: list[float], other_logps: list[float]) -> list[float]:
    return rounded([logp - other for logp, other in zip(logps, other_logps, strict=True)])


def rounded(values: list[float]) -> list[float]:
    return [round(value, 4) + 0.0 for value in values]  # the sum turns -0.0 into 0.0


def split_text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> list[str]:
    """The text that each of these tokens adds to those before it.

    A token is decoded with the four before it, since many tokenizers drop a space at the beginning
    of a text. A character of several tokens is U+FFFD at the first of them and whole at the last.
    """
    texts = []
    for i in range(len(token_ids)):
        start = max(0, i - 4)
        text_before = tokenizer.decode(token_ids[start:i])
        text = tokenizer.decode(token_ids[start : i + 1])
        texts.append(text[len(os.path.commonprefix([text_before, text])) :])
    return texts
