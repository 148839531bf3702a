"""How long main.py would run on H100s, and what that would cost: an estimate that needs no GPU.

    python benchmarks/gpu_estimate.py Qwen/Qwen2-0.5B-Instruct

It prints two tables in Markdown, one row for each model and number of GPUs: memory, hours and
dollars of a run, and the seconds of one iteration by part. Nothing in them is measured on a GPU.

Work is counted on the project's own code. Each operator of PyTorch that is no mere view is taken
for one kernel, and its bytes are those of the tensors that it reads and writes. The decode step is
counted on the meta device. A decoder layer and the output layer are counted on the CPU, at small
sizes under bfloat16 autocast. The FLOPs of matrix products are 2 for each weight and token in a
forward pass, and 4 in a backward pass.

Time follows from the constants below:

  GPU            FLOPs / matrix product rate + bytes / memory bandwidth
  decode step    the same, + kernels x seconds of a kernel in a CUDA graph
  loss           the greater of its time on the GPU and kernels x seconds of a launch by Python
  several GPUs   + bytes that are gathered or summed / bandwidth of NVLink, as if nothing overlapped

Left out are loading, rewards, logs and checkpoints, and the FLOPs of attention.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).parent.parent))

import memory_table  # noqa: E402
from memory_table import BFLOAT16, FLOAT32, GB  # noqa: E402

import flags  # noqa: E402
import utils  # noqa: E402
from logs import markdown  # noqa: E402
from sampling import generation  # noqa: E402
from sampling.decoding import Decoder  # noqa: E402

# --- What is assumed ------------------------------------------------------------------------------

# NVIDIA's data sheet of the H100 SXM: 3.35 TB/s, and 989 TFLOP/s in dense bfloat16 products.
# A copy within the memory of an H100 reaches 2,903 GB/s (github.com/aigatech/vpbenchmarking).
BYTES_PER_SECOND = 2.903e12
# Assumed: products of these sizes run at 60 % of the peak. MosaicML measured 35 to 46 % for whole
# training steps of 0.76 to 7 B parameters, other kernels included (github.com/mosaicml/llm-foundry,
# scripts/train/benchmarking/README.md).
FLOPS_PER_SECOND = 0.6 * 989e12
# A launch in a CUDA graph costs 1.3 microseconds on an H100
# (hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles). Assumed: 1 more until data flows.
GRAPH_SECONDS_PER_KERNEL = 2.3e-6
# Assumed: Python, transformers and autograd take this long to launch a kernel. On an x86_64 core in
# the cloud, with layers so small that they hardly compute, a forward pass of Qwen2-0.5B's 24 layers
# took 15 microseconds for each kernel, and a backward pass 11.
PYTHON_SECONDS_PER_KERNEL = 10e-6
# 376 GB/s in one direction between two H100s (github.com/NVIDIA/nccl/issues/1264).
NVLINK_BYTES_PER_SECOND = 376e9

# GSM8K's training questions in the default prompt, by Qwen2's tokenizer: 105 tokens on average.
PROMPT_TOKENS = 105
EVALUATION_PROBLEMS = 1319
# Assumed: lengths of completions are spread evenly up to --max_completion_length. With 512 that is
# 256 on average; verl logged 279 for Qwen2.5-0.5B-Instruct on GSM8K (docs/qwen2.md).

# Bytes that an update moves for each weight of this process. Clipping reads the gradient for its
# norm, and reads and writes it to scale it: 12. Fused AdamW reads weight, gradient and two moments,
# and writes all but the gradient: 28. The sampling copy reads the weight and writes bfloat16: 6.
UPDATE_BYTES = 12 + 28 + 6


# --- Counting kernels and bytes -------------------------------------------------------------------

aten = torch.ops.aten
# These give out memory, or another view of it, without a kernel.
NO_KERNEL = {
    aten._unsafe_view.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
}
# These read only as much of their first argument as they return.
READS_A_PART = {
    aten.embedding.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.searchsorted.Tensor,
}


def bytes_of(tensors) -> int:
    """Bytes of all tensors in a nested structure; of one that is expanded, those that exist."""
    total = 0
    for tensor in tree_leaves(tensors):
        if isinstance(tensor, torch.Tensor):
            total += min(tensor.nbytes, tensor.untyped_storage().nbytes())
    return total


class KernelCounter(TorchDispatchMode):
    """Counts the kernels that run inside it, and the bytes that they read and write."""

    def __init__(self):
        super().__init__()
        self.kernels = 0
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self.kernels += 1
        self.num_bytes += num_bytes

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if operator.is_view or operator in NO_KERNEL:
            return result
        if operator in READS_A_PART:
            self.add(2 * bytes_of(result))
        elif operator is aten.index_copy_.default:
            source = args[3]
            self.add(2 * bytes_of(source))
        else:
            self.add(bytes_of((args, kwargs)) + bytes_of(result))
        return result

    def fused_attention(self, query, key, value, attn_mask=None, **options):
        """Stands in for PyTorch's attention, which on CUDA is one kernel."""
        output = torch.empty_like(query)
        self.add(bytes_of((query, key, value, attn_mask, output)))
        return output


