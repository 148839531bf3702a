"""What a GPU does in main.py: three tables in Markdown, to paste into docs/gpus.md.

    python benchmarks/gpu.py --model_name Qwen/Qwen2-0.5B-Instruct
    python benchmarks/gpu.py --config FOLDER --dataset_name arithmetic   # random weights, offline
    python benchmarks/gpu.py --quick                                     # seconds, also on a CPU

Any other flag is one of main.py's. On one GPU it should take about ten minutes. It prints

  decode steps   For several numbers of rows and slots: the time of an ordinary step and of one that
                 is captured as a CUDA graph, and whether both draw the same tokens. Beside them is
                 the bound that memory sets: the bytes of weights, keys and values that a step
                 reads, divided by the bandwidth of a copy within this device's memory.
  iteration      main.py's seconds by stage, its tokens a second, and the peak of memory in each
                 stage, beside the peak that benchmarks/memory_table.py computes.
  two processes  The same under torchrun, if there are two GPUs (or only a CPU).

Each table is printed as soon as it is known. With random weights hardly any completion ends before
--max_completion_length, so that an iteration takes longer than one of a trained model.
"""

import gc
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import benchmark  # noqa: E402
import memory_table  # noqa: E402

import flags  # noqa: E402
import llms  # noqa: E402
import main as grpo  # noqa: E402
from logs import jsonl, markdown  # noqa: E402
from sampling import generation  # noqa: E402
from sampling.decoding import CapturedDecoder, Decoder  # noqa: E402
from training import write_logs  # noqa: E402
from training.metrics import StageTimer  # noqa: E402

# The first iterations capture graphs and warm up.
WARM_UP_ITERATIONS = 2


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    rows: tuple[int, ...]  # sequences in a decode step
    slots: tuple[int, ...]  # tokens of each sequence that a decode step has room for
    decode_steps: int  # timed
    iterations: int  # timed
    copied_bytes: int  # in the measurement of the bandwidth


FULL = Sizes((32, 128, 256, 512), (256, 1024, 2048), 64, 3, 2**30)
QUICK = Sizes((2, 8), (256,), 16, 1, 2**24)
# What --quick adds to main.py's flags.
QUICK_FLAGS = [
    *["--model_name", "tiny/0.1m", "--dataset_name", "arithmetic"],
    *["--rollout_batch_size", "16", "--group_size", "4", "--max_completion_length", "16"],
]


# --- Decode steps ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeRun:
    """What some decode steps drew, how long they took, and what a step has to read."""

    tokens: torch.Tensor  # (R, n)
    logps: torch.Tensor  # (R, n)
    seconds_per_step: float
    num_bytes: int  # of weights, keys and values
    num_graphs: int


@torch.no_grad()
def run_decoder(decoder_class, model, rows: int, slots: int, num_steps: int) -> DecodeRun:
    """Take decode steps on rows that share one prompt, which fills all slots but the steps'."""
    device = model.device
    prompt_length = slots - num_steps - 2  # the first draw and an untimed step take a slot each
    generator = torch.Generator().manual_seed(0)
    prompt_ids = torch.randint(model.config.vocab_size, (1, prompt_length), generator=generator)
    prompt_ids = prompt_ids.to(device)
    prompt_mask = torch.ones_like(prompt_ids)
    uniforms = 1 - torch.rand(rows, num_steps + 2, dtype=torch.float64, generator=generator)
    timer = StageTimer(device.type)
    with generation._sampling_mode(model):
        cache, last_hidden = generation._run_prompts(model, prompt_ids, prompt_mask)
        decoder = decoder_class(model, rows, slots)
        decoder.start(cache, prompt_mask, uniforms.to(device))
        assert decoder.size == (rows, slots), decoder.size
        decoder.draw(model, last_hidden.repeat_interleave(rows, dim=0), temperature=1.0)
        decoder.step(model, temperature=1.0)  # untimed: it captures the graph
        with timer("decode"):
            for _ in range(num_steps):
                decoder.step(model, temperature=1.0)
    cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in decoder.cache.layers)
    return DecodeRun(
        tokens=decoder.tokens[:rows, prompt_length:].cpu(),
        logps=decoder.logps[:rows, prompt_length:].cpu(),
        seconds_per_step=timer.flush()["time/decode"] / num_steps,
        num_bytes=cache_bytes + bytes_of_weights(model),
        num_graphs=len(getattr(decoder, "graphs", {})),
    )


def bytes_of_weights(model) -> int:
    """Bytes of the weights that a step reads: all but an embedding that is only looked up."""
    total = sum(weight.nbytes for weight in model.parameters())
    embedding = model.get_input_embeddings().weight
    is_tied = embedding is model.get_output_embeddings().weight
    return total if is_tied else total - embedding.nbytes


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second that a copy within the device's memory reads and writes."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timer = StageTimer(device.type)
    bandwidths = []
    for repeat in range(11):
        with timer("copy"):
            target.copy_(source)
        seconds = timer.flush()["time/copy"]
        if repeat > 0:  # the first one only warms up
            bandwidths.append(2 * num_bytes / seconds)
    return median(bandwidths)


