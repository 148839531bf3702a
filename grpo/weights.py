"""The policy's weights: copies such as the reference, shards, adapters, and the disk."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import MethodType

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

import llms
import utils
from grpo import distributed

# --- Copies and shards ----------------------------------------------------------------------------


def get_base_model(model: PreTrainedModel) -> "PreTrainedModel | WithoutAdapters":
    """The frozen reference policy: a copy of the model that is never updated.

    Of a model with adapters it is the model while they are switched off. A copy is split over the
    processes, if there are several. Where autocast would round the weights of the decoder's linear
    maps in every pass, they are bfloat16 from the beginning.
    """
    if has_adapters(model):
        return WithoutAdapters(model)
    linear_weights = []
    if utils.trains_in_bfloat16(model):
        for module in model.get_decoder().modules():
            if isinstance(module, torch.nn.Linear):
                linear_weights.append(module.weight)
    return shard(frozen_copy(model, linear_weights))


def frozen_copy(model: PreTrainedModel, in_bfloat16: list[Tensor]) -> PreTrainedModel:
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


def shard(model: PreTrainedModel) -> PreTrainedModel:
    """Split weights, gradients and optimiser states over the processes, by FSDP2.

    A layer's weights are gathered just before it runs, and freed after it. On CUDA that is in
    bfloat16, to which autocast would cast its matrices anyway (its norms are rounded here alone);
    the residual stream, the embedding, the output layer, the sum of the gradients and the master
    weights stay float32. A gradient is summed over the processes and not averaged, since each
    process's loss is its share of the update's.

    A model with adapters stays whole in every process (`distributed.sum_gradients`).
    """
    if distributed.world_size() == 1 or has_adapters(model):
        return model
    mesh = init_device_mesh(model.device.type, (distributed.world_size(),))
    layer_policy = MixedPrecisionPolicy()
    if utils.trains_in_bfloat16(model):
        layer_policy = MixedPrecisionPolicy(
            torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    decoder = model.get_decoder()
    for layer in getattr(decoder, "layers", None) or decoder.h:  # h: GPT-2, GPT-J, Falcon
        _shard_module(layer, mesh, layer_policy)
    embedding = model.get_input_embeddings()
    if embedding.weight is not model.get_output_embeddings().weight:
        _shard_module(embedding, mesh, MixedPrecisionPolicy())  # it is freed again after its use
    _shard_module(model, mesh, MixedPrecisionPolicy())
    # The loss calls model.per_token_logps and not forward. FSDP2 gathers the embedding, the last
    # norm and the output layer for registered methods only.
    model.per_token_logps = MethodType(utils.per_token_logps_of_unsharded, model)
    register_fsdp_forward_method(model, "per_token_logps")
    return model


def _shard_module(module: torch.nn.Module, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy):
    fully_shard(module, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=True)
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(1.0)


# --- LoRA (arXiv:2106.09685), through peft --------------------------------------------------------

# Adapters are multiplied by ALPHA / rank, with which the best learning rate hardly depends on the
# rank: about ten times that of full training (https://thinkingmachines.ai/blog/lora/).
LORA_ALPHA = 32


def add_adapters(model: PreTrainedModel, rank: int, seed: int) -> None:
    """Freeze the model, and give every linear map of its decoder an adapter, drawn from a seed.

    Where autocast would round the weights of these maps in every pass, they become bfloat16 once
    and for all.
    """
    from peft import LoraConfig

    # By name: "all-linear" also takes the weights of experts, which lie together in one.
    decoder = model.get_decoder()
    linear = {module for module in decoder.modules() if isinstance(module, torch.nn.Linear)}
    names = [name for name, module in model.named_modules() if module in linear]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.add_adapter(LoraConfig(r=rank, lora_alpha=LORA_ALPHA, target_modules=names))
    if utils.trains_in_bfloat16(model):
        for layer in adapted_layers(model).values():
            layer.base_layer.to(torch.bfloat16)
        # Any weight that was loaded keeps the whole float32 file in memory.
        for weight in model.parameters():
            weight.data = weight.data.clone()
    model.train()
    num_trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    print(f"LoRA of rank {rank}: {num_trained:,} weights are trained")


class WithoutAdapters:
    """The reference of a model with adapters: the model itself, while they are switched off."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def __call__(self, *args, **kwargs):
        return self._run(self.model, *args, **kwargs)

    def get_decoder(self) -> Callable:
        return partial(self._run, self.model.get_decoder())

    def generate(self, *args, **kwargs):
        return self._run(self.model.generate, *args, **kwargs)

    def _run(self, function: Callable, *args, **kwargs):
        self.model.disable_adapters()
        try:
            return function(*args, **kwargs)
        finally:
            self.model.enable_adapters()


def has_adapters(model: PreTrainedModel) -> bool:
    return bool(adapted_layers(model))


def adapted_layers(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """The linear maps that have an adapter, by their names in the model."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model without adapters, under its names, none of them tied.

    What an adapter adds is added in float32.
    """
    layers = adapted_layers(model)
    for name, weight in model.state_dict().items():
        if ".lora_" in name or name in model.all_tied_weights_keys:
            continue
        name = name.replace(".base_layer.", ".")
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None:
            weight = weight + layer.get_delta_weight("default").float()
        yield name, weight


# --- On the disk ----------------------------------------------------------------------------------


SHARD = "1GB"  # of a file of weights, which is copied in memory while it is written


def save(model: PreTrainedModel, folder: Path, weights: dict[str, Tensor] | None) -> None:
    """Write a directory that loads as --model_name, with the whole weights of a sharded model.

    Adapters are merged in, and folder/adapter has them in peft's own files.
    """
    if not has_adapters(model):
        model.save_pretrained(folder, state_dict=weights, max_shard_size=SHARD)
        return
    with torch.device("meta"):
        plain_model = type(model)(model.config)
    plain_model.generation_config = model.generation_config
    merged = {name: weight.float().cpu() for name, weight in merged_weights(model)}
    plain_model.save_pretrained(folder, state_dict=merged, max_shard_size=SHARD)
    model.save_pretrained(folder / "adapter")


def read_weights(folder: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """The trained weights that `save` has written, under the names that they have in `model`."""
    if has_adapters(model):
        from peft.utils import load_peft_weights

        saved = load_peft_weights(folder / "adapter", device="cpu")
        return {
            name.removeprefix("base_model.model.").replace(".weight", ".default.weight"): weight
            for name, weight in saved.items()
        }
    # transformers saves some weights under other names than a model has for them, or several
    # together as one. Only its own way of loading knows which.
    return llms.load_model(folder, copy.deepcopy(model.config)).state_dict()
