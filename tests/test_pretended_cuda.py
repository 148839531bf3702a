"""main.py and sft.py on a pretended CUDA device.

The device has the kernels of the CPU, but CUDA's rules: no mixed devices, no synchronisation in a
captured step, autocast, random numbers of its own, and new memory full of NaN. Its source is in
tools/pretend_cuda of the folder that GRPO_LITE_DATA names. It is compiled once, in two minutes.
"""

import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import pytest
import torch
from conftest import ROOT, logs_of

pytestmark = pytest.mark.slow

RUNNER = ROOT / "tests" / "run_on_pretended_cuda.py"
MODEL_AND_DATA = "--model_name tiny/0.3m --dataset_name arithmetic --device cuda --eval_size 16"
NUM_ITERATIONS = 4
# Each iteration has two batches of sampling and two updates.
TRAINING = f"""{MODEL_AND_DATA} --num_train_iters {NUM_ITERATIONS} --rollout_batch_size 16
    --group_size 4 --train_batch_size 8 --max_completion_length 48 --max_concurrent_sequences 8
    --learning_rate 1e-3 --eval_iterations 1"""


@pytest.fixture(scope="session")
def device(data_folder):
    """The folder of the built device."""
    source = data_folder / "tools" / "pretend_cuda"
    if not source.exists():
        pytest.skip(f"there is no pretended CUDA device in {source}")
    if not shutil.which("g++"):
        pytest.skip("the pretended CUDA device needs g++ to be compiled")
    if torch.version.cuda:
        pytest.skip("the pretended CUDA device needs the CPU build of torch")
    # What is built is linked to this torch, and of no use to one in another place.
    torch_folder = zlib.crc32(torch.__file__.encode())
    name = f"pretend_cuda-{torch.__version__}-{torch_folder:08x}"
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers must not build at once
        if not (folder / "pretend.py").exists():
            build = [source / "build.sh", sys.executable, folder]
            subprocess.run(build, check=True, capture_output=True, timeout=600)
    return folder


def run_on(device, script, flags, output_dir, num_processes=1, **environment):
    """Run a script that writes to a folder: (all that it printed, its counts).

    There are no counts of several processes, which end without Python's ordinary end.
    """
    counts_file = output_dir.with_suffix(".counts.json")
    environment = os.environ | environment | {"OMP_NUM_THREADS": "1"}
    environment["FAKECUDA_REPORT"] = str(counts_file)
    command = ["env", f"LD_PRELOAD={device / '_fakecuda.so'}", sys.executable, RUNNER, device]
    if num_processes > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
        command = [*torchrun, f"--nproc_per_node={num_processes}", *command]
    command += [script, *flags.split(), "--output_dir", output_dir]
    result = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout
    counts = json.loads(counts_file.read_text()) if num_processes == 1 else {}
    return result.stdout, counts


def logs_without_memory(folder):
    """The logs and transcripts of a run, without times and peaks of memory."""
    logs = logs_of(folder)
    for rows in logs.values():
        for row in rows:
            for key in [key for key in row if key.startswith("memory/")]:
                del row[key]
    return logs


@pytest.fixture(scope="session")
def trained(device, tmp_path_factory):
    """A run of main.py on the device: (its folder, what it printed, the counts)."""
    folder = tmp_path_factory.mktemp("pretended") / "run"
    return folder, *run_on(device, "main.py", TRAINING, folder)


def assert_all_is_captured(output, counts):
    assert "without CUDA graphs" not in output
    assert counts["graphs"]["failed"] == []
    assert counts["graphs"]["replayed"] > 5 * counts["graphs"]["captured"] > 0


def test_the_host_is_seldom_asked_and_never_in_a_captured_step(trained):
    """Each synchronisation makes the GPU wait for Python."""
    _, output, counts = trained
    assert int(output.rpartition("attentions of a packed row: ")[2]) > 0
    assert_all_is_captured(output, counts)
    num_checks_for_ends = NUM_ITERATIONS * 2 * 48 / 8
    assert counts["by_stage"]["sample"] < 10 * num_checks_for_ends
    num_updates = NUM_ITERATIONS * 2
    assert counts["by_stage"]["loss"] < 80 * num_updates


def test_a_resumed_run_equals_an_uninterrupted_one(device, trained, tmp_path):
    """A kept decoder overflowed in an iteration after --resume, at the first longer prompt."""
    whole_run, _, _ = trained
    folder = tmp_path / "run"
    run_on(device, "main.py", TRAINING + " --num_train_iters 1", folder)
    output, _ = run_on(device, "main.py", TRAINING + " --resume", folder)
    assert "continuing from" in output and "step_000001" in output
    assert logs_without_memory(folder) == logs_without_memory(whole_run)
    weights = f"checkpoints/step_{NUM_ITERATIONS:06d}/model.safetensors"
    assert (folder / weights).read_bytes() == (whole_run / weights).read_bytes()


def test_a_small_gpu_samples_fewer_sequences_at_a_time(device, tmp_path):
    """Where keys and values took more than an eighth of its memory, nothing was captured."""
    bytes_per_token = 2 * 2 * 48 * 2  # keys and values of two layers in bfloat16
    memory = 8 * 3 * 256 * bytes_per_token  # three of the eight sequences of a batch
    run = run_on(device, "main.py", TRAINING, tmp_path / "run", FAKECUDA_MEMORY=str(memory))
    assert_all_is_captured(*run)


def test_sft_runs_on_a_gpu(device, gold_file, tmp_path):
    flags = f"{MODEL_AND_DATA} --train_batch_size 8 --max_completion_length 32"
    flags += f" --train_file {gold_file} --num_updates 3 --eval_updates 2"
    run_on(device, "sft.py", flags, tmp_path / "sft")


def test_two_gpus_share_a_run(device, tmp_path):
    """Weights that a process has given back are NaN on this device."""
    folder = tmp_path / "run"
    shorter = f"{TRAINING} --num_train_iters {NUM_ITERATIONS - 1}"
    run_on(device, "main.py", shorter, folder, num_processes=2)
    output, _ = run_on(device, "main.py", TRAINING + " --resume", folder, num_processes=2)
    assert "continuing from" in output and f"step_{NUM_ITERATIONS - 1:06d}" in output
    rows = logs_of(folder)["train_log.jsonl"]
    assert len(rows) == NUM_ITERATIONS
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
