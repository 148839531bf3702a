"""Training runs on several processes (gloo, CPU) give the numbers of one, and end when one dies.

Either continues the checkpoints of the other. Sums are made in another order, so numbers are equal
up to float32 rounding.
"""

import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import (
    LettersEvaluator,
    approx,
    assert_same_run,
    completions_of,
    fixed_sample,
    logps_of,
    logs_of,
    ragged_batch,
    random_model,
    relative_distance,
    run_as_processes,
    run_flags,
)

import evaluator
import llms
import main
import utils
from config import LossConfig, RunConfig
from grpo import distributed, weights
from grpo.run import Run
from grpo.sampler import TorchSampler

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
NUM_GROUPS = 8
GROUP_SIZE = 4


class SometimesMissing(LettersEvaluator):
    """Rewards that differ within a group; one in five is missing."""

    def compute_rewards(self, prompts, completions, answers, **columns):
        rewards = super().compute_rewards(prompts, completions, answers)
        is_missing = torch.tensor([[len(text) % 5 == 2] for text in completions])
        values = rewards.per_function.masked_fill(is_missing, torch.nan)
        return evaluator.Rewards(values, rewards.details)


evaluator.EVALUATORS["missing"] = SometimesMissing


# --- what every process does ----------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Two updates that one process and several must make alike."""

    advantages: str  # which of them are missing or 0: see completions_of_update
    length_normalization: str
    beta: float = 0.04
    loss_type: str = "grpo_clip"
    group_size: int = GROUP_SIZE
    off_policy: bool = False
    tied: bool = True  # whether the output layer is the embedding
    checkpointing: bool = False  # gradient checkpointing
    lora_rank: int | None = None


# Several processes skip groups, and have no rewards, in different places.
CASES = [
    Case("full", "masked_mean"),
    Case("full", "masked_mean", lora_rank=3),
    Case("missing", "token_mean", checkpointing=True),
    Case("missing", "masked_normalize", off_policy=True, loss_type="gspo", tied=False),
    Case("skipped", "token_mean", beta=0.0),
    Case("half skipped", "masked_mean", beta=0.0),
    Case("all skipped", "masked_mean", beta=0.0),
    # As in supervised fine-tuning; one of four processes has no completion.
    Case("three", "masked_mean", beta=0.0, group_size=1, loss_type="reinforce_with_baseline"),
]


def completions_of_update(case, seed):
    """The completions of all processes."""
    batch = ragged_batch(NUM_GROUPS, GROUP_SIZE, seed)
    advantages = batch["advantages"]
    if case.advantages in ("missing", "skipped"):
        advantages[[1, 2, 9]] = torch.nan
        advantages[4:8] = torch.nan
        advantages[16:24] = torch.nan
    if case.advantages == "skipped":
        advantages[8:12] = 0
        advantages[-4:] = 0
    if case.advantages == "half skipped":
        advantages[16:] = 0
    if case.advantages == "all skipped":
        advantages[:] = 0
    completions = completions_of(batch)
    if case.off_policy:
        old_logps = logps_of(random_model(2), batch).tolist()
        for completion, logps in zip(completions, old_logps, strict=True):
            completion.old_logps = logps[: len(completion.ids)]
    return completions[:3] if case.advantages == "three" else completions


def make_updates(case):
    """What two updates did: their metrics, gradients and final weights, each as a vector."""
    model = random_model(0, tie_word_embeddings=case.tied).train()
    if case.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    base_model = None
    if case.beta > 0:
        base_model = random_model(1, tie_word_embeddings=case.tied).requires_grad_(False)
        weights.shard(base_model)
    sampler = TorchSampler(model, None, RunConfig(lora_rank=case.lora_rank))
    if case.lora_rank:
        weights.add_adapters(model, case.lora_rank, seed=0)
        base_model = weights.get_base_model(model)
    weights.shard(model)
    # SGD shows a wrong factor, which AdamW would hide. The training runs below use AdamW.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = LossConfig(
        group_size=case.group_size,
        length_normalization=case.length_normalization,
        loss_type=case.loss_type,
        beta=case.beta,
        mask_truncated_completions=True,
        max_completion_length=6,
    )
    results = {}
    for seed in range(2):
        completions = completions_of_update(case, seed)
        metrics = main.accumulate_gradient(
            model, base_model, distributed.share(completions), config, micro_batch_tokens=50
        )
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results[f"gradient {seed}"] = torch.cat([torch.zeros(1), *map(whole_vector, gradients)])
        with mock.patch.object(main, "MAX_GRAD_NORM", 0.5):
            metrics |= main.take_step(model, optimizer, 0.1, metrics["loss"])
        sampler.refresh(model)
        results[f"metrics {seed}"] = torch.tensor([metrics[name] for name in sorted(metrics)])
    merged = dict(weights.merged_weights(model))
    results["weights"] = torch.cat([whole_vector(weight.detach()) for weight in merged.values()])
    copies = sampler.model.state_dict()
    sampler_weights = torch.cat([copies[name].flatten() for name in merged])
    assert torch.equal(results["weights"], sampler_weights), "the sampler is the policy's copy"
    return results


def whole_vector(tensor):
    """All of a tensor that may be sharded, as a vector."""
    return distributed.full_tensor(tensor).flatten()


RUNS = {  # name: flags of a run with completions by fixed_sample
    "missing": dict(rollout_batch_size=32, beta=0.0, evaluator="missing", micro_batch_tokens=300),
    # With a second epoch the policy is scored before its updates too.
    "resumed": dict(rollout_batch_size=16, sampling_dtype="bfloat16", epochs_per_rollout_batch=2),
}


