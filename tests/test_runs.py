"""Runs that are killed, stopped or damaged continue as if nothing had happened."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, random_model, run_flags, run_script, small_tokenizer

import checkpoints
import main
import runs
import utils

TIMES = ("time/", "elapsed")
TINY = ROOT / "tiny" / "1m"


def logs(folder):
    """Every log and transcript of a run, without its times."""
    files = sorted(folder.glob("*.jsonl")) + sorted(folder.glob("rollouts/*")) + sorted(folder.glob("eval/*"))
    return {
        str(file.relative_to(folder)): [
            {key: value for key, value in row.items() if not key.startswith(TIMES)} for row in utils.read_jsonl(file)
        ]
        for file in files
    }


def final_state(folder, step):
    """Weights and trainer's state of a checkpoint, flattened to what can be compared bit for bit."""
    path = folder / "checkpoints" / f"step_{step:06d}"
    state = torch.load(path / "trainer.pt", weights_only=True)
    state.pop("elapsed")
    return (path / "model.safetensors").read_bytes(), state


def assert_same_run(actual, expected, step):
    assert logs(actual) == logs(expected)
    (weights, state), (expected_weights, expected_state) = final_state(actual, step), final_state(expected, step)
    assert weights == expected_weights
    assert str(state) == str(expected_state)  # shapes and counters, then every number of it
    flat, expected_flat = (torch.utils._pytree.tree_leaves(s) for s in (state, expected_state))
    for a, b in zip(flat, expected_flat, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


HEADER = 4  # lines that a start prints before its first step or evaluation
STEP = re.compile(r"(?:evaluation at )?step +([1-9][0-9]*)")


def killed_run(flags, output_dir, kills, last_step, generator, script="main.py"):
    """Run a script, killed with SIGKILL at `kills` random moments and resumed each time, then left to end.

    A moment is a random number of printed lines and then a random time, less than it takes to finish: every kill finds
    the process alive, or the test fails. The first life may end anywhere, the second ends after a checkpoint.

    Returns:
        the kills that fell after a checkpoint. Asserts that no step before a checkpoint was run again.
    """
    command = [sys.executable, str(ROOT / script), *flags]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    after_checkpoint = 0
    for attempt in range(kills + 1):
        newest = max([int(p.name[5:]) for p in checkpoints.finished(output_dir)], default=0)
        resume = ["--resume"] if (output_dir / "args.json").exists() else []
        process = subprocess.Popen(
            command + resume, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1, env=environment
        )
        steps_left = last_step - newest
        more = generator.randint(0, min(4, steps_left - 2)) if newest or not attempt else 5
        steps = []
        for count, line in enumerate(process.stdout):
            steps += [int(found[1]) for found in [STEP.match(line)] if found]
            if attempt < kills and count + 1 == HEADER + more:
                break
        assert not steps or steps[0] == newest + 1, f"went on at step {steps[0]} after a checkpoint at {newest}"
        if attempt == kills:
            assert process.wait() == 0
            return after_checkpoint
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(generator.uniform(0, 0.03 * steps_left))
        process.kill()
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL, f"attempt {attempt}: ended before it was killed"
        after_checkpoint += any(checkpoints.finished(output_dir))


def check_kill_and_resume(tmp_path, kills, at_least, **flags):
    flags = dict(num_train_iters=12, save_iterations=2, eval_iterations=3, max_completion_length=48) | flags
    flags |= dict(evaluator="gsm8k", learning_rate=1e-4)
    assert run_script("main.py", *run_flags(TINY, tmp_path / "whole", **flags)).returncode == 0
    generator = random.Random(0)
    folder = tmp_path / "killed"
    count = killed_run(run_flags(TINY, folder, **flags), folder, kills, 12, generator)
    assert count >= at_least
    assert_same_run(folder, tmp_path / "whole", 12)
    assert any(row["grad_norm"] > 0 for row in utils.read_jsonl(folder / "train_log.jsonl")), "nothing was learnt"


def test_killed_and_resumed_run_equals_the_whole_one(tmp_path):
    check_kill_and_resume(tmp_path, kills=2, at_least=1)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"epochs_per_rollout_batch": 2, "train_batch_size": 4}], ids=["on", "off"])
def test_twenty_kills(tmp_path, flags):
    check_kill_and_resume(tmp_path, kills=20, at_least=15, **flags)


