"""What memory main.py needs on each GPU, computed from models' configs: a Markdown table in GB.

    python benchmarks/memory_table.py Qwen/Qwen2-0.5B-Instruct Qwen/Qwen2-1.5B-Instruct
    python benchmarks/memory_table.py Qwen/Qwen2-0.5B-Instruct --output memory.png
        also draws the peak of each row by what the memory is for

A model has P parameters, and there are N processes. Each GPU always holds

  20 P / N bytes   float32 master weights, gradients, two AdamW moments and the reference, sharded
   2 P bytes       a bfloat16 copy of all weights, for sampling

On top comes the largest of these:

  sampling   The cache: keys and values of all sequences that are sampled at one time, for prompts
             and completions, and the logits of one token of each. An evaluation samples up to
             --max_concurrent_sequences at one time, and an iteration no more than its share of
             --rollout_batch_size. If a cache takes at most an eighth of the GPU, CUDA graphs are
             used. Then it stays in memory afterwards, because the graphs read it.
  training   Activations of one micro-batch, the logits of one chunk of its tokens, and the weights
             at work.
             On one process the weights at work are bfloat16 casts of the linear layers, and the
             output layer's gradient before it is added to the sum of gradients.
             On several processes they are the gathered embedding and output layer with their
             gradients, in float32; two gathered decoder layers in bfloat16; the gradient of one
             decoder layer; and the buffer in which the processes sum that gradient.
  step       An intermediate result of AdamW, 4 P / N. On several processes the last sum of
             gradients can take more: embedding and output layer, their gradients and the buffer in
             which the processes sum these gradients. Then the larger number counts.

Activations are counted and not guessed. A model with one decoder layer and one with two do a
forward pass in bfloat16 autocast, with prompts shared as in training. Autograd saves
more bytes for each token in the second model. The difference is what one layer takes.
"""

import sys
import textwrap
from argparse import ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import torch
from matplotlib.figure import Figure
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

import flags  # noqa: E402
import plotter  # noqa: E402
import utils  # noqa: E402
from logs import markdown  # noqa: E402

GB = 10**9
# Bytes of one number.
FLOAT32 = 4
BFLOAT16 = 2
# For each logit of a chunk the entropy holds four float32 numbers: the logit, its distance to the
# largest, its probability, and a product.
BYTES_PER_LOGIT = 4 * FLOAT32


def read_config(name):
    """Read a model's config by its hub name or folder. argparse converts arguments with it."""
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ArgumentTypeError(f"{name}: no config of a model can be read there") from error


def positive_int(text: str) -> int:
    """A number of GPUs. argparse converts arguments with it."""
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text} is no number of GPUs; use 1 or more")
    return int(text)


def add_configs_and_processes(parser):
    """Add the arguments that say which models are computed, and for which machines."""
    add = parser.add_argument
    add("configs", nargs="+", type=read_config, help="hub names or folders with a config.json")
    processes_help = "numbers of GPUs, one process on each; default: 1 2 4 8"
    add("--processes", type=positive_int, nargs="+", default=[1, 2, 4, 8], help=processes_help)
    memory_help = "memory of one GPU in GB; a tenth of it is left to CUDA, NCCL and fragmentation"
    add("--gpu_memory", type=float, default=80, help=memory_help)


def parse_args(argv=None):
    description = "The memory that main.py needs on each GPU. Other flags are main.py's."
    parser = flags.ArgumentParser(description=description)
    add_configs_and_processes(parser)
    parser.add_argument("--output", type=Path, help="also draw the peaks into this file, FILE.png")
    table_args, main_argv = parser.parse_known_args(argv)
    main_args = flags.parse_args(main_argv)
    if table_args.output:
        try:
            plotter.check_output(table_args.output)
        except ValueError as error:
            parser.error(str(error))
    return SimpleNamespace(**{**vars(main_args), **vars(table_args)})


# --- Activations ----------------------------------------------------------------------------------


