"""Runs on several processes (gloo, CPU) give the numbers of one, end when one dies, and share checkpoints."""

import hashlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    ROOT,
    VOCAB,
    LettersEvaluator,
    as_flags,
    assert_same_run,
    closed_port,
    ragged_batch,
    random_model,
    rollout_of,
    run_flags,
    start,
)

import distributed
import evaluator
import llms
import main
import sft
from logs import jsonl
from sampling.rollout import Rollout, left_pad
from training import checkpoints

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
GROUPS, GROUP_SIZE = 8, 4


class SometimesMissing(LettersEvaluator):
    """Rewards that spread, of which one in five is missing."""

    def compute_rewards(self, prompts, completions, answers):
        rewards = super().compute_rewards(prompts, completions, answers)
        missing = torch.tensor([[len(text) % 5 == 2] for text in completions])
        return evaluator.Rewards(
            rewards.per_function.masked_fill(missing, torch.nan), rewards.details
        )


evaluator.EVALUATORS["missing"] = SometimesMissing


# --- what every process does ----------------------------------------------------------------------


def advantages_of(case):
    """(N,): some missing, some groups (or, of two processes, all of the second one's) without any."""
    advantages = torch.randn(GROUPS * GROUP_SIZE, generator=torch.Generator().manual_seed(7))
    if case in ("missing", "mixed"):
        advantages[[1, 2, 9]] = advantages[4:8] = advantages[16:24] = torch.nan
    if case in ("skipped", "mixed"):
        advantages[8:12] = advantages[-4:] = 0
    if case == "half skipped":
        advantages[len(advantages) // 2 :] = 0
    return advantages * 0 if case == "all skipped" else advantages


CASES = [
    dict(case="full", length_normalization="masked_mean"),
    dict(case="missing", length_normalization="masked_normalize"),
    dict(case="half skipped", length_normalization="masked_mean", beta=0.0),
    dict(case="mixed", length_normalization="token_mean", beta=0.0),
    dict(case="missing", length_normalization="token_mean"),
    dict(case="mixed", length_normalization="token_mean", checkpointing=True),
    dict(case="full", length_normalization="masked_mean", tied=False),
    dict(
        case="skipped",
        length_normalization="masked_normalize",
        beta=0.0,
        tied=False,
        loss_type="no_baseline",
    ),
    dict(case="all skipped", length_normalization="masked_mean", beta=0.0),
]


def two_updates(case, beta=0.04, tied=True, checkpointing=False, **flags):
    """Metrics and gradient of two updates on two ragged batches, and the weights after them."""
    model = random_model(0, tie_word_embeddings=tied).train()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    base = (
        llms.shard(random_model(1, tie_word_embeddings=tied).requires_grad_(False))
        if beta
        else None
    )
    sampler = llms.get_sampler(model)
    llms.shard(model)
    # SGD, and AdamW in the runs below: AdamW hides a factor, and makes of a gradient that is only rounding a full step.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    run = SimpleNamespace(
        model=model, base_model=base, sampler=sampler, optimizer=optimizer, scheduler=scheduler
    )
    flags = run_flags(
        "unused", "unused", beta=beta, micro_batch_tokens=50, max_grad_norm=0.5, **flags
    )
    args = main.parse_args([*flags, "--mask_truncated_completions"])
    advantages, steps = advantages_of(case), []
    for seed in range(2):
        mine = distributed.share(torch.arange(len(advantages)))
        rollout = rollout_of(ragged_batch(GROUPS, GROUP_SIZE, seed)).select(mine)
        metrics = main.accumulate_gradient(
            args, run, rollout, advantages[mine], list(range(len(mine)))
        )
        parts = [
            distributed.full_tensor(p.grad).flatten()
            for p in model.parameters()
            if p.grad is not None
        ]
        gradient = torch.cat([torch.zeros(1), *parts])
        metrics |= main.take_step(args, run, metrics["loss"])
        steps.append((metrics, gradient))
    weights = torch.cat([distributed.full_tensor(p).detach().flatten() for p in model.parameters()])
    copied = torch.cat([p.flatten() for p in sampler.parameters()])
    assert torch.equal(weights, copied), "the sampler is the policy's copy"
    return steps, weights


