"""Training runs on several processes (gloo, CPU) give the numbers of one, and end when one dies.

Either continues the checkpoints of the other. Sums are made in another order, so numbers are equal
up to float32 rounding.
"""

import os
import re
import shutil
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
    as_flags,
    assert_same_log_row,
    assert_same_run,
    assert_same_transcript,
    closed_port,
    completions_of,
    fixed_sample,
    in_place_of_sample,
    logps_of,
    ragged_batch,
    random_model,
    relative_distance,
    run_flags,
    start,
)

import evaluator
import llms
import main
import sft
from config import LossConfig
from grpo import checkpoints, distributed, jsonl, weights
from grpo.run import Run

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

    advantages: str  # which of them are missing or 0: see advantages_of
    length_normalization: str
    beta: float = 0.04
    loss_type: str = "grpo_clip"
    off_policy: bool = False
    tied: bool = True  # whether the output layer is the embedding
    checkpointing: bool = False  # gradient checkpointing


# Several processes skip groups, and have no rewards, in different places. "half skipped": half of
# the processes have no group with a gradient.
CASES = [
    Case("full", "masked_mean"),
    Case("missing", "masked_normalize"),
    Case("half skipped", "masked_mean", beta=0.0),
    Case("mixed", "token_mean", beta=0.0),
    Case("missing", "token_mean"),
    Case("mixed", "token_mean", checkpointing=True),
    Case("full", "masked_mean", tied=False),
    Case("skipped", "masked_normalize", beta=0.0, tied=False, loss_type="no_baseline"),
    Case("all skipped", "masked_mean", beta=0.0),
    Case("missing", "masked_mean", beta=0.0, loss_type="gspo", off_policy=True),
    Case("missing", "token_mean", beta=0.0, loss_type="cispo", off_policy=True),
]


def advantages_of(name):
    """(N,) advantages, some missing (NaN), and some groups with advantage 0 throughout."""
    N = NUM_GROUPS * GROUP_SIZE
    advantages = torch.randn(N, generator=torch.Generator().manual_seed(7))
    if name in ("missing", "mixed"):
        advantages[[1, 2, 9]] = torch.nan
        advantages[4:8] = torch.nan
        advantages[16:24] = torch.nan
    if name in ("skipped", "mixed"):
        advantages[8:12] = 0
        advantages[-4:] = 0
    if name == "half skipped":
        advantages[N // 2 :] = 0
    if name == "all skipped":
        advantages[:] = 0
    return advantages


@dataclass
class Updates:
    """What two updates did."""

    metrics: list[dict]  # of each update
    gradients: list[torch.Tensor]  # of each update, all parameters as one vector
    weights: torch.Tensor  # after both


def completions_of_update(case, seed):
    """The completions of all processes."""
    batch = ragged_batch(NUM_GROUPS, GROUP_SIZE, seed)
    batch["advantages"] = advantages_of(case.advantages)
    completions = completions_of(batch)
    if case.off_policy:
        old_logps = logps_of(random_model(2), batch).tolist()
        for completion, logps in zip(completions, old_logps, strict=True):
            completion.old_logps = logps[: len(completion.ids)]
    return completions


def make_updates(case):
    """The two updates of a case, on two ragged batches."""
    model = random_model(0, tie_word_embeddings=case.tied).train()
    if case.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    base_model = None
    if case.beta > 0:
        base_model = random_model(1, tie_word_embeddings=case.tied).requires_grad_(False)
        weights.shard(base_model)
    sampler = weights.get_sampler(model)
    weights.shard(model)
    # The weights after SGD show a wrong factor, which AdamW hides. AdamW also makes a full step of
    # a gradient that is only rounding. The training runs below use AdamW.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = LossConfig(
        group_size=GROUP_SIZE,
        length_normalization=case.length_normalization,
        loss_type=case.loss_type,
        beta=case.beta,
        mask_truncated_completions=True,
        max_completion_length=6,
    )
    updates = Updates([], [], None)
    for seed in range(2):
        completions = completions_of_update(case, seed)
        metrics = main.accumulate_gradient(
            model, base_model, distributed.share(completions), config, micro_batch_tokens=50
        )
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        updates.gradients.append(torch.cat([torch.zeros(1), *map(whole_vector, gradients)]))
        with mock.patch.object(main, "MAX_GRAD_NORM", 0.5):
            metrics |= main.take_step(model, optimizer, 0.1, metrics["loss"])
        weights.refresh_sampler(sampler, model)
        updates.metrics.append({name: float(value) for name, value in metrics.items()})
    updates.weights = torch.cat([whole_vector(p.detach()) for p in model.parameters()])
    sampler_weights = torch.cat([p.flatten() for p in sampler.parameters()])
    assert torch.equal(updates.weights, sampler_weights), "the sampler is the policy's copy"
    return updates