def model_of(config, **changes):
    """A float32 model of the changed config, on the meta device, where it takes no memory."""
    settings = {**config.to_dict(), **changes}
    settings.pop("layer_types", None)  # made anew for the changed number of layers
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            type(config).from_dict(settings), dtype=torch.float32
        )


def saved_bytes(model, num_groups, group_size, length):
    """Bytes of the tensors that autograd saves in the forward pass over groups with shared prompts.

    Args:
        length: the tokens of each prompt, and of each completion.
    """
    storages = {}  # {address: (bytes, tensor)}; several tensors can share one storage

    def pack(tensor):
        storage = tensor.untyped_storage()
        # Keep the tensor, so that its storage is not freed and its address not used again.
        storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    def unpack(tensor):
        return tensor

    ids = torch.zeros(num_groups * group_size, 2 * length, dtype=torch.long)
    mask = torch.ones_like(ids)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, unpack),
        torch.autocast("cpu", torch.bfloat16),
    ):
        hidden = utils._completion_hidden_states(model, ids, mask, length, group_size)
    assert hidden.requires_grad
    return sum(num_bytes for num_bytes, _ in storages.values())


def bytes_per_token(config, num_layers, group_size):
    """Bytes that a model with num_layers layers saves for each token that runs through it."""
    model = model_of(config, num_hidden_layers=num_layers, vocab_size=64)
    model = model.to_empty(device="cpu")  # uninitialised weights, since values do not matter
    length = 8
    # Autograd saves weights as well. Both counts include them, so that their difference does not.
    one_group = saved_bytes(model, 1, group_size, length)
    two_groups = saved_bytes(model, 2, group_size, length)
    tokens_of_group = length + group_size * length
    return (two_groups - one_group) / tokens_of_group


def activation_bytes(config, group_size, checkpointing):
    """Bytes for each token that runs through the model, over all decoder layers."""
    one_layer = bytes_per_token(config, 1, group_size)
    two_layers = bytes_per_token(config, 2, group_size)
    layer = two_layers - one_layer
    outside_layers = one_layer - layer
    if checkpointing:
        # Each layer keeps only its float32 input. In the backward pass one layer at a time computes
        # its activations again.
        inputs = config.num_hidden_layers * FLOAT32 * config.hidden_size
        return inputs + layer + outside_layers
    return config.num_hidden_layers * layer + outside_layers


# --- Memory by what it is for ---------------------------------------------------------------------