def compare(ordinary: DecodeRun, captured: DecodeRun) -> str:
    """Whether captured steps drew the same tokens as ordinary ones, with the same log-probs."""
    if captured.num_graphs == 0:
        return "nothing was captured"
    num_different = int((ordinary.tokens != captured.tokens).sum())
    if num_different:
        return f"**{num_different} of {ordinary.tokens.numel()} tokens differ**"
    if not torch.equal(ordinary.logps, captured.logps):
        return "tokens equal, **log-probs differ**"
    return "equal"


def decode_table(args, sizes: Sizes) -> str:
    """A row for each number of rows and slots."""
    policy, _ = llms.get_llm_tokenizer(args.model_name, args.device)
    model = llms.get_sampler(policy, args.sampling_dtype).eval()
    del policy
    bandwidth = copy_bandwidth(model.device, sizes.copied_bytes)
    settings = [(rows, slots) for slots in sizes.slots for rows in sizes.rows]
    table = []
    for rows, slots in write_logs.progress_bar(settings, desc="decode steps"):
        try:
            cells = decode_cells(model, rows, slots, sizes.decode_steps, bandwidth)
        except torch.OutOfMemoryError:
            cells = ["-", "-", "-", "-", "does not fit into the memory"]
        table.append([str(rows), str(slots), *cells])
        torch.cuda.empty_cache()
    header = ["rows", "slots", "bound", "ordinary", "captured", "bound / fastest", "tokens"]
    about = f"Decode steps, in ms. A copy moves {bandwidth / 1e9:,.0f} GB/s."
    return f"{about}\n\n{markdown.table(header, table)}"


def decode_cells(model, rows: int, slots: int, num_steps: int, bandwidth: float) -> list[str]:
    """The bound, the times of both kinds of steps, and whether they draw the same."""
    ordinary = run_decoder(Decoder, model, rows, slots, num_steps)
    bound = ordinary.num_bytes / bandwidth
    fastest = ordinary.seconds_per_step
    captured_ms = "-"
    verdict = "not captured here"
    # As in sampling itself, only bfloat16 weights on CUDA are captured.
    if model.device.type == "cuda" and model.dtype == torch.bfloat16:
        captured = run_decoder(CapturedDecoder, model, rows, slots, num_steps)
        fastest = min(fastest, captured.seconds_per_step)
        captured_ms = f"{1000 * captured.seconds_per_step:.3f}"
        verdict = compare(ordinary, captured)
    ordinary_ms = f"{1000 * ordinary.seconds_per_step:.3f}"
    return [f"{1000 * bound:.3f}", ordinary_ms, captured_ms, f"{bound / fastest:.0%}", verdict]


# --- Iterations of main.py ------------------------------------------------------------------------


def run_main(args, sizes: Sizes, folder: Path, num_processes: int) -> list[dict]:
    """Run main.py, and return the timed lines of its train_log.jsonl.

    One process runs inside this one, several run under torchrun.

    Raises:
        SystemExit: main.py has ended with an error, which it has printed.
    """
    output_dir = folder / f"processes{num_processes}"
    argv = [
        *args.main_flags,
        *["--output_dir", str(output_dir), "--model_name", args.model_name],
        *["--num_train_iters", str(WARM_UP_ITERATIONS + sizes.iterations)],
        *["--eval_iterations", "1000000", "--eval_size", str(num_processes)],
        *["--save_iterations", "1000000"],
    ]
    if num_processes == 1:
        code = grpo.main(argv)
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        torchrun.append(f"--nproc_per_node={num_processes}")
        command = [sys.executable, *torchrun, str(HERE.parent / "main.py"), *argv]
        code = subprocess.run(command, stdout=sys.stderr).returncode
    if code:
        raise SystemExit(code)
    # What a run holds refers to itself in a circle, so that memory is not freed by itself.
    gc.collect()
    torch.cuda.empty_cache()
    return jsonl.read(output_dir / "train_log.jsonl")[WARM_UP_ITERATIONS - 1 :]


