"""Loading a policy with its tokenizer, and refusing one that cannot be trained exactly here."""

import os
from pathlib import Path
from types import MethodType

import torch
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
from grpo import decoding, generation
from grpo.rollout import Completion, compute_logps, split_into_groups

transformers_logging.disable_progress_bar()


def resolve_device(device: str) -> str:
    """What --device stands for here: `auto` is a GPU where there is one. Raises ValueError."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {device} cannot be used here ({_one_line(error)})") from None
    if torch.device(device).index:
        torch.cuda.set_device(device)  # the current one has the random state that is restored
    return device


# --- Loading --------------------------------------------------------------------------------------


def find_model(model_name: str) -> str:
    """What --model_name stands for: of a run's folder, its newest checkpoint. Raises ValueError."""
    folder = Path(model_name)
    checkpoints = finished_checkpoints(folder)
    if checkpoints:
        newest = checkpoints[max(checkpoints)]
        print(f"{model_name} is a run; its newest checkpoint is {newest}")
        return str(newest)
    # A name on the hub has one slash, and what stands before it is no folder here.
    is_path = model_name.count("/") > 1 or os.path.isdir(os.path.dirname(model_name))
    if is_path and not folder.exists():
        raise ValueError(f"--model_name {model_name}: there is no such folder")
    return model_name


def finished_checkpoints(output_dir: Path) -> dict[int, Path]:
    """{step: path} of a run's checkpoints, but not of copies such as step_000100_kept."""
    paths = {}
    for path in output_dir.glob("checkpoints/step_*"):
        number = path.name.removeprefix("step_")
        if number.isdecimal():
            paths[int(number)] = path
    return paths