def memory_by_purpose(config, processes, args, activation):
    """{what the memory is for: bytes on each GPU}; `peaks` says which are needed at one time.

    Args:
        activation: the bytes of activations for each token, from activation_bytes.
    """
    # All decoder layers are alike, so that a model of one layer tells the number of weights.
    model = model_of(config, num_hidden_layers=1)
    layer_parameters = model.get_decoder().layers[0].parameters()
    weights_per_layer = sum(weight.numel() for weight in layer_parameters)
    weights_with_one_layer = sum(weight.numel() for weight in model.parameters())
    # The weights of the embedding, the output layer and the last norm.
    weights_outside_layers = weights_with_one_layer - weights_per_layer
    weights_in_layers = weights_per_layer * config.num_hidden_layers
    P = weights_outside_layers + weights_in_layers
    weights_of_output_layer = config.vocab_size * config.hidden_size

    # Keys and values of one token, in bfloat16.
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys_of_layer = config.num_key_value_heads * head_dim
    cache_bytes_per_token = 2 * BFLOAT16 * config.num_hidden_layers * keys_of_layer
    sequence_length = args.max_prompt_length + args.max_completion_length
    # To draw a token takes float32 logits and probabilities.
    draw_bytes_per_sequence = (FLOAT32 + FLOAT32) * config.vocab_size
    cache_bytes_per_sequence = sequence_length * cache_bytes_per_token + draw_bytes_per_sequence
    max_sequences = args.max_concurrent_sequences
    sequences_of_iteration = min(max_sequences, args.rollout_batch_size // processes)

    tokens_per_pass = args.micro_batch_tokens
    if args.gradient_checkpointing:
        # Then prompts are not shared: a prompt runs once for each of its completions. But
        # micro_batch_tokens still counts it once for its group, so that more tokens run in a pass.
        group_tokens = args.max_prompt_length + args.group_size * args.max_completion_length
        tokens_per_pass *= args.group_size * sequence_length / group_tokens

    num_logits = min(utils.LOGITS_CHUNK_ON_GPU, args.micro_batch_tokens * config.vocab_size)

    if processes == 1:
        # Autocast casts the weights of matrix products. The embedding is only looked up.
        casts = BFLOAT16 * (weights_in_layers + weights_of_output_layer)
        new_gradient = FLOAT32 * weights_of_output_layer  # of one micro-batch
        weights_at_work = casts + new_gradient
        step = FLOAT32 * P
    else:
        outside_with_gradients = 2 * FLOAT32 * weights_outside_layers
        two_gathered_layers = 2 * BFLOAT16 * weights_per_layer
        gradient_of_layer = BFLOAT16 * weights_per_layer
        buffer_of_sum = FLOAT32 * weights_per_layer
        weights_at_work = (
            outside_with_gradients + two_gathered_layers + gradient_of_layer + buffer_of_sum
        )
        # At most three float32 copies of the weights outside the layers are held at one time: the
        # gathered weights, their gradient, and the buffer in which the processes sum it.
        step = max(FLOAT32 * P / processes, 3 * FLOAT32 * weights_outside_layers)
    return {
        "master weights": FLOAT32 * P / processes,
        "gradients": FLOAT32 * P / processes,
        "optimiser": 2 * FLOAT32 * P / processes,
        "reference": FLOAT32 * P / processes if args.beta else 0,
        "sampling copy": BFLOAT16 * P,
        "cache": sequences_of_iteration * cache_bytes_per_sequence,
        "cache in evaluation": max_sequences * cache_bytes_per_sequence,
        "activations": tokens_per_pass * activation,
        "logits": BYTES_PER_LOGIT * num_logits,
        "weights at work": weights_at_work,
        "step": step,
    }


def memory_by_stage(memory, gpu_memory):
    """{stage of main.py: {what the memory is for: bytes at the stage's peak}}.

    Args:
        memory: from memory_by_purpose.
        gpu_memory: bytes of a GPU.
    """
    always = ["master weights", "gradients", "optimiser", "reference", "sampling copy"]
    # A cache that CUDA graphs read stays while the loss runs. sampling/decoding.py uses them only
    # if the cache takes at most an eighth of the GPU. Graphs for evaluations serve iterations too.
    largest_lasting_cache = gpu_memory / 8
    sample = [*always, "cache"]
    evaluation = [*always, "cache in evaluation"]
    if memory["cache in evaluation"] <= largest_lasting_cache:
        always = sample = evaluation
    elif memory["cache"] <= largest_lasting_cache:
        always = sample
        evaluation = [*sample, "cache in evaluation"]
    purposes_by_stage = {
        "sample": sample,
        "evaluation": evaluation,
        "loss": [*always, "activations", "logits", "weights at work"],
        "step": [*always, "step"],
    }
    by_stage = {}
    for stage, purposes in purposes_by_stage.items():
        by_stage[stage] = {purpose: memory[purpose] for purpose in purposes}
    return by_stage


def peaks(memory, gpu_memory):
    """{stage of main.py: bytes at its peak}; memory_by_stage explains the arguments."""
    by_stage = memory_by_stage(memory, gpu_memory)
    return {stage: sum(needed.values()) for stage, needed in by_stage.items()}


def fits(memory, gpu_memory):
    """Whether a tenth of the GPU is left at the peak."""
    return max(peaks(memory, gpu_memory).values()) < 0.9 * gpu_memory


# --- The figure -----------------------------------------------------------------------------------

STYLE = plotter.STYLE | {"font.size": 10, "figure.titlesize": 12, "legend.fontsize": 10}
# What the processes share is blue.
COLORS = {
    "master weights": "#003A5C",
    "gradients": "#0072B2",
    "optimiser": "#56B4E9",
    "reference": "#A6CEE3",
    "sampling copy": "#999999",
    "cache": "#009E73",
    "cache in evaluation": "#7FCEB9",
    "activations": "#D55E00",
    "logits": "#E69F00",
    "weights at work": "#F3CF80",
    "step": "#CC79A7",
}
SIZES_OF_GPUS = (24, 48, 80)  # GB


@dataclass(frozen=True)
class Row:
    """A model on a number of GPUs."""

    model: str
    processes: int
    memory: dict[str, float]  # from memory_by_purpose

    @property
    def label(self):
        gpus = "GPU" if self.processes == 1 else "GPUs"
        return f"{self.model}, {self.processes} {gpus}"


def draw(rows, gpu_memory):
    """A bar for each row: the memory at its peak, by what it is for."""
    fig = Figure((6.5, 0.36 * len(rows) + 2.4), layout="constrained")
    fig.suptitle(textwrap.fill(title_of(rows, gpu_memory), 58))
    ax = fig.add_subplot(xlabel="GB on each GPU at the peak (computed)")
    ax.set_yticks(range(len(rows)), [row.label for row in rows])
    names_drawn = set()
    for y, row in enumerate(rows):
        by_stage = memory_by_stage(row.memory, gpu_memory)
        needed = max(by_stage.values(), key=lambda by_purpose: sum(by_purpose.values()))
        left = 0
        for purpose, num_bytes in needed.items():
            if num_bytes:
                label = "" if purpose in names_drawn else purpose
                names_drawn.add(purpose)
                width = num_bytes / GB
                ax.barh(y, width, left=left, color=COLORS[purpose], label=label)
                left += width
    for size in SIZES_OF_GPUS:
        ax.axvline(size, color="black", linestyle="--", linewidth=1)
        place = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "bottom"}
        ax.text(size, 1.01, f"{size} GB", fontsize="small", **place)
    ax.invert_yaxis()
    ax.grid(False)
    fig.legend(loc="outside lower center", ncols=3)
    return fig