def iteration_table(args, log: list[dict], num_processes: int) -> str:
    """Seconds, and GB at the peak as measured and as computed, of each stage.

    Args:
        log: the last untimed line, and the timed ones.
    """
    timed = log[1:]
    num_tokens = median(line["sampled_tokens"] for line in timed)
    # An iteration lasts from one line of the log to the next, so that it includes what belongs to
    # no stage, such as writing transcripts.
    times = [line["elapsed"] for line in log]
    whole = median(end - start for start, end in zip(times, times[1:], strict=False))
    computed = computed_peaks(args, num_processes)
    table = []
    for stage in ("sample", "reward", "logps", "tokens", "loss", "step"):
        seconds = median(line[f"time/{stage}"] for line in timed)
        cells = [stage, f"{seconds:.3f}"]
        peaks = [line.get(f"memory/{stage}") for line in timed]  # on CUDA alone
        cells.append("-" if None in peaks else f"{max(peaks):.1f}")
        cells.append(f"{computed[stage] / memory_table.GB:.1f}" if stage in computed else "-")
        table.append(cells)
    table.append(["whole iteration", f"{whole:.3f}", "-", "-"])
    sample_seconds = median(line["time/sample"] for line in timed)
    length = median(line["response_length"] for line in timed)
    about = (
        f"An iteration on {num_processes} process{'es' if num_processes > 1 else ''}:"
        f" {num_tokens:,.0f} tokens, {length:.0f} for each completion;"
        f" {num_tokens / sample_seconds:,.0f} tokens a second in sampling,"
        f" {num_tokens / whole:,.0f} in all. Memory is that of one process."
    )
    header = ["stage", "seconds", "GB at the peak", "GB computed"]
    return f"{about}\n\n{markdown.table(header, table)}"


def computed_peaks(args, num_processes: int) -> dict[str, float]:
    """{stage: bytes at its peak}, as memory_table computes them for an iteration."""
    config = AutoConfig.from_pretrained(args.model_name)
    main_args = flags.parse_args(args.main_flags)
    # Evaluations, for which the table reckons too, may sample more sequences at a time.
    my_sequences = main_args.rollout_batch_size // num_processes
    main_args.max_concurrent_sequences = min(main_args.max_concurrent_sequences, my_sequences)
    activation = memory_table.activation_bytes(
        config, main_args.group_size, main_args.gradient_checkpointing
    )
    memory = memory_table.memory_by_purpose(config, num_processes, main_args, activation)
    gpu_memory = 80 * memory_table.GB
    if torch.device(args.device).type == "cuda":
        gpu_memory = torch.cuda.get_device_properties(args.device).total_memory
    return memory_table.peaks(memory, gpu_memory)


# --- The command line -----------------------------------------------------------------------------


def parse_args(argv=None):
    parser = flags.ArgumentParser(
        description="What a GPU does in main.py: three tables in Markdown. Other flags are"
        " main.py's."
    )
    add = parser.add_argument
    config_help = "folder with a config.json: take random weights of that shape, and no model"
    add("--config", type=Path, help=config_help)
    tokenizer_help = "folder with the tokenizer that belongs to --config (default: the same folder)"
    add("--tokenizer", type=Path, help=tokenizer_help)
    quick_help = "a check of this script, in seconds: a tiny model and small sizes"
    add("--quick", action="store_true", help=quick_help)
    own_args, main_flags = parser.parse_known_args(argv)
    if own_args.quick:
        main_flags = [*QUICK_FLAGS, *main_flags]
    main_args = flags.parse_args(main_flags)
    return SimpleNamespace(
        config=own_args.config,
        tokenizer=own_args.tokenizer or own_args.config,
        quick=own_args.quick,
        main_flags=main_flags,
        model_name=main_args.model_name,
        sampling_dtype=main_args.sampling_dtype,
        device=main_args.device,
        threads=torch.get_num_threads(),
    )


def make_random_model(config_folder: Path, tokenizer_folder: Path, folder: Path) -> None:
    """Write a model with random weights and a tokenizer.

    Raises:
        ValueError: a folder does not hold what it should.
    """
    for name, parent in (("config.json", config_folder), ("tokenizer.json", tokenizer_folder)):
        if not (parent / name).is_file():
            raise ValueError(f"there is no {name} in {parent}; name it by --config or --tokenizer")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(config_folder)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)


def main(argv=None):
    args = parse_args(argv)
    sizes = QUICK if args.quick else FULL
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))  # for the processes of torchrun
    with tempfile.TemporaryDirectory() as name:
        try:
            measure(args, sizes, Path(name))
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def measure(args, sizes: Sizes, folder: Path) -> None:
    """Print every table as soon as it is known; what main.py prints goes to stderr.

    Raises:
        ValueError, OSError: a flag is wrong, or a file is wrong or missing.
    """
    on_cpu = torch.device(args.device).type == "cpu"
    if on_cpu and not args.quick:
        raise ValueError("there is no GPU here; --quick checks this script on a CPU")
    flags.check(flags.parse_args(args.main_flags))
    with redirect_stdout(sys.stderr):
        if args.config:
            make_random_model(args.config, args.tokenizer, folder / "model")
            args.model_name = str(folder / "model")
        decode = decode_table(args, sizes)
    weights = "random weights" if args.config else args.model_name
    print(f"`python {' '.join(sys.argv)}`: {weights}, {benchmark.describe_setting(args)}")
    print(f"\n{decode}", flush=True)
    numbers_of_processes = [1]
    if on_cpu or torch.cuda.device_count() > 1:
        numbers_of_processes.append(2)
    for num_processes in numbers_of_processes:
        with redirect_stdout(sys.stderr):
            log = run_main(args, sizes, folder, num_processes)
            iteration = iteration_table(args, log, num_processes)
        print(f"\n{iteration}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
