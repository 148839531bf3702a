"""Training runs that are killed, stopped or damaged continue as if nothing had happened."""

import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import sys

import pytest
import torch
from conftest import (
    ROOT,
    as_flags,
    assert_same_run,
    logs_of,
    random_model,
    run_flags,
    small_tokenizer,
    start,
)

import distributed
import main
import sft
from config import GRPOConfig, parse
from logs import jsonl
from sampling import generation
from training import checkpoints, steps
from training.run import run_description
from training.signals import Diverged, Guard

sys.path.insert(0, str(ROOT / "experiments"))
import expert_iteration  # noqa: E402

TINY = ROOT / "tiny" / "1m"
PROGRAMS = {"main": main.main, "sft": sft.main, "expert iteration": expert_iteration.main}


@pytest.fixture(scope="module")
def command(model_folder, gold_file):
    """command(program, output_dir, **flags): the flags of a small run."""
    common = dict(
        model_name=model_folder,
        dataset_name="arithmetic",
        evaluator="letters",
        eval_size=4,
        learning_rate=1e-3,
        train_batch_size=4,
        device="cpu",
    )
    sft_flags = common | dict(
        train_file=gold_file,
        num_updates=6,
        eval_updates=3,
        save_updates=2,
        max_completion_length=300,
    )
    expert_iteration_flags = common | dict(
        num_questions=4, group_size=4, n_ei_steps=3, epochs=6, max_completion_length=6
    )

    def flags_of(program, output_dir, **flags):
        if program == "main":
            return run_flags(model_folder, output_dir, **flags)
        small = sft_flags if program == "sft" else expert_iteration_flags
        return as_flags(output_dir=output_dir, **small | flags)

    return flags_of


@pytest.fixture(scope="module")
def undisturbed(command, whole_run, tmp_path_factory):
    """undisturbed(program): the folder of the run that its flags make if nothing disturbs it."""
    folders = {"main": whole_run}

    def folder_of(program):
        if program not in folders:
            folders[program] = tmp_path_factory.mktemp("undisturbed") / "run"
            assert PROGRAMS[program](command(program, folders[program])) == 0
        return folders[program]

    return folder_of


# --- killed ---------------------------------------------------------------------------------------

KILLS = int(os.environ.get("KILLS", 2))  # how often each run is killed, at random moments
STEP = re.compile(r"step +([1-9][0-9]*)(?: \||:)")  # the line of an iteration, or of an evaluation


def last_saved_step(output_dir):
    return max((int(path.name[5:]) for path in checkpoints.finished(output_dir)), default=0)


def run_and_kill(program, flags, output_dir, last_step, generator, *, is_first):
    """Run a program, or resume it, and kill it with SIGKILL at a random moment.

    A moment is a random number of printed steps and then a random time, less than the program
    still needs: the test fails if the kill finds no living process. The first moment may come
    anywhere, a later one comes after a checkpoint.

    Returns:
        whether there was a checkpoint when it was killed.
    """
    saved_step = last_saved_step(output_dir)
    num_steps_left = last_step - saved_step
    if saved_step or is_first:
        num_printed_steps = generator.randint(0, min(4, num_steps_left - 2))
    else:
        num_printed_steps = 5
    process, output = start(program, with_resume(flags, output_dir))
    steps = []
    for line in output:
        steps += map(int, STEP.findall(line))
        if len(steps) >= num_printed_steps:
            break
    assert_goes_on_after(saved_step, steps)
    process.join(generator.uniform(0, 0.03 * num_steps_left))
    process.kill()
    has_checkpoint = last_saved_step(output_dir) > 0
    process.join()
    assert process.exitcode == -signal.SIGKILL, "it ended by itself"
    return has_checkpoint


def run_to_its_end(program, flags, output_dir):
    saved_step = last_saved_step(output_dir)
    process, output = start(program, with_resume(flags, output_dir))
    steps = [int(step) for step in STEP.findall(output.read())]
    process.join()
    assert process.exitcode == 0
    assert_goes_on_after(saved_step, steps)


def with_resume(flags, output_dir):
    if (output_dir / "args.json").exists():
        return [*flags, "--resume"]
    return flags


def assert_goes_on_after(saved_step, steps):
    """No step up to the checkpoint is run again, and none is left out."""
    if steps:
        assert steps[0] == saved_step + 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["on-policy", "off-policy", "dynamic sampling", "sft"])