def title_of(rows, gpu_memory):
    """The least number of GPUs that each model needs."""
    processes_by_model = {}  # {model: the numbers of GPUs that are enough}
    for row in rows:
        enough = processes_by_model.setdefault(row.model, [])
        if fits(row.memory, gpu_memory):
            enough.append(row.processes)
    most = max(row.processes for row in rows)
    needs = []
    for model, enough in processes_by_model.items():
        needs.append(f"{model}: {min(enough) if enough else f'more than {most}'}")
    return f"GPUs of {gpu_memory / GB:g} GB that are needed with these flags: {', '.join(needs)}"


# --- The command ----------------------------------------------------------------------------------


def main(argv=None):
    args = parse_args(argv)
    gpu_memory = args.gpu_memory * GB
    rows = []
    cells = []
    for config in args.configs:
        activation = activation_bytes(config, args.group_size, args.gradient_checkpointing)
        for processes in args.processes:
            memory = memory_by_purpose(config, processes, args, activation)
            name = Path(config.name_or_path).name
            rows.append(Row(name.removesuffix("-Instruct"), processes, memory))
            peak = max(peaks(memory, gpu_memory).values())
            in_gb = [f"{num_bytes / GB:.1f}" for num_bytes in [*memory.values(), peak]]
            has_room = "yes" if fits(memory, gpu_memory) else "**no**"
            cells.append([name, str(processes), *in_gb, has_room])
    header = ["model", "GPUs", *memory, "peak", f"fits in {args.gpu_memory:g} GB"]
    print(markdown.table(header, cells))
    if args.output:
        with matplotlib.rc_context(STYLE):
            plotter.save([draw(rows, gpu_memory)], args.output, dpi=150)


if __name__ == "__main__":
    main()
