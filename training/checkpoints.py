"""Checkpoints: written whole or not at all, checked when read, and the logs cut back to them.

On several processes the first one writes and reads, in the same form as on one.
"""

import os
import shutil
import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import distributed
from logs import jsonl

LOGS = ("train_log.jsonl", "eval_log.jsonl")
TRANSCRIPTS = ("rollouts", "eval")


def write(
    output_dir: Path,
    step: int,
    model,
    tokenizer,
    state: dict,
    *,
    weights=None,
    accuracy=None,
    keep=3,
) -> Path | None:
    """Write checkpoints/step_NNNNNN: a Hugging Face directory, the trainer's state, and a manifest, last.

    All is written and synced under a temporary name, then renamed: a checkpoint is complete or absent. Then only the
    newest `keep` and the one of the highest accuracy are kept. A full disk is said, and training goes on.

    Args:
        state: of types that `torch.load(weights_only=True)` reads: tensors, numbers, text, lists and dicts.
        weights: of a sharded model, as gather_state returns them; None: the model has them.
    """
    folder = Path(output_dir) / "checkpoints"
    path, temporary = folder / f"step_{step:06d}", folder / f"step_{step:06d}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        torch.save(state, temporary / "trainer.pt")
        checksums = {file.name: _crc32(file) for file in sorted(temporary.iterdir())}
        log_sizes = {
            file.name: file.stat().st_size
            for name in LOGS
            if (file := folder.parent / name).exists()
        }
        manifest = {"step": step, "accuracy": accuracy, "log_sizes": log_sizes, "crc32": checksums}
        jsonl.write_json(temporary / "manifest.json", manifest)
        for file in [*temporary.iterdir(), temporary]:
            _sync(file)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)
        _sync(folder)
    except (
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # mostly a full disk, as each library reports it
        shutil.rmtree(temporary, ignore_errors=True)
        print(f"warning: no checkpoint written at step {step} ({error})")
        return None

    kept = sorted(finished(output_dir))
    accuracies = {
        p: accuracy for p in kept if (accuracy := _manifest(p).get("accuracy")) is not None
    }
    for old in set(kept[:-keep]) - {max(accuracies, key=accuracies.get, default=None)}:
        shutil.rmtree(old, ignore_errors=True)
    return path


def finished(output_dir: Path) -> list[Path]:
    """Paths of the checkpoints whose writing was finished, in no order."""
    return [path.parent for path in Path(output_dir).glob("checkpoints/step_??????/manifest.json")]


def find(output_dir: Path) -> tuple[Path, dict] | None:
    """The newest intact checkpoint as (path, manifest), or None; damaged ones are said, and put aside by their name."""
    for path in sorted(finished(output_dir), reverse=True):
        manifest = _manifest(path)
        checksums = manifest.get("crc32", {"manifest.json": 0})
        damaged = [name for name, crc in checksums.items() if _crc32(path / name) != crc]
        if not damaged:
            return path, manifest
        print(f"checkpoint {path} is damaged ({', '.join(damaged)}); trying the one before")
        shutil.rmtree(path.with_suffix(".damaged"), ignore_errors=True)
        os.replace(path, path.with_suffix(".damaged"))
    return None


def _manifest(path: Path) -> dict:
    """What a checkpoint says of itself; {} where that cannot be read."""
    try:
        return jsonl.parse((path / "manifest.json").read_bytes(), path)
    except (OSError, ValueError):
        return {}


def load(path: Path, model, optimizer) -> dict:
    """Put a checkpoint's weights and optimiser state into place and return the rest of the trainer's state.

    The first process reads, and the others get from it what is theirs.
    """
    weights, state = {}, {}
    if distributed.is_main():
        for file in sorted(path.glob("*.safetensors")):
            weights |= load_file(file)
        tied = set(model.all_tied_weights_keys)  # saved once, under their other name
        different = set(weights) ^ set(model.state_dict())
        if different - tied:
            raise ValueError(
                f"{path} holds other weights than the model of this run: {sorted(different - tied)}"
            )
        state = torch.load(path / "trainer.pt", map_location="cpu", weights_only=True)
    optimizer_state = state.pop("optimizer", {})
    scatter_state(model, optimizer, weights, optimizer_state)
    return distributed.from_main(state)


def gather_state(model, optimizer) -> tuple[dict | None, dict]:
    """All processes: whole weights and optimiser state of a sharded model, for the first one, on its CPU.

    The same form as on one process; there the weights are None, for the model has them.
    """
    state = optimizer.state_dict()
    if distributed.world_size() == 1:
        return None, state
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if state["state"]:  # before the first update there is none, and asking for it would make one
        named = get_optimizer_state_dict(model, optimizer, options=options).get("state", {})
        state["state"] = {
            i: named[name] for i, (name, _) in enumerate(model.named_parameters()) if name in named
        }
    return {
        name: weight for name, weight in weights.items() if name not in model.all_tied_weights_keys
    }, state


def scatter_state(model, optimizer, weights: dict, state: dict) -> None:
    """All processes: give a model and its optimiser what the first process has read; the others pass {} and {}."""
    if distributed.world_size() == 1:
        model.load_state_dict(weights, strict=False)  # a tied weight is there once
        return optimizer.load_state_dict(state) if state else None
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if weights:
        weights |= {name: weights[saved] for name, saved in model.all_tied_weights_keys.items()}
    set_model_state_dict(model, weights, options=options)
    if distributed.from_main(bool(state) and bool(state["state"])):
        if state:
            names = [name for name, _ in model.named_parameters()]
            groups = [
                group | {"params": [names[i] for i in group["params"]]}
                for group in state["param_groups"]
            ]
            state = {
                "state": {names[i]: value for i, value in state["state"].items()},
                "param_groups": groups,
            }
        set_optimizer_state_dict(model, optimizer, state, options=options)
        for group in optimizer.param_groups:
            group["betas"] = tuple(group["betas"])  # it came back as a list


def rewind(output_dir: Path, log_sizes: dict[str, int], last: dict[str, int]) -> None:
    """Cut the logs back to what they were at a checkpoint, and remove later transcripts: they will be made again.

    last: of each folder of transcripts the number of the last to be kept; none of what is not named.
    """
    if not distributed.is_main():
        return
    for name in LOGS:
        file = Path(output_dir) / name
        if file.exists():
            size, lines = log_sizes.get(name, 0), file.read_bytes()
            if size > len(lines):
                print(f"warning: {file} has lost lines since the checkpoint was written")
            os.truncate(file, lines[:size].rfind(b"\n") + 1)  # whole lines
    for folder in TRANSCRIPTS:
        for file in Path(output_dir, folder).glob("step_??????.jsonl"):
            if int(file.stem.removeprefix("step_")) > last.get(folder, -1):
                file.unlink()


def _crc32(path):
    """None for a file that is not there."""
    if not path.exists():
        return None
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(2**24):
            crc = zlib.crc32(block, crc)
    return crc


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