def test_killed_and_resumed_run_equals_the_undisturbed_one(kind, command, tmp_path):
    name = "sft" if kind == "sft" else "main"
    if name == "sft":
        flags = dict(num_updates=12, eval_updates=1, max_completion_length=72)
    else:
        flags = dict(
            num_train_iters=12, eval_iterations=3, max_completion_length=48, learning_rate=1e-4
        )
    if kind == "off-policy":
        flags |= dict(epochs_per_rollout_batch=2, train_batch_size=4)
    if kind == "dynamic sampling":
        flags |= dict(dynamic_sampling=2, lr_schedule="cosine", temperature=0.3)
    flags |= dict(model_name=TINY, evaluator="gsm8k")
    program = PROGRAMS[name]
    assert program(command(name, tmp_path / "undisturbed", **flags)) == 0

    killed = tmp_path / "killed"
    killed_flags = command(name, killed, **flags)
    generator = random.Random(kind)
    num_kills_after_checkpoint = 0
    for i in range(KILLS):
        num_kills_after_checkpoint += run_and_kill(
            program, killed_flags, killed, 12, generator, is_first=i == 0
        )
    run_to_its_end(program, killed_flags, killed)
    assert num_kills_after_checkpoint >= 0.75 * KILLS - 0.5
    assert_same_run(killed, tmp_path / "undisturbed")
    rows = jsonl.read(killed / "train_log.jsonl")
    assert any(row["grad_norm"] > 0 for row in rows), "nothing was learnt"


# --- stopped --------------------------------------------------------------------------------------


def do_after_call(monkeypatch, module, name, call, action):
    """Do something after a given call, counted from 1, of a module's function."""
    original = getattr(module, name)
    calls = itertools.count(1)

    def disturbed(*args, **kwargs):
        result = original(*args, **kwargs)
        if next(calls) == call:
            action()
        return result

    monkeypatch.setattr(module, name, disturbed)


@pytest.mark.parametrize(
    ("program", "module", "name", "call", "num_finished"),
    [
        pytest.param("main", generation, "generate", 1, 0, id="evaluation before the first update"),
        pytest.param("main", generation, "generate", 3, 1, id="sampling"),
        pytest.param("main", main, "accumulate_gradient", 2, 1, id="loss"),
        pytest.param(
            "main", main, "take_step", 2, 2, id="optimiser step: the iteration is finished first"
        ),
        pytest.param("main", generation, "generate", 4, 2, id="evaluation"),
        pytest.param("main", torch, "save", 1, 2, id="checkpoint"),
        pytest.param("sft", sft, "accumulate_sft_gradient", 3, 2, id="sft: loss"),
        pytest.param("sft", steps, "clip_and_step", 3, 3, id="sft: the update is finished first"),
        pytest.param(
            "expert iteration", generation, "generate", 4, 1, id="expert iteration: sampling"
        ),
        pytest.param(
            "expert iteration",
            sft,
            "accumulate_sft_gradient",
            2,
            1,
            id="expert iteration: fine-tuning",
        ),
    ],
)
def test_a_signal_saves_and_leaves_wherever_it_comes(
    program, module, name, call, num_finished, command, undisturbed, tmp_path, monkeypatch, capsys
):
    """num_finished: of iterations, updates or expert iterations, when the run saves itself."""
    number = signal.SIGINT if module is main else signal.SIGTERM
    expected_folder = undisturbed(program)  # made before the function is replaced

    def send_signal():
        assert signal.getsignal(number) != signal.SIG_DFL, "it would end the tests"
        os.kill(os.getpid(), number)

    do_after_call(monkeypatch, module, name, call, send_signal)
    flags = command(program, tmp_path / "stopped")
    assert PROGRAMS[program](flags) == 130
    finished_steps = [0]
    for row in jsonl.read(expected_folder / "train_log.jsonl"):
        if row.get("ei_step", row["step"]) <= num_finished:
            finished_steps.append(row["step"])
    step = max(finished_steps)
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert last_line.startswith(f"stopped by {number.name} after step {step};")
    _, manifest = checkpoints.find(tmp_path / "stopped")
    assert manifest["step"] == step
    assert PROGRAMS[program]([*flags, "--resume"]) == 0
    assert_same_run(tmp_path / "stopped", expected_folder)


@pytest.mark.parametrize(
    ("program", "shorter"),
    [("main", {"num_train_iters": 2}), ("expert iteration", {"n_ei_steps": 1})],
)
def test_a_finished_run_is_extended_as_if_it_had_been_longer(
    program, shorter, command, undisturbed, tmp_path
):
    expected_folder = undisturbed(program)
    folder = tmp_path / "run"
    assert PROGRAMS[program](command(program, folder, **shorter)) == 0
    assert logs_of(folder) != logs_of(expected_folder)
    assert PROGRAMS[program]([*command(program, folder), "--resume"]) == 0
    assert_same_run(folder, expected_folder)


