"""Everything that touches a model's weights: loading a policy and its tokenizer, sharding it, and sampling from it.

Shapes: B sequences, P prompt tokens, C completion tokens, T = P + C, V vocabulary.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import MethodType, SimpleNamespace

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache
from transformers.utils import is_flash_attn_2_available
from transformers.utils import logging as transformers_logging

import utils
from runs import processes
from sampling.decoding import ATTENTION, decoder_for
from sampling.rollout import Rollout, as_rollout, left_pad

transformers_logging.disable_progress_bar()


# --- Loading ----------------------------------------------------------------------------------------------------------


def get_llm_tokenizer(
    model_name: str, device: str = "cpu", *, gradient_checkpointing: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a policy in float32 (the master weights) and its tokenizer, by hub name or path.

    Only safetensors, never code from the model's repository. Attention is flash-attention 2 where CUDA and the package
    allow it, else PyTorch's SDPA. Dropout is set to 0: what is sampled must be what is trained.

    Raises:
        ValueError: in one line, when the model can't be found, loaded, or served exactly.
    """
    check_model_name("--model_name", model_name)
    flag = f"--model_name {model_name}:"
    attention = "flash_attention_2" if torch.device(device).type == "cuda" and is_flash_attn_2_available() else "sdpa"
    try:
        config = AutoConfig.from_pretrained(model_name)
        dropped = _remove_dropout(config)
        tokenizer = AutoTokenizer.from_pretrained(model_name)
        model = AutoModelForCausalLM.from_pretrained(
            model_name, config=config, dtype=torch.float32, attn_implementation=attention, use_safetensors=True
        )
    # What transformers raises for a directory that lacks files, or holds others, has no common class.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{flag} cannot be loaded ({reason}). Give a directory with safetensors weights and a"
            " tokenizer, or the name of a model on a hub that this machine can reach"
        ) from error
    if not tokenizer("a 1", add_special_tokens=False)["input_ids"]:  # what transformers makes where there is no file
        raise ValueError(f"{flag} there are no tokenizer files (tokenizer.json)")
    known = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > known:
        raise ValueError(f"{flag} its tokenizer knows {len(tokenizer)} tokens, the model only {known}")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{flag} its tokenizer has no EOS token, so a completion could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # harmless: masks here go by position, never by token id
    tokenizer.padding_side = "left"
    model = model.to(device).train()
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(model.device)  # a graph is captured and replayed on the current one
        torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each new shape, which each batch has
    if reason := why_not_served(model):
        raise ValueError(f"{flag} {reason}, so it cannot be trained exactly here; take another")
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    print(f"{model_name}: {sum(p.numel() for p in model.parameters()):,} parameters, attention {attention}, {device}")
    if dropped:
        print(f"{model_name}: dropout set to 0 ({', '.join(dropped)})")
    if torch.device(device).type == "cuda" and not utils.has_bfloat16():
        print("this GPU has no bfloat16: training and sampling are in float32")
    return model, tokenizer


def check_model_name(flag: str, name: str) -> None:
    """Raise ValueError for a path without a directory: nobody should wait for a hub to say so."""
    path = Path(name)
    local = name.startswith((".", "/", "~")) or len(path.parts) > 2 or (len(path.parts) == 2 and path.parent.is_dir())
    if local and not path.is_dir():
        raise ValueError(f"{flag} {name}: there is no such directory")


def _remove_dropout(config) -> list[str]:
    """Set every dropout rate of a config to 0, those of its text model too; names and values of what was not 0."""
    found = {}
    for part in (config, config.get_text_config()):  # most often the same
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float) and value > 0:
                found[name] = value
                setattr(part, name, 0.0)
    return [f"{name} {value:g}" for name, value in found.items()]


RESCALING = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")  # of Gemma, Granite, ...


