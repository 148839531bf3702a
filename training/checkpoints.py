"""Checkpoints: each is written completely or not at all.

A checkpoint is a Hugging Face directory with the trainer's state in it, trainer.pt. With several
processes the first one reads and writes, in the format that one process uses.
"""

import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import distributed
import llms
import lora
from logs import jsonl

LOGS = ("train_log.jsonl", "eval_log.jsonl")
TRANSCRIPTS = ("rollouts", "eval")


# --- Writing --------------------------------------------------------------------------------------


def write(
    output_dir: Path,
    step: int,
    model,
    tokenizer,
    state: dict,
    *,
    weights: dict | None = None,
    keep: int = 3,
) -> Path:
    """Write checkpoints/step_NNNNNN, and return its path.

    Everything is written and synced under a temporary name, which is then changed: a checkpoint is
    complete, or it is not there. Afterwards only the newest `keep` checkpoints remain, and the most
    accurate one.

    Args:
        state: what `torch.load(weights_only=True)` can read: tensors, numbers, text, lists, dicts.
        weights: by `gather_state`; None: the model's own.

    Raises:
        OSError: it cannot be written, for example because the disk is full.
    """
    folder = Path(output_dir) / "checkpoints"
    path = folder / f"step_{step:06d}"
    temporary = folder / "unfinished"
    shutil.rmtree(temporary, ignore_errors=True)  # a killed run may have left it
    try:
        if lora.has_adapters(model):
            lora.save(temporary, model, weights)
        else:
            model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        torch.save(state | {"log_sizes": _sync_logs(output_dir)}, temporary / "trainer.pt")
        for file in temporary.rglob("*"):
            _sync(file)
        _sync(temporary)
        shutil.rmtree(path, ignore_errors=True)  # one that could not be read
        os.replace(temporary, path)
        _sync(folder)
    # Most often the disk is full, which each library reports by an exception of its own.
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"{path} could not be written ({error})") from error
    _remove_old_checkpoints(output_dir, keep)
    return path


def _sync_logs(output_dir) -> dict[str, int]:
    """The sizes in bytes of the logs that exist, which are then on the disk."""
    sizes = {}
    for name in LOGS:
        log = Path(output_dir) / name
        if log.exists():
            _sync(log)
            sizes[name] = log.stat().st_size
    return sizes


def _sync(path) -> None:
    """Wait until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_old_checkpoints(output_dir, keep) -> None:
    """Remove all checkpoints but the newest `keep` and the most accurate one."""
    paths = finished(output_dir)
    accuracies = {}
    for row in read_evaluations(output_dir):
        if row["step"] in paths and "accuracy" in row:
            accuracies[row["step"]] = row["accuracy"]
    kept = set(list(paths)[-keep:])
    if accuracies:
        kept.add(max(accuracies, key=accuracies.get))
    for step in paths.keys() - kept:
        shutil.rmtree(paths[step], ignore_errors=True)


def read_evaluations(output_dir: Path) -> list[dict]:
    """The rows of eval_log.jsonl."""
    log = Path(output_dir) / "eval_log.jsonl"
    return jsonl.read(log) if log.exists() else []


# --- Reading --------------------------------------------------------------------------------------


def finished(output_dir: Path) -> dict[int, Path]:
    """{step: path} of all checkpoints whose writing was finished, in the order of their steps."""
    paths = {}
    for path in Path(output_dir).glob("checkpoints/step_*"):
        number = path.name.removeprefix("step_")
        if number.isdecimal() and path.is_dir():
            paths[int(number)] = path
    return dict(sorted(paths.items()))


def read_newest(output_dir: Path, model) -> tuple[Path | None, dict, dict]:
    """(path, weights, trainer's state) of the newest checkpoint that can be read.

    One that cannot be read is reported. The path is None if there is no checkpoint at all.

    Raises:
        ValueError: none of the checkpoints can be read.
    """
    paths = finished(output_dir)
    for path in reversed(paths.values()):
        try:
            weights = llms.read_weights(path, model)
            state = torch.load(path / "trainer.pt", map_location="cpu", weights_only=True)
            return path, weights, state
        except Exception as error:  # each library has exceptions of its own for a damaged file
            reason = " ".join(str(error).split())[:200]
            print(f"warning: checkpoint {path} cannot be read ({reason}); trying the one before")
    if paths:
        raise ValueError(
            f"--resume: no checkpoint in {output_dir} can be read; name another --output_dir"
        )
    return None, {}, {}


def rewind(output_dir: Path, log_sizes: dict[str, int], last_steps: dict[str, int]) -> None:
    """Cut the logs back to what they were at a checkpoint, and remove later transcripts.

    What is removed will be made again.

    Args:
        log_sizes: the size in bytes of each log; a log that is not named becomes empty.
        last_steps: for each folder of transcripts the step of the last one that stays; in a folder
            that is not named, none stays.

    Raises:
        ValueError: a line that stays is damaged.
    """
    if not distributed.is_main():
        return
    ends = {}
    for name in LOGS:
        log = Path(output_dir) / name
        if not log.exists():
            continue
        content = log.read_bytes()
        size = log_sizes.get(name, 0)
        if size > len(content):
            print(f"warning: {log} has lost lines since the checkpoint was written")
        ends[log] = content[:size].rfind(b"\n") + 1
        for number, line in enumerate(content[: ends[log]].split(b"\n"), 1):
            if line.strip():
                jsonl.parse(line, f"{log}, line {number}")
    # Nothing is removed before every line that stays has been read.
    for log, end in ends.items():
        os.truncate(log, end)
    for folder in TRANSCRIPTS:
        last_step = last_steps.get(folder, -1)
        for file in Path(output_dir, folder).glob("step_*.jsonl"):
            number = file.stem.removeprefix("step_")
            if number.isdecimal() and int(number) > last_step:
                file.unlink()


# --- The state of one process, and of several -----------------------------------------------------


def gather_state(model, optimizer) -> tuple[dict | None, dict]:
    """All processes: the complete weights and optimiser state, under the names of the parameters.

    Of several processes the first one gets them, on its CPU. On one process the weights are None,
    because the model has them, unless it has adapters (`lora.gather_weights`).
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # Before the first update the optimiser has no state, and asking for it would create one.
    optimizer_state = {}
    if optimizer.state:
        optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    if lora.has_adapters(model):
        return lora.gather_weights(model), optimizer_state
    if distributed.world_size() == 1:
        return None, optimizer_state
    weights = get_model_state_dict(model, options=options)
    for tied_name in model.all_tied_weights_keys:
        weights.pop(tied_name, None)
    return weights, optimizer_state


def scatter_state(model, optimizer, weights: dict, optimizer_state: dict) -> None:
    """All processes: load weights and optimiser state that the first process has read.

    The other processes pass {} for both, and each gets its shard.
    """
    has_several = distributed.world_size() > 1
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=has_several, strict=False)
    if weights and not lora.has_adapters(model):  # adapters are not tied
        for name, saved_name in model.all_tied_weights_keys.items():
            weights[name] = weights[saved_name]
    set_model_state_dict(model, weights, options=options)
    saved_names = distributed.from_main(list(optimizer_state.get("state", {})))
    if not saved_names:
        return
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    for name, parameter in model.named_parameters():
        if name not in saved_names:  # it has had no gradient yet, as an expert without tokens
            optimizer.state.pop(parameter, None)
    for group in optimizer.param_groups:
        group["betas"] = tuple(group["betas"])  # it came back as a list
