"""Loading a policy with its tokenizer, and refusing one that cannot be trained exactly here."""

from pathlib import Path

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

import utils
from grpo import generation
from grpo.rollout import Completion, make_batch, split_into_groups

transformers_logging.disable_progress_bar()


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
    model_name: str, device: str = "cpu", *, gradient_checkpointing: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a policy in float32 (the master weights) and its tokenizer.

    Weights come from safetensors only, and code from the model's repository is never run. Dropout
    and noise are set to 0, since what is sampled must be what is trained. Before the model goes to
    its device, a few tokens are sampled and scored on the CPU, where float32 shows small
    differences.

    Args:
        model_name: a directory, or the name of a model on the hub.
        gradient_checkpointing: compute activations again in the backward pass, to save memory.

    Raises:
        ValueError: in one line, if the model cannot be found or loaded, or if log-probs that are
            computed here would differ from the model's own.
    """
    try:
        config = AutoConfig.from_pretrained(model_name, output_attentions=False, return_dict=True)
        removed_noise = _remove_noise(config)
        tokenizer = AutoTokenizer.from_pretrained(model_name)
        model = load_model(model_name, config)
    except Exception as error:  # what transformers raises has no class in common
        raise ValueError(
            f"--model_name {model_name}: cannot be loaded ({_one_line(error)})"
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
    _set_ends(tokenizer, model)
    model.to(device)
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)  # CUDA graphs use the current device
        # cuDNN's attention makes a plan for each new shape, and every batch has a new shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
    # The attention of the loss; the sampler has its own. With the package flash-attn on a GPU,
    # "flash_attention_2" pays for long completions.
    model.set_attn_implementation("sdpa")
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    print(f"{model_name}: {model.num_parameters():,} parameters, on {device}")
    if removed_noise:
        print(f"{model_name}: dropout and noise set to 0 ({', '.join(removed_noise)})")
    return model, tokenizer


def load_model(model_name: str | Path, config: PreTrainedConfig) -> PreTrainedModel:
    """A model in float32 whose weights are exactly those in its files.

    Raises:
        ValueError: The weights are quantized, are those of another model, or are not finite.
        Exception: whatever transformers raises for files that are missing or cannot be read.
    """
    model, report = AutoModelForCausalLM.from_pretrained(
        model_name,
        config=config,
        dtype=torch.float32,
        attn_implementation="sdpa",
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # these are reported
        output_loading_info=True,
    )
    weights = model.state_dict()
    faults = {
        "are missing": report["missing_keys"],
        "belong to another model": report["unexpected_keys"],
        "have another shape": [name for name, *_ in report["mismatched_keys"]],
        "are not finite": [name for name in weights if not weights[name].isfinite().all()],
        "belong to an adapter": [name for name in weights if ".lora_" in name],
        "are quantized": ["all"] if getattr(config, "quantization_config", None) else [],
    }
    messages = []
    for fault, names in faults.items():
        if names:
            messages.append(f"{len(names)} weights {fault}, such as {min(names)}")
    if messages:
        raise ValueError("; ".join(messages))
    return model


def _set_ends(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Make the token with which the chat template ends a turn the EOS.

    A completion also ends at every EOS that the tokenizer and the generation_config had before. The
    model's new generation_config says how completions are sampled here: without top-k, top-p or
    penalties, whatever its files say.
    """
    eos_ids = set(generation.eos_token_ids(model, tokenizer))
    end = end_of_turn(tokenizer)
    added_tokens = {token.content for token in tokenizer.added_tokens_decoder.values()}
    if end in added_tokens and end != tokenizer.eos_token:
        print(f"completions end with {end}, as in the chat template, or {tokenizer.eos_token}")
        tokenizer.eos_token = end
        eos_ids.add(tokenizer.eos_token_id)
    elif end not in ("", tokenizer.eos_token):
        print(
            f"warning: the chat template ends a turn with {end!r}, which is no special token of the"
            f" tokenizer, so that completions end only with {tokenizer.eos_token}"
        )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=sorted(eos_ids),
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )


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
    added_tokens = [token.content for token in tokenizer.added_tokens_decoder.values()]
    ends = [token for token in added_tokens if token.strip() and token in end]
    return min(ends, key=end.index, default=end.strip()) if has_reply else ""


def max_positions(model: PreTrainedModel) -> int | None:
    """How many tokens a prompt and its completion may have together; None without a limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_positions(
    model: PreTrainedModel, longest_prompt: int, max_completion_length: int
) -> None:
    """Raise ValueError where a prompt and its completion do not fit into the model's positions."""
    num_positions = max_positions(model)
    if num_positions and longest_prompt + max_completion_length > num_positions:
        raise ValueError(
            f"--max_completion_length {max_completion_length}: this model has {num_positions:,}"
            f" positions, and the longest prompt takes {longest_prompt} of them"
        )


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
    # With LongRoPE one large position changes the frequencies of a whole batch.
    if "longrope" in str(getattr(config, "rope_parameters", None)):
        return "it has LongRoPE, whose frequencies depend on the longest row of a batch"
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
