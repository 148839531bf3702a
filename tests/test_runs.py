"""Runs that are killed, stopped or damaged continue as if nothing had happened."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
from types import SimpleNamespace

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

import main
import sft
from logs import jsonl
from sampling import generation
from training import checkpoints
from training.run import run_description
from training.signals import Diverged, Guard

sys.path.insert(0, str(ROOT / "experiments"))
import expert_iteration  # noqa: E402

TINY = ROOT / "tiny" / "1m"
PROGRAMS = {"main": main.main, "sft": sft.main, "expert iteration": expert_iteration.main}


@pytest.fixture(scope="module")
def command(model_folder, gold_file):
    """command(program, output_dir, **flags): the flags of a small run."""

    def flags_of(program, output_dir, **flags):
        if program == "main":
            return run_flags(model_folder, output_dir, **flags)
        small = dict(
            model_name=model_folder,
            output_dir=output_dir,
            dataset_name="arithmetic",
            evaluator="letters",
        )
        small |= dict(eval_size=4, learning_rate=1e-3, train_batch_size=4, device="cpu")
        if program == "sft":
            small |= dict(
                train_file=gold_file,
                num_updates=6,
                eval_updates=3,
                save_updates=2,
                max_completion_length=300,
            )
        else:
            small |= dict(
                num_questions=4, group_size=4, n_ei_steps=3, epochs=6, max_completion_length=6
            )
        return as_flags(**small | flags)

    return flags_of


@pytest.fixture(scope="module")
def undisturbed(command, whole_run, tmp_path_factory):
    """undisturbed(program): the folder of the run that its flags make when nothing comes between."""
    folders = {"main": whole_run}

    def folder_of(program):
        if program not in folders:
            folders[program] = tmp_path_factory.mktemp("undisturbed") / "run"
            assert PROGRAMS[program](command(program, folders[program])) == 0
        return folders[program]

    return folder_of


# --- killed ---------------------------------------------------------------------------------------

KILLS = int(os.environ.get("KILLS", 2))  # moments of each run, at random
STEP = re.compile(r"step +([1-9][0-9]*)(?: \||:)")  # the line of an iteration, or of an evaluation


def killed_run(program, flags, output_dir, last_step, generator):
    """Run a program, killed with SIGKILL at random moments and resumed each time, then left to end.

    A moment is a random number of lines about steps and then a random time, less than it takes to finish: every kill
    finds the process alive, or the test fails. The first life may end anywhere, the second ends after a checkpoint.

    Returns:
        the kills that fell after a checkpoint. Asserts that no step before a checkpoint was run again.
    """
    after_checkpoint = 0
    for life in range(KILLS + 1):
        newest = max([int(path.name[5:]) for path in checkpoints.finished(output_dir)], default=0)
        resume = ["--resume"] if (output_dir / "args.json").exists() else []
        process, output = start(program, [*flags, *resume])
        steps_left = last_step - newest
        more = generator.randint(0, min(4, steps_left - 2)) if newest or not life else 5
        steps = []
        for line in output:
            steps += map(int, STEP.findall(line))
            if life < KILLS and len(steps) >= more:
                break
        assert not steps or steps[0] == newest + 1, (
            f"went on at step {steps[0]} after a checkpoint at {newest}"
        )
        if life < KILLS:
            process.join(generator.uniform(0, 0.03 * steps_left))
            process.kill()
            after_checkpoint += any(checkpoints.finished(output_dir))
        process.join()
        assert process.exitcode == (-signal.SIGKILL if life < KILLS else 0), (
            f"life {life} ended by itself"
        )
    return after_checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["on-policy", "off-policy", "dynamic sampling", "sft"])
def test_killed_and_resumed_run_equals_the_whole_one(kind, command, tmp_path):
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
    whole, killed = (
        command(name, tmp_path / end, model_name=TINY, evaluator="gsm8k", **flags) for end in "ab"
    )
    assert PROGRAMS[name](whole) == 0
    count = killed_run(PROGRAMS[name], killed, tmp_path / "b", 12, random.Random(kind))
    assert count >= 0.75 * KILLS - 0.5
    assert_same_run(tmp_path / "b", tmp_path / "a")
    assert any(row["grad_norm"] > 0 for row in jsonl.read(tmp_path / "b" / "train_log.jsonl")), (
        "nothing was learnt"
    )


# --- stopped --------------------------------------------------------------------------------------


def disturb(monkeypatch, owner, name, call, action):
    """Do something after a given call, counted from 1, of a module's function."""
    original, calls = getattr(owner, name), itertools.count(1)

    def disturbed(*args, **kwargs):
        result = original(*args, **kwargs)
        if next(calls) == call:
            action()
        return result

    monkeypatch.setattr(owner, name, disturbed)