def count_decode_step(model, rows: int, used_slots: int) -> KernelCounter:
    """One more token for each of `rows` rows that have used_slots tokens; `model` is on meta."""
    decoder = Decoder(model, rows, used_slots + 256)
    prompt_ids = torch.zeros(1, used_slots, dtype=torch.long, device="meta")
    prompt_mask = torch.ones_like(prompt_ids)
    uniforms = torch.zeros(rows, 1, dtype=torch.float64, device="meta")
    counter = KernelCounter()
    with torch.no_grad(), generation._sampling_mode(model):
        cache = DynamicCache()
        model.get_decoder()(prompt_ids, past_key_values=cache, use_cache=True)
        decoder.start(cache, prompt_mask, uniforms)
        attention = patch.object(F, "scaled_dot_product_attention", counter.fused_attention)
        with attention, counter:
            decoder.step(model, temperature=1.0)
    return counter


@dataclass(frozen=True)
class LayerWork:
    """Kernels of one decoder layer in a pass, and the bytes that they move for each token."""

    forward_kernels: float
    forward_bytes: float
    backward_kernels: float
    backward_bytes: float


def count_layer(config) -> LayerWork:
    """What a second decoder layer adds, and what more tokens add to it.

    So neither embedding, output layer and masks nor the reading of the weights are in it.
    """
    one_layer = count_passes(config, 1, num_tokens=64)
    two_layers = count_passes(config, 2, num_tokens=64)
    one_layer_longer = count_passes(config, 1, num_tokens=128)
    two_layers_longer = count_passes(config, 2, num_tokens=128)
    work = []
    for i in range(2):  # forward and backward
        kernels = two_layers[i].kernels - one_layer[i].kernels
        short = two_layers[i].num_bytes - one_layer[i].num_bytes
        longer = two_layers_longer[i].num_bytes - one_layer_longer[i].num_bytes
        work += [kernels, (longer - short) / 64]
    return LayerWork(*work)


def count_passes(config, num_layers: int, num_tokens: int) -> tuple[KernelCounter, KernelCounter]:
    """A forward and a backward pass through the body of a model with num_layers layers."""
    model = memory_table.model_of(config, num_hidden_layers=num_layers, vocab_size=64)
    model = model.to_empty(device="cpu")  # uninitialised weights, since values do not matter
    ids = torch.zeros(1, num_tokens, dtype=torch.long)
    forward = KernelCounter()
    with torch.autocast("cpu", torch.bfloat16):
        with forward:
            hidden = model.get_decoder()(ids, use_cache=False).last_hidden_state
    backward = KernelCounter()
    with backward:
        hidden.sum().backward()
    return forward, backward


def count_bytes_per_logit(needs_grad: bool) -> float:
    """Bytes that the output layer moves for each logit; with needs_grad in both passes."""
    H = 1  # so that hidden states and weights hardly count
    V = 4096

    def count(num_tokens):
        states = torch.randn(num_tokens, H, requires_grad=needs_grad)
        weight = torch.randn(V, H, requires_grad=needs_grad)
        token_ids = torch.zeros(num_tokens, dtype=torch.long)
        counter = KernelCounter()
        with torch.autocast("cpu", torch.bfloat16), counter:
            logps, _ = utils._ChunkedLogps.apply(states, weight, None, token_ids, 1.0, needs_grad)
            if needs_grad:
                logps.sum().backward()
        return counter.num_bytes

    return (count(512) - count(256)) / (256 * V)


# --- The parts of an iteration --------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """What the estimate needs to know of a model."""

    config: object
    sampler: torch.nn.Module  # bfloat16, on the meta device
    layer: LayerWork
    weights_in_layers: int
    weights: int

    @classmethod
    def from_config(cls, config) -> "Model":
        sampler = memory_table.model_of(config).to(torch.bfloat16).eval()
        layers = sampler.get_decoder().layers
        return cls(
            config=config,
            sampler=sampler,
            layer=count_layer(config),
            weights_in_layers=sum(weight.numel() for weight in layers.parameters()),
            weights=sum(weight.numel() for weight in sampler.parameters()),
        )


def gpu_seconds(flops: float, num_bytes: float) -> float:
    """The time of large kernels on the GPU."""
    return flops / FLOPS_PER_SECOND + num_bytes / BYTES_PER_SECOND


