"""How long an iteration of main.py would take on H100s, by stage, computed from the configs of models.

    python benchmarks/time_table.py Qwen/Qwen2-0.5B-Instruct --micro_batch_tokens 16384

An estimate, never measured: each number is a range between two sets of assumptions, LOW and HIGH. The H100 (SXM) reads
3.35 TB/s, does 989 TFLOP/s in bfloat16 and 67 in float32, and sends 450 GB/s over NVLink. What is counted is what the
code runs; a stage takes as long as the slowest of its launches of kernels, its bytes and its FLOPs:

  sampling    one pass of the decoder a token until the last row ends, which is --max_completion_length: of so many rows
              one is cut. It reads the bfloat16 copy, keys and values (`cache` times: copies for attention included) and
              the logits (48 bytes each, counted in llms._decode). Rows that ended have left: the mean row has
              --completion_length tokens (HIGH: the maximum). Each process samples its share, with as many steps
  layers      2 FLOPs a parameter and token for a forward pass (reference and policy), 4 for the backward pass, 2 more
              with --gradient_checkpointing. The prompt runs once for a group, with checkpointing once for a row
  output      the output layer in chunks of utils.LOGITS_CHUNK logits. Each reads the bfloat16 weights four times
              (policy, its backward pass twice, reference) and adds to the float32 gradient. HIGH: and the logits
  exchange    several processes: gathered weights, summed gradients, refreshed copies. LOW: hidden behind the layers
  step        AdamW, clipping, and refreshing the sampling copy

Not counted: attention's FLOPs, padding within a micro-batch, rewards, logs, checkpoints. Sources of LOW and HIGH:
`launch`, seconds a decoder layer: 8.4 ms for the 32 layers of Llama 3.1 8B on an H100 (cloudai.pt/cuda-graphs-torch-
compile-1-65x-llm-decode-speedup), 39 tokens/s with the 30 layers of SmolLM2-135M (huggingface.co/kernels/phanerozoic/
model-as-a-kernel, GPU not said where we saw it); between them 27 % of the memory bound for Qwen2.5-7B on an H100
(arXiv:2605.30571), some 0.6 ms. The same is assumed for a chunk's kernels, about as many, and twice it for a layer's
backward pass. `mfu`, `bandwidth` (shares of the peak) and `adam` (bytes a parameter) are our guesses; `cache` is
from transformers' code: flash-attention's unpadding copies once, SDPA with a mask copies for every query head.
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parent))

import memory_table  # noqa: E402
from memory_table import utils  # noqa: E402

MEMORY, BFLOAT16, FLOAT32, NVLINK = 3.35e12, 989e12, 67e12, 450e9  # of one H100, per second
LOW = SimpleNamespace(launch=0.26e-3, mfu=0.5, bandwidth=0.9, cache=3, logits=0, adam=28, hidden=True, longest=False)
HIGH = SimpleNamespace(
    launch=0.85e-3, mfu=0.25, bandwidth=0.5, cache=None, logits=130, adam=80, hidden=False, longest=True
)


def parse_args(argv=None):
    parser = utils.ArgumentParser(description="A table of the time that main.py would take on H100s.")
    add = parser.add_argument
    add("configs", nargs="+", help="hub names or folders with a config.json")
    add("--processes", type=int, nargs="+", default=[1])
    add("--rollout_batch_size", type=int, default=256)
    add("--group_size", type=int, default=8)
    add("--prompt_length", type=int, default=106, help="mean; GSM8K's test prompts have 106 tokens of Qwen2's")
    add("--completion_length", type=int, default=200, help="mean, an assumption (the high end: the maximum)")
    add("--max_completion_length", type=int, default=512)
    add("--max_concurrent_sequences", type=int, default=512)
    add("--micro_batch_tokens", type=int, default=16384)
    add("--beta", type=float, default=0.04, help="0: no reference")
    add("--gradient_checkpointing", action="store_true")
    add("--eval_size", type=int, default=1319)
    add("--eval_iterations", type=int, default=100)
    return parser.parse_args(argv)


def sampling(config, s, rows, group, args, at):
    """Seconds to sample so many rows on one GPU, in turns; s: memory_table.shape."""
    C = args.max_completion_length
    turns = math.ceil(rows / args.max_concurrent_sequences)
    alive = rows / turns * (1 if at.longest else args.completion_length / C)  # on average over a turn's C steps
    copies = at.cache or 1 + 2 * config.num_attention_heads / config.num_key_value_heads
    weights = s.layer * config.num_hidden_layers + s.output
    step_bytes = 2 * weights + alive * ((args.prompt_length + C / 2) * s.token * copies + 48 * config.vocab_size)
    compute = 2 * weights * alive / (BFLOAT16 * at.mfu)
    step = max(config.num_hidden_layers * at.launch, step_bytes / (MEMORY * at.bandwidth), compute)
    prefill = 2 * weights * rows / group * args.prompt_length / (BFLOAT16 * at.mfu)
    return turns * C * step + prefill


def stages(config, s, processes, args, at):
    """{stage: seconds} of one iteration on each GPU."""
    layers, G = config.num_hidden_layers, args.group_size
    rows, prompt = args.rollout_batch_size / processes, args.prompt_length
    C = args.max_completion_length if at.longest else args.completion_length
    reference, checkpointing, several = bool(args.beta), args.gradient_checkpointing, processes > 1

    fitting = min(G, max(1, (args.micro_batch_tokens - prompt) // C))  # rows of a group in a pass: else it is cut
    parts = rows / G * math.ceil(G / fitting)
    passes = math.ceil(parts / max(1, args.micro_batch_tokens // (prompt + G * C))) if fitting == G else parts
    tokens = rows * C + prompt * (rows if checkpointing else parts)
    body, units = s.layer * layers, 3 + reference + checkpointing  # in forward passes
    runs = 1 if checkpointing else 1 + (1 if several else utils.LENGTH_BUCKETS)  # prompts, then completions
    compute = max(2 * body * tokens * units / (BFLOAT16 * at.mfu), passes * runs * units * layers * at.launch)

    chunk = utils.LOGITS_CHUNK // config.vocab_size
    chunk_bytes = (2 * (3 + reference) + 8) * s.output + at.logits * utils.LOGITS_CHUNK
    a_chunk = max(at.launch, chunk_bytes / (MEMORY * at.bandwidth), 2 * s.output * chunk / FLOAT32)

    link = NVLINK * at.bandwidth * processes / max(1, processes - 1)
    moved = runs * body * (2 * (2 + reference) + 4) + 4 * s.outside * (3 + reference)  # in a pass, gradients in float32
    exchange = (passes * moved + 2 * s.P) / link if several else 0
    return {
        "sampling": sampling(config, s, rows, G, args, at),
        "layers": compute,
        "output": rows * C / chunk * a_chunk,
        "exchange": max(0, exchange - compute) if at.hidden else exchange,
        "step": (at.adam * s.P / processes + 6 * s.P) / (MEMORY * at.bandwidth),
    }


def main(argv=None):
    args = parse_args(argv)
    print(
        "Seconds on H100s, estimated, low to high; "
        + " ".join(f"{k} {v}" for k, v in list(vars(args).items())[2:])
        + "\n"
    )
    header = None
    for name in args.configs:
        config = AutoConfig.from_pretrained(name)
        s = memory_table.shape(config)
        for processes in args.processes:
            columns = []
            for at in (LOW, HIGH):
                column = stages(config, s, processes, args, at)
                column["iteration"] = sum(column.values())
                column["evaluation"] = sampling(config, s, args.eval_size / processes, 1, args, at)
                evaluations = 1 + 1000 / args.eval_iterations
                column["hours per 1,000"] = (1000 * column["iteration"] + evaluations * column["evaluation"]) / 3600
                columns.append(column)
            if header is None:
                header = ["model", "GPUs", *columns[0]]
                print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
            cells = [f"{columns[0][stage]:.2g} to {columns[1][stage]:.2g}" for stage in columns[0]]
            print("| " + " | ".join([Path(name).name, str(processes), *cells]) + " |")


if __name__ == "__main__":
    main()