@pytest.mark.parametrize(
    ("program", "owner", "name", "call", "done"),
    [
        pytest.param("main", generation, "generate", 1, 0, id="evaluation before the first update"),
        pytest.param("main", generation, "generate", 3, 1, id="sampling"),
        pytest.param("main", main, "accumulate_gradient", 2, 1, id="loss"),
        pytest.param(
            "main", main, "take_step", 2, 2, id="optimiser step: the iteration is finished first"
        ),
        pytest.param("main", generation, "generate", 4, 2, id="evaluation"),
        pytest.param("main", torch, "save", 1, 2, id="checkpoint"),
        pytest.param(
            "sft", sft, "accumulate_sft_gradient", 3, 3, id="sft: the update is finished first"
        ),
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
    program, owner, name, call, done, command, undisturbed, tmp_path, monkeypatch, capsys
):
    """done: what was finished when it was saved, in iterations, updates or expert iterations."""
    number = signal.SIGINT if owner is main else signal.SIGTERM
    whole = undisturbed(program)

    def kill():
        assert signal.getsignal(number) != signal.SIG_DFL, "it would end the tests"
        os.kill(os.getpid(), number)

    disturb(monkeypatch, owner, name, call, kill)
    flags = command(program, tmp_path / "stopped")
    assert PROGRAMS[program](flags) == 130
    rows = jsonl.read(whole / "train_log.jsonl")
    step = max((row["step"] for row in rows if row.get("ei_step", row["step"]) <= done), default=0)
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert last_line.startswith(f"stopped by {number.name} after step {step};")
    assert checkpoints.find(tmp_path / "stopped")[1]["step"] == step
    assert PROGRAMS[program]([*flags, "--resume"]) == 0
    assert_same_run(tmp_path / "stopped", whole)


@pytest.mark.parametrize(
    ("program", "half"), [("main", {"num_train_iters": 2}), ("expert iteration", {"n_ei_steps": 1})]
)
def test_a_finished_run_is_extended_as_if_it_had_been_longer(
    program, half, command, undisturbed, tmp_path
):
    assert PROGRAMS[program](command(program, tmp_path / "run", **half)) == 0
    assert logs_of(tmp_path / "run") != logs_of(undisturbed(program))
    assert PROGRAMS[program]([*command(program, tmp_path / "run"), "--resume"]) == 0
    assert_same_run(tmp_path / "run", undisturbed(program))


def test_resume_goes_back_to_the_newest_checkpoint(whole_run, model_folder, tmp_path):
    """As after a kill between two checkpoints: later lines and transcripts go, and are made again."""
    run = shutil.copytree(whole_run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step_000004")
    (run / "rollouts" / "step_000005.jsonl").write_text("")
    assert main.main([*run_flags(model_folder, run), "--resume"]) == 0
    assert_same_run(run, whole_run)


def test_full_disk_keeps_the_checkpoint_before_and_says_so(
    whole_run, tmp_path, model_folder, monkeypatch, capsys
):
    """A last checkpoint that could not be written ended in "done" and exit code 0."""

    def full():
        raise OSError(28, "No space left on device")

    disturb(monkeypatch, torch, "save", 2, full)
    assert main.main(run_flags(model_folder, tmp_path / "run")) == 1
    said = capsys.readouterr()
    assert "no checkpoint written at step 4 ([Errno 28] No space left on device)" in said.out
    assert "the last checkpoint could not be written" in said.err
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000002"]
    monkeypatch.undo()
    assert main.main(["--resume", "--output_dir", str(tmp_path / "run")]) == 0
    assert_same_run(tmp_path / "run", whole_run)


def test_two_runs_with_one_seed_are_identical(tmp_path, model_folder, whole_run):
    for seed in (0, 1):
        assert main.main(run_flags(model_folder, tmp_path / str(seed), seed=seed)) == 0
    assert_same_run(tmp_path / "0", whole_run)
    assert logs_of(tmp_path / "1") != logs_of(whole_run)


# --- checkpoints ----------------------------------------------------------------------------------


def saved(folder, step, **kwargs):
    return checkpoints.write(
        folder, step, random_model(step), small_tokenizer(), {"step": step}, **kwargs
    )


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest"])
def test_damaged_checkpoint_falls_back_to_the_one_before(damage, tmp_path, capsys):
    saved(tmp_path, 2)
    newest = saved(tmp_path, 4)
    assert checkpoints.find(tmp_path)[0] == newest
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
    assert path.name == "step_000002" and manifest["step"] == 2
    assert f"checkpoint {newest} is damaged" in capsys.readouterr().out
    model = random_model(0)
    assert checkpoints.load(path, model, torch.optim.AdamW(model.parameters())) == {"step": 2}
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.parameters(), random_model(2).parameters(), strict=True)
    )


