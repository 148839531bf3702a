"""Everything that touches a model's weights: loading a policy and its tokenizer, copying it, sharding it."""

import copy
from pathlib import Path
from types import MethodType

import torch
from safetensors import SafetensorError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_flash_attn_2_available
from transformers.utils import logging as transformers_logging

import distributed
import utils

transformers_logging.disable_progress_bar()


# --- Loading --------------------------------------------------------------------------------------


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
    attention = (
        "flash_attention_2"
        if torch.device(device).type == "cuda" and is_flash_attn_2_available()
        else "sdpa"
    )
    try:
        config = AutoConfig.from_pretrained(model_name)
        dropped = _remove_dropout(config)
        tokenizer = AutoTokenizer.from_pretrained(model_name)
        model = AutoModelForCausalLM.from_pretrained(
            model_name,
            config=config,
            dtype=torch.float32,
            attn_implementation=attention,
            use_safetensors=True,
        )
    # What transformers raises for a directory that lacks files, or holds others, has no common class.
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ImportError,
        SafetensorError,
    ) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{flag} cannot be loaded ({reason}). Give a directory with safetensors weights and a"
            " tokenizer, or the name of a model on a hub that this machine can reach"
        ) from error
    if not tokenizer("a 1", add_special_tokens=False)[
        "input_ids"
    ]:  # what transformers makes where there is no file
        raise ValueError(f"{flag} there are no tokenizer files (tokenizer.json)")
    known = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > known:
        raise ValueError(
            f"{flag} its tokenizer knows {len(tokenizer)} tokens, the model only {known}"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{flag} its tokenizer has no EOS token, so a completion could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = (
            tokenizer.eos_token
        )  # harmless: masks here go by position, never by token id
    tokenizer.padding_side = "left"
    model = model.to(device).train()
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(model.device)  # a graph is captured and replayed on the current one
        torch.backends.cuda.enable_cudnn_sdp(
            False
        )  # it makes a plan for each new shape, which each batch has
    if reason := why_not_served(model):
        raise ValueError(f"{flag} {reason}, so it cannot be trained exactly here; take another")
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    print(
        f"{model_name}: {sum(p.numel() for p in model.parameters()):,} parameters, attention {attention}, {device}"
    )
    if dropped:
        print(f"{model_name}: dropout set to 0 ({', '.join(dropped)})")
    if torch.device(device).type == "cuda" and not utils.has_bfloat16():
        print("this GPU has no bfloat16: training and sampling are in float32")
    return model, tokenizer


def check_model_name(flag: str, name: str) -> None:
    """Raise ValueError for a path without a directory: nobody should wait for a hub to say so."""
    path = Path(name)
    local = (
        name.startswith((".", "/", "~"))
        or len(path.parts) > 2
        or (len(path.parts) == 2 and path.parent.is_dir())
    )
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


RESCALING = (
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
)  # of Gemma, Granite, ...


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
    expected = (
        torch.stack(rows).float().log_softmax(-1).gather(-1, ids[:, -3:].unsqueeze(-1)).squeeze(-1)
    )
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
    half = dtype == "bfloat16" or (
        dtype == "auto" and model.device.type == "cuda" and utils.has_bfloat16()
    )
    if not half and distributed.world_size() == 1:
        return model
    copied = copy.deepcopy(model).requires_grad_(False).eval()
    for p in (
        copied.parameters() if half else ()
    ):  # not buffers: rounded rotary frequencies would be other positions
        p.data = p.data.to(torch.bfloat16)
    return copied


@torch.no_grad()
def refresh_sampler(sampler: PreTrainedModel, model: PreTrainedModel) -> None:
    """Give a sampling copy the policy's present weights."""
    if distributed.world_size() > 1:
        for copied, part in zip(sampler.parameters(), model.parameters(), strict=True):
            copied.copy_(distributed.full_tensor(part.to(copied.dtype)))
    elif sampler is not model:
        torch._foreach_copy_(list(sampler.parameters()), list(model.parameters()))


def shard(model: PreTrainedModel) -> PreTrainedModel:
    """Split weights, gradients and optimiser states over the processes, by FSDP2; on one process nothing changes.

    A layer's weights are gathered just before it runs, and freed after it; its gradient is summed over the processes,
    whose losses are shares of one update's. On CUDA the decoder layers are gathered in bfloat16, to which autocast
    would cast them; the residual stream, embedding, output layer, gradients' sum and master weights stay float32.
    """
    if distributed.world_size() == 1:
        return model
    mesh = init_device_mesh(model.device.type, (distributed.world_size(),))
    half = MixedPrecisionPolicy(
        torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in (*model.get_decoder().layers, model):
        use_half = mesh.device_type == "cuda" and utils.has_bfloat16() and module is not model
        policy = half if use_half else MixedPrecisionPolicy()
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    # The loss runs the model's parts, not its forward: this method has embedding, norm and output layer gathered.
    model.per_token_logps = MethodType(utils.per_token_logps_of_unsharded, model)
    register_fsdp_forward_method(model, "per_token_logps")
    return model