def whole_vector(tensor):
    """All of a tensor that may be sharded, as a vector."""
    return distributed.full_tensor(tensor).flatten()


RUNS = {  # name: flags of a run with completions by fixed_sample
    "on-policy": dict(rollout_batch_size=16, eval_size=5, num_train_iters=3),
    "missing": dict(
        rollout_batch_size=32,
        beta=0.0,
        evaluator="missing",
        num_train_iters=3,
        micro_batch_tokens=300,
    ),
    # The policy is scored before its updates too, since the sampler is not the policy.
    "resumed": dict(
        rollout_batch_size=16, eval_size=5, num_train_iters=4, sampling_dtype="bfloat16"
    ),
}


def run_main(model_folder, output, name, *switches, **flags):
    flags = RUNS[name] | dict(learning_rate=0.01) | flags
    with in_place_of_sample(fixed_sample):
        return main.main([*run_flags(model_folder, output, **flags), *switches])


def run_sft(model_folder, output):
    rows = []
    for n in range(8):
        completion = "x" * (3 * n % 11) + "1"
        rows.append({"question": f"{n} and {n * n}", "completion": completion, "answer": "1"})
    gold_file = output.parent / "gold.jsonl"
    if distributed.is_main():
        jsonl.write(gold_file, rows)
    distributed.barrier()
    flags = as_flags(
        model_name=model_folder,
        output_dir=output,
        train_file=gold_file,
        dataset_name="arithmetic",
        evaluator="letters",
        eval_size=5,
        max_completion_length=12,
        num_updates=3,
        train_batch_size=3,
        micro_batch_tokens=64,
        eval_updates=2,
        save_updates=9,
        learning_rate=1e-3,
        device="cpu",
    )
    return sft.main(flags)


def make_first_half(model_folder, folder):
    """Half of the run "resumed"; make_everything goes on with it."""
    assert run_main(model_folder, folder / "resumed", "resumed", num_train_iters=2) == 0


def make_everything(model_folder, folder):
    """The updates and training runs that are compared, in one process or as one of several."""
    updates = [make_updates(case) for case in CASES]
    if distributed.is_main():
        torch.save([vars(two_updates) for two_updates in updates], folder / "updates.pt")
    assert run_main(model_folder, folder / "on-policy", "on-policy") == 0
    assert run_main(model_folder, folder / "missing", "missing") == 0
    assert run_main(model_folder, folder / "resumed", "resumed", "--resume") == 0
    assert run_sft(model_folder, folder / "sft") == 0


def make_everything_as_one_of_several(model_folder, folder):
    distributed.init("cpu")
    distributed.finish = lambda code: code  # several training runs in one set of processes
    make_everything(model_folder, folder)


# --- what is compared -----------------------------------------------------------------------------


def launch(num_processes, *command):
    """A script under torchrun."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    command = [*TORCHRUN, str(num_processes), *map(str, command)]
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


@pytest.fixture(scope="module")
def made_by_one(model_folder, tmp_path_factory):
    """The folder of what one process makes."""
    folder = tmp_path_factory.mktemp("one")
    make_first_half(model_folder, folder)
    make_everything(model_folder, folder)
    return folder


def load_updates(folder):
    return [Updates(**fields) for fields in torch.load(folder / "updates.pt")]


def assert_same_updates(actual, expected, case):
    for metrics, expected_metrics in zip(actual.metrics, expected.metrics, strict=True):
        assert metrics == approx(expected_metrics), case
    for gradient, expected_gradient in zip(actual.gradients, expected.gradients, strict=True):
        assert_close(gradient, expected_gradient, case)
    assert_close(actual.weights, expected.weights, case)


def assert_close_runs(folder, expected_folder):
    """Transcripts are equal; logs, AdamW's state and log-probs of tokens are so up to rounding."""
    for log in ("train_log.jsonl", "eval_log.jsonl"):
        rows = jsonl.read(folder / log)
        assert len(rows) > 1
        for row, expected in zip(rows, jsonl.read(expected_folder / log), strict=True):
            assert_same_log_row(row, expected)
    for transcripts in ("rollouts", "eval"):
        for path in expected_folder.glob(f"{transcripts}/*"):
            assert_same_transcript(folder / transcripts / path.name, path)

    checkpoint = max((expected_folder / "checkpoints").iterdir()).name
    assert checkpoint == ("step_000004" if folder.name == "resumed" else "step_000003")
    paths = [path / "checkpoints" / checkpoint for path in (folder, expected_folder)]
    assert_close(*[weights_of(path) for path in paths], folder.name)
    state, expected_state = [optimizer_state(path) for path in paths]
    assert state.keys() == expected_state.keys()
    for name, state_of_tensor in state.items():
        assert state_of_tensor["step"] == expected_state[name]["step"]
    assert_close(squared_gradients(state), squared_gradients(expected_state), folder.name)


