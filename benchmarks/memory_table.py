"""What memory main.py needs on each GPU, by part, computed from the configs of models: a Markdown table in GB.

    python benchmarks/memory_table.py Qwen/Qwen2-0.5B-Instruct Qwen/Qwen2-1.5B-Instruct Qwen/Qwen2-7B-Instruct

P parameters on N processes: float32 master weights, gradients, two AdamW moments and the reference, all sharded, are
20 P / N bytes, and each process has a whole bfloat16 copy that samples, 2 P. On top comes the largest of

  sampling   keys and values of the concurrent sequences, prompt and completion, and their logits; they stay for CUDA
             graphs, if they take at most an eighth of the GPU
  training   activations of one micro-batch, and the weights at work. One process: bfloat16 casts of the linear layers,
             and the output layer's new gradient. Several: embedding and output layer gathered, with gradient, in
             float32; two decoder layers in bfloat16, and one's gradient with the buffer in which it is summed
  step       AdamW's intermediate, 4 P / N; or the buffer in which the embedding's gradient is summed

Activations are counted, not guessed: the bytes that autograd saves per token in one more decoder layer of the model's
width, in bfloat16 autocast, with prompts shared as in training.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

import flags  # noqa: E402
import utils  # noqa: E402

GB = 10**9


def read_config(name):
    """A model's config by its hub name or folder, as the type of an argument."""
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise flags.argparse.ArgumentTypeError(
            f"{name}: no config of a model can be read there"
        ) from error


def parse_args(argv=None):
    parser = flags.ArgumentParser(
        description="The memory that main.py needs on each GPU; other flags are main.py's."
    )
    add = parser.add_argument
    add("configs", nargs="+", type=read_config, help="hub names or folders with a config.json")
    add("--processes", type=int, nargs="+", default=[1, 2, 4])
    add(
        "--gpu_memory",
        type=float,
        default=80,
        help="GB; a tenth of it is left to CUDA, NCCL and fragmentation",
    )
    own, rest = parser.parse_known_args(argv)
    return SimpleNamespace(**vars(flags.parse_args(rest)) | vars(own))


def model_of(config, **changes):
    """A float32 model of a config with some changes, which takes no memory yet."""
    settings = config.to_dict() | changes
    settings.pop("layer_types", None)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            type(config).from_dict(settings), dtype=torch.float32
        )


def saved_bytes(model, groups, group_size, length):
    """Bytes of the tensors that autograd keeps from the forward pass over groups of completions that share prompts."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    ids = torch.zeros(groups * group_size, 2 * length, dtype=torch.long)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast("cpu", torch.bfloat16),
    ):
        hidden = utils._completion_hidden_states(
            model, ids, torch.ones_like(ids), length, group_size
        )
    assert hidden.requires_grad
    return sum(nbytes for nbytes, _ in storages.values())


def activation_bytes(config, group_size, checkpointing):
    """Bytes per token that goes through the model, over all decoder layers."""
    slopes, length = [], 8
    for layers in (1, 2):
        model = model_of(config, num_hidden_layers=layers, vocab_size=64).to_empty(
            device="cpu"
        )  # of any weights
        few, many = (saved_bytes(model, groups, group_size, length) for groups in (1, 2))
        slopes.append(
            (many - few) / (length + group_size * length)
        )  # per token: the weights are in both
    layer, rest = slopes[1] - slopes[0], 2 * slopes[0] - slopes[1]
    if checkpointing:  # each layer keeps its float32 input; one layer at a time is computed again
        return config.num_hidden_layers * 4 * config.hidden_size + layer + rest
    return config.num_hidden_layers * layer + rest


def parts(config, processes, args, activation):
    """{part: bytes} on each GPU; `peak` says which of them are there at the same time."""
    model = model_of(config, num_hidden_layers=1)  # all layers are alike, and one is made sooner
    layer = sum(p.numel() for p in model.get_decoder().layers[0].parameters())
    outside = (
        sum(p.numel() for p in model.parameters()) - layer
    )  # embedding, output layer, last norm
    P, output = (
        outside + layer * config.num_hidden_layers,
        config.vocab_size * config.hidden_size,
    )  # parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = (
        2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    )  # bytes of its keys and values
    prompt, completion, group = args.max_prompt_length, args.max_completion_length, args.group_size
    rows, passed = args.max_concurrent_sequences, args.micro_batch_tokens
    if (
        args.gradient_checkpointing
    ):  # then each row brings its prompt, which the budget counts once for a group
        passed *= group * (prompt + completion) / (prompt + group * completion)
    alone = (
        2 * (P - outside + output) + 4 * output
    )  # casts of what is multiplied; the gradient of one loss
    gathered = 2 * 4 * outside + (2 * 2 + 2 + 4) * layer
    return {
        "master weights": 4 * P / processes,
        "gradients": 4 * P / processes,
        "optimiser": 8 * P / processes,
        "reference": 4 * P / processes if args.beta else 0,
        "sampling copy": 2 * P,
        "cache": rows * (prompt + completion) * token + 4 * 4 * rows * config.vocab_size,
        "activations": passed * activation,
        "weights at work": alone if processes == 1 else gathered,
        "step": max(4 * P / processes, 3 * 4 * outside if processes > 1 else 0),
    }


def stages(part, gpu_memory):
    """{stage of main.py: bytes at its peak}. A cache that CUDA graphs read stays while the loss runs."""
    always = sum(
        part[name]
        for name in ("master weights", "gradients", "optimiser", "reference", "sampling copy")
    )
    kept = (
        part["cache"] if part["cache"] <= gpu_memory / 8 else 0
    )  # the bound of sampling/decoding.py
    return {
        "sample": always + part["cache"],
        "loss": always + kept + part["activations"] + part["weights at work"],
        "step": always + kept + part["step"],
    }


def main(argv=None):
    args, header = parse_args(argv), None
    for config in args.configs:
        activation = activation_bytes(config, args.group_size, args.gradient_checkpointing)
        for processes in args.processes:
            part = parts(config, processes, args, activation)
            if header is None:
                header = ["model", "GPUs", *part, "peak", f"fits in {args.gpu_memory:g} GB"]
                print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
            peak = max(stages(part, args.gpu_memory * GB).values())
            fits = "yes" if peak < 0.9 * args.gpu_memory * GB else "**no**"
            cells = [
                Path(config.name_or_path).name,
                processes,
                *(f"{value / GB:.1f}" for value in part.values()),
            ]
            print("| " + " | ".join(map(str, [*cells, f"{peak / GB:.1f}", fits])) + " |")


if __name__ == "__main__":
    main()
