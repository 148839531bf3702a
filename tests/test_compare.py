"""experiments/compare.py: which runs it makes, how it goes on, and what its tables say."""

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import ROOT, logs_of

from experiments import compare
from grpo import jsonl

MODEL = ["--model_name", "tiny/0.1m", "--dataset_name", "arithmetic", "--device", "cpu"]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """compare.main sets the number of threads, and handlers of signals."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    handlers = {number: signal.getsignal(number) for number in compare.SIGNALS}
    yield
    compare.STOP.clear()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def arm(text, *common_flags, rates=None):
    return compare.parse_arm(text, list(common_flags), rates)


@pytest.mark.parametrize(
    "text, name, script, flags",
    [
        ("beta 0.04", "beta0.04", "main.py", ["--beta", "0.04"]),
        ("--beta 0", "beta0", "main.py", ["--beta", "0"]),
        (
            "--loss_type gspo --cliprange 3e-4",
            "loss_typegspo_cliprange3e-4",
            "main.py",
            ["--loss_type", "gspo", "--cliprange", "3e-4"],
        ),
        ("base:", "base", "main.py", []),
        (
            "no_std: no-use_std_normalization",
            "no_std",
            "main.py",
            ["--no-use_std_normalization"],
        ),
        ("sft: sft.py --train_file 'a b'", "sft", "sft.py", ["--train_file", "a b"]),
    ],
)
def test_an_arm_is_read_from_one_argument(text, name, script, flags):
    read = arm(text)
    assert (read.name, read.script, read.flags) == (name, script, flags)


def test_an_arm_overrides_the_flags_of_all():
    read = arm("beta 0", "--beta", "0.1", "--group_size=4", rates=["1e-4", "2e-4"])
    assert compare.group_flags(read.flags) == {"--beta": ["0"], "--group_size": ["4"]}
    assert read.learning_rates == ("1e-4", "2e-4")
    read = arm("x: --learning_rate 3e-4", rates=["1e-4", "2e-4"])
    assert read.learning_rates == ("3e-4",)
    assert "--learning_rate" not in read.flags


def test_every_arm_gets_every_rate_and_seed():
    args = compare.parse_args("--arm x --output_dir o --seeds 2 --first_seed 5".split())
    arms = [arm("a: --model_name m{seed}", rates=["1e-4", "2e-4"]), arm("b:")]
    runs = compare.plan_runs(args, arms)
    names = ["a_rate1e-4_seed5", "a_rate2e-4_seed5", "b_seed5"]
    names += ["a_rate1e-4_seed6", "a_rate2e-4_seed6", "b_seed6"]
    assert [run.name for run in runs] == names
    flags = compare.group_flags(runs[4].flags)
    assert flags["--model_name"] == ["m6"]
    assert flags["--learning_rate"] == ["2e-4"]
    assert flags["--seed"] == ["6"]
    assert flags["--eval_split"] == ["validation"], "nothing is tuned on test"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--arm", "beta 0", "--arm", "beta 0.0"], "differ in nothing"),
        (["--arm", "base:", "--arm", "beta 0.04"], "differ in nothing"),  # 0.04 is the default
        (["--arm", "a: --beta 0", "--arm", "a: --beta 1"], "the name a"),
        (["--arm", "beta 0", "--seeds", "1"], "--seeds 1"),
        (["--arm", "beta 0", "--seeds", "3", "--tuning_seeds", "4"], "--tuning_seeds 4"),
        (["--arm", "beta 0", "--arm", "beta 1", "--learning_rate", "0"], "must be more than 0"),
        (["--arm", "beta 0", "--learning_rate", "1e-4", "1e-4"], "twice"),
        (["--arm", "a b: --beta 0"], "needs a name"),
        (["--arm", "x: none.py --beta 0"], "no script none.py"),
        (["--arm", "betta 0", "--arm", "beta 0"], "--betta"),
        (["--arm", "beta 0", "--", "--seed", "3"], "--seed is set for each run"),
        (["--arm", "x: --eval_only", "--arm", "beta 0"], "--eval_only is set for each run"),
        (["--arm", "..: --beta 0"], "needs a name"),
        (["--arm", "beta 0", "--", "tiny/1m"], "tiny/1m"),
        (["--arm", "beta 0", "--jobs", "0"], "--jobs 0"),
        (["--arm", "beta 0 'x"], "quotation"),
        (["--beta", "0"], "--arm"),
        (["--arm", "beta 0", "--model_name", "m"], "--model_name is no flag of compare.py; flags"),
    ],
)
def test_a_mistake_is_one_clear_line(flags, message, tmp_path, capsys):
    output = tmp_path / "output"
    try:
        code = compare.main(["--output_dir", str(output), *flags])
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error and error.count("\n") == 1
    assert not output.exists(), "it is found before any run"


def write_finished_run(folder, accuracies, num_right_on_test, **flags):
    """A finished run: its accuracies at steps 0, 10, 20, ..., and right answers of 16 on test."""
    rows = [{"step": 10 * i, "accuracy": accuracy} for i, accuracy in enumerate(accuracies)]
    jsonl.write(folder / "eval_log.jsonl", rows)
    jsonl.write_json(folder / "args.json", {"args": flags, "parameters": 1})
    jsonl.write(folder / "answers.jsonl", [])
    if num_right_on_test is not None:
        bits = "1" + "1" * num_right_on_test + "0" * (16 - num_right_on_test)
        row = {"strict": f"{int(bits, 2):x}", "n": 16, "questions": 1}
        jsonl.write(folder / "test.jsonl", [row])


@pytest.fixture
def finished(tmp_path):
    """Arms a and b with two rates and two seeds; a is better at 1e-4, and b at 2e-4."""
    runs = {  # name: its accuracies, and how many answers are right on test
        "a_rate1e-4_seed0": ((0.9, 0.2, 0.4), 8),  # 30 % after step 0, 50 % on test
        "a_rate1e-4_seed1": ((0.9, 0.4, 0.6), 12),  # 50 %, 75 %
        "a_rate2e-4_seed0": ((0.9, 0.0, 0.5), None),  # 25 %
        "a_rate2e-4_seed1": ((0.9, 0.0, 0.9), None),  # 45 %
        "b_rate1e-4_seed0": ((0.9, 0.1, 0.1), None),  # 10 %
        "b_rate1e-4_seed1": ((0.9, 0.1, 0.1), None),  # 10 %
        "b_rate2e-4_seed0": ((0.9, 0.3, 0.5), 12),  # 40 %, 75 %
        "b_rate2e-4_seed1": ((0.9, 0.6, 0.8), 12),  # 70 %, 75 %
    }
    for name, (accuracies, num_right) in runs.items():
        flags = {
            "beta": 0.04 if name.startswith("a") else 0.0,
            "learning_rate": 1e-4 if "1e-4" in name else 2e-4,
            "seed": int(name[-1]),
        }
        write_finished_run(tmp_path / name, accuracies, num_right, **flags)
    return tmp_path


COMMAND = ["--arm", "a: --beta 0.04", "--arm", "b: --beta 0", "--seeds", "2"]
COMMAND += ["--learning_rate", "1e-4", "2e-4"]


def test_the_tables_by_hand(finished, capsys):
    assert compare.main([*COMMAND, "--output_dir", str(finished), "--test_size", "16"]) == 0
    tables = (finished / "comparison.md").read_text()
    assert "8 runs, of which 8 are finished" in capsys.readouterr().out
    assert (finished / "comparison.png").stat().st_size > 1000
    assert "| a | **40.0** | 35.0 |" in tables
    assert "| b | 10.0 | **55.0** |" in tables
    assert "| a | 0.0001 | 30.0, 50.0 | 40.0 | 50.0, 75.0 | 62.5 |" in tables
    assert "| b | 0.0002 | 40.0, 70.0 | 55.0 | 75.0, 75.0 | 75.0 |" in tables
    # Student's 97.5 % point with one degree of freedom is 12.706. The standard errors are 5 on
    # validation and 12.5 on test.
    assert "| b | +10.0, +20.0 | +15.0 [-48.5, 78.5] | undecided |" in tables
    assert "| b | +25.0, +0.0 | +12.5 [-146.3, 171.3] | undecided |" in tables


def test_arms_with_equal_outcomes_are_named(finished):
    args = compare.parse_args([*COMMAND, "--output_dir", str(finished)])
    a, b = compare.compare(args, compare.parse_arms(args))
    line = "a and b have equal outcomes in every run"
    assert line not in compare.make_tables(args, [a, b])
    assert line in compare.make_tables(args, [a, replace(b, by_rate=a.by_rate)])


def test_the_last_evaluation_can_be_the_outcome(finished):
    assert compare.main([*COMMAND, "--output_dir", str(finished), "--outcome", "last"]) == 0
    tables = (finished / "comparison.md").read_text()
    assert "| a | 50.0 | **70.0** |" in tables
    assert "on test" not in tables


def test_seed_0_alone_can_choose_the_rate(finished, capsys):
    """Runs with seed 1 at the other rates are then neither made nor read."""
    (finished / "a_rate2e-4_seed1" / "answers.jsonl").unlink()
    (finished / "b_rate1e-4_seed1" / "answers.jsonl").unlink()
    assert compare.main([*COMMAND, "--output_dir", str(finished), "--tuning_seeds", "1"]) == 0
    assert "| a | 0.0001 | 30.0, 50.0 | 40.0 |" in (finished / "comparison.md").read_text()
    assert "4 runs, of which 4 are finished" in capsys.readouterr().out


def test_logs_of_a_flag_that_is_no_longer_named_are_refused(finished, capsys):
    """Without --beta an arm has the default of 0.04. The runs of b, with 0, once counted for it."""
    command = ["--arm", "a: --beta 0.04", "--arm", "b: --group_size 4", *COMMAND[4:]]
    assert compare.main([*command, "--output_dir", str(finished)]) == 2
    assert "--beta 0.0, not 0.04" in capsys.readouterr().err


def test_an_unfinished_run_of_another_setting_is_refused(finished, capsys):
    """It would go on with its own flags: --resume takes those that are not named from args.json."""
    (finished / "b_rate1e-4_seed0" / "answers.jsonl").unlink()
    command = ["--arm", "a: --beta 0.04", "--arm", "b: --group_size 4", *COMMAND[4:]]
    assert compare.main([*command, "--output_dir", str(finished)]) == 2
    assert "--beta 0.0, not 0.04" in capsys.readouterr().err


def test_what_changes_no_result_may_differ(finished):
    command = [*COMMAND, "--output_dir", str(finished), "--", "--micro_batch_tokens", "99"]
    args = json.loads((finished / "a_rate1e-4_seed0" / "args.json").read_text())
    args["args"]["micro_batch_tokens"] = 4096
    jsonl.write_json(finished / "a_rate1e-4_seed0" / "args.json", args)
    assert compare.main(command) == 0


def test_another_number_of_test_problems_is_evaluated_anew(finished, capsys):
    assert compare.main([*COMMAND, "--output_dir", str(finished), "--test_size", "8"]) == 2
    assert "no checkpoint to evaluate on test" in capsys.readouterr().err


def test_runs_on_different_test_problems_are_refused(finished, capsys):
    (row,) = jsonl.read(finished / "b_rate2e-4_seed1" / "test.jsonl")
    jsonl.write(finished / "b_rate2e-4_seed1" / "test.jsonl", [row | {"questions": 2}])
    assert compare.main([*COMMAND, "--output_dir", str(finished), "--test_size", "16"]) == 2
    assert "different test problems" in capsys.readouterr().err


def jobs_that_end_with(codes, tmp_path):
    """A job for each exit code, which prints a line and ends with it."""
    jobs = []
    for i, code in enumerate(codes):
        script = tmp_path / f"job{i}.py"
        script.write_text(f"print('error: it has diverged')\nraise SystemExit({code})")
        jobs.append(compare.Job(f"job{i}", str(script), [], tmp_path / f"output{i}"))
    return jobs


def test_a_run_that_diverges_does_not_keep_others_from_being_made(tmp_path):
    finished = []
    with pytest.raises(compare.Failed) as failed:
        jobs = jobs_that_end_with([1, 0, 0], tmp_path)
        compare.run_side_by_side(jobs, 2, lambda job: finished.append(job.name), "training")
    assert sorted(finished) == ["job1", "job2"]
    assert failed.value.exit_code == 1
    assert "1 of 3 runs have failed" in str(failed.value)
    assert "job0: it has diverged" in str(failed.value)


def test_a_signal_while_a_run_is_started_stops_this_run_too(tmp_path, monkeypatch):
    """Whoever asks to stop must find no run that goes on alone, as its folder would be in use."""
    (job,) = jobs_that_end_with([0], tmp_path)
    processes = []
    start_process = subprocess.Popen

    def start_and_signal(command, **options):
        sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
        processes.append(start_process(sleeper, **options))
        signal.raise_signal(signal.SIGTERM)
        return processes[-1]

    monkeypatch.setattr(compare.subprocess, "Popen", start_and_signal)
    signal.signal(signal.SIGTERM, lambda *_: compare.STOP.set())
    with pytest.raises(KeyboardInterrupt):
        compare.run_side_by_side([job], 1, pytest.fail, "training")
    assert processes[0].poll() == -signal.SIGTERM


def test_a_run_that_refuses_its_flags_ends_all(tmp_path):
    with pytest.raises(compare.Failed) as failed:
        jobs = jobs_that_end_with([2, 0], tmp_path)
        compare.run_side_by_side(jobs, 1, pytest.fail, "training")
    assert failed.value.exit_code == 2


def run_compare(own_flags, output_dir, *common_flags):
    command = [sys.executable, "experiments/compare.py", *own_flags, "--output_dir", output_dir]
    return subprocess.Popen(
        [str(word) for word in [*command, "--", *common_flags]],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )


@pytest.mark.slow
def test_a_split_that_is_missing_is_one_line(tmp_path):
    row = {"question": "1 + 1?", "answer": "#### 2"}
    for split in ("train", "test"):
        jsonl.write(tmp_path / "data" / f"{split}.jsonl", [row])
    flags = ["--model_name", "tiny/0.1m", "--dataset_path", tmp_path / "data"]
    own_flags = ["--arm", "beta 0", "--arm", "beta 1", "--jobs", "1"]
    process = run_compare(own_flags, tmp_path, *flags)
    output, error = process.communicate(timeout=120)
    assert process.returncode == 2, output + error
    assert error.startswith("error: beta0_seed0: ") and error.count("\n") == 1
    assert "validation" in error


@pytest.mark.slow
def test_a_comparison_that_is_stopped_goes_on(tmp_path):
    """Stopped in the middle, the same command makes the runs that are missing, and no other."""
    own_flags = ["--arm", "beta 0.04", "--arm", "beta 0", "--learning_rate", "1e-3"]
    own_flags += ["--seeds", "2"]
    flags = "--num_train_iters 4 --rollout_batch_size 8 --group_size 4 --eval_size 8"
    flags += " --max_completion_length 16 --eval_iterations 2"
    flags = [*MODEL, *flags.split()]

    stopped = run_compare(own_flags, tmp_path, *flags)
    for line in stopped.stdout:
        if "(2 of 4)" in line:
            stopped.send_signal(signal.SIGTERM)
    _, error = stopped.communicate(timeout=120)
    assert stopped.returncode == 130
    assert "the same command goes on" in error
    summaries = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/answers.jsonl")}
    assert 2 <= len(summaries) < 4

    again = run_compare(own_flags, tmp_path, *flags)
    output, error = again.communicate(timeout=300)
    assert again.returncode == 0, output + error
    for path, time_before in summaries.items():
        assert path.stat().st_mtime_ns == time_before, "made only once"
    for beta, seed in itertools.product(("0.04", "0"), (0, 1)):
        folder = tmp_path / f"beta{beta}_rate1e-3_seed{seed}"
        steps = [row["step"] for row in logs_of(folder)["train_log.jsonl"]]
        assert steps == list(range(1, 5)), folder
        args = json.loads((folder / "args.json").read_text())["args"]
        assert (args["beta"], args["seed"]) == (float(beta), seed)
    assert "| beta0.04 |" in (tmp_path / "comparison.md").read_text()


def test_the_checkpoint_of_the_last_step_is_tested(finished):
    """As text, step_1000000 comes before step_999999, and step_1000000.tmp after both."""
    run = compare.PlannedRun(compare.Arm("a", "main.py", [], ("1e-4",)), "1e-4", 0)
    folder = finished / run.name
    for name in ("step_999999", "step_1000000", "step_1000000.tmp"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    flags = compare.make_test_job(run, folder, 16).flags
    model_name = flags[flags.index("--model_name") + 1]
    assert model_name == str(folder / "checkpoints" / "step_1000000")
