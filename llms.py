"""Models as a whole: loading a policy with its tokenizer, copying it, and sharding it."""

import copy
import logging
import re
from pathlib import Path
from types import MethodType

import torch
from huggingface_hub import model_info
from jinja2 import TemplateError
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

import distributed
import lora
import utils
from grpo.rollout import Completion, make_batch, split_into_groups
from sampling import generation
from sampling.vllm import VLLMSampler

transformers_logging.disable_progress_bar()


class _LoadReport(logging.Filter):
    """Keeps transformers' table of missing weights off the terminal; `_load_model` says it."""

    text = ""

    def filter(self, record):
        if "LOAD REPORT" in record.msg:
            self.text = record.msg
            return False
        return "checkpoint seem corrupted" not in record.msg


LOAD_REPORT = _LoadReport()
logging.getLogger("transformers.modeling_utils").addFilter(LOAD_REPORT)


def resolve_device(device: str) -> str:
    """What --device stands for here: `auto` is a GPU where there is one. Raises ValueError."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {device} cannot be used here ({_one_line(error)})") from None
    return device


# --- Loading --------------------------------------------------------------------------------------


def get_llm_tokenizer(
    model_name: str,
    device: str = "cpu",
    *,
    attn_implementation: str = "sdpa",
    gradient_checkpointing: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a policy in float32 (the master weights) and its tokenizer.

    Weights come from safetensors only, and code from the model's repository is never run. Dropout
    and noise are set to 0, since what is sampled must be what is trained. Before the model goes to
    its device, a few tokens are sampled and scored on the CPU, where float32 shows small
    differences.

    Args:
        model_name: a directory, or the name of a model on the hub. The hub is asked only if the
            model is not in its local cache.
        attn_implementation: the attention of the loss; sampling has its own.
        gradient_checkpointing: compute activations again in the backward pass, to save memory.

    Raises:
        ValueError: in one line, if the model cannot be found or loaded, or if log-probs that are
            computed here would differ from the model's own.
    """
    check_model_name("--model_name", model_name)
    try:
        model, tokenizer, removed_noise = _load_from_cache_or_hub(model_name)
    except Exception as error:  # what transformers raises has no class in common
        raise ValueError(
            f"--model_name {model_name}: cannot be loaded ({_one_line(error)}). It takes a"
            " directory, or the name of a model on a hub that this machine can reach, with complete"
            " safetensors weights that are not quantized, a tokenizer and SDPA attention"
        ) from error
    if tokenizer.pad_token_id is None:
        # This does no harm: masks here go by position, never by token id.
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    model.train()
    reason = _why_tokenizer_does_not_fit(tokenizer, model) or why_not_supported(model)
    if reason is not None:
        raise ValueError(
            f"--model_name {model_name}: {reason}, so it cannot be trained exactly here; take"
            " another model"
        )
    _end_turns_as_template(tokenizer, model)
    model.to(device)
    is_cuda = model.device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(model.device)  # CUDA graphs use the current device
        # cuDNN's attention makes a plan for each new shape, and every batch has a new shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
    _set_attention(model, attn_implementation)
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    num_parameters = sum(weight.numel() for weight in model.parameters())
    attention = model.config._attn_implementation
    print(f"{model_name}: {num_parameters:,} parameters, attention {attention}, {device}")
    if removed_noise:
        print(f"{model_name}: dropout and noise set to 0 ({', '.join(removed_noise)})")
    if is_cuda and not utils.has_bfloat16():
        print("this GPU has no bfloat16: training and sampling are in float32")
    return model, tokenizer


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the chat template writes after a reply: its first special token, if it has one.

    It is empty if there is no template, or if nothing follows a reply.
    """
    if not tokenizer.chat_template:
        return ""
    chat = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "REPLY"}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except (TemplateError, TypeError, ValueError):
        return ""  # rl_datasets.render_chat says so if the template is needed
    _, has_reply, end = text.rpartition("REPLY")
    if not has_reply:
        return ""
    special_tokens = [token for token in _added_tokens(tokenizer) if token in end]
    return min(special_tokens, key=end.index, default=end.strip())


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The tokens that stand in the tokenizer apart from its vocabulary, such as <|im_end|>."""
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values()]
    return [token for token in tokens if token.strip()]