def test_resume_goes_back_to_the_newest_checkpoint(whole_run, model_folder, tmp_path):
    """As after a kill between two checkpoints.

    Later lines and transcripts are removed, and made again.
    """
    run = shutil.copytree(whole_run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step_000004")
    (run / "rollouts" / "step_000005.jsonl").write_text("")
    assert main.main([*run_flags(model_folder, run), "--resume"]) == 0
    assert_same_run(run, whole_run)


def test_full_disk_keeps_the_checkpoint_before_and_says_so(
    whole_run, tmp_path, model_folder, monkeypatch, capsys
):
    """A last checkpoint that could not be written ended in "done" and exit code 0."""

    def raise_disk_full():
        raise OSError(28, "No space left on device")

    do_after_call(monkeypatch, torch, "save", 2, raise_disk_full)
    assert main.main(run_flags(model_folder, tmp_path / "run")) == 1
    out, err = capsys.readouterr()
    assert "no checkpoint written at step 4 ([Errno 28] No space left on device)" in out
    assert "the last checkpoint could not be written" in err
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000002"]
    monkeypatch.undo()
    assert main.main(["--resume", "--output_dir", str(tmp_path / "run")]) == 0
    assert_same_run(tmp_path / "run", whole_run)


def test_two_runs_with_one_seed_are_identical(tmp_path, model_folder, whole_run):
    for seed in (0, 1):
        assert main.main(run_flags(model_folder, tmp_path / str(seed), seed=seed)) == 0
    assert_same_run(tmp_path / "0", whole_run)
    assert logs_of(tmp_path / "1") != logs_of(whole_run)


# --- checkpoints ----------------------------------------------------------------------------------


def save(folder, step, **options):
    """Write a checkpoint whose weights are those of random_model(step)."""
    model = random_model(step)
    return checkpoints.write(folder, step, model, small_tokenizer(), {"step": step}, **options)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest"])
def test_damaged_checkpoint_falls_back_to_the_one_before(damage, tmp_path, capsys):
    save(tmp_path, 2)
    newest = save(tmp_path, 4)
    path, _ = checkpoints.find(tmp_path)
    assert path == newest
    weights = newest / "model.safetensors"
    if damage == "truncate":
        os.truncate(weights, weights.stat().st_size // 2)
    elif damage == "flip":
        content = bytearray(weights.read_bytes())
        content[-5] ^= 1
        weights.write_bytes(content)
    elif damage == "remove":
        (newest / "trainer.pt").unlink()
    else:
        (newest / "manifest.json").write_text("{")
    path, manifest = checkpoints.find(tmp_path)
    assert path.name == "step_000002"
    assert manifest["step"] == 2
    assert f"checkpoint {newest} is damaged" in capsys.readouterr().out
    model = random_model(0)
    assert checkpoints.load(path, model, torch.optim.AdamW(model.parameters())) == {"step": 2}
    for p, expected in zip(model.parameters(), random_model(2).parameters(), strict=True):
        assert torch.equal(p, expected)


def test_half_written_checkpoint_is_not_seen(tmp_path):
    save(tmp_path, 2)
    half_written = tmp_path / "checkpoints" / "step_000004.tmp"
    half_written.mkdir()
    (half_written / "manifest.json").write_text("{}")
    path, _ = checkpoints.find(tmp_path)
    assert path.name == "step_000002"


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path):
    for step, accuracy in ((1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, 0.6)):
        save(tmp_path, step, accuracy=accuracy, keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000004", "step_000005"]


def test_checkpoint_is_a_hugging_face_directory(tmp_path, whole_run):
    checkpoint = whole_run / "checkpoints" / "step_000004"
    assert main.main(run_flags(checkpoint, tmp_path / "run", eval_only="")) == 0
    expected = jsonl.read(whole_run / "eval_log.jsonl")[-1]
    row = jsonl.read(tmp_path / "run" / "eval_log.jsonl")[-1]
    for key in ("accuracy", "reward", "response_length"):
        assert row[key] == expected[key]


# --- guards ---------------------------------------------------------------------------------------


def test_non_finite_gradient_skips_the_update(monkeypatch, tmp_path, model_folder, capsys):
    """The weights stay as they were, the batch is on disk, and three in a row end the run."""
    compute_loss = main.compute_loss
    weights_of_calls = []

    def nan_loss(model, *tensors, **options):
        weights_of_calls.append([p.detach().clone() for p in model.parameters()])
        loss, metrics = compute_loss(model, *tensors, **options)
        return loss * torch.nan, metrics

    monkeypatch.setattr(main, "compute_loss", nan_loss)
    assert main.main(run_flags(model_folder, tmp_path / "run", num_train_iters=9)) == 1
    assert len(weights_of_calls) == 3
    for first, last in zip(weights_of_calls[0], weights_of_calls[-1], strict=True):
        assert torch.equal(first, last)
    out, err = capsys.readouterr()
    assert out.count("an update was skipped") == 3
    assert err.count("error:") == 1
    assert "in 3 iterations in a row an update was skipped" in err
    assert "the run has diverged" in err
    rows = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert [row["skipped_updates"] for row in rows] == [1, 1, 1]
    assert rows[0]["grad_norm"] is None
    assert len(jsonl.read(tmp_path / "run" / "rollouts" / "step_000003.jsonl")) == 8


CALM = {"kl_per_token": 0.1, "entropy": 2.0, "skipped_updates": 0, "zero_std_fraction": 0.1}


def test_guard_needs_patience_in_a_row():
    guard = Guard(max_kl=1.0, patience=3)
    high_kl = CALM | {"kl_per_token": 5.0}
    for metrics in (CALM, high_kl, high_kl, CALM, high_kl, high_kl):
        assert guard.check(metrics) == []
    with pytest.raises(Diverged, match="mean KL .* above 1 nats in 3 iterations in a row, now 5"):
        guard.check(high_kl)


def test_guard_takes_a_kl_that_is_not_a_number_for_divergence():
    guard = Guard(max_kl=1.0, patience=3)
    nan_kl = CALM | {"kl_per_token": math.nan}
    assert guard.check(nan_kl) == []
    assert guard.check(nan_kl) == []
    with pytest.raises(Diverged):
        guard.check(nan_kl)


def test_guard_warns_once():
    guard = Guard()
    guard.check(CALM)
    suspect = CALM | {"entropy": 0.01, "zero_std_fraction": 0.95}
    flat_groups_warning, entropy_warning = guard.check(suspect)
    assert "95% of the groups" in flat_groups_warning
    assert "entropy fell to 0.01 nats" in entropy_warning
    assert guard.check(suspect) == []


def test_training_says_what_looks_wrong_and_knows_the_iterations_before_a_resume(
    model_folder, tmp_path, monkeypatch, capsys
):
    """A random model writes on until it is cut."""
    numbers_of_earlier_rows = []
    original_check = Guard.check

    def recording_check(guard, metrics):
        earlier_rows = (guard.logs.train, guard.logs.evaluations)
        numbers_of_earlier_rows.append(tuple(map(len, earlier_rows)))
        return original_check(guard, metrics)

    monkeypatch.setattr(Guard, "check", recording_check)
    flags = run_flags(model_folder, tmp_path / "run", num_train_iters=2, eval_iterations=1)
    assert main.main(flags) == 0
    assert capsys.readouterr().out.count("completions are cut") == 1
    (tmp_path / "run" / "train_log.jsonl").open("a").write("torn")
    longer = run_flags(model_folder, tmp_path / "run", num_train_iters=4, eval_iterations=1)
    assert main.main([*longer, "--resume"]) == 0
    assert numbers_of_earlier_rows == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_evaluation_with_several_samples_reports_pass_at_k(tmp_path, model_folder):
    flags = run_flags(
        model_folder, tmp_path / "run", eval_samples=4, eval_temperature=1.0, eval_only=""
    )
    assert main.main(flags) == 0
    (row,) = jsonl.read(tmp_path / "run" / "eval_log.jsonl")
    assert row["n"] == 4
    assert row["pass@1"] == row["accuracy"] <= row["pass@2"] <= row["pass@4"]
    assert len(jsonl.read(tmp_path / "run" / "eval" / "step_000000.jsonl")) == 16
    assert not (tmp_path / "run" / "train_log.jsonl").exists()


def test_logs_hold_no_secret(tmp_path, model_folder, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    monkeypatch.setenv("HF_TOKEN", "hf-very-secret")
    args = parse(GRPOConfig, run_flags(model_folder, tmp_path))
    description = run_description(args, random_model())
    assert "very-secret" not in json.dumps(description, default=str)
    assert description["args"]["group_size"] == 4, "the flags are there"


def test_random_numbers_of_the_gpu_in_use_go_on_on_a_machine_with_fewer(monkeypatch):
    """The states of all eight GPUs of a machine were kept, and then fitted no other machine."""
    restored_states = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda gpu: f"state of GPU {gpu}")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *state: restored_states.append(state))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    saved_state = distributed.get_rng_state()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    distributed.resume_rng_state([saved_state], new_seed=1)
    assert restored_states == [("state of GPU 0", 0)]