def sampling_seconds(model: Model, num_rows: int, prompts: int, args) -> float:
    """The time to sample num_rows completions on one GPU, in turns."""
    num_turns = math.ceil(num_rows / args.max_concurrent_sequences)
    rows_of_turn = math.ceil(num_rows / num_turns)
    num_points = 8  # the rows become fewer and the slots more, so several steps are counted
    steps_per_point = args.max_completion_length / num_points
    seconds = 0.0
    kept_rows = rows_of_turn
    for point in range(num_points):
        num_tokens = int((point + 0.5) * steps_per_point)
        num_open = max(1, rows_of_turn * (1 - num_tokens / args.max_completion_length))
        while num_open <= 0.75 * kept_rows:  # as _Turn.size_to_keep does
            kept_rows = int(0.75 * kept_rows)
        step = count_decode_step(model.sampler, kept_rows, PROMPT_TOKENS + num_tokens)
        flops = 2 * model.weights * kept_rows
        step_seconds = gpu_seconds(flops, step.num_bytes) + step.kernels * GRAPH_SECONDS_PER_KERNEL
        seconds += steps_per_point * step_seconds
    prompt_flops = 2 * model.weights_in_layers * PROMPT_TOKENS * prompts
    return num_turns * seconds + gpu_seconds(prompt_flops, 0)


@dataclass(frozen=True)
class Passes:
    """The passes through the model that the loss of one process makes."""

    micro_batches: int
    passes: int  # a prompt pass, and one for each bucket of completions
    tokens: int  # that run, padding included
    completion_tokens: int


def plan_passes(num_rows: int, processes: int, args) -> Passes:
    """Divide completions of evenly spread lengths into micro-batches, as the loss does."""
    golden_ratio = (math.sqrt(5) - 1) / 2  # its multiples are spread evenly, in no order
    lengths = [
        1 + int(args.max_completion_length * (i * golden_ratio % 1)) for i in range(num_rows)
    ]
    micro_batches = utils.split_into_micro_batches(
        [PROMPT_TOKENS] * num_rows, lengths, args.group_size, args.micro_batch_tokens
    )
    # Gradient checkpointing shares no prompt, and runs whole rows in one pass.
    shares_prompts = not args.gradient_checkpointing
    num_buckets = utils.LENGTH_BUCKETS if shares_prompts and processes == 1 else 1
    passes = 0
    tokens = 0
    for rows in micro_batches:
        sorted_lengths = torch.tensor(sorted(lengths[row] for row in rows))
        for bucket in sorted_lengths.chunk(num_buckets):
            passes += 1
            tokens += len(bucket) * int(bucket.max())
        if shares_prompts:
            passes += 1
            tokens += PROMPT_TOKENS * math.ceil(len(rows) / args.group_size)
        else:
            tokens += PROMPT_TOKENS * len(rows)
    return Passes(len(micro_batches), passes, tokens, sum(lengths))


def body_seconds(model: Model, plan: Passes, args) -> tuple[float, float]:
    """(time on the GPU, time of Python's launches) of the decoder layers in the loss."""
    layer = model.layer
    # The policy, its activations again under checkpointing, and the reference.
    num_forward = 1 + bool(args.gradient_checkpointing) + (args.beta > 0)
    flops_per_token = (2 * num_forward + 4) * model.weights_in_layers
    bytes_per_token = num_forward * layer.forward_bytes + layer.backward_bytes
    num_layers = model.config.num_hidden_layers
    on_gpu = gpu_seconds(flops_per_token * plan.tokens, num_layers * bytes_per_token * plan.tokens)
    kernels = num_forward * layer.forward_kernels + layer.backward_kernels
    return on_gpu, plan.passes * num_layers * kernels * PYTHON_SECONDS_PER_KERNEL


def output_seconds(model: Model, plan: Passes, args) -> float:
    """The time of the output layer: log-probs of policy and reference, entropy, gradients."""
    num_logits = plan.completion_tokens * model.config.vocab_size
    bytes_per_logit = count_bytes_per_logit(needs_grad=True)
    # Forward, the same again in the backward pass, and the gradients of states and weight.
    num_products = 4
    if args.beta > 0:
        bytes_per_logit += count_bytes_per_logit(needs_grad=False)
        num_products += 1
    H = model.config.hidden_size
    num_chunks = max(plan.micro_batches, num_logits / utils.LOGITS_CHUNK_ON_GPU)
    weight_bytes = num_chunks * num_products * BFLOAT16 * H * model.config.vocab_size
    flops = 2 * num_products * H * num_logits
    return gpu_seconds(flops, bytes_per_logit * num_logits + weight_bytes)