def _end_turns_as_template(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Make the token with which the chat template ends a turn the EOS, and say so.

    A completion also ends at every EOS that the tokenizer and the generation_config had before.
    """
    end = end_of_turn(tokenizer)
    if end in ("", tokenizer.eos_token):
        return
    if end not in _added_tokens(tokenizer):
        print(
            f"warning: the chat template ends a turn with {end!r}, which is no special token of the"
            f" tokenizer, so that completions end only with {tokenizer.eos_token}"
        )
        return
    print(
        f"the chat template ends a turn with {end}, and not with the EOS {tokenizer.eos_token}:"
        f" completions end with either, and those of sft.py with {end}"
    )
    eos_ids = generation.eos_token_ids(model, tokenizer)
    tokenizer.eos_token = end
    model.generation_config.eos_token_id = sorted({*eos_ids, tokenizer.eos_token_id})


def max_positions(model: PreTrainedModel) -> int | None:
    """How many tokens a prompt and its completion may have together; None if there is no limit.

    LongRoPE has two sets of frequencies, and transformers takes the second for a whole batch if any
    position in it exceeds the original length. A prompt that is shared and a completion that runs
    on top of it would get one set each. So the original length is the limit.
    """
    config = model.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None)]
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    # Some models have a dict of parameters for each type of layer, the others just one.
    is_nested = all(isinstance(value, dict) for value in rope_parameters.values())
    for parameters in rope_parameters.values() if is_nested else [rope_parameters]:
        if parameters.get("rope_type") == "longrope":
            limits.append(parameters.get("original_max_position_embeddings"))
    return min((limit for limit in limits if limit), default=None)


def check_positions(
    model: PreTrainedModel, longest_prompt: int, max_completion_length: int
) -> None:
    """Raise ValueError where a prompt and its completion do not fit into the model's positions."""
    num_positions = max_positions(model)
    if num_positions is not None and longest_prompt + max_completion_length > num_positions:
        raise ValueError(
            f"--max_completion_length {max_completion_length}: this model has {num_positions:,}"
            f" positions, and the longest prompt takes {longest_prompt} of them"
        )


def _set_attention(model: PreTrainedModel, attn_implementation: str) -> None:
    """Raises ValueError, in one line, for attention that the model or this machine cannot use."""
    flag = f"--attn_implementation {attn_implementation}"
    if "flash" in attn_implementation and model.device.type != "cuda":
        raise ValueError(f"{flag}: it runs on a GPU only; take sdpa, the default")
    try:
        model.set_attn_implementation(attn_implementation)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{flag}: {_one_line(error)}") from error


def read_weights(folder: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """The trained weights in a directory, under the names that they have in `model`.

    transformers saves some weights under other names than a model has for them, or several together
    as one. Only its own way of loading knows which.

    Raises:
        ValueError: The weights are those of another model, or not finite.
    """
    if lora.has_adapters(model):
        return lora.read_adapter(folder, model)
    return _load_model(folder, copy.deepcopy(model.config)).state_dict()


def _load_from_cache_or_hub(
    model_name: str,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str]]:
    """The model, its tokenizer, and the dropout and noise that were removed."""
    try:
        return _load_files(model_name, local_files_only=True)
    except OSError:  # a file is missing
        if Path(model_name).is_dir():
            raise
    try:
        model_info(model_name, timeout=10)  # asks once, where a download would ask six times
    except Exception as error:  # what the hub's client raises has no class in common
        raise ValueError(
            "there is no such directory, nor a complete copy in the hub's local cache; the hub:"
            f" {error}"
        ) from error
    return _load_files(model_name, local_files_only=False)


def _load_files(
    model_name: str, local_files_only: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str]]:
    # transformers refuses to save a config that asks for attentions, which SDPA does not have.
    config = AutoConfig.from_pretrained(
        model_name, local_files_only=local_files_only, output_attentions=False, return_dict=True
    )
    removed_noise = _remove_noise(config)
    tokenizer = AutoTokenizer.from_pretrained(model_name, local_files_only=local_files_only)
    model = _load_model(model_name, config, local_files_only=local_files_only)
    return model, tokenizer, removed_noise