def test_half_written_checkpoint_is_not_seen(tmp_path):
    saved(tmp_path, 2)
    (tmp_path / "checkpoints" / "step_000004.tmp").mkdir()
    (tmp_path / "checkpoints" / "step_000004.tmp" / "manifest.json").write_text("{}")
    assert checkpoints.find(tmp_path)[0].name == "step_000002"


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path):
    for step, accuracy in ((1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, 0.6)):
        saved(tmp_path, step, accuracy=accuracy, keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step_000002",
        "step_000004",
        "step_000005",
    ]


def test_checkpoint_is_a_hugging_face_directory(tmp_path, whole_run):
    checkpoint = whole_run / "checkpoints" / "step_000004"
    assert main.main(run_flags(checkpoint, tmp_path / "run", eval_only="")) == 0
    last, first = (
        jsonl.read(folder / "eval_log.jsonl")[-1] for folder in (whole_run, tmp_path / "run")
    )
    for key in ("accuracy", "reward", "response_length"):
        assert last[key] == first[key]


# --- guards ---------------------------------------------------------------------------------------


def test_non_finite_gradient_skips_the_update(monkeypatch, tmp_path, model_folder, capsys):
    """The weights stay as they were, the batch is on disk, and after three in a row the run ends in one line."""
    original, seen = main.compute_loss, []

    def poisoned(model, *args, **kwargs):
        seen.append([p.detach().clone() for p in model.parameters()])
        loss, metrics = original(model, *args, **kwargs)
        return loss * float("nan"), metrics

    monkeypatch.setattr(main, "compute_loss", poisoned)
    assert main.main(run_flags(model_folder, tmp_path / "run", num_train_iters=9)) == 1
    assert len(seen) == 3 and all(torch.equal(a, b) for a, b in zip(seen[0], seen[-1], strict=True))
    out, err = capsys.readouterr()
    assert out.count("an update was skipped") == 3
    assert (
        "updates that are not finite in 3 iterations in a row: the run has diverged" in err
        and err.count("error:") == 1
    )
    rows = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert [row["skipped_updates"] for row in rows] == [1, 1, 1] and rows[0]["grad_norm"] is None
    assert len(jsonl.read(tmp_path / "run" / "rollouts" / "step_000003.jsonl")) == 8


def test_guard_needs_patience_in_a_row_and_warns_once():
    guard = Guard(max_kl=1.0, patience=3)
    calm = {"kl_per_token": 0.1, "entropy": 2.0, "skipped_updates": 0, "zero_std_fraction": 0.1}
    wild = calm | {"kl_per_token": 5.0}
    for metrics in (calm, wild, wild, calm, wild, wild):
        assert guard.check(metrics) == []
    with pytest.raises(Diverged, match="mean KL .* above 1 nats in 3 iterations in a row, now 5"):
        guard.check(wild)
    with pytest.raises(Diverged):
        for _ in range(3):
            guard.check(calm | {"kl_per_token": float("nan")})
    guard = Guard()
    guard.check(calm)
    first = guard.check(calm | {"entropy": 0.01, "zero_std_fraction": 0.95})
    assert len(first) == 2 and "entropy fell to 0.0100" in first[0] and "95%" in first[1]
    assert guard.check(calm | {"entropy": 0.01, "zero_std_fraction": 0.95}) == []


def test_evaluation_with_several_samples_reports_pass_at_k(tmp_path, model_folder):
    flags = run_flags(
        model_folder, tmp_path / "run", eval_samples=4, eval_temperature=1.0, eval_only=""
    )
    assert main.main(flags) == 0
    (row,) = jsonl.read(tmp_path / "run" / "eval_log.jsonl")
    assert row["n"] == 4 and row["pass@1"] == row["accuracy"] <= row["pass@2"] <= row["pass@4"]
    assert len(jsonl.read(tmp_path / "run" / "eval" / "step_000000.jsonl")) == 16
    assert not (tmp_path / "run" / "train_log.jsonl").exists()


def test_logs_hold_no_secret(tmp_path, model_folder, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    monkeypatch.setenv("HF_TOKEN", "hf-very-secret")
    args = main.parse_args(run_flags(model_folder, tmp_path))
    assert "very-secret" not in json.dumps(run_description(args, random_model()), default=str)
    assert run_description(SimpleNamespace(a=1), random_model())["args"] == {"a": 1}
