"""Training runs that are killed or stopped continue as if nothing had happened."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import ask
import expert_iteration
import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    as_flags,
    assert_same_run,
    logs_of,
    random_model,
    run_flags,
    start,
)
from filelock import FileLock

import llms
import main
import sft
import utils
from config import GRPOConfig, parse, read_args
from grpo import checkpoints, distributed, generation, jsonl

KILLS = int(os.environ.get("KILLS", 2))  # how often each run is killed, at random moments
NUM_ITERATIONS = 12
COMMON = dict(
    model_name=ROOT / "tiny" / "1m",
    dataset_name="arithmetic",
    evaluator="gsm8k",
    eval_size=4,
    train_batch_size=4,
    learning_rate=1e-3,
    max_completion_length=48,
    device="cpu",
)
GRPO = dict(
    num_train_iters=NUM_ITERATIONS,
    rollout_batch_size=8,
    group_size=4,
    eval_iterations=3,
    save_iterations=2,
    learning_rate=1e-4,
)
EXPERT_ITERATION = dict(
    n_ei_steps=NUM_ITERATIONS, num_questions=12, group_size=4, epochs=1, eval_ei_steps=2
)
SFT = dict(num_updates=NUM_ITERATIONS, eval_updates=1, save_updates=2, max_completion_length=72)
# {kind of run: its program, and its flags beside the common ones}
KINDS = {
    "on-policy": (main.main, GRPO | dict(train_batch_size=8)),
    "off-policy": (main.main, GRPO | dict(epochs_per_rollout_batch=2)),
    "sft": (sft.main, SFT),
    "expert iteration": (expert_iteration.main, EXPERT_ITERATION),
}


def flags_of(kind, gold_file, output_dir, **others):
    _, flags = KINDS[kind]
    if kind == "sft":
        flags = flags | dict(train_file=gold_file)
    return as_flags(output_dir=output_dir, **COMMON | flags | others)


def with_resume(flags, output_dir):
    if (output_dir / "args.json").exists():
        return [*flags, "--resume"]
    return flags


# --- killed ---------------------------------------------------------------------------------------


def iterations_in(text, program):
    """The numbers of the iterations that a program's output tells of.

    An expert iteration that keeps no solution makes no step: it prints a line of its own.
    """
    name = "expert iteration" if program is expert_iteration.main else "step"
    return [int(number) for number in re.findall(rf"^{name} (\d+)\b", text, re.MULTILINE)]


def last_saved_iteration(output_dir):
    paths = llms.finished_checkpoints(output_dir)
    if not paths:
        return 0
    return torch.load(paths[max(paths)] / "trainer.pt", weights_only=True)["iteration"]


def run_and_kill(program, flags, output_dir, generator, *, is_first):
    """Run a program, or resume it, and kill it with SIGKILL at a random moment.

    A moment is a random number of printed iterations and then a random time, less than the program
    still needs: the test fails if the kill finds no living process. The first moment may come
    anywhere, a later one comes after a checkpoint.

    Returns:
        whether there was a checkpoint when it was killed.
    """
    saved_iteration = last_saved_iteration(output_dir)
    num_left = NUM_ITERATIONS - saved_iteration
    if saved_iteration or is_first:
        num_printed = generator.randint(0, min(4, num_left - 2))
    else:
        num_printed = 5
    process, output = start(program, with_resume(flags, output_dir))
    iterations = []
    for line in output:
        iterations += iterations_in(line, program)
        if len(iterations) >= num_printed:
            break
    assert_goes_on_after(saved_iteration, iterations)
    process.join(generator.uniform(0, 0.03 * num_left))
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "it ended by itself"
    return last_saved_iteration(output_dir) > 0


def assert_goes_on_after(saved_iteration, iterations):
    """No iteration up to the checkpoint is run again, and none is left out."""
    if iterations:
        assert iterations[0] == saved_iteration + 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_run_equals_the_undisturbed_one(kind, gold_file, tmp_path):
    program, _ = KINDS[kind]
    assert program(flags_of(kind, gold_file, tmp_path / "undisturbed")) == 0

    killed = tmp_path / "killed"
    flags = flags_of(kind, gold_file, killed)
    generator = random.Random(kind)
    num_kills_after_checkpoint = 0
    for i in range(KILLS):
        num_kills_after_checkpoint += run_and_kill(
            program, flags, killed, generator, is_first=i == 0
        )
    saved_iteration = last_saved_iteration(killed)
    process, output = start(program, with_resume(flags, killed))
    text = output.read()
    process.join()
    assert process.exitcode == 0, text
    assert_goes_on_after(saved_iteration, iterations_in(text, program))
    assert num_kills_after_checkpoint >= 0.75 * KILLS - 0.5
    assert_same_run(killed, tmp_path / "undisturbed")
    rows = jsonl.read(killed / "train_log.jsonl")
    assert any(row["grad_norm"] > 0 for row in rows), "nothing was learnt"


def do_before_call(monkeypatch, module, name, call, action):
    """Do something before a given call, counted from 1, of a module's function."""
    original = getattr(module, name)
    calls = itertools.count(1)

    def disturbed(*args, **kwargs):
        if next(calls) == call:
            action()
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, disturbed)