def _load_model(
    model_name: str | Path, config: PreTrainedConfig, *, local_files_only: bool = True
) -> PreTrainedModel:
    """A model in float32 whose weights are exactly those in its files.

    Raises:
        ValueError: The weights are quantized, are those of another model, or are not finite.
    """
    for text_config in (config, config.get_text_config()):
        if getattr(text_config, "quantization_config", None) is not None:
            raise ValueError("its config.json has a quantization_config: the weights are quantized")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            model_name,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=local_files_only,
            adapter_kwargs={"local_files_only": local_files_only},  # where peft is installed
            ignore_mismatched_sizes=True,  # these are reported
            output_loading_info=True,
        )
    except RuntimeError as error:
        # A model may hold as one tensor what its files hold as several, such as experts.
        names = re.findall(r"^(.+?) +\| \S*CONVERSION", LOAD_REPORT.text, re.MULTILINE)
        if "CONVERSION" not in str(error) or not names:
            raise
        raise ValueError(
            "weights missing from the files or of a wrong shape, among those that make up"
            f" {', '.join(names[:2])}"
        ) from error
    not_finite = [
        name for name, weight in model.state_dict().items() if not weight.isfinite().all()
    ]
    wrong_shapes = [
        f"{name} ({list(shape)} in the files, {list(expected_shape)} by config.json)"
        for name, shape, expected_shape in report["mismatched_keys"]
    ]
    faults = {
        "missing from the files": report["missing_keys"],
        "that the model does not have": report["unexpected_keys"],
        "of a wrong shape": wrong_shapes,
        "not finite (NaN or infinite)": not_finite,
    }
    messages = []
    for fault, names in faults.items():
        if names:
            first_names = ", ".join(sorted(names)[:2])
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            messages.append(f"weights {fault}: {first_names}{more}")
    if messages:
        raise ValueError("; ".join(messages))
    return model


def check_model_name(flag: str, name: str) -> None:
    """Refuse a path where there is no directory: otherwise a hub would be asked for it.

    A directory must hold one model, and no adapter and no pointers of Git LFS.

    Raises:
        ValueError: naming the flag and the path.
    """
    path = Path(name)
    looks_like_path = name.startswith((".", "/", "~")) or len(path.parts) > 2
    # "tiny/9m" is a path and not a name on the hub if there is a directory tiny.
    parent_exists = len(path.parts) == 2 and path.parent.is_dir()
    if (looks_like_path or parent_exists) and not path.is_dir():
        raise ValueError(f"{flag} {name}: there is no such directory")
    if (path / "adapter_config.json").exists():
        raise ValueError(
            f"{flag} {name}: holds an adapter (LoRA: adapter_config.json); merge it into its base"
            " model and give the directory of the result, or move its files away if the weights"
            " beside it are meant"
        )
    one_file = path / "model.safetensors"
    index = path / "model.safetensors.index.json"
    if one_file.exists() and index.exists():
        raise ValueError(
            f"{flag} {name}: holds weights twice, in {one_file.name} and in the files that"
            f" {index.name} lists; move those away that are not meant"
        )
    for file in sorted(path.glob("*")):
        if file.is_file() and _is_git_lfs_pointer(file):
            raise ValueError(
                f"{flag} {name}: {file.name} is only a Git LFS pointer to the file; fetch it with"
                " `git lfs pull`"
            )


def _is_git_lfs_pointer(file: Path) -> bool:
    first_words = b"version https://git-lfs"
    with file.open("rb") as content:
        return content.read(len(first_words)) == first_words


def _one_line(error: Exception, max_length: int = 300) -> str:
    return " ".join(str(error).split())[:max_length]


def _remove_noise(config) -> list[str]:
    """Set every rate of dropout and of noise in a config, such as a router's jitter, to 0.

    Returns:
        The name and former value of each rate that was not 0.
    """
    rates = {}
    for text_config in (config, config.get_text_config()):  # most often these are the same
        for name, value in vars(text_config).items():
            is_noise = any(word in name for word in ("drop", "jitter", "noise"))
            if is_noise and isinstance(value, float) and value > 0:
                rates[name] = value
                setattr(text_config, name, 0.0)
    return [f"{name} {value:g}" for name, value in rates.items()]