def communication_seconds(model: Model, plan: Passes, processes: int, args) -> float:
    """The time in which the processes gather weights and sum gradients, if nothing overlaps."""
    if processes == 1:
        return 0.0
    outside = model.weights - model.weights_in_layers  # gathered and summed in float32
    gather = BFLOAT16 * model.weights_in_layers + FLOAT32 * outside
    total = FLOAT32 * model.weights
    # A backward pass gathers the weights again, and sums the gradients.
    policy_bytes = plan.passes * (gather + gather + total)
    reference_bytes = plan.passes * gather if args.beta > 0 else 0
    received = (policy_bytes + reference_bytes) * (processes - 1) / processes
    return received / NVLINK_BYTES_PER_SECOND


@dataclass(frozen=True)
class Iteration:
    """Seconds of one iteration by part, and of one evaluation."""

    sampling: float
    body: float  # decoder layers in the loss, on the GPU
    output: float  # the output layer in the loss, on the GPU
    launches: float  # of the loss, by Python; they overlap with its time on the GPU
    communication: float
    update: float
    evaluation: float

    @property
    def total(self) -> float:
        loss = max(self.body + self.output, self.launches)
        return self.sampling + loss + self.communication + self.update


def estimate(model: Model, processes: int, args) -> Iteration:
    """The seconds of an iteration on so many H100s."""
    num_rows = args.rollout_batch_size // processes
    plan = plan_passes(num_rows, processes, args)
    body, launches = body_seconds(model, plan, args)
    problems = math.ceil(EVALUATION_PROBLEMS / processes)
    return Iteration(
        sampling=sampling_seconds(model, num_rows, num_rows // args.group_size, args),
        body=body,
        output=output_seconds(model, plan, args),
        launches=launches,
        communication=communication_seconds(model, plan, processes, args),
        update=gpu_seconds(0, UPDATE_BYTES * model.weights / processes),
        evaluation=sampling_seconds(model, problems, problems, args),
    )


# --- The command line and its tables --------------------------------------------------------------


def parse_args(argv=None):
    description = "Hours and dollars of main.py on H100s. Other flags are main.py's."
    parser = flags.ArgumentParser(description=description)
    memory_table.add_configs_and_processes(parser)
    # RunPod asked 2.69 (Community) and 3.99 (Secure) dollars for an H100 SXM on 2026-11-09
    # (raw.githubusercontent.com/datareceipts/data-receipts/main/109-gpu-pricing/README.md).
    parser.add_argument("--price", type=float, default=3.0, help="dollars for an hour of one GPU")
    table_args, main_argv = parser.parse_known_args(argv)
    main_args = flags.parse_args(main_argv)
    args = SimpleNamespace(**{**vars(main_args), **vars(table_args)})
    if not 0 < args.price < math.inf:
        parser.error(f"--price must be more than 0, not {args.price}")
    for processes in args.processes:
        if args.rollout_batch_size % (args.group_size * processes) != 0:
            parser.error(
                f"--processes {processes}: --rollout_batch_size {args.rollout_batch_size} cannot be"
                f" split into groups of {args.group_size} on so many GPUs"
            )
    # What the page's row says has to be added to the command.
    args.added_flags = " ".join(main_argv)
    return args


def main(argv=None):
    args = parse_args(argv)
    run_rows = []
    part_rows = []
    for config in args.configs:
        name = Path(config.name_or_path).name
        model = Model.from_config(config)
        activation = memory_table.activation_bytes(
            config, args.group_size, args.gradient_checkpointing
        )
        for processes in args.processes:
            memory = memory_table.memory_by_purpose(config, processes, args, activation)
            peak = max(memory_table.peaks(memory, args.gpu_memory * GB).values())
            iteration = estimate(model, processes, args)
            num_evaluations = 1 + math.ceil(args.num_train_iters / args.eval_iterations)
            training = args.num_train_iters * iteration.total
            hours = (training + num_evaluations * iteration.evaluation) / 3600
            dollars = hours * processes * args.price
            added_flags = f"`{args.added_flags}`" if args.added_flags else "none"
            run_rows.append(
                [
                    name,
                    str(processes),
                    f"{peak / GB:.0f}",
                    f"{hours:.1f}",
                    f"{dollars:.0f}",
                    added_flags,
                ]
            )
            seconds = [*vars(iteration).values(), iteration.total]
            part_rows.append([name, str(processes), *[f"{value:.1f}" for value in seconds]])
    numbers = ["GB per GPU (computed)", "hours (computed)", f"dollars (at {args.price:g} an hour)"]
    print(markdown.table(["model", "GPUs", *numbers, "flags to add"], run_rows) + "\n")
    parts = [
        *["sampling", "decoder layers", "output layer", "launches", "communication", "update"],
        *["one evaluation", "whole iteration"],
    ]
    print(markdown.table(["model", "GPUs", *parts], part_rows))


if __name__ == "__main__":
    main()