def run_main(model_folder, folder, name, num_iterations, *switches):
    flags = RUNS[name] | dict(learning_rate=0.01, eval_size=5, num_train_iters=num_iterations)
    with mock.patch.object(Run, "sample", fixed_sample):
        flags = run_flags(model_folder, folder / name, **flags)
        assert main.main([*flags, *switches]) == 0


def make_everything(model_folder, folder):
    """The updates and training runs that are compared, in one process or as one of several."""
    updates = [make_updates(case) for case in CASES]
    if distributed.is_main():
        torch.save(updates, folder / "updates.pt")
    run_main(model_folder, folder, "missing", 3)
    run_main(model_folder, folder, "resumed", 4, "--resume")  # after two iterations by one process


def make_everything_as_one_of_several(model_folder, folder):
    distributed.init("cpu")
    distributed.finish = lambda code: code  # several training runs in one set of processes
    make_everything(model_folder, folder)


# --- what is compared -----------------------------------------------------------------------------


def launch(num_processes, *command):
    """main.py under torchrun."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    command = [*TORCHRUN, str(num_processes), __file__, *map(str, command)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def output_of(process, seconds=600):
    """All that a launched script prints; it must end well."""
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, output[-3000:]
    return output


def assert_close_runs(folder, expected_folder):
    """Transcripts are equal; logs and weights are so up to rounding."""
    logs = logs_of(folder)
    expected_logs = logs_of(expected_folder)
    assert logs.keys() == expected_logs.keys()
    for name, expected_rows in expected_logs.items():
        for row, expected in zip(logs[name], expected_rows, strict=True):
            if name.endswith("_log.jsonl"):
                row = with_nan(row)
                expected = approx(with_nan(expected))
            assert row == expected, name
    checkpoint = max((expected_folder / "checkpoints").iterdir()).name
    paths = [path / "checkpoints" / checkpoint for path in (folder, expected_folder)]
    assert_close(*[weights_of(path) for path in paths], folder.name)


def with_nan(row):
    """A line of a log, in which a NaN is null."""
    return {key: math.nan if value is None else value for key, value in row.items()}


def weights_of(checkpoint):
    model, _ = llms.get_llm_tokenizer(str(checkpoint))
    return torch.cat([p.flatten() for p in model.parameters()])


def assert_close(actual, expected, message, tolerance=1e-5):
    """Relative distance of two vectors; both may be 0."""
    if expected.norm() == 0:
        assert actual.norm() == 0, message
    else:
        assert relative_distance(actual, expected) < tolerance, message


@pytest.mark.slow
def test_four_processes_give_the_numbers_of_one(model_folder, tmp_path, capsys):
    """Metrics, gradients, weights, logs and transcripts. Each continues the other's checkpoint."""
    one = tmp_path / "one"
    four = tmp_path / "four"
    for folder in (one, four):
        folder.mkdir()
        run_main(model_folder, folder, "resumed", 2)
    make_everything(model_folder, one)
    outputs = run_as_processes(4, make_everything_as_one_of_several, model_folder, four)
    assert "saved by 1 processes, continued by 4" in outputs[0]
    assert not any("done: " in output for output in outputs[1:]), "only the first one prints"

    updates = zip(torch.load(four / "updates.pt"), torch.load(one / "updates.pt"), strict=True)
    for case, (actual, expected) in zip(CASES, updates, strict=True):
        for name in expected:
            assert_close(actual[name], expected[name], (case, name))
    for name in ("missing", "resumed"):
        assert_close_runs(four / name, one / name)

    # One process continues what several have saved, and what it has saved itself.
    capsys.readouterr()
    for folder in (four, one):
        run_main(model_folder, folder, "resumed", 5, "--resume")
    assert "saved by 4 processes, continued by 1" in capsys.readouterr().out
    assert_close_runs(four / "resumed", one / "resumed")


def test_each_process_has_its_own_random_numbers(monkeypatch):
    """Completions of all processes would be the same otherwise."""
    assert distributed.process_seed(5) == 5
    with utils.isolated_seed(0):
        expected = torch.rand(3)
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    assert distributed.process_seed(5) != 5
    # A user's file that draws once gave each process another data set.
    with utils.isolated_seed(0):
        assert torch.equal(torch.rand(3), expected)


# --- a process that is told to stop ---------------------------------------------------------------


def stop_second_process(process):
    """Stop the second process in the fourth step, and return all that was printed."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(r"step +3 ", line):
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = []
    for pid in children:
        if __file__ in Path(f"/proc/{pid}/cmdline").read_text():
            workers.append(int(pid))
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    return "".join(lines) + output


def six_steps(model_folder, folder):
    return run_flags(
        model_folder,
        folder,
        num_train_iters=6,
        eval_iterations=3,
        max_completion_length=30,
        rollout_batch_size=64,
        eval_size=5,
    )


@pytest.mark.slow
def test_a_job_ends_when_one_process_is_stopped_and_goes_on(model_folder, tmp_path):
    undisturbed = tmp_path / "undisturbed"
    output_of(launch(2, *six_steps(model_folder, undisturbed)))
    flags = six_steps(model_folder, tmp_path / "run")
    process = launch(2, *flags)
    output = stop_second_process(process)
    assert process.returncode != 0
    (saved_step,) = re.findall(r"stopped by SIGTERM after iteration (\d)", output)
    assert max(llms.finished_checkpoints(tmp_path / "run")) == int(saved_step)
    output = output_of(launch(2, *flags, "--resume"))
    assert f"continuing from {tmp_path}/run/checkpoints/step_00000{saved_step}" in output
    assert_same_run(tmp_path / "run", undisturbed)


if __name__ == "__main__":  # what torchrun starts
    sys.exit(main.main(sys.argv[1:]))