def send(number):
    """Send this process a signal."""
    os.kill(os.getpid(), number)


def run_until_killed(flags, function, call):
    """main.py, which is killed before a call of a function, given as "module.name"."""
    module, _, name = function.rpartition(".")
    with pytest.MonkeyPatch.context() as monkeypatch:
        do_before_call(monkeypatch, sys.modules[module], name, call, partial(send, signal.SIGKILL))
        return main.main(flags)


@pytest.mark.slow  # it starts five processes
def test_a_run_killed_as_it_writes_a_checkpoint_goes_on_from_the_one_before(
    whole_run, model_folder, tmp_path
):
    """Weights alone, a state without its end, a checkpoint without its name: none is seen.

    What was written is whole, the log of a killed run's last iterations is written again, and
    nothing unfinished is left.
    """
    folder = tmp_path / "run"
    flags = run_flags(model_folder, folder, save_iterations=1)
    for function, call, saved_iteration in (
        ("grpo.checkpoints.gather_state", 1, 0),
        ("torch.save", 2, 1),
        ("os.sync", 1, 1),
        ("os.replace", 4, 1),  # after those of args.json and two transcripts
        ("grpo.checkpoints.remove_old", 1, 2),
    ):
        process, output = start(run_until_killed, with_resume(flags, folder), function, call)
        text = output.read()
        process.join()
        assert process.exitcode == -signal.SIGKILL, text
        assert last_saved_iteration(folder) == saved_iteration, text
    assert main.main([*flags, "--resume"]) == 0
    assert_same_run(folder, whole_run)
    assert all(path.name.startswith("step_") for path in (folder / "checkpoints").iterdir())


# --- stopped --------------------------------------------------------------------------------------


# When a signal comes: before a call, counted from the start, of a module's function. How many
# iterations have finished when the run ends. The first call of generate is the check of the model
# at load.
MOMENTS = [
    (generation, "generate", 2, 0),  # the evaluation before the first update
    (generation, "generate", 2, 1),  # sampling in the first iteration
    (torch, "save", 1, 2),  # the checkpoint of the second iteration
    (main, "take_step", 1, 3),
    (main, "take_step", 1, 4),  # the last update
]


def test_a_signal_saves_and_leaves_after_the_iteration_in_which_it_comes(
    whole_run, model_folder, tmp_path, capsys
):
    """The run is stopped at one moment after the other, and goes on each time.

    In the last iteration there is nothing to stop: the run ends well.
    """
    folder = tmp_path / "stopped"
    flags = run_flags(model_folder, folder)
    last_iteration = last_saved_iteration(whole_run)
    for module, name, call, num_finished in MOMENTS:
        number = signal.SIGINT if module is main else signal.SIGTERM
        handler_before = signal.getsignal(number)
        handlers = []

        def send_and_look(number=number, handlers=handlers):
            send(number)
            handlers.append(signal.getsignal(number))

        with pytest.MonkeyPatch.context() as patch:
            do_before_call(patch, module, name, call, send_and_look)
            exit_code = main.main(with_resume(flags, folder))
        assert handlers == [signal.SIG_DFL], "a second signal ends it at once"
        assert signal.getsignal(number) == handler_before, "a notebook goes on"
        assert last_saved_iteration(folder) == num_finished
        error = capsys.readouterr().err
        if num_finished == last_iteration:
            assert exit_code == 0
        else:
            assert exit_code == 128 + number
            assert f"stopped by {number.name} after iteration {num_finished}; --resume" in error
    assert_same_run(folder, whole_run)


def test_a_finished_run_is_extended_as_if_it_had_been_longer(
    whole_run, model_folder, tmp_path, capsys
):
    flags = run_flags(model_folder, tmp_path / "run")
    assert main.main([*flags, "--num_train_iters", "2"]) == 0
    assert logs_of(tmp_path / "run") != logs_of(whole_run)
    for folder in ("rollouts", "eval"):  # of an iteration after the checkpoint
        jsonl.write(tmp_path / f"run/{folder}/step_000099.jsonl", [])
    trainer = tmp_path / "run/checkpoints/step_000002/trainer.pt"
    torch.save(torch.load(trainer, weights_only=True) | {"elapsed": 1_000.0}, trainer)
    assert main.main([*flags, "--resume"]) == 0
    rows = jsonl.read(tmp_path / "run/train_log.jsonl")
    assert [row["elapsed"] > 1_000 for row in rows] == [False, False, True, True]
    assert main.main([*flags, "--resume", "--num_train_iters", "2"]) == 2
    assert "--resume: the run is at 4 of 2" in capsys.readouterr().err
    assert_same_run(tmp_path / "run", whole_run)


