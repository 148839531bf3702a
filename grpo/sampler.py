"""The project's own sampler, as a run has it: which weights it samples from, and their renewal."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import utils
from config import RunConfig
from grpo import distributed, generation, weights
from grpo.rollout import Completion


class TorchSampler:
    """Samples from the policy itself, or from a copy of its weights."""

    def __init__(
        self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: RunConfig
    ):
        """Copy the policy where that is needed, before it gets adapters or is sharded.

        Adapters are merged into the copy. Of several processes each has a whole copy. They make
        unequal numbers of decoding steps, which a sharded model cannot do.
        """
        self.tokenizer = tokenizer
        self.max_concurrent_sequences = config.max_concurrent_sequences
        dtype = config.sampling_dtype
        is_bfloat16 = dtype == "bfloat16" or (dtype == "auto" and utils.trains_in_bfloat16(policy))
        needs_copy = config.lora_rank is not None or distributed.world_size() > 1
        self.is_policy = not (is_bfloat16 or needs_copy)
        self.model = policy
        if not self.is_policy:
            rounded = list(policy.parameters()) if is_bfloat16 else []
            self.model = weights.frozen_copy(policy, rounded)

    def sample(self, prompts: Sequence[str], **options) -> list[Completion]:
        """Completions of each prompt, by the options of `generation.generate`."""
        options["max_concurrent_sequences"] = self.max_concurrent_sequences
        return generation.generate(self.model, self.tokenizer, prompts, **options)

    @torch.no_grad()
    def refresh(self, policy: PreTrainedModel) -> None:
        """All: take over the policy's present weights."""
        if self.is_policy:
            return
        copies = self.model.state_dict()
        for name, weight in weights.merged_weights(policy):
            copies[name].copy_(distributed.full_tensor(weight.to(copies[name].dtype)))