def test_two_runs_with_one_seed_are_identical(tmp_path, model_folder):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert main.main(run_flags(model_folder, tmp_path / name, seed=seed)) == 0
    assert_same_run(tmp_path / "b", tmp_path / "a", 4)
    assert logs(tmp_path / "c") != logs(tmp_path / "a")


DRIVER = """
import os, signal, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import conftest, main, llms, runs, torch
torch.set_num_threads(1)
owner, name = {target}
original, calls = getattr(owner, name), 0
def interrupting(*args, **kwargs):
    global calls
    calls += 1
    if calls == {call}:
        {before}
    result = original(*args, **kwargs)
    if calls == {call}:
        {after}
    return result
setattr(owner, name, interrupting)
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def whole_run(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main.main(run_flags(model_folder, folder)) == 0
    return folder


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("target", "call", "step"),
    [
        pytest.param('llms, "_decode"', 1, 0, marks=SLOW, id="evaluation before the first update"),
        pytest.param('llms, "_decode"', 3, 1, id="sampling"),
        pytest.param('main, "accumulate_gradient"', 2, 1, marks=SLOW, id="loss"),
        pytest.param('main, "take_step"', 2, 2, marks=SLOW, id="optimiser step: the iteration is finished first"),
        pytest.param('llms, "_decode"', 4, 2, id="evaluation"),
        pytest.param('torch, "save"', 1, 2, id="checkpoint"),
    ],
)
def test_sigterm_saves_and_leaves_wherever_it_comes(target, call, step, tmp_path, model_folder, whole_run):
    kill = "os.kill(os.getpid(), signal.SIGTERM)"
    driver = DRIVER.format(root=str(ROOT), target=target, call=call, before=kill, after="pass")
    flags = run_flags(model_folder, tmp_path / "stopped")
    process = subprocess.run([sys.executable, "-c", driver, *flags], capture_output=True, text=True, timeout=120)
    assert process.returncode == 130, process.stderr
    assert process.stderr.strip().splitlines()[-1].startswith(f"stopped by SIGTERM after step {step};")
    assert "Traceback" not in process.stderr
    path, manifest = checkpoints.find(tmp_path / "stopped")
    assert manifest["step"] == step
    assert main.main([*flags, "--resume"]) == 0
    assert_same_run(tmp_path / "stopped", whole_run, 4)


def test_full_disk_keeps_the_checkpoint_before_and_says_so(tmp_path, model_folder):
    full = "raise OSError(28, 'No space left on device')"
    driver = DRIVER.format(root=str(ROOT), target='torch, "save"', call=2, before=full, after="pass")
    flags = run_flags(model_folder, tmp_path / "run")
    process = subprocess.run([sys.executable, "-c", driver, *flags], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0
    assert "no checkpoint written at step 4 ([Errno 28] No space left on device)" in process.stdout
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000002"]


def saved(folder, step, **kwargs):
    return checkpoints.write(folder, step, random_model(step), small_tokenizer(), {"step": step}, **kwargs)


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
    assert checkpoints.load(path, model) == {"step": 2}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), random_model(2).parameters(), strict=True))


def test_half_written_checkpoint_is_not_seen(tmp_path):
    saved(tmp_path, 2)
    (tmp_path / "checkpoints" / "step_000004.tmp").mkdir()
    (tmp_path / "checkpoints" / "step_000004.tmp" / "manifest.json").write_text("{}")
    assert checkpoints.find(tmp_path)[0].name == "step_000002"


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path):
    for step, accuracy in ((1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, 0.6)):
        saved(tmp_path, step, accuracy=accuracy, keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_000002", "step_000004", "step_000005"]


def test_checkpoint_is_a_hugging_face_directory(tmp_path, model_folder):
    assert main.main(run_flags(model_folder, tmp_path / "a")) == 0
    checkpoint = tmp_path / "a" / "checkpoints" / "step_000004"
    assert main.main(run_flags(checkpoint, tmp_path / "b", num_train_iters=1)) == 0
    last, first = (
        utils.read_jsonl(tmp_path / "a" / "eval_log.jsonl")[-1],
        utils.read_jsonl(tmp_path / "b" / "eval_log.jsonl")[0],
    )
    assert [last[key] for key in ("accuracy", "reward", "response_length")] == [
        first[key] for key in ("accuracy", "reward", "response_length")
    ]


def test_resume_refuses_other_flags_and_extends_a_finished_run(tmp_path, model_folder, capsys):
    assert main.main(run_flags(model_folder, tmp_path / "run", num_train_iters=2)) == 0
    assert main.main([*run_flags(model_folder, tmp_path / "run", learning_rate=0.5), "--resume"]) == 2
    assert "--learning_rate was 0.001, not 0.5" in capsys.readouterr().err
    assert main.main([*run_flags(model_folder, tmp_path / "run", num_train_iters=4), "--resume"]) == 0
    assert [row["step"] for row in utils.read_jsonl(tmp_path / "run" / "train_log.jsonl")] == [1, 2, 3, 4]
    assert main.main([*run_flags(model_folder, tmp_path / "absent"), "--resume"]) == 2


# --- guards -----------------------------------------------------------------------------------------------------------


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
        "updates that are not finite in 3 iterations in a row: the run has diverged" in err and err.count("error:") == 1
    )
    rows = utils.read_jsonl(tmp_path / "run" / "train_log.jsonl")
    assert [row["skipped_updates"] for row in rows] == [1, 1, 1] and rows[0]["grad_norm"] is None
    assert len(utils.read_jsonl(tmp_path / "run" / "rollouts" / "step_000003.jsonl")) == 8


def test_guard_needs_patience_in_a_row_and_warns_once():
    guard = runs.Guard(max_kl=1.0, patience=3)
    calm = {"kl": 0.1, "entropy": 2.0, "skipped_updates": 0, "zero_std_fraction": 0.1}
    wild = calm | {"kl": 5.0}
    for metrics in (calm, wild, wild, calm, wild, wild):
        assert guard.check(metrics) == []
    with pytest.raises(runs.Diverged, match="mean KL .* above 1 nats in 3 iterations in a row, now 5"):
        guard.check(wild)
    with pytest.raises(runs.Diverged):
        for _ in range(3):
            guard.check(calm | {"kl": float("nan")})
    guard = runs.Guard()
    guard.check(calm)
    first = guard.check(calm | {"entropy": 0.01, "zero_std_fraction": 0.95})
    assert len(first) == 2 and "entropy fell to 0.0100" in first[0] and "95%" in first[1]
    assert guard.check(calm | {"entropy": 0.01, "zero_std_fraction": 0.95}) == []


def test_interrupts_wait_for_release():
    interrupts = runs.Interrupts()
    interrupts.hold()
    interrupts._handle(signal.SIGTERM, None)
    with pytest.raises(runs.Interrupted, match="SIGTERM"):
        interrupts.release()
    with pytest.raises(runs.Interrupted, match="SIGINT"):
        runs.Interrupts()._handle(signal.SIGINT, None)


def test_pass_at_k_in_closed_form():
    """2 of 4 right: 1 - C(2, k) / C(4, k) = 1/2, 5/6, 1, 1."""
    assert [utils.pass_at_k([2], 4, k) for k in (1, 2, 3, 4)] == pytest.approx([1 / 2, 5 / 6, 1, 1])
    assert utils.pass_at_k([0, 4, 2], 4, 2) == pytest.approx((0 + 1 + 5 / 6) / 3)


def test_evaluation_with_several_samples_reports_pass_at_k(tmp_path, model_folder):
    flags = run_flags(model_folder, tmp_path / "run", eval_samples=4, eval_temperature=1.0, eval_only="")
    assert main.main(flags) == 0
    (row,) = utils.read_jsonl(tmp_path / "run" / "eval_log.jsonl")
    assert row["n"] == 4 and row["pass@1"] == row["accuracy"] <= row["pass@2"] <= row["pass@4"]
    assert len(utils.read_jsonl(tmp_path / "run" / "eval" / "step_000000.jsonl")) == 16
    assert not (tmp_path / "run" / "train_log.jsonl").exists()


def test_logs_hold_no_secret(tmp_path, model_folder, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    monkeypatch.setenv("HF_TOKEN", "hf-very-secret")
    args = main.parse_args(run_flags(model_folder, tmp_path))
    assert "very-secret" not in json.dumps(runs.run_description(args, random_model()), default=str)
    assert runs.run_description(SimpleNamespace(a=1), random_model())["args"] == {"a": 1}
