"""LoRA (arXiv:2106.09685): train a product of two small matrices beside each frozen weight.

A linear map of the decoder computes (W + s B A) x. The weights W of the model stay as they
are, A and B are trained, and the scale s is ALPHA / r. B is 0 at first, so that the model begins
unchanged. The embedding, the norms and the output layer have no adapter, and neither have experts
that a model holds as one tensor.

Shapes: r rank, I inputs and O outputs of a linear map. W is (O, I), A (r, I) and B (O, r).
"""

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import distributed
import utils

# The scale is ALPHA / r, with which the best learning rate hardly depends on the rank: about ten
# times that of full training (https://thinkingmachines.ai/blog/lora/).
ALPHA = 32

# The files that peft reads, and what it calls the model in the names of the weights.
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."


class LoRALinear(torch.nn.Linear):
    """A linear map with the weights of another one, which stay frozen, and an adapter."""

    def __init__(self, linear: torch.nn.Linear, rank: int, generator: torch.Generator):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        share_weights(self, linear)
        bound = 1 / math.sqrt(self.in_features)
        A = torch.empty(rank, self.in_features).uniform_(-bound, bound, generator=generator)
        B = torch.zeros(self.out_features, rank)
        self.lora_A = torch.nn.Parameter(A.to(linear.weight.device))
        self.lora_B = torch.nn.Parameter(B.to(linear.weight.device))
        self.rank = rank
        self.scale = ALPHA / rank

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) to (..., O)."""
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)

    def merged_weight(self) -> Tensor:
        """All: W + s B A, (O, I) in float32."""
        A = distributed.full_tensor(self.lora_A)
        B = distributed.full_tensor(self.lora_B)
        return self.weight.float() + self.scale * (B @ A)


def share_weights(linear: torch.nn.Linear, other: torch.nn.Linear) -> None:
    linear.weight = other.weight
    linear.bias = other.bias


def add_adapters(model: PreTrainedModel, rank: int, seed: int) -> None:
    """Freeze the model, and give every linear map of its decoder an adapter.

    Where autocast would round the weights of these maps in every pass, they become bfloat16 once
    and for all.

    Args:
        seed: of A, which is the same in all processes.

    Raises:
        ValueError: there are no such maps, or the rank is too large for one of them.
    """
    model.requires_grad_(False)
    decoder = set(model.get_decoder().modules())  # which has no output layer
    linears = {
        name: module
        for name, module in model.named_modules()
        if module in decoder and type(module) is torch.nn.Linear  # a subclass computes otherwise
    }
    if not linears:
        raise ValueError(f"--lora_rank {rank}: this model has no linear maps that take adapters")
    sizes = {name: min(linear.weight.shape) for name, linear in linears.items()}
    smallest = min(sizes, key=sizes.get)
    if rank > sizes[smallest]:
        raise ValueError(
            f"--lora_rank {rank} is more than the {sizes[smallest]} of the smallest linear map,"
            f" {smallest}, which has no greater rank; lower it"
        )
    generator = torch.Generator().manual_seed(seed)
    is_rounded = utils.has_autocast(model.device)
    for name, linear in linears.items():
        if is_rounded:
            linear.to(torch.bfloat16)
        model.set_submodule(name, LoRALinear(linear, rank, generator))
    num_trained = sum(weight.numel() for weight in adapter_weights(model).values())
    print(f"LoRA of rank {rank}: {num_trained:,} weights are trained")


def without_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """The model as it was before it got adapters.

    It has modules of its own and shares the frozen weights, so that none is held twice.
    """
    shared = {id(weight): weight for weight in model.parameters()}
    base_model = copy.deepcopy(model, shared)  # deepcopy copies nothing that is in `shared`
    for name, layer in adapted_layers(base_model).items():
        linear = torch.nn.Linear(layer.in_features, layer.out_features, device="meta")
        share_weights(linear, layer)
        base_model.set_submodule(name, linear)
    return base_model.eval()


def adapted_layers(model: PreTrainedModel) -> dict[str, LoRALinear]:
    """The linear maps that have an adapter, by their names in the model."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)
    }


def has_adapters(model: PreTrainedModel) -> bool:
    return bool(adapted_layers(model))


def adapter_weights(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """A and B of every adapter by their names in the model; without adapters, nothing."""
    weights = {}
    for name, layer in adapted_layers(model).items():
        weights[f"{name}.lora_A"] = layer.lora_A
        weights[f"{name}.lora_B"] = layer.lora_B
    return weights


def frozen_weights(model: PreTrainedModel) -> set[torch.nn.Parameter]:
    """The weights beside which adapters are trained; without adapters, none."""
    if not has_adapters(model):
        return set()
    return {weight for weight in model.parameters() if not weight.requires_grad}


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """All: the model's weights by name, with the adapters merged in, and none that is tied."""
    layers = adapted_layers(model)
    left_out = adapter_weights(model).keys() | model.all_tied_weights_keys.keys()
    for name, weight in model.state_dict().items():
        if name in left_out:
            continue
        layer = layers.get(name.removesuffix(".weight"))
        yield name, weight if layer is None else layer.merged_weight()


@torch.no_grad()
def merge_into(sampler: PreTrainedModel, model: PreTrainedModel) -> None:
    """All: give a copy without adapters the weights of a model with its adapters merged in."""
    for name, layer in adapted_layers(model).items():
        sampler.get_submodule(name).weight.copy_(layer.merged_weight())


# --- Checkpoints ----------------------------------------------------------------------------------


@torch.no_grad()
def gather_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """All: the weights of the model with its adapters merged in, and A and B by their own names.

    They are whole, in float32 and on the CPU.
    """
    weights = dict(merged_weights(model)) | adapter_weights(model)
    return {name: distributed.full_tensor(w).float().cpu() for name, w in weights.items()}


def save(folder: Path, model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Write the merged model to a folder, and its adapter in peft's format to folder/adapter.

    A directory with an adapter directly in it would not load as a model.

    Args:
        weights: by `gather_weights`.
    """
    names = adapter_weights(model).keys()
    merged = {name: weight for name, weight in weights.items() if name not in names}
    model.save_pretrained(folder, state_dict=merged)
    adapter = {f"{PREFIX}{name}.weight": weights[name] for name in names}
    layers = adapted_layers(model)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.config.name_or_path,
        "r": next(iter(layers.values())).rank,
        "lora_alpha": ALPHA,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter").mkdir()
    save_file(adapter, folder / "adapter" / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / "adapter" / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def read_adapter(folder: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of the adapter that `save` has written, by their names in the model.

    Raises:
        ValueError: it is the adapter of another model.
    """
    saved = load_file(folder / "adapter" / WEIGHTS_FILE)
    weights = {
        name.removeprefix(PREFIX).removesuffix(".weight"): weight for name, weight in saved.items()
    }
    if weights.keys() != adapter_weights(model).keys():
        raise ValueError(f"{folder / 'adapter'} is the adapter of another model")
    return weights