def fixed_sample(args, run, examples, num_samples, temperature, progress=None):
    """Stands in for main.sample: completions that depend on prompt, number and step, not on process or random state."""
    prompts = run.tokenizer([e["prompt"] for e in examples], add_special_tokens=False)["input_ids"]
    ids, mask = left_pad([p for p in prompts for _ in range(num_samples)], 0, "cpu")
    names = [f"{e['id']} {run.step} {j}" for e in examples for j in range(num_samples)]
    seeds = [int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") for name in names]
    lengths = torch.tensor([1 + seed % args.max_completion_length for seed in seeds])
    C = int(lengths.max())
    draws = [
        torch.randint(7, VOCAB, (C,), generator=torch.Generator().manual_seed(seed))
        for seed in seeds
    ]
    completion_mask = (torch.arange(C) < lengths[:, None]).long()
    completion_ids = torch.stack(draws) * completion_mask
    return Rollout(
        prompt_ids=ids,
        completion_ids=completion_ids,
        attention_mask=torch.cat([mask, completion_mask], dim=1),
        completion_mask=completion_mask,
        sampled_logps=torch.zeros(completion_ids.shape),
        finished=lengths < args.max_completion_length,
        texts=[
            run.tokenizer.decode(row[:n]) for row, n in zip(completion_ids, lengths, strict=True)
        ],
    )


RUNS = {  # name: flags of a run with completions by fixed_sample
    "on": dict(rollout_batch_size=16, eval_size=5, max_grad_norm=0.1, num_train_iters=3),
    "missing": dict(
        rollout_batch_size=32,
        beta=0.0,
        evaluator="missing",
        num_train_iters=3,
        micro_batch_tokens=300,
    ),
    "resumed": dict(rollout_batch_size=16, eval_size=5, num_train_iters=4),
}
SFT = dict(
    num_updates=3,
    train_batch_size=3,
    micro_batch_tokens=64,
    eval_updates=2,
    save_updates=9,
    learning_rate=1e-3,
)


def run_main(model, output, name, resume=(), **more):
    flags = run_flags(model, output, **RUNS[name] | dict(learning_rate=0.01) | more)
    main.sample, original = fixed_sample, main.sample
    try:
        return main.main([*flags, *resume])
    finally:
        main.sample = original


def run_sft(model, output):
    rows = [
        {"question": f"{n} and {n * n}", "completion": "x" * (3 * n % 11) + "1", "answer": "1"}
        for n in range(8)
    ]
    if distributed.is_main():
        jsonl.write(output.parent / "gold.jsonl", rows)
    distributed.barrier()
    flags = SFT | dict(
        model_name=model, output_dir=output, train_file=output.parent / "gold.jsonl", device="cpu"
    )
    flags |= dict(
        dataset_name="arithmetic", evaluator="letters", eval_size=5, max_completion_length=12
    )
    return sft.main(as_flags(**flags, log_entropy=""))


def half_a_run(model, folder):
    assert run_main(model, folder / "resumed", "resumed", num_train_iters=2) == 0


def make(model, folder, quick=False):
    """What is compared, for one process and for several."""
    results = [two_updates(**case) for case in CASES[: 4 if quick else None]]
    if distributed.is_main():
        torch.save(results, folder / "updates.pt")
    assert run_main(model, folder / "on", "on") == 0
    assert quick or run_main(model, folder / "missing", "missing") == 0
    assert (
        run_main(model, folder / "resumed", "resumed", ["--resume"]) == 0
    )  # half of it was made by one process
    assert run_sft(model, folder / "sft") == 0


def as_one_of_several(model, folder, quick):
    distributed.init("cpu")
    distributed.finish = lambda code: code  # several runs in one set of processes
    make(model, folder, quick)


# --- what is compared -----------------------------------------------------------------------------


def launch(count, *command):
    """A script under torchrun."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    command = [*TORCHRUN, str(count), *map(str, command)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def finished(process, seconds=600):
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, output[-3000:]
    return output


@pytest.fixture(scope="module")
def alone(model_folder, tmp_path_factory):
    """The cases on one process."""
    folder = tmp_path_factory.mktemp("one")
    half_a_run(model_folder, folder)
    make(model_folder, folder)
    return folder


def compare(alone, folder):
    """Everything in the folder with the same of one process."""
    expected, actual = (torch.load(f / "updates.pt") for f in (alone, folder))
    for case, one, several in zip(CASES, expected, actual, strict=False):
        for (metrics, gradient), (metrics_of_several, gradient_of_several) in zip(
            one[0], several[0], strict=True
        ):
            assert metrics_of_several == approx(metrics), case
            close(gradient_of_several, gradient, case)
        close(several[1], one[1], case)
    for name in [path.name for path in folder.iterdir() if path.is_dir()]:
        ours, theirs = folder / name, alone / name
        for log in ("train_log.jsonl", "eval_log.jsonl"):
            pairs = list(zip(jsonl.read(ours / log), jsonl.read(theirs / log), strict=True))
            assert len(pairs) > 1
            for row, expected in pairs:
                assert values(row) == approx(values(expected)), (name, log)
        for transcript in [*theirs.glob("rollouts/*"), *theirs.glob("eval/*")]:
            assert jsonl.read(ours / transcript.relative_to(theirs)) == jsonl.read(transcript)
        step = f"checkpoints/step_{4 if name == 'resumed' else 3:06d}"
        close(
            *(torch.cat([p.flatten() for p in weights(f / step).values()]) for f in (ours, theirs)),
            name,
        )
        states = [
            torch.load(f / step / "trainer.pt", weights_only=True)["optimizer"]["state"]
            for f in (ours, theirs)
        ]
        assert states[0].keys() == states[1].keys() and states[0][0]["step"] == states[1][0]["step"]
        close(
            *(torch.cat([s["exp_avg_sq"].flatten() for s in state.values()]) for state in states),
            name,
        )


def values(row):
    """A line of a log without its times; null is NaN."""
    return {
        k: math.nan if v is None else v
        for k, v in row.items()
        if not k.startswith(("time/", "elapsed"))
    }


def approx(expected):
    return pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True)


def weights(checkpoint):
    return dict(llms.get_llm_tokenizer(str(checkpoint))[0].named_parameters())


def close(actual, expected, message, tolerance=1e-5):
    distance = ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()
    assert distance < tolerance, (message, distance)


@pytest.mark.parametrize(
    "count", [2, pytest.param(4, marks=pytest.mark.slow)]
)  # two make fewer cases
def test_several_processes_give_the_numbers_of_one(count, alone, model_folder, tmp_path, capsys):
    """Loss, metrics, gradients, norms, weights, logs, transcripts; and either continues the other's checkpoint."""
    half_a_run(model_folder, tmp_path)
    job = dict(
        WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(closed_port())
    )  # as torchrun says it
    case = as_one_of_several, model_folder, tmp_path, count == 2
    started = [start(*case, RANK=str(rank), **job) for rank in range(count)]
    output = [output.read() for _, output in started]
    for process, _ in started:
        process.join()
        assert process.exitcode == 0, output
    assert f"saved by 1 processes, continued by {count}" in output[0]
    compare(alone, tmp_path)
    shutil.copytree(alone / "on", tmp_path / "alone")
    for folder in ("alone", "on"):
        run_main(model_folder, tmp_path / folder, "on", ["--resume"], num_train_iters=4)
    row, expected = (
        values(jsonl.read(tmp_path / name / "train_log.jsonl")[-1]) for name in ("on", "alone")
    )
    assert row["step"] == 4 and row == approx(expected)
    assert f"saved by {count} processes, continued by 1" in capsys.readouterr().out


# --- a process that dies, raises or is told to stop -----------------------------------------------


def raise_in_one(*flags):
    """main.py, in which the second process meets an error in its fourth reward: iteration 3, after an evaluation."""
    original, calls = main.reward, []

    def reward(*args):
        calls.append(args)
        if distributed.rank() == 1 and len(calls) == 4:
            raise RuntimeError("this reward cannot be computed")
        return original(*args)

    main.reward = reward
    return main.main(list(flags))


def kill_second(process, number):
    """Send the second process a signal when the third step is done, so in the fourth: returns what was printed."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(r"step +3 ", line):
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [int(pid) for pid in children if __file__ in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2
    os.kill(workers[1], number)
    output, _ = process.communicate(timeout=60)
    return "".join(lines) + output


@pytest.fixture(scope="module")
def six_steps_run(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    finished(launch(2, __file__, "run", *six_steps(model_folder, folder)))
    return folder


def six_steps(model_folder, folder):
    flags = dict(
        num_train_iters=6,
        eval_iterations=3,
        max_completion_length=30,
        rollout_batch_size=64,
        eval_size=5,
    )
    return run_flags(model_folder, folder, **flags)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "raised", "told to stop"])
def test_a_job_ends_when_one_process_does_and_can_be_resumed(
    end, six_steps_run, model_folder, tmp_path
):
    flags = six_steps(model_folder, tmp_path / "run")
    if end == "raised":
        process = launch(2, __file__, "raise", *flags)
        output, _ = process.communicate(timeout=90)  # of which some 15 s are the start
        assert "RuntimeError: this reward cannot be computed" in output
    else:
        process = launch(2, __file__, "run", *flags)
        output = kill_second(process, signal.SIGKILL if end == "killed" else signal.SIGTERM)
    assert process.returncode != 0
    stopped = re.search(r"stopped by SIGTERM after step (\d)", output)
    assert output.count("stopped by") == (end == "told to stop"), output[-2000:]
    _, manifest = checkpoints.find(tmp_path / "run")
    assert manifest["step"] == (int(stopped[1]) if stopped else 2)
    assert f"continuing after step {manifest['step']} " in finished(
        launch(2, __file__, "run", *flags, "--resume")
    )
    assert_same_run(tmp_path / "run", six_steps_run)


@pytest.mark.slow
def test_two_processes_learn_as_one_does(tmp_path):
    """The demo's first 12 updates, of which one process learns as much."""
    flags = dict(
        model_name=ROOT / "tiny" / "1m",
        output_dir=tmp_path / "run",
        num_train_iters=12,
        rollout_batch_size=128,
        max_completion_length=96,
        learning_rate=1e-4,
        micro_batch_tokens=4096,
        eval_iterations=12,
        save_iterations=12,
        eval_size=200,
    )
    finished(
        launch(2, ROOT / "main.py", *as_flags(**flags, dataset_name="arithmetic")), seconds=900
    )
    first, last = jsonl.read(tmp_path / "run" / "eval_log.jsonl")
    assert last["n"] == 200 and last["accuracy_low"] > first["accuracy_high"]


if __name__ == "__main__":  # what torchrun starts
    mode, *flags = sys.argv[1:]
    sys.exit(raise_in_one(*flags) if mode == "raise" else main.main(flags))