@torch.no_grad()
def why_not_served(model: PreTrainedModel) -> str | None:
    """Why log-probs as utils computes them are not those of the model's own forward pass; None where they are.

    Tried on four short random rows, since no list of names can know every model: two prompts of unequal length, with
    two completions each.
    """
    text = model.config.get_text_config()
    for name in RESCALING:
        if getattr(text, name, None) not in (None, 1, 1.0):
            return f"it rescales its logits after the output layer ({name})"
    V, device = text.vocab_size, model.device
    ids = torch.randint(V, (4, 8), generator=torch.Generator().manual_seed(0)).to(device)
    ids[1::2, :5] = ids[::2, :5]  # (4, 5 + 3)
    mask = torch.ones_like(ids)
    mask[2:, :2] = 0  # the second prompt is shorter
    try:
        with utils.autocast(device):
            logps = utils.get_per_token_logps(model, ids, mask, 3, group_size=2)
            inputs = [row[real.bool()].unsqueeze(0) for row, real in zip(ids, mask, strict=True)]
            rows = [model(row, use_cache=False).logits[0, -4:-1] for row in inputs]
    except Exception as error:  # whatever a model raises that is built otherwise
        reason = " ".join(str(error).split())[:150]
        return f"its layers do not keep keys and values that completions can share ({type(error).__name__}: {reason})"
    expected = torch.stack(rows).float().log_softmax(-1).gather(-1, ids[:, -3:].unsqueeze(-1)).squeeze(-1)
    gap = (logps - expected).abs().max().item()
    # Float32 rounds by some 1e-6 here, bfloat16 (autocast on CUDA) by some hundredths.
    if not gap < (0.2 if device.type == "cuda" else 1e-3):
        return f"its log-probs are off by {gap:.2g} from those of its own forward pass (does it rescale its logits?)"
    return None


def get_base_model(model: PreTrainedModel) -> PreTrainedModel:
    """The frozen reference policy: a copy of the model that is never updated, sharded where there are processes."""
    return shard(copy.deepcopy(model).requires_grad_(False).eval())


def get_sampler(model: PreTrainedModel, dtype: str = "auto") -> PreTrainedModel:
    """The weights that sample: the policy itself, or its copy in bfloat16 ("auto": on CUDA, where it is faster).

    Of several processes each has a whole copy: they make unequal numbers of decoding steps, which shards could not.
    """
    half = dtype == "bfloat16" or (dtype == "auto" and model.device.type == "cuda" and utils.has_bfloat16())
    if not half and processes.world_size() == 1:
        return model
    copied = copy.deepcopy(model).requires_grad_(False).eval()
    for p in copied.parameters() if half else ():  # not buffers: rounded rotary frequencies would be other positions
        p.data = p.data.to(torch.bfloat16)
    return copied


@torch.no_grad()
def refresh_sampler(sampler: PreTrainedModel, model: PreTrainedModel) -> None:
    """Give a sampling copy the policy's present weights."""
    if processes.world_size() > 1:
        for copied, part in zip(sampler.parameters(), model.parameters(), strict=True):
            copied.copy_(processes.whole(part.to(copied.dtype)))
    elif sampler is not model:
        torch._foreach_copy_(list(sampler.parameters()), list(model.parameters()))


def shard(model: PreTrainedModel) -> PreTrainedModel:
    """Split weights, gradients and optimiser states over the processes, by FSDP2; on one process nothing changes.

    A layer's weights are gathered just before it runs, and freed after it; its gradient is summed over the processes,
    whose losses are shares of one update's. On CUDA the decoder layers are gathered in bfloat16, to which autocast
    would cast them; the residual stream, embedding, output layer, gradients' sum and master weights stay float32.
    """
    if processes.world_size() == 1:
        return model
    mesh = init_device_mesh(model.device.type, (processes.world_size(),))
    half = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*model.get_decoder().layers, model):
        use_half = mesh.device_type == "cuda" and utils.has_bfloat16() and module is not model
        policy = half if use_half else MixedPrecisionPolicy()
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    # The loss runs the model's parts, not its forward: this method has embedding, norm and output layer gathered.
    model.per_token_logps = MethodType(utils.per_token_logps, model)
    register_fsdp_forward_method(model, "per_token_logps")
    return model


