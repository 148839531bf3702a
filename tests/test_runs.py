"""Training runs that are killed, stopped or damaged continue as if nothing had happened."""

import asyncio
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import sys
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import signals
import torch
import tqdm
from conftest import (
    ROOT,
    LettersEvaluator,
    as_flags,
    assert_same_run,
    logs_of,
    random_model,
    run_flags,
    small_tokenizer,
    start,
)
from training import checkpoints, loop, write_logs
from training.guard import Diverged, Guard
from training.run import run_description

import distributed
import evaluator
import main
import sft
import utils
from config import GRPOConfig, parse
from grpo import jsonl
from sampling import generation

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
        max_completion_length=110,
    )
    expert_iteration_flags = common | dict(
        num_questions=12, group_size=4, n_ei_steps=3, epochs=6, max_completion_length=30
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
# The line of an iteration, or of an evaluation where each iteration of SFT has one.
ITERATION = re.compile(r"(?:step +|evaluation at step |expert iteration )([1-9][0-9]*)(?: of|:)")


def last_saved_iteration(output_dir):
    paths = checkpoints.finished(output_dir)
    if not paths:
        return 0
    return torch.load(paths[max(paths)] / "trainer.pt", weights_only=True)["iteration"]


def run_and_kill(program, flags, output_dir, last_iteration, generator, *, is_first):
    """Run a program, or resume it, and kill it with SIGKILL at a random moment.

    A moment is a random number of printed iterations and then a random time, less than the program
    still needs: the test fails if the kill finds no living process. The first moment may come
    anywhere, a later one comes after a checkpoint.

    Returns:
        whether there was a checkpoint when it was killed.
    """
    saved_iteration = last_saved_iteration(output_dir)
    num_left = last_iteration - saved_iteration
    if saved_iteration or is_first:
        num_printed = generator.randint(0, min(4, num_left - 2))
    else:
        num_printed = 5
    process, output = start(program, with_resume(flags, output_dir))
    iterations = []
    for line in output:
        iterations += map(int, ITERATION.findall(line))
        if len(set(iterations)) >= num_printed:
            break
    assert_goes_on_after(saved_iteration, iterations)
    process.join(generator.uniform(0, 0.03 * num_left))
    process.kill()
    process.join()
    has_checkpoint = last_saved_iteration(output_dir) > 0
    assert process.exitcode == -signal.SIGKILL, "it ended by itself"
    return has_checkpoint


def run_to_its_end(program, flags, output_dir):
    saved_iteration = last_saved_iteration(output_dir)
    process, output = start(program, with_resume(flags, output_dir))
    text = output.read()
    process.join()
    assert process.exitcode == 0, text
    iterations = [int(number) for number in ITERATION.findall(text)]
    assert_goes_on_after(saved_iteration, iterations)


def with_resume(flags, output_dir):
    if (output_dir / "args.json").exists():
        return [*flags, "--resume"]
    return flags


def assert_goes_on_after(saved_iteration, iterations):
    """No iteration up to the checkpoint is run again, and none is left out."""
    if iterations:
        assert iterations[0] == saved_iteration + 1


KINDS = {
    "on-policy": "main",
    "off-policy": "main",
    "dynamic sampling": "main",
    "sft": "sft",
    "expert iteration": "expert iteration",
}
NUM_ITERATIONS = 12


def flags_of_kind(kind):
    if kind == "sft":
        flags = dict(num_updates=NUM_ITERATIONS, eval_updates=1, max_completion_length=72)
    elif kind == "expert iteration":
        flags = dict(n_ei_steps=NUM_ITERATIONS, epochs=1, max_completion_length=48)
        flags |= dict(eval_ei_steps=2)
    else:
        flags = dict(num_train_iters=NUM_ITERATIONS, eval_iterations=3, max_completion_length=48)
        flags |= dict(learning_rate=1e-4)
    if kind == "off-policy":
        flags |= dict(epochs_per_rollout_batch=2, train_batch_size=4)
    if kind == "dynamic sampling":
        flags |= dict(dynamic_sampling=2, lr_schedule="cosine", temperature=0.3)
    return flags | dict(model_name=TINY, evaluator="gsm8k")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_run_equals_the_undisturbed_one(kind, command, tmp_path):
    name = KINDS[kind]
    program = PROGRAMS[name]
    flags = flags_of_kind(kind)
    assert program(command(name, tmp_path / "undisturbed", **flags)) == 0

    killed = tmp_path / "killed"
    killed_flags = command(name, killed, **flags)
    generator = random.Random(kind)
    num_kills_after_checkpoint = 0
    for i in range(KILLS):
        num_kills_after_checkpoint += run_and_kill(
            program, killed_flags, killed, NUM_ITERATIONS, generator, is_first=i == 0
        )
    run_to_its_end(program, killed_flags, killed)
    assert num_kills_after_checkpoint >= 0.75 * KILLS - 0.5
    assert_same_run(killed, tmp_path / "undisturbed")
    rows = jsonl.read(killed / "train_log.jsonl")
    assert any(row["grad_norm"] > 0 for row in rows), "nothing was learnt"


# --- stopped --------------------------------------------------------------------------------------


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
    """Send this process a signal, which must be handled."""
    assert signal.getsignal(number) != signal.SIG_DFL, "it would end the tests"
    os.kill(os.getpid(), number)


class Waiting(LettersEvaluator):
    """Gets a signal when it is called for the third time, and then waits, as for a judge."""

    num_calls = 0

    def compute_rewards(self, prompts, completions, answers):
        type(self).num_calls += 1
        if self.num_calls == 3:
            send(signal.SIGINT)
            asyncio.run(signals.wait_unless_stopped(asyncio.Event().wait()))
        return super().compute_rewards(prompts, completions, answers)


@dataclass(frozen=True)
class Moment:
    """When a signal comes: before a call, counted from the start, of a module's function."""

    module: ModuleType
    name: str
    call: int
    num_finished: int  # of iterations, when the run saves itself
    is_evaluation: bool = False  # of main.py: the evaluation of this step is left


@pytest.mark.parametrize(
    ("program", "moments"),
    [
        pytest.param(
            "main",
            [
                Moment(generation, "generate", 1, 0, is_evaluation=True),  # before the first update
                Moment(generation, "generate", 2, 1),  # sampling in the first iteration
                Moment(torch, "save", 1, 2),  # the checkpoint of the second iteration
                Moment(main, "take_step", 1, 3),
                Moment(generation, "generate", 2, 4, is_evaluation=True),  # after the last update
            ],
            id="main",
        ),
        pytest.param(
            "sft",
            [
                Moment(sft, "accumulate_gradient", 3, 3),
                Moment(generation, "generate", 1, 3),  # the evaluation of that update
                Moment(sft, "accumulate_gradient", 3, 6),  # the last update
            ],
            id="sft",
        ),
        pytest.param(
            "expert iteration",
            [Moment(generation, "generate", 4, 2)],
            id="expert iteration: sampling",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "expert iteration",
            [Moment(sft, "accumulate_gradient", 2, 1)],
            id="expert iteration: fine-tuning",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_signal_saves_and_leaves_wherever_it_comes(
    program, moments, command, undisturbed, tmp_path, capsys
):
    """An evaluation is left between its batches, an iteration is finished.

    The run is stopped at one moment after the other, and goes on each time.
    """
    expected_folder = undisturbed(program)
    folder = tmp_path / "stopped"
    flags = command(program, folder)
    for moment in moments:
        number = signal.SIGINT if moment.module is main else signal.SIGTERM
        with pytest.MonkeyPatch.context() as patch:
            do_before_call(patch, moment.module, moment.name, moment.call, partial(send, number))
            assert PROGRAMS[program](with_resume(flags, folder)) == 128 + number, moment
        finished_steps = [0]
        for row in jsonl.read(expected_folder / "train_log.jsonl"):
            if row.get("ei_step", row["step"]) <= moment.num_finished:
                finished_steps.append(row["step"])
        step = max(finished_steps)
        last_line = capsys.readouterr().err.strip().splitlines()[-1]
        assert last_line == f"stopped by {number.name} after step {step}; --resume continues"
        assert max(checkpoints.finished(folder)) == step
        if moment.is_evaluation:
            evaluated_steps = [row["step"] for row in checkpoints.read_evaluations(folder)]
            assert step not in evaluated_steps, "the evaluation was left"
    assert PROGRAMS[program]([*flags, "--resume"]) == 0
    assert_same_run(folder, expected_folder)


def test_a_signal_ends_the_wait_for_a_judge_and_the_iteration_is_made_again(
    whole_run, model_folder, tmp_path, monkeypatch, capsys
):
    """Calls 1 to 3 are the evaluation and two iterations."""
    monkeypatch.setitem(evaluator.EVALUATORS, "letters", Waiting)
    flags = run_flags(model_folder, tmp_path / "run")
    assert main.main(flags) == 130
    assert "stopped by SIGINT after step 1;" in capsys.readouterr().err
    assert main.main([*flags, "--resume"]) == 0
    assert_same_run(tmp_path / "run", whole_run)


def run_and_send_twice(flags, first, second):
    """main.py, which gets two signals in its third iteration."""

    def send_twice():
        send(first)
        os.kill(os.getpid(), second)

    with pytest.MonkeyPatch.context() as monkeypatch:
        do_before_call(monkeypatch, main, "accumulate_gradient", 3, send_twice)
        return main.main(flags)


@pytest.mark.slow  # it starts a process
@pytest.mark.parametrize(
    ("first", "second", "exitcode"),
    [
        (signal.SIGINT, signal.SIGINT, -signal.SIGINT),
        (signal.SIGHUP, signal.SIGTERM, 128 + signal.SIGHUP),
    ],
)
def test_a_second_signal_ends_at_once_unless_a_terminal_closes(
    first, second, exitcode, whole_run, model_folder, tmp_path
):
    """The run then goes on after its newest checkpoint. A closing terminal sends several."""
    flags = run_flags(model_folder, tmp_path / "run")
    process, output = start(run_and_send_twice, flags, first, second)
    text = output.read()
    process.join()
    assert process.exitcode == exitcode, text
    ends_at_once = exitcode < 0
    assert last_saved_iteration(tmp_path / "run") == (2 if ends_at_once else 3)
    assert main.main([*flags, "--resume"]) == 0
    assert_same_run(tmp_path / "run", whole_run)


@pytest.mark.slow  # it starts a process
def test_a_closed_pipe_is_a_signal_like_others(whole_run, model_folder, tmp_path):
    """`main.py ... | head -5` lost all iterations since the last checkpoint."""
    flags = run_flags(model_folder, tmp_path / "run")
    read_end, write_end = os.pipe()
    process, output = start(run_with_closed_pipe, flags)
    text = output.read()
    process.join()
    os.close(read_end)
    os.close(write_end)
    assert process.exitcode == 128 + signal.SIGPIPE, text
    assert "stopped by SIGPIPE after step 1; --resume continues" in text
    assert main.main([*flags, "--resume"]) == 0
    assert_same_run(tmp_path / "run", whole_run)


def run_with_closed_pipe(flags):
    """main.py, whose stdout nobody reads any more in its first iteration."""
    read_end, write_end = os.pipe()
    os.dup2(write_end, 1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        do_before_call(monkeypatch, main, "accumulate_gradient", 1, lambda: os.close(read_end))
        return main.main(flags)


@pytest.mark.parametrize(
    ("program", "shorter"),
    [
        ("main", {"num_train_iters": 2}),
        pytest.param("expert iteration", {"n_ei_steps": 1}, marks=pytest.mark.slow),
    ],
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


def test_a_run_is_resumed_only_with_what_it_began_with(model_folder, tmp_path, capsys):
    """It went on with other problems, rewards, prompts, or another reference."""
    model = shutil.copytree(model_folder, tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}<eos>{% endfor %}")
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def short(completions, answers, **columns): return [0.0] * 8")
    for split in ("train", "test"):
        rows = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(8)]
        jsonl.write(tmp_path / "data" / f"{split}.jsonl", rows)
    flags = run_flags(
        model,
        tmp_path / "run",
        dataset_name="gsm8k",
        dataset_path=tmp_path / "data",
        evaluator=f"{rewards}:short",
        eval_size=8,
        num_train_iters=1,
    )
    assert main.main(flags) == 0
    for file, old, new, name in (
        (tmp_path / "data" / "train.jsonl", b"#### 2", b"#### 3", "the training data"),
        (tmp_path / "data" / "test.jsonl", b"#### 2", b"#### 3", "the evaluation data"),
        (template, b"<eos>", b" <eos>", "the chat template"),
        (rewards, b"0.0", b"1.0", f"the file {rewards}"),
        (model / "model.safetensors", None, None, f"the model {model}"),
    ):
        content = file.read_bytes()
        other_last_weight = content[:-1] + bytes([content[-1] ^ 1])
        file.write_bytes(content.replace(old, new) if old else other_last_weight)
        capsys.readouterr()
        assert main.main([*flags, "--resume"]) == 2
        assert f"began with, and {name} changed since" in capsys.readouterr().err
        file.write_bytes(content)
    assert main.main([*flags, "--resume"]) == 0


def test_sft_is_resumed_only_with_its_solutions(command, gold_file, tmp_path, capsys):
    file = shutil.copy(gold_file, tmp_path / "gold.jsonl")
    flags = command("sft", tmp_path / "run", train_file=file, num_updates=2)
    assert sft.main(flags) == 0
    file.write_text(file.read_text().replace("<reasoning>", "<reasoning> "))
    assert sft.main([*flags, "--resume"]) == 2
    assert "and the training data changed since" in capsys.readouterr().err


def test_a_resumed_run_samples_with_the_weights_of_its_checkpoint(model_folder, tmp_path):
    """A copy in bfloat16 still had the weights that training began with."""
    settings = dict(sampling_dtype="bfloat16", learning_rate=1e-2, warmup_steps=0)
    settings |= dict(eval_iterations=1, save_iterations=1)
    whole = run_flags(model_folder, tmp_path / "whole", **settings, num_train_iters=2)
    assert main.main(whole) == 0
    resumed = run_flags(model_folder, tmp_path / "resumed", **settings)
    assert main.main([*resumed, "--num_train_iters", "1"]) == 0
    assert main.main([*resumed, "--num_train_iters", "2", "--resume"]) == 0
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")


def test_a_resumed_run_keeps_the_command_that_began_it(whole_run, tmp_path, monkeypatch):
    """It was replaced by `main.py --resume`, which nobody can repeat."""
    run = shutil.copytree(whole_run, tmp_path / "run")
    monkeypatch.setattr("sys.argv", ["main.py", "--resume"])
    assert main.main(["--resume", "--output_dir", str(run)]) == 0
    args = json.loads((run / "args.json").read_text())
    assert args["command"] == json.loads((whole_run / "args.json").read_text())["command"]
    assert args["resumed"] == ["python main.py --resume"]


def content_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit_args(run):
    args = json.loads((run / "args.json").read_text())
    args["args"]["weight_decay"] = 0.5
    (run / "args.json").write_text(json.dumps(args))


def damage_log(run):
    log = run / "train_log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    lines[1] = "torn" + lines[1][4:]
    after_the_checkpoint = lines[-1]
    log.write_text("".join([*lines, after_the_checkpoint]))


def save_as_another_version_did(run):
    for path in checkpoints.finished(run).values():
        torch.save({"optimizer": {}, "ei_step": 0}, path / "trainer.pt")


@pytest.mark.parametrize(
    ("spoil", "flags", "words"),
    [
        (None, ["--num_train_iters", "3"], ["4 iterations already", "3 that are asked for"]),
        (edit_args, [], ["--weight_decay was 0.0, not 0.5"]),
        (damage_log, [], ["train_log.jsonl, line 2", "not valid JSON"]),
        (save_as_another_version_did, [], ["another version", "--model_name"]),
    ],
    ids=["too few iterations", "args.json edited", "log damaged", "another version"],
)
def test_what_cannot_be_continued_is_refused_in_one_line(
    spoil, flags, words, whole_run, tmp_path, capsys
):
    """An edited args.json was recorded and had no effect, and a damaged log stopped the plotter.

    With fewer iterations than were made, the run said "done".
    """
    run = shutil.copytree(whole_run, tmp_path / "run")
    if spoil:
        spoil(run)
    content = content_of(run)
    assert main.main(["--resume", "--output_dir", str(run), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for word in words:
        assert word in line
    assert content_of(run) == content


def test_full_disk_keeps_the_checkpoint_before_and_says_so(
    whole_run, tmp_path, model_folder, monkeypatch, capsys
):
    """A last checkpoint that could not be written ended in "done" and exit code 0."""

    def raise_disk_full():
        raise OSError(28, "No space left on device")

    do_before_call(monkeypatch, torch, "save", 2, raise_disk_full)
    assert main.main(run_flags(model_folder, tmp_path / "run")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    folder = tmp_path / "run" / "checkpoints"
    assert f"{folder / 'step_000004'} could not be written" in line
    assert "No space left on device" in line
    assert f"the newest checkpoint is {folder / 'step_000002'}, and --resume" in line
    assert [path.name for path in folder.iterdir()] == ["step_000002"]
    monkeypatch.undo()
    assert main.main(["--resume", "--output_dir", str(tmp_path / "run")]) == 0
    assert_same_run(tmp_path / "run", whole_run)


@pytest.mark.parametrize(
    ("module", "name", "call", "is_replaced"),
    [
        pytest.param(main, "take_step", 3, False, id="moved", marks=pytest.mark.slow),
        pytest.param(loop, "save_checkpoint", 2, False, id="moved before the last checkpoint"),
        pytest.param(main, "take_step", 3, True, id="replaced", marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_directory_is_moved_does_not_go_on_in_another(
    module, name, call, is_replaced, model_folder, tmp_path, monkeypatch, capsys
):
    """It said "done", and half of its logs, or its last checkpoint, were elsewhere."""
    folder = tmp_path / "run"

    def move():
        folder.rename(tmp_path / "moved")
        if is_replaced:
            folder.mkdir()

    do_before_call(monkeypatch, module, name, call, move)
    assert main.main(run_flags(model_folder, folder)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{folder} has been moved or removed; --resume" in line
    assert not (folder / "checkpoints").exists()
    assert folder.exists() == is_replaced


def test_two_runs_with_one_seed_are_identical(tmp_path, model_folder, whole_run):
    assert main.main(run_flags(model_folder, tmp_path / "0")) == 0
    assert_same_run(tmp_path / "0", whole_run)
    assert main.main(run_flags(model_folder, tmp_path / "1", seed=1, num_train_iters=1)) == 0
    first_rollouts = "rollouts/step_000001.jsonl"
    assert logs_of(tmp_path / "1")[first_rollouts] != logs_of(whole_run)[first_rollouts]


# --- checkpoints ----------------------------------------------------------------------------------


def save(folder, step, **options):
    """Write a checkpoint whose weights are those of random_model(step)."""
    model = random_model(step)
    return checkpoints.write(folder, step, model, small_tokenizer(), {"step": step}, **options)


@pytest.mark.parametrize("damage", ["weights", "state", "removed"])
def test_a_checkpoint_that_cannot_be_read_falls_back_to_the_one_before(damage, tmp_path, capsys):
    save(tmp_path, 2)
    newest = save(tmp_path, 4)
    path, _, _ = checkpoints.read_newest(tmp_path, random_model(0))
    assert path == newest
    if damage == "removed":
        (newest / "trainer.pt").unlink()
    else:
        file = newest / ("model.safetensors" if damage == "weights" else "trainer.pt")
        os.truncate(file, file.stat().st_size // 2)
    path, weights, state = checkpoints.read_newest(tmp_path, random_model(0))
    assert path.name == "step_000002"
    assert state["step"] == 2
    assert capsys.readouterr().out.count(f"checkpoint {newest} cannot be read") == 1
    for name, weight in random_model(2).state_dict().items():
        assert torch.equal(weights[name], weight)


def test_half_written_checkpoint_is_not_seen(tmp_path, monkeypatch):
    save(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # not an error of a disk, so nothing cleans up
            save(tmp_path, 4)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    assert list(checkpoints.finished(tmp_path)) == [2]
    save(tmp_path, 6)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step_000002",
        "step_000006",
    ]


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path):
    for step, accuracy in ((1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, 0.6)):
        row = {"step": step} if accuracy is None else {"step": step, "accuracy": accuracy}
        jsonl.append(tmp_path / "eval_log.jsonl", row)
        save(tmp_path, step, keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000004", "step_000005"]


def test_checkpoints_are_ordered_by_number(tmp_path):
    """As text, step_1000000 comes before step_999999, which was then the newest."""
    for step in (999_999, 1_000_000):
        save(tmp_path, step, keep=1)
    path, _, state = checkpoints.read_newest(tmp_path, random_model(0))
    assert path.name == "step_1000000"
    assert state["step"] == 1_000_000
    assert list(checkpoints.finished(tmp_path)) == [1_000_000]
    for name in ("step_x", "step_1000001.tmp", "step_-1"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "step_1000002").write_text("a file")
    assert list(checkpoints.finished(tmp_path)) == [1_000_000]


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


CALM = {"kl_per_token": 0.1, "skipped_updates": 0}


def test_guard_needs_patience_in_a_row():
    guard = Guard(max_kl=1.0)
    high_kl = CALM | {"kl_per_token": 5.0}
    for metrics in (CALM, high_kl, high_kl, CALM, high_kl, high_kl):
        guard.check(metrics)
    with pytest.raises(Diverged, match="mean KL .* above 1 nats in 3 iterations in a row, now 5"):
        guard.check(high_kl)
    skipped = CALM | {"skipped_updates": 1}
    for metrics in (CALM, skipped, skipped, CALM, skipped, skipped):
        guard.check(metrics)
    with pytest.raises(Diverged, match="in 3 iterations in a row an update was skipped"):
        guard.check(skipped)


def test_guard_takes_a_kl_that_is_not_a_number_for_divergence():
    guard = Guard(max_kl=1.0)
    nan_kl = CALM | {"kl_per_token": math.nan}
    guard.check(nan_kl)
    guard.check(nan_kl)
    with pytest.raises(Diverged):
        guard.check(nan_kl)


def test_evaluation_with_several_samples_reports_pass_at_k(tmp_path, model_folder, capsys):
    """The command that plots it was not quoted."""
    folder = tmp_path / "my run"
    flags = run_flags(model_folder, folder, eval_samples=4, eval_temperature=1.0, eval_only="")
    assert main.main(flags) == 0
    assert capsys.readouterr().out.endswith(f"python plotter.py --log_dir '{folder}'\n")
    (row,) = jsonl.read(folder / "eval_log.jsonl")
    assert row["n"] == 4
    assert row["pass@1"] == row["accuracy"] <= row["pass@2"] <= row["pass@4"]
    assert len(jsonl.read(folder / "eval" / "step_000000.jsonl")) == 16
    assert not (folder / "train_log.jsonl").exists()


# --- progress -------------------------------------------------------------------------------------


def test_a_step_says_how_many_there_are_and_what_time_is_left(capsys):
    run = SimpleNamespace(step=18, num_iterations=100)
    write_logs.print_step(run, ["loss 0.5"], seconds=2.0)
    assert capsys.readouterr().out == "step   18 of 100 | loss 0.5 | 2.00 s, 02:44 left\n"


def test_progress_in_a_file_is_lines(monkeypatch, capsys):
    """An evaluation that took minutes was silent, unless it wrote to a terminal."""
    seconds = itertools.count(step=20)  # each look at the clock is 20 s later
    monkeypatch.setattr(tqdm.std, "time", lambda: next(seconds))
    with distributed.progress_bar(total=8, desc="sampling", unit="completion") as bar:
        bar.update(2)
        bar.update(2)
    assert capsys.readouterr().err == "sampling: 4 of 8 completions, 00:40 left\n"


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
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: "state of the GPU in use")
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored_states.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    saved_state = distributed.get_rng_state()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    distributed.resume_rng_state([saved_state], new_seed=1)
    assert restored_states == ["state of the GPU in use"]


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