def get_llm_tokenizer(
    model_name: str,
    device: str = "cpu",
    *,
    train_dtype: str | None = None,
    gradient_checkpointing: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a policy in float32 (the master weights) and its tokenizer.

    Weights come from safetensors only, and code from the model's repository is never run. Dropout
    and noise are set to 0, since what is sampled must be what is trained.

    Args:
        model_name: a directory, or the name of a model on the hub.
        train_dtype: of products, "float32" or "bfloat16"; None: bfloat16 on a GPU that has it.
        gradient_checkpointing: compute activations again in the backward pass, to save memory.

    Raises:
        ValueError: in one line, if the model cannot be found or loaded, or if log-probs that are
            computed here would differ from the model's own.
    """
    try:
        config = AutoConfig.from_pretrained(model_name, output_attentions=False, return_dict=True)
        _remove_noise(config)
        tokenizer = AutoTokenizer.from_pretrained(model_name)
        if not tokenizer("a 1", add_special_tokens=False)["input_ids"]:
            raise ValueError("there are no tokenizer files")  # transformers makes an empty one
        model = load_model(model_name, config)
        _set_ends(tokenizer, model)
    except Exception as error:  # what transformers raises has no class in common
        raise ValueError(
            f"--model_name {model_name}: cannot be loaded ({_one_line(error)})"
        ) from error
    model.train()
    # While the model is on the CPU, where float32 shows small differences.
    reason = why_not_supported(model, tokenizer)
    if reason is not None:
        raise ValueError(
            f"--model_name {model_name}: {reason}, so it cannot be trained exactly here; take"
            " another model"
        )
    model.to(device)
    model.train_dtype = train_dtype
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)  # CUDA graphs use the current device
        # cuDNN's attention makes a plan for each new shape, and every batch has a new shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
    # The attention of the loss; the sampler has its own. With the package flash-attn it may be
    # "flash_attention_2".
    model.set_attn_implementation("sdpa")
    # oneDNN compiles a kernel for each new shape, which takes longer than a small model's products.
    is_large = model.config.get_text_config().hidden_size >= 512
    if is_large and model.device.type == "cpu":
        utils.use_fastest_exact_products()
        model.set_attn_implementation(decoding.ATTENTION)
        if utils.trains_in_bfloat16(model):
            _add_biases_in_float32(model)
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    print(f"{model_name}: {model.num_parameters():,} parameters, on {device}")
    return model, tokenizer


def _add_biases_in_float32(model: PreTrainedModel) -> None:
    """Round queries and keys to bfloat16 before their bias is added, and not after.

    In some layers Qwen2's keys have biases of up to 200. Beside these, bfloat16 would keep little
    of how the keys of two tokens differ, and the gradients of these layers would be off.
    """

    def linear(self: torch.nn.Linear, inputs: Tensor) -> Tensor:
        product = torch.nn.functional.linear(inputs, self.weight)
        return (product + self.bias.float()).to(inputs.dtype)

    for name, module in model.named_modules():
        if name.endswith((".q_proj", ".k_proj")) and module.bias is not None:
            module.forward = MethodType(linear, module)


def load_model(model_name: str | Path, config: PreTrainedConfig) -> PreTrainedModel:
    """A model in float32 whose weights are exactly those in its files.

    Raises:
        ValueError: The weights are quantized, are those of another model, or are not finite.
        Exception: whatever transformers raises for files that are missing or cannot be read.
    """
    if getattr(config, "quantization_config", None):
        raise ValueError("its weights are quantized")
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
    model gets a new generation_config, for its checkpoints: without top-k, top-p or penalties,
    whatever its files say. Of it the sampler here reads the EOS alone (grpo/generation.py).
    """
    eos_ids = generation.eos_token_ids(model, tokenizer)
    end = end_of_turn(tokenizer)
    if end not in (None, tokenizer.eos_token):
        print(f"completions end with {end}, as in the chat template, or {tokenizer.eos_token}")
        tokenizer.eos_token = end
        eos_ids.append(tokenizer.eos_token_id)
    if tokenizer.eos_token is None:
        raise ValueError("its tokenizer has no EOS token to end a completion")
    if tokenizer.pad_token_id is None:
        # This does no harm: masks here go by position, never by token id.
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=sorted(set(eos_ids)),
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The first special token that the chat template writes after a reply; None without one."""
    if not tokenizer.chat_template:
        return None
    chat = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "REPLY"}]
    _, _, end = tokenizer.apply_chat_template(chat, tokenize=False).partition("REPLY")
    added_tokens = [token.content for token in tokenizer.added_tokens_decoder.values()]
    special_tokens = [token for token in added_tokens if token.strip() and token in end]
    return min(special_tokens, key=end.index, default=None)


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


def _remove_noise(config: PreTrainedConfig) -> None:
    """Set every rate of dropout and of noise, such as a router's jitter, to 0."""
    for text_config in (config, config.get_text_config()):  # most often these are the same
        for name, value in vars(text_config).items():
            is_noise = any(word in name for word in ("drop", "jitter", "noise"))
            if is_noise and isinstance(value, float):
                setattr(text_config, name, 0.0)


# --- Which models are supported -------------------------------------------------------------------

# Fields of configs, such as Gemma's, Granite's and Cohere's, that change the logits after the
# output layer. Log-probs here are made from the output layer itself.
RESCALING = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


# The greatest difference of two log-probs, in nats, that is taken for float32 rounding.
LOGP_TOLERANCE = 1e-3


@torch.no_grad()
def why_not_supported(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str | None:
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
    gaps = []
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every GPU too
            completions = generation.generate(
                model, tokenizer, ["What is 1 + 2?", "a 1"], num_samples=2, max_completion_length=4
            )
        logps_of_rows = compute_logps(model, split_into_groups(completions, 2))
        for completion, logps in zip(completions, logps_of_rows, strict=True):
            expected = _plain_logps(model, completion)
            gaps.append(torch.tensor(logps) - expected)
            gaps.append(torch.tensor(completion.sampled_logps) - expected)
    except Exception as error:  # a model of another kind may raise anything
        return (
            "its layers do not keep keys and values that completions can share"
            f" ({type(error).__name__}: {_one_line(error, 150)})"
        )
    gap = torch.cat(gaps).abs().max().item()
    if gap < LOGP_TOLERANCE:
        return None
    # A gap of NaN comes here as well.
    return (
        f"its log-probs are off by {gap:.2g} from those of its own forward pass (does it rescale"
        " its logits?)"
    )


def _plain_logps(model: PreTrainedModel, completion: Completion) -> Tensor:
    """The log-probs of a completion's tokens, by the model's own forward pass on it alone."""
    row = torch.tensor([completion.prompt_ids + completion.ids])
    logits = model(row, use_cache=False).logits[0, :-1]  # each predicts the next token
    logps = logits.float().log_softmax(-1).gather(-1, row[0, 1:].unsqueeze(-1)).squeeze(-1)
    return logps[-len(completion.ids) :]