def _why_tokenizer_does_not_fit(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> str | None:
    """Why a model cannot be trained with its tokenizer; None if it can.

    Where there are no tokenizer files, transformers makes a tokenizer that knows no token.
    """
    num_embeddings = model.get_input_embeddings().num_embeddings
    if not tokenizer("a 1", add_special_tokens=False)["input_ids"]:
        return "there are no tokenizer files (tokenizer.json)"
    last_id = max(tokenizer.get_vocab().values())
    if last_id >= num_embeddings:
        return f"its tokenizer's ids go up to {last_id}, the model's only to {num_embeddings - 1}"
    if tokenizer.eos_token_id is None:
        return "its tokenizer has no EOS token to end a completion"
    return None


# --- Which models are supported -------------------------------------------------------------------

# Fields of configs, such as Gemma's, Granite's and Cohere's, that change the logits after the
# output layer. Log-probs here are made from the output layer itself.
RESCALING = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


# The greatest difference of two log-probs, in nats, that is taken for float32 rounding.
LOGP_TOLERANCE = 1e-3


@torch.no_grad()
def why_not_supported(model: PreTrainedModel) -> str | None:
    """Why sampling and log-probs here differ from the model's own forward pass; None if they agree.

    Two prompts of unequal length get two sampled completions each. Their log-probs are computed in
    three ways, since no list of names can know every model: by the sampler, by utils, and by the
    model's own forward pass on one row at a time.
    """
    config = model.config.get_text_config()
    for name in RESCALING:
        if getattr(config, name, None) not in (None, 1, 1.0):
            return f"it rescales its logits after the output layer ({name})"
    C = 3
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(config.vocab_size, (2, 5), generator=generator).tolist()
    prompts[1] = prompts[1][2:]  # the second prompt is shorter
    uniforms = 1 - torch.rand((4, C), generator=generator, dtype=torch.float64)
    try:
        completion_ids, sampled_logps = generation.sample_tokens(model, prompts, uniforms)
        prompts_of_rows = utils.repeat_each(prompts, 2)
        pairs = zip(prompts_of_rows, completion_ids.tolist(), strict=True)
        completions = [Completion(prompt, ids) for prompt, ids in pairs]
        batch = make_batch(split_into_groups(completions, 2), model.device)
        ids = batch.prompt_completion_ids
        mask = batch.attention_mask
        logps = utils.get_per_token_logps(model, ids, mask, C, group_size=2)
        expected = _logps_of_unpadded_rows(model, ids, mask, C)
    except Exception as error:  # a model of another kind may raise anything
        return (
            "its layers do not keep keys and values that completions can share"
            f" ({type(error).__name__}: {_one_line(error, 150)})"
        )
    gap = torch.stack([logps - expected, sampled_logps - expected]).abs().max().item()
    if gap < LOGP_TOLERANCE:
        return None
    # A gap of NaN comes here as well.
    return (
        f"its log-probs are off by {gap:.2g} from those of its own forward pass (does it rescale"
        " its logits?)"
    )


def _logps_of_unpadded_rows(model: PreTrainedModel, ids: Tensor, mask: Tensor, C: int) -> Tensor:
    """(B, C) log-probs of the last C tokens, by the model's forward pass on one row at a time."""
    rows = []
    for row_ids, row_mask in zip(ids, mask.bool(), strict=True):
        logits = model(row_ids[row_mask].unsqueeze(0), use_cache=False).logits[0]
        rows.append(logits[-C - 1 : -1])  # each predicts the next token
    logps = torch.stack(rows).float().log_softmax(-1)  # (B, C, V)
    return logps.gather(-1, ids[:, -C:].unsqueeze(-1)).squeeze(-1)


# --- Copies and shards ----------------------------------------------------------------------------


def get_base_model(model: PreTrainedModel) -> PreTrainedModel:
    """The frozen reference policy: a copy of the model that is never updated.

    Of a model with adapters it is the model without them, which shares its weights. A copy is split
    over the processes, if there are several. Where autocast would round the weights of the decoder
    layers' linear maps in every pass, they are bfloat16 from the beginning.
    """
    if lora.has_adapters(model):
        return lora.without_adapters(model)
    linear_weights = []
    if utils.has_autocast(model.device):
        linear_weights = weights_that_autocast_rounds(model)
    return shard(_frozen_copy(model, linear_weights))


def weights_that_autocast_rounds(model: PreTrainedModel) -> list[Tensor]:
    """The weights and biases of the linear maps in the decoder layers."""
    weights = []
    for module in model.get_decoder().layers.modules():
        if isinstance(module, torch.nn.Linear):
            weights += module.parameters(recurse=False)
    return weights


def _frozen_copy(model: PreTrainedModel, in_bfloat16: list[Tensor]) -> PreTrainedModel:
    """A copy that is never updated, some of whose weights are rounded to bfloat16.

    Buffers stay float32: rounded rotary frequencies would stand for other positions.
    """
    ids_in_bfloat16 = {id(weight) for weight in in_bfloat16}
    copies = {}
    for weight in model.parameters():
        dtype = torch.bfloat16 if id(weight) in ids_in_bfloat16 else weight.dtype
        weight_copy = weight.detach().to(dtype, copy=True)
        copies[id(weight)] = torch.nn.Parameter(weight_copy, requires_grad=False)
    return copy.deepcopy(model, copies).eval()  # deepcopy takes what was copied already from there


def get_sampler(model: PreTrainedModel, dtype: str = "auto") -> PreTrainedModel:
    """The model that samples: the policy itself, or a copy of it.

    Of several processes each has a whole copy. They make unequal numbers of decoding steps, which a
    sharded model cannot do. With adapters it is a copy into which they are merged.

    Args:
        dtype: "float32"; "bfloat16", for which a copy is made; or "auto", which is bfloat16 on
            CUDA, where that is faster, and float32 elsewhere.
    """
    is_bfloat16 = dtype == "bfloat16" or (dtype == "auto" and utils.has_autocast(model.device))
    if lora.has_adapters(model):
        model = lora.without_adapters(model)
    elif not is_bfloat16 and distributed.world_size() == 1:
        return model
    sampler = _frozen_copy(model, list(model.parameters()) if is_bfloat16 else [])
    return sampler if is_bfloat16 else sampler.float()


@torch.no_grad()
def refresh_sampler(sampler: PreTrainedModel | VLLMSampler, model: PreTrainedModel) -> None:
    """Give a sampling copy the policy's present weights."""
    if isinstance(sampler, VLLMSampler):
        sampler.load_weights(lora.merged_weights(model))
    elif lora.has_adapters(model):
        lora.merge_into(sampler, model)
    elif distributed.world_size() > 1:
        for copied, weight in zip(sampler.parameters(), model.parameters(), strict=True):
            copied.copy_(distributed.full_tensor(weight.to(copied.dtype)))
    elif sampler is not model:
        torch._foreach_copy_(list(sampler.parameters()), list(model.parameters()))


def shard(model: PreTrainedModel) -> PreTrainedModel:
    """Split weights, gradients and optimiser states over the processes, by FSDP2.

    On one process nothing changes. A layer's weights are gathered just before it runs, and freed
    after it. Its gradient is summed over the processes and not averaged, since each process's loss
    is its share of the whole update's loss.

    On CUDA the decoder layers are gathered in bfloat16, to which autocast would cast them anyway.
    The residual stream, the embedding, the output layer, the sum of the gradients and the master
    weights stay float32.

    Weights beside which adapters are trained are not split, and need not be gathered. The reference
    shares them.
    """
    if distributed.world_size() == 1:
        return model
    mesh = init_device_mesh(model.device.type, (distributed.world_size(),))
    if mesh.device_type == "cuda" and utils.has_bfloat16():
        layer_policy = MixedPrecisionPolicy(
            torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    else:
        layer_policy = MixedPrecisionPolicy()
    whole = lora.frozen_weights(model)
    for layer in model.get_decoder().layers:
        _shard_module(layer, mesh, layer_policy, whole)
    embedding = model.get_input_embeddings()
    if embedding.weight is not model.get_output_embeddings().weight:
        # It is freed again after its use.
        _shard_module(embedding, mesh, MixedPrecisionPolicy(), whole)
    _shard_module(model, mesh, MixedPrecisionPolicy(), whole)
    # The loss calls model.per_token_logps and not forward. FSDP2 gathers the embedding, the last
    # norm and the output layer for registered methods only.
    model.per_token_logps = MethodType(utils.per_token_logps_of_unsharded, model)
    register_fsdp_forward_method(model, "per_token_logps")
    return model


def _shard_module(
    module: torch.nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    whole: set[torch.nn.Parameter],
) -> None:
    """Split a module's weights, but for `whole`, over the processes; its gradient is a sum."""
    fully_shard(
        module, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=True, ignored_params=whole
    )
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(1.0)