def weights_of(checkpoint):
    model, _ = llms.get_llm_tokenizer(str(checkpoint))
    return torch.cat([p.flatten() for p in model.parameters()])


def optimizer_state(checkpoint):
    return torch.load(checkpoint / "trainer.pt", weights_only=True)["optimizer"]["state"]


def squared_gradients(state):
    """AdamW's running means of the squared gradients, as one vector."""
    return torch.cat(
        [state_of_tensor["exp_avg_sq"].flatten() for state_of_tensor in state.values()]
    )


def assert_close(actual, expected, message, tolerance=1e-5):
    """Relative distance of two vectors; both may be 0."""
    if expected.norm() == 0:
        assert actual.norm() == 0, message
    else:
        assert relative_distance(actual, expected) < tolerance, message


@pytest.mark.slow
def test_four_processes_give_the_numbers_of_one(made_by_one, model_folder, tmp_path, capsys):
    """Metrics, gradients, weights, logs and transcripts. Each continues the other's checkpoint."""
    make_first_half(model_folder, tmp_path)
    job = dict(WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(closed_port()))
    arguments = (make_everything_as_one_of_several, model_folder, tmp_path)
    started = [start(*arguments, RANK=str(rank), **job) for rank in range(4)]
    outputs = [output.read() for _, output in started]
    for process, _ in started:
        process.join()
        assert process.exitcode == 0, outputs
    assert "saved by 1 processes, continued by 4" in outputs[0]

    updates = load_updates(tmp_path)
    for case, actual, expected in zip(CASES, updates, load_updates(made_by_one), strict=True):
        assert_same_updates(actual, expected, case)
    for name in ("on-policy", "resumed", "sft", "missing"):
        assert_close_runs(tmp_path / name, made_by_one / name)

    # One process continues what several have saved, and what it has saved itself.
    shutil.copytree(made_by_one / "on-policy", tmp_path / "by one")
    capsys.readouterr()
    for name in ("on-policy", "by one"):
        run_main(model_folder, tmp_path / name, "on-policy", "--resume", num_train_iters=4)
    assert "saved by 4 processes, continued by 1" in capsys.readouterr().out
    row = jsonl.read(tmp_path / "on-policy" / "train_log.jsonl")[-1]
    expected = jsonl.read(tmp_path / "by one" / "train_log.jsonl")[-1]
    assert row["step"] == 4
    assert_same_log_row(row, expected)


# --- a process that dies, raises or is told to stop -----------------------------------------------


def raise_in_one(*flags):
    """main.py, in which the second process meets an error as it rewards in iteration 3."""
    original = Run.reward

    def reward(run, completions):
        if distributed.rank() == 1 and run.iteration == 3:
            raise RuntimeError("this reward cannot be computed")
        return original(run, completions)

    Run.reward = reward
    return main.main(list(flags))


def signal_second_process(process, number):
    """Send the second process a signal in the fourth step, and return all that was printed."""
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
    os.kill(workers[1], number)
    output, _ = process.communicate(timeout=60)
    return "".join(lines) + output


@pytest.fixture(scope="module")
def six_steps_run(model_folder, tmp_path_factory):
    """The folder of six steps on two processes that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("six steps") / "run"
    output_of(launch(2, __file__, "run", *six_steps(model_folder, folder)))
    return folder


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
def test_a_job_ends_when_one_process_raises(model_folder, tmp_path):
    process = launch(2, __file__, "raise", *six_steps(model_folder, tmp_path / "run"))
    output, _ = process.communicate(timeout=90)  # of which some 15 s are the start
    assert process.returncode != 0
    assert "RuntimeError: this reward cannot be computed" in output
    assert max(checkpoints.finished(tmp_path / "run")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_job_ends_when_one_process_is_stopped_and_goes_on(
    number, six_steps_run, model_folder, tmp_path
):
    flags = six_steps(model_folder, tmp_path / "run")
    process = launch(2, __file__, "run", *flags)
    output = signal_second_process(process, number)
    assert process.returncode != 0
    saved_step = 2
    stopped = re.findall(r"stopped by SIGTERM after iteration (\d)", output)
    if number == signal.SIGTERM:
        assert len(stopped) == 1, output[-2000:]
        saved_step = int(stopped[0])
    else:
        assert not stopped
    assert max(checkpoints.finished(tmp_path / "run")) == saved_step
    output = output_of(launch(2, __file__, "run", *flags, "--resume"))
    assert f"continuing from {tmp_path}/run/checkpoints/step_{saved_step:06d}" in output
    assert_same_run(tmp_path / "run", six_steps_run)


if __name__ == "__main__":  # what torchrun starts
    mode, *flags = sys.argv[1:]
    sys.exit(raise_in_one(*flags) if mode == "raise" else main.main(flags))
