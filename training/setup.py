"""Model, data and rewards of a run, from its settings."""

from transformers import PreTrainedModel

import llms
import lora
import utils
from config import FineTuningConfig, GRPOConfig
from evaluator import get_evaluator
from rl_datasets import get_dataloaders
from sampling.vllm import VLLMSampler
from training.checks import check, check_lengths
from training.memory import OutOfMemory, flag_to_lower
from training.run import Run
from training.timer import StageTimer


def load(config: GRPOConfig | FineTuningConfig, *, with_reference: bool = False) -> Run:
    """What every script trains with; the script adds its optimiser and the number of iterations.

    Raises ValueError or OSError for a wrong flag, or for a file that is wrong or missing.
    """
    check(config)
    utils.seed_everything(config.seed)
    model, tokenizer = llms.get_llm_tokenizer(
        config.model_name,
        config.device,
        attn_implementation=config.attn_implementation,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    if config.lora_rank is not None:
        lora.add_adapters(model, config.lora_rank, config.seed)
    train_loader, eval_loader = get_dataloaders(
        config.dataset_name,
        tokenizer,
        prompt=config.prompt,
        dataset_path=config.dataset_path,
        max_prompt_length=config.max_prompt_length,
        seed=config.seed,
        eval_split=config.eval_split,
        eval_size=config.eval_size,
    )
    longest_prompt = max(train_loader.longest_prompt, eval_loader.longest_prompt)
    check_lengths(model, longest_prompt, config.max_completion_length)
    for split, loader in (("training", train_loader), (config.eval_split, eval_loader)):
        dropped = ""
        if loader.dropped:
            dropped = f" ({loader.dropped} dropped: longer than {config.max_prompt_length} tokens)"
        print(f"{config.dataset_name}: {len(loader):,} {split} problems{dropped}")
    base_model = llms.get_base_model(model) if with_reference else None
    evaluator = get_evaluator(
        config.evaluator or train_loader.default_evaluator,
        prompt=train_loader.prompt.name,
        config=config,
        reference=(base_model, tokenizer),  # --judge_type policy judges with it
    )
    evaluator.check_gold(train_loader.examples, eval_loader.examples)
    if config.sampler == "vllm":
        max_length = longest_prompt + config.max_completion_length
        sampler = load_vllm(config, model, max_length)
    else:
        sampler = llms.get_sampler(model, config.sampling_dtype)
    return Run(
        model=llms.shard(model),
        base_model=base_model,
        sampler=sampler,
        tokenizer=tokenizer,
        evaluator=evaluator,
        train_loader=train_loader,
        eval_loader=eval_loader,
        timer=StageTimer(model.device),
    )


def load_vllm(
    config: GRPOConfig | FineTuningConfig, model: PreTrainedModel, max_length: int
) -> VLLMSampler:
    """The sampler of --sampler vllm, with the policy's weights.

    Args:
        max_length: the most tokens of a prompt and its completion.

    Raises:
        ValueError: in one line, for a model that vLLM cannot load.
        OutOfMemory: it names the flag to lower.
    """
    num_sequences = config.max_concurrent_sequences
    try:
        with flag_to_lower("max_concurrent_sequences", num_sequences, how="start again with"):
            sampler = VLLMSampler(
                model,
                config.model_name,
                max_length=max_length,
                max_concurrent_sequences=num_sequences,
                seed=config.seed,
            )
            llms.refresh_sampler(sampler, model)
            return sampler
    except OutOfMemory:
        raise
    except Exception as error:  # what vLLM raises has no class in common
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"--sampler vllm: vLLM cannot load {config.model_name}"
            f" ({type(error).__name__}: {reason}); use --sampler torch"
        ) from error
