"""How fast a decode step is on a GPU, for random weights in the shapes of given models: Markdown tables.

  python benchmarks/gpu.py Qwen/Qwen2-0.5B-Instruct Qwen/Qwen2-1.5B-Instruct Qwen/Qwen2-7B-Instruct

Its ms by rows and room, captured in a CUDA graph and not; whether both draw the same, bit for bit; and how long
weights, keys and values take to be read once, at the speed of a copy here.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import memory_table
import torch
from transformers import AutoModelForCausalLM, DynamicCache, __version__

import llms
from flags import ArgumentParser
from runs.write_logs import Stages
from sampling import decoding

GB, SIZES = 10**9, ((64, 512), (256, 512), (256, 1024), (512, 1024))  # rows, room


def seconds(device, run, times=10):
    """The mean time of a call, after two to warm up."""
    stages = Stages(device)
    run(), run()
    with stages("run"):
        for _ in range(times):
            run()
    return stages.flush()["time/run"] / times


@torch.no_grad()
def decode(device, config):
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        block = torch.empty(2**28 if device != "cpu" else 2**20)  # 1 GiB
        bandwidth = 2 * 4 * len(block) / seconds(device, block.clone)  # bytes per second, read and written
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"\nmemory moves at {bandwidth / GB:,.0f} GB/s\n")
    print("| rows | room | captured, ms | not captured, ms | read once, ms | equal |\n|---|---|---|---|---|---|")
    for rows, room in SIZES if device != "cpu" else SIZES[:1]:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache = DynamicCache()
        for layer in range(config.num_hidden_layers):
            states = torch.randn(2, 1, config.num_key_value_heads, room - 20, head_dim, device=device)
            cache.update(*states.to(torch.bfloat16), layer)
        mask, uniforms = torch.ones(1, room - 20, device=device), 1 - torch.rand(rows, 20, device=device)
        hidden = torch.randn(rows, config.hidden_size, device=device, dtype=torch.bfloat16)
        kept, taken, milliseconds = decoding.decoder_for(model, cache, rows, room), [], []
        for decoder in (kept, decoding.Decoder(model, rows, room)):
            decoder.start(cache, mask, uniforms)
            decoder.draw(model, hidden, 1.0)
            with llms._sampling(model):
                milliseconds.append(1e3 * seconds(device, lambda d=decoder: d.step(model, 1.0)))
            taken.append((decoder.tokens[:rows].clone(), decoder.logps[:rows].clone()))
        once = 1e3 * (weights + rows * room * 2 * 2 * config.num_key_value_heads * head_dim * len(cache)) / bandwidth
        captured = f"{milliseconds[0]:.2f}" if vars(kept).get("works") else "-"
        equal = "yes" if all(map(torch.equal, *taken)) else "**no**"
        print(f"| {rows} | {room} | {captured} | {milliseconds[1]:.2f} | {once:.2f} | {equal} |", flush=True)
        decoding.KEPT.clear()


def main(argv=None):
    parser = ArgumentParser(description="The decode step on one GPU.")
    parser.add_argument("configs", nargs="+", type=memory_table.read_config, help="hub names, or folders of configs")
    parser.add_argument("--device", default="cuda", help="cuda; cpu shows only that it runs")
    args = parser.parse_args(argv)
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device} cannot be used here; use cpu")
    print(torch.cuda.get_device_name() if args.device != "cpu" else "cpu", torch.__version__, __version__, sep=", ")
    for config in args.configs:
        print(f"\n## {config.name_or_path}")
        decode(args.device, config)


if __name__ == "__main__":
    main()