def test_logs_are_not_written_anew_where_the_checkpoints_are_gone(model_folder, tmp_path, capsys):
    """They were deleted for the sake of the disk, and --resume began again and cut the logs."""
    flags = run_flags(model_folder, tmp_path / "run", num_train_iters=1)
    assert main.main(flags) == 0
    logs = logs_of(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    assert main.main([*flags, "--resume"]) == 2
    assert "checkpoints is gone" in capsys.readouterr().err
    assert logs_of(tmp_path / "run") == logs


def test_another_seed_gives_other_samples(tmp_path, model_folder, whole_run):
    assert main.main(run_flags(model_folder, tmp_path / "1", seed=1, num_train_iters=1)) == 0
    first_rollouts = "rollouts/step_000001.jsonl"
    assert logs_of(tmp_path / "1")[first_rollouts] != logs_of(whole_run)[first_rollouts]
    ids = [record["id"] for record in logs_of(whole_run)[first_rollouts]]
    assert ids == [ids[0]] * 4 + [ids[4]] * 4, "a group answers one problem"


def test_a_directory_belongs_to_one_run(model_folder, tmp_path, capsys):
    """Two starts at once, or --resume while the first still ran, corrupted logs and checkpoints."""
    folder = tmp_path / "run"
    flags = run_flags(model_folder, folder, num_train_iters=1)
    folder.mkdir()
    lock = FileLock(folder / "lock")
    with lock:
        assert main.main(flags) == 2
        assert f"--output_dir {folder} is in use by another process" in capsys.readouterr().err
    assert main.main(flags) == 0
    lock.acquire(timeout=0)  # nobody holds it any more


# --- checkpoints ----------------------------------------------------------------------------------


def test_the_newest_and_the_best_checkpoints_are_kept_and_one_state(tmp_path, monkeypatch):
    """The trainer's state takes two thirds of a checkpoint."""
    monkeypatch.setattr(checkpoints, "KEEP", 2)
    for step, accuracy in enumerate((0.2, 0.9, 0.4, 0.5, 0.6), 1):
        jsonl.append(tmp_path / "eval_log.jsonl", {"step": step, "accuracy": accuracy})
        folder = tmp_path / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "trainer.pt").touch()
        checkpoints.remove_old(tmp_path)
    paths = (tmp_path / "checkpoints").iterdir()
    has_state = {path.name: (path / "trainer.pt").exists() for path in paths}
    assert has_state == {"step_000002": False, "step_000004": False, "step_000005": True}


