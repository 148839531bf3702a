"""vLLM in the place of the project's own sampler: --sampler vllm.

It runs in this process, with memory of its own. It draws from the whole distribution and returns
the log-probs of softmax(logits / temperature), as `generation` does. But a completion depends on
those that are sampled beside it.
"""

import os
from collections.abc import Callable, Sequence
from statistics import fmean

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import utils
from grpo import distributed, weights
from grpo.generation import EndFinder, eos_token_ids, tokenize
from grpo.rollout import Completion, compute_logps

# vLLM stores keys and values in blocks of at most this many tokens.
BLOCK_TOKENS = 128
MAX_GAP = 0.1  # nats per token on average; bfloat16 alone gives up to 0.04


class VLLMSampler:
    """A copy of the policy in vLLM, which is bfloat16 on a GPU that has it."""

    def __init__(
        self,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config,
        max_length: int,
    ):
        """Load vLLM beside a policy, and give it the policy's weights.

        Args:
            policy: as it was loaded, before it gets adapters or is sharded.
            max_length: the most tokens of a prompt and its completion.
        """
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # it is given tensors of this process
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # it would send them to its authors
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        self.tokenizer = tokenizer
        self.device = policy.device
        self.has_tied_weights = policy.config.tie_word_embeddings
        self.generation_config = policy.generation_config  # says which tokens end a completion
        self.dtype = torch.bfloat16 if utils.trains_in_bfloat16(policy) else torch.float32
        num_rows = config.max_concurrent_sequences
        cache_tokens = num_rows * (max_length + BLOCK_TOKENS)
        self.llm = LLM(
            model=config.model_name,
            dtype=self.dtype,
            seed=distributed.process_seed(config.seed),
            max_model_len=max_length,
            max_num_seqs=num_rows,
            kv_cache_memory_bytes=cache_tokens * kv_cache_bytes_per_token(policy, self.dtype),
            gpu_memory_utilization=0.01,  # a share that must be free at first
            enforce_eager=self.device.type != "cuda",
            load_format="dummy",  # so a weight that `refresh` left out would be noticed
            logprobs_mode="processed_logprobs",  # those after the division by the temperature
            # Of several processes each has a vLLM with all weights, on its own GPU.
            distributed_executor_backend=(
                "external_launcher" if distributed.world_size() > 1 else None
            ),
        )
        self.refresh(policy)

    @torch.no_grad()
    def refresh(self, policy: PreTrainedModel) -> None:
        """All: give vLLM every weight of the policy, by the name that it has there."""
        named_weights = (
            (name, distributed.full_tensor(weight.to(self.dtype)))
            for name, weight in weights.merged_weights(policy)
        )
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_weights})
        if self.device.type == "cpu" and self.has_tied_weights:
            self.llm.apply_model(pack_output_layer)
        self.llm.reset_prefix_cache()  # the keys and values of prompts, by the old weights

    def check(self, policy: PreTrainedModel, prompts: Sequence[str]) -> None:
        """Raise RunEnds if vLLM has other log-probs of a few completions than the policy."""
        completions = self.sample(prompts, max_completion_length=16)
        logps = compute_logps(policy, [[completion] for completion in completions])
        gaps = []
        for completion, policy_logps in zip(completions, logps, strict=True):
            pairs = zip(completion.sampled_logps, policy_logps, strict=True)
            gaps += [abs(sampled_logp - policy_logp) for sampled_logp, policy_logp in pairs]
        end_if_other_logps(fmean(gaps))

    def sample(
        self,
        prompts: Sequence[str],
        *,
        num_samples: int = 1,
        max_completion_length: int = 512,
        temperature: float = 1.0,
        stop_strings: Sequence[str] = (),
        progress: Callable | None = None,
    ) -> list[Completion]:
        """Sample as `generation.generate` does, with its options and result.

        `progress` has no effect: vLLM says nothing of it.
        """
        from vllm import SamplingParams

        if len(prompts) == 0:
            return []
        prompt_ids = tokenize(self.tokenizer, prompts)
        params = SamplingParams(
            n=num_samples,
            temperature=temperature,
            max_tokens=max_completion_length,
            stop=list(stop_strings),
            include_stop_str_in_output=True,
            stop_token_ids=eos_token_ids(self, self.tokenizer),
            ignore_eos=True,  # of the model's files; it is among the stop_token_ids
            skip_special_tokens=False,  # a stop string may be one
            logprobs=0,  # of the sampled token alone
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompt_ids], params, use_tqdm=False
        )
        completions = []
        for ids, output in zip(prompt_ids, outputs, strict=True):
            for sequence in output.outputs:
                pairs = zip(sequence.token_ids, sequence.logprobs, strict=True)
                logps = [logp_of_id[token_id].logprob for token_id, logp_of_id in pairs]
                finished = sequence.finish_reason == "stop"
                completions.append(Completion(ids, list(sequence.token_ids), logps, finished))
        EndFinder(self, self.tokenizer, stop_strings).give_texts(completions)
        return completions


def end_if_other_logps(gap: float) -> None:
    """Raise RunEnds where vLLM's log-probs are too far from the policy's, in nats on average."""
    if not gap <= MAX_GAP:
        raise utils.RunEnds(
            f"vLLM's log-probs differ from the policy's by {gap:.2g} nats on average, so it samples"
            " from another distribution; use --sampler torch"
        )


def pack_output_layer(vllm_model: nn.Module) -> None:
    """Renew the copy of a tied embedding that is the output layer on a CPU, in its own layout."""
    layer = vllm_model.lm_head
    layer.quant_method.process_weights_after_loading(layer)


def kv_cache_bytes_per_token(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """The memory that the keys and values of one token take."""
    config = model.config.get_text_config()
    head_size = getattr(config, "head_dim", None)
    head_size = head_size or config.hidden_size // config.num_attention_heads
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * num_heads * head_size * dtype.itemsize