# --- Sampling ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *,
    num_samples: int = 1, max_new_tokens: int = 512, temperature: float = 1.0, stop_strings: Sequence[str] = (),
    max_concurrent_sequences: int = 512, progress: Callable[[int], None] | None = None,
) -> Rollout:  # fmt: skip
    """Sample num_samples completions of each prompt from softmax(logits / temperature): the project's one sampler.

    The whole distribution is sampled (no top-k, top-p or penalties, whatever the model's own generation_config says),
    so that its log-probs are those that the loss recomputes. Each prompt runs once, for all of its samples;
    sequences that have ended leave the batch.

    Args:
        prompts: texts, chat template already applied.
        temperature: 0 is greedy.
        stop_strings: a completion also ends with the token that completes one of these in its text.
        max_concurrent_sequences: the memory bound; more than these are sampled in turns.
        progress: called with a number of completions each time so many are done.

    Returns:
        A Rollout of len(prompts) * num_samples rows; the samples of a prompt are consecutive.
    """
    device = model.device
    prompt_ids = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
    stop = _Stopper(model, tokenizer, stop_strings)
    B = len(prompts) * num_samples
    out = SimpleNamespace(
        completion_ids=torch.full((B, max_new_tokens), tokenizer.pad_token_id, device=device),
        sampled_logps=torch.zeros((B, max_new_tokens), device=device),
        # Drawn at once, so that a sample depends neither on who else is sampled with it nor on who has left.
        uniforms=1 - torch.rand((B, max_new_tokens), dtype=torch.float64, device=device),  # never 0, which p = 0 meets
        lengths=torch.full((B,), max_new_tokens, device=device),
        finished=torch.zeros(B, dtype=torch.bool, device=device),
    )
    # Prompts of similar length share a turn, the longest first: if memory runs out, it does so at once. Where not even
    # the samples of one prompt fit, they are sampled in several turns.
    order = sorted(range(len(prompts)), key=lambda i: -len(prompt_ids[i]))
    numbers, most = range(num_samples), max_concurrent_sequences
    parts = [numbers[j : j + most] for j in range(0, num_samples, most)]
    per_turn = max(1, most // num_samples)
    turns = [(order[i : i + per_turn], part) for i in range(0, len(order), per_turn) for part in parts]
    # Float32 weights sample under the autocast of the loss; a bfloat16 copy needs none.
    with utils.autocast(device if model.dtype == torch.float32 else "cpu"), _sampling(model):
        for turn, part in turns:
            ids, mask = left_pad([prompt_ids[i] for i in turn], tokenizer.pad_token_id, device)
            rows = torch.tensor([i * num_samples + j for i in turn for j in part], device=device)
            _decode(model, ids, mask, rows, len(part), temperature, stop, out)
            if progress:
                progress(len(rows))

    # What was sampled past a stop is cut off.
    completions = [row[:n] for row, n in zip(out.completion_ids.tolist(), out.lengths.tolist(), strict=True)]
    rows = [(prompt_ids[i // num_samples], completion) for i, completion in enumerate(completions)]
    rollout = as_rollout(rows, tokenizer.pad_token_id, device)
    own = rollout.completion_mask.bool()
    rollout.sampled_logps = out.sampled_logps[:, : own.shape[1]].where(own, 0.0)
    rollout.finished, rollout.texts = out.finished, stop.texts(completions, out.finished.tolist())
    return rollout


@contextmanager
def _sampling(model):
    """Evaluation mode, and attention that takes the decode step's mask: flash-attention's would ask the host."""
    was_training, before = model.training, model.config._attn_implementation
    chosen = ATTENTION if model._can_set_attn_implementation() else before  # Falcon has its own
    try:
        model.eval().set_attn_implementation(chosen)
        yield
    finally:
        model.train(was_training).set_attn_implementation(before)


def _decode(model, ids, mask, rows, num_samples, temperature, stop, out):
    """Sample num_samples completions of each prompt in ids (N, P) to their end, writing `rows` of out."""
    position_ids, cache = (mask.cumsum(1) - 1).clamp(min=0), DynamicCache()  # plain layers, as in utils
    prefill = model.get_decoder()(
        ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache, use_cache=True
    )
    P, max_new_tokens = ids.shape[1], out.completion_ids.shape[1]
    decoder = decoder_for(model, cache, len(rows), P + max_new_tokens)
    decoder.start(cache, mask, out.uniforms[rows])
    decoder.draw(model, prefill.last_hidden_state[:, -1].repeat_interleave(num_samples, dim=0), temperature)
    alive, looked = torch.ones_like(rows, dtype=torch.bool), 0
    for n in range(1, max_new_tokens + 1):  # tokens that each row has
        last = n == max_new_tokens
        if last or n - looked >= decoder.look:
            end, looked = stop(decoder.tokens[: len(rows), P : P + n], looked), n
            done = alive & (end > 0)
            out.lengths[rows[done]], out.finished[rows[done]] = end[done], True
            alive &= ~done
            left, size = int(alive.sum()), len(rows)
            while left <= 0.75 * size > 0:  # leaving copies the cache: in quarters, so that graphs are of few sizes
                size = int(0.75 * size)
            if last or size < len(rows):
                for mine, whole in ((decoder.tokens, out.completion_ids), (decoder.logps, out.sampled_logps)):
                    whole[rows, :n] = mine[: len(rows), P : P + n]
                if last or not size:
                    return
                keep = (~alive).int().argsort(stable=True)[:size]
                decoder.keep(keep, P + n - 1)
                rows, alive = rows[keep], alive[keep]
        if P + n == decoder.size[1]:  # the room is full
            decoder.fit(decoder.cache, P + n)
        decoder.step(model, temperature)


@torch.no_grad()
def compute_logps(
    model: PreTrainedModel, rollout: Rollout, *, group_size: int, temperature: float, micro_batch_tokens: int
) -> Tensor:
    """(B, C) log-probs of a whole rollout's completions under a model, without gradient; 0 where masked."""
    logps = torch.zeros_like(rollout.sampled_logps)
    everything, sharded = range(len(logps)), processes.is_sharded(model)
    for rows, batch, _ in rollout.micro_batches(everything, group_size, micro_batch_tokens, sharded):
        C = batch.completion_ids.shape[1]
        with utils.autocast(model.device):
            logps[rows, :C] = utils.get_per_token_logps(
                model, batch.prompt_completion_ids, batch.attention_mask, C,
                group_size=group_size, temperature=temperature,
            )  # fmt: skip
    return logps


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a completion: the tokenizer's EOS and the generation_config's (Qwen2 has two)."""
    listed = model.generation_config.eos_token_id
    listed = listed if isinstance(listed, list) else [listed]
    return sorted({tokenizer.eos_token_id, *(i for i in listed if i is not None)})


class _Stopper:
    """Knows where a completion ends: at an EOS id, or with the token that completes a stop string in its text."""

    def __init__(self, model, tokenizer, stop_strings):
        self.tokenizer, self.stop_strings = tokenizer, tuple(stop_strings)
        self.eos_ids = eos_token_ids(model, tokenizer)
        self.eos = torch.tensor(self.eos_ids, device=model.device)
        if self.stop_strings:
            table = torch.zeros(model.get_output_embeddings().weight.shape[0], dtype=torch.bool)
            known = _may_complete(tokenizer, self.stop_strings)[: len(table)]  # the tokenizer's tokens may be more
            table[: len(known)] = torch.tensor(known)
            self.may_complete = table.to(model.device)  # (V,)
            # Every token adds at least one byte of text, save special ones: a little room for these.
            self.window = max(len(s.encode()) for s in self.stop_strings) + 8

    def __call__(self, tokens, since):
        """(rows,) how many of its tokens (rows, n) each row keeps, ends looked for from column `since` on; 0: none."""
        recent = tokens[:, since:]
        ends = torch.isin(recent, self.eos)
        if self.stop_strings:
            candidates = self.may_complete[recent].nonzero()
            windows = [tokens[i, max(0, since + j + 1 - self.window) : since + j + 1] for i, j in candidates.tolist()]
            texts = self.tokenizer.batch_decode(windows)
            hits = [any(s in text for s in self.stop_strings) for text in texts]
            ends[candidates.unbind(1)] |= torch.tensor(hits, dtype=torch.bool, device=ends.device)
        return torch.where(ends.any(1), since + 1 + ends.int().argmax(1), 0)

    def texts(self, completions, finished):
        """Completions as text: without the final EOS, up to the end of the stop string; other special tokens stay."""
        texts = self.tokenizer.batch_decode([ids[:-1] if ids[-1] in self.eos_ids else ids for ids in completions])
        for i, text in enumerate(texts):
            ends = [text.index(s) + len(s) for s in self.stop_strings if s in text]
            texts[i] = text[: min(ends)] if ends and finished[i] else text
        return texts


@lru_cache(maxsize=8)
def _may_complete(tokenizer, stop_strings):
    """For each token id, whether its text holds the last character of a stop string: only then is decoding needed.

    A character outside ASCII can be split over several tokens, so then every token may complete the string.
    """
    last = [s[-1] for s in stop_strings]
    if not all(c.isascii() for c in last):
        return [True] * len(tokenizer)
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    return [any(c in text for c in last) for text in texts]