def test_ctrl_c_ends_a_lone_evaluation_at_once(monkeypatch, tmp_path, whole_run):
    """It was to stop after an iteration, and there is none."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The first call is a check at load.
    do_before_call(monkeypatch, generation, "generate", 2, partial(send, signal.SIGINT))
    checkpoint = whole_run / "checkpoints" / "step_000004"
    with pytest.raises(KeyboardInterrupt):
        main.main(run_flags(checkpoint, tmp_path / "run", eval_only=""))


# --- what a run says ------------------------------------------------------------------------------


def test_non_finite_gradients_skip_updates_and_three_in_a_row_end_the_run(
    monkeypatch, tmp_path, model_folder, capsys
):
    """The weights stay as they were, and the batch is on disk. A resumed run goes on counting."""
    compute_loss = main.compute_loss
    weights = []  # at each iteration
    is_finite = [False, False, True, False, False, False]

    def damaged_loss(model, *tensors, **options):
        loss, metrics = compute_loss(model, *tensors, **options)
        if not is_finite[len(weights)] and len(weights) % 2:
            loss = loss + torch.nan  # its gradient is finite
        elif not is_finite[len(weights)]:
            loss.register_hook(lambda gradient: gradient * torch.nan)
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
        return loss, metrics

    monkeypatch.setattr(main, "compute_loss", damaged_loss)
    flags = run_flags(model_folder, tmp_path / "run")
    assert main.main([*flags, "--num_train_iters", "5"]) == 0
    assert main.main([*flags, "--num_train_iters", "9", "--resume"]) == 1
    for before, after, was_finite in zip(weights, weights[1:], is_finite, strict=False):
        assert torch.equal(before, after) != was_finite
    (line,) = capsys.readouterr().err.splitlines()
    assert "in 3 iterations in a row an update was skipped" in line
    assert "the run has diverged" in line
    rows = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert [row["skipped_updates"] for row in rows] == [1, 1, 0, 1, 1, 1]
    assert rows[0]["grad_norm"] is None
    assert len(jsonl.read(tmp_path / "run" / "rollouts" / "step_000006.jsonl")) == 8


def write_args(folder, *flags):
    """What write_args writes of a run in this folder."""
    config = parse(GRPOConfig, ["--output_dir", str(folder), *flags])
    checkpoints.write_args(SimpleNamespace(config=config, model=random_model()))
    return json.loads((folder / "args.json").read_text())


def test_args_json_names_the_first_command_and_the_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "__file__", str(tmp_path / "checkpoints.py"))
    monkeypatch.setattr("sys.argv", ["main.py", "--output_dir", "my run"])
    assert write_args(tmp_path)["commit"] is None, "there is no repository"

    def git(arguments):
        command = f"git -c user.name=Ada -c user.email=ada@example.com {arguments}"
        return subprocess.check_output(command.split(), cwd=tmp_path, text=True)

    (tmp_path / "losses.py").write_text("loss = 1")
    for arguments in ("init", "add losses.py", "commit --message one"):
        git(arguments)
    commit = git("rev-parse HEAD").strip()
    assert write_args(tmp_path)["commit"] == commit
    (tmp_path / "losses.py").write_text("loss = 2")
    monkeypatch.setattr("sys.argv", ["main.py", "--resume"])
    args = write_args(tmp_path, "--resume", "--num_train_iters", "7")
    assert args["commit"] == f"{commit}-dirty"
    assert args["command"] == "python main.py --output_dir 'my run'"
    assert args["args"]["num_train_iters"] == 7


def test_every_generator_goes_on_where_its_state_was_kept():
    """A reward that draws from `random` or NumPy gave other rewards after --resume."""

    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()

    utils.seed_everything(5)
    saved_state = distributed.get_rng_state()
    with utils.isolated_seed(7):
        numbers_of_an_evaluation = draw()
    numbers = draw()
    distributed.resume_rng_state([saved_state], new_seed=1)
    assert draw() == numbers != numbers_of_an_evaluation


def test_a_full_disk_ends_the_run_in_a_line_and_keeps_what_was_saved(
    model_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda folder: SimpleNamespace(free=9.0))
    flags = run_flags(model_folder, tmp_path / "run")
    assert main.main(flags) == 1
    assert "a checkpoint takes" in capsys.readouterr().err
    monkeypatch.undo()
    assert main.main([*flags, "--resume"]) == 0


def test_weights_of_other_names_are_refused_at_resume():
    """They were left out without a word, and the run went on from the initial model."""
    model = random_model()
    with pytest.raises(ValueError, match="has no weight model.layers.9"):
        checkpoints.scatter_state(model, None, {"model.layers.9": torch.zeros(1)}, {})


def test_a_run_leads_to_the_next_one(whole_run, tmp_path, capsys):
    """From SFT to GRPO: the folder of a run stands for its newest checkpoint.

    A greedy evaluation of it does not depend on the seed. A copy of a checkpoint is left alone.
    """
    folder = shutil.copytree(whole_run, tmp_path / "first")
    newest = folder / "checkpoints/step_000004"
    shutil.copytree(newest, folder / "checkpoints/step_000009_1")
    assert main.main(run_flags(folder, tmp_path / "run", eval_only="", seed=1)) == 0
    assert f"its newest checkpoint is {newest}" in capsys.readouterr().out
    assert read_args(tmp_path / "run" / "args.json")["model_name"] == str(newest)
    expected = jsonl.read(whole_run / "eval_log.jsonl")[-1]
    row = jsonl.read(tmp_path / "run" / "eval_log.jsonl")[-1]
    for key in ("accuracy", "reward", "response_length"):
        assert row[key] == expected[key]


def test_what_was_trained_can_be_asked(whole_run, tmp_path, capsys):
    flags = ["--max_completion_length", "3"]
    assert ask.main([str(whole_run), "1 + 2?", "3 + 4?", *flags]) == 0
    output = capsys.readouterr().out
    assert output.count("before") == output.count("after") == 2 and "3 + 4?" in output
    assert ask.main([str(whole_run), *flags]) == 0
    assert capsys.readouterr().out.count("before") == 3
    for place, question in ((tmp_path, "1?"), (whole_run, " "), (tmp_path / "absent", "1?")):
        assert ask.main([str(place), question]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    folder = shutil.copytree(whole_run, tmp_path / "run")
    record = json.loads((folder / "args.json").read_text())
    record["args"]["model_name"] = "nobody/nothing"
    (folder / "args.json").write_text(json.dumps(record))
    assert ask.main([str(folder), "1 + 2?", *flags]) == 0
    output = capsys.readouterr().out
    assert "only the model after training is asked" in output and " before" not in output
