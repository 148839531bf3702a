"""The experiments' scripts, at tiny scale."""

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT, run_flags

import generate_gold
import main
import plotter
import sft
from experiments import archive
from grpo import jsonl

sys.path.insert(0, str(ROOT / "experiments"))

import answers
import expert_iteration
from answers import checked_steps


def test_steps_of_arithmetic_are_checked():
    assert checked_steps("3 * 4 = 12\n25% of 40 = 10\n1/4 of 40 = 11\n6 / 0 = 6\n") == [
        ("easy", True),
        ("direct", True),
        ("direct", False),
        ("easy", False),
    ]
    text = "so 3 + 4 = 7\n7 / 2 = 3\n10 - 4 = 6"  # a step is a whole line
    assert checked_steps(text) == [("easy", False), ("easy", True)]
    text = "47 + 38 = 70 + 15 = 85\n85 - 38 = 85 - 30 - 8 = 55 - 8 = 46\n"
    text += "25% of 80 = 80 / 4 = 20\n1 + 1 = 2 = \n2 + 2 == 4\n7 + 1 = 8 = 8"
    assert checked_steps(text) == [
        ("careful", True),
        ("careful", False),
        ("careful", True),
        ("easy", True),
    ]


def test_steps_of_hostile_completions_are_checked():
    """Huge numbers once took for ever, and division by zero raised."""
    lines = [
        f"25% of {'9' * 400} = 5",
        f"{'9' * 5000} / 3 = 5",
        "1/0 of 5 = 5",
        " = " * 9999,
        "1" + " = 1" * 9999,
    ]
    assert checked_steps("\n".join(lines)) == [("easy", False)]
    assert checked_steps("100000000001 / 1 = 100000000000") == [("easy", False)], "no rounding"


def test_what_a_run_changed_is_said_in_words(tmp_path, capsys):
    """Two questions are learnt, one with a careful step; control characters are not printed."""
    answer = {
        "id": "arithmetic/1",
        "prompt": "form\n<|user|>\nHow many?<|end|>",
        "completion": "\x1b\n33 - 11 = 1",
        "length": 5,
        "correct_strict": False,
        "correct_flexible": False,
    }
    first_evaluation = [
        answer,
        answer | {"id": "arithmetic/2", "correct_strict": True},
        answer | {"id": "arithmetic/3", "prompt": "Why?"},
    ]
    learnt = {
        "completion": "33 * 4 = 120 + 12 = 132\n132 + 1 = 134",
        "length": 20,
        "correct_strict": True,
    }
    last_evaluation = [
        answer | learnt,
        first_evaluation[1],
        first_evaluation[2] | {"correct_strict": True},
    ]
    with pytest.raises(ValueError, match="no evaluations in its eval/"):
        answers.main(tmp_path)
    jsonl.write(tmp_path / "eval" / "step_999990.jsonl", first_evaluation)
    with pytest.raises(ValueError, match="has not two evaluations"):
        answers.main(tmp_path)
    jsonl.write(tmp_path / "eval" / "step_1000000.jsonl", last_evaluation)
    answers.main(tmp_path)
    printed = capsys.readouterr().out
    for line in (
        "mean tokens per completion  5.0 -> 10.0",
        "completions with steps  3 of 3 (100%) -> 3 of 3 (100%)",
        "right steps  0 of 3 (0%) -> 1 of 4 (25%)",
        "hard steps that are careful  0 of 3 (0%) -> 1 of 4 (25%)",
        "right, of careful steps  0 of 0 -> 1 of 1 (100%)",
        "right, of direct steps  0 of 3 (0%) -> 0 of 3 (0%)",
    ):
        assert f"\n{line}\n" in printed
    assert printed.endswith(
        "Of the 2 questions that were wrong and are right, the one with the most careful steps:\n"
        "\nHow many?\n"
        "\n--- step_999990\n?\n33 - 11 = 1\n"
        "\n--- step_1000000\n33 * 4 = 120 + 12 = 132\n132 + 1 = 134\n"
    )


@pytest.fixture
def packed_study(tmp_path, monkeypatch):
    """The folder of a study that was packed, with its runs and its page."""
    monkeypatch.setattr(archive, "STUDIES", tmp_path)
    folder = tmp_path / "a"
    (folder / "base_seed0" / "eval").mkdir(parents=True)
    (folder / "base_seed0" / "args.json").write_bytes(b'{"rate": 1}\r\n')
    (folder / "base_seed0" / "eval" / "step_000001.jsonl").write_bytes(bytes(range(256)))
    (folder / "cases.jsonl").write_text("{}\n", "utf-8")
    (folder / "README.md").write_text("page", "utf-8")
    archive.pack("a")
    return folder


def files_in(folder):
    """{path: content} of the files that are not hidden, without the archive."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith(".") and path.name != archive.ARCHIVE:
            files[str(path.relative_to(folder))] = path.read_bytes()
    return files


def remove_runs(folder):
    """Leave what a clone has: the page and the archive."""
    shutil.rmtree(folder / "base_seed0")
    (folder / "cases.jsonl").unlink()
    (folder / archive.STAMP).unlink()


def test_a_study_is_packed_and_unpacked_byte_for_byte(packed_study):
    files = files_in(packed_study)
    assert len(files) == 4
    remove_runs(packed_study)
    (packed_study / "README.md").write_text("a newer page", "utf-8")
    assert archive.main(["unpack"]) == 0
    assert files_in(packed_study) == files | {"README.md": b"a newer page"}


def test_the_same_runs_give_the_same_archive(packed_study):
    packed = (packed_study / archive.ARCHIVE).read_bytes()
    os.utime(packed_study / "base_seed0" / "args.json", (1, 1))
    (packed_study / "base_seed0" / "args.json").chmod(0o600)
    assert archive.main(["pack"]) == 0
    assert (packed_study / archive.ARCHIVE).read_bytes() == packed


def test_a_study_is_unpacked_once(packed_study):
    """A run that was changed later must not be lost, and the archive is not even read again."""
    remove_runs(packed_study)
    archive.unpack("a")
    args = packed_study / "base_seed0" / "args.json"
    args.write_text("changed", "utf-8")
    (packed_study / archive.ARCHIVE).unlink()
    archive.unpack("a")
    assert args.read_text("utf-8") == "changed"


def test_a_newer_archive_replaces_the_runs_of_the_older_one(packed_study):
    """As after a git pull. A run that is not in the archive stays."""
    (packed_study / archive.STAMP).write_text("the checksum of an older archive", "utf-8")
    (packed_study / "base_seed0" / "old.json").write_text("{}", "utf-8")
    (packed_study / "mine_seed0").mkdir()
    archive.unpack("a")
    assert not (packed_study / "base_seed0" / "old.json").exists()
    assert (packed_study / "mine_seed0").exists()


def test_a_damaged_archive_is_refused(packed_study, capsys):
    remove_runs(packed_study)
    files = files_in(packed_study)
    path = packed_study / archive.ARCHIVE
    packed = path.read_bytes()
    path.write_bytes(packed[:-1] + bytes([packed[-1] ^ 1]))
    assert archive.main(["unpack", "a"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert str(path) in error and "checksum" in error
    assert files_in(packed_study) == files
    path.unlink()
    assert archive.main(["unpack", "a"]) == 2
    assert archive.main(["unpack", "unknown"]) == 2


def test_an_unsafe_archive_is_refused(packed_study, capsys):
    """A file of the archive could otherwise be written outside the folder of the study."""
    remove_runs(packed_study)
    files = files_in(packed_study)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as unsafe:
        unsafe.addfile(tarfile.TarInfo("run/args.json"))
        unsafe.addfile(tarfile.TarInfo("../../outside"))
    (packed_study / archive.ARCHIVE).write_bytes(packed.getvalue())
    archive.write_checksum("a", hashlib.sha256(packed.getvalue()).hexdigest())
    assert archive.main(["unpack", "a"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "outside" in error
    assert files_in(packed_study) == files
    assert not (packed_study.parent.parent / "outside").exists()
    assert not (packed_study / archive.TEMPORARY).exists()


def test_several_processes_unpack_at_the_same_time(packed_study, monkeypatch):
    """As two pytest workers do on a fresh clone: one of them unpacks, and the others wait.

    Threads stand for the processes here, because a lock belongs to an open file.
    """
    files = files_in(packed_study)
    opened = []
    open_archive = tarfile.open

    def counting_open(*args, **kwargs):
        opened.append(kwargs)
        return open_archive(*args, **kwargs)

    monkeypatch.setattr(tarfile, "open", counting_open)
    for _ in range(5):
        remove_runs(packed_study)
        opened.clear()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(archive.unpack, ["a"] * 4))
        assert files_in(packed_study) == files
        assert len(opened) == 1


def test_packing_does_not_lose_runs_that_were_not_unpacked(packed_study, capsys):
    remove_runs(packed_study)
    (packed_study / "new_seed0").mkdir()
    (packed_study / "new_seed0" / "args.json").write_text("{}", "utf-8")
    packed = (packed_study / archive.ARCHIVE).read_bytes()
    assert archive.main(["pack", "a"]) == 2
    assert "unpack a" in capsys.readouterr().err
    assert (packed_study / archive.ARCHIVE).read_bytes() == packed


def test_every_archive_has_its_checksum():
    checksums = archive.read_checksums()
    archives = ROOT.glob(f"experiments/*/{archive.ARCHIVE}")
    assert set(checksums) == {path.parent.name for path in archives}
    for study, checksum in checksums.items():
        packed = (ROOT / "experiments" / study / archive.ARCHIVE).read_bytes()
        assert hashlib.sha256(packed).hexdigest() == checksum, study


def test_expert_iteration_keeps_only_right_completions_and_logs_entropy(tmp_path, monkeypatch):
    sampled = []
    sample = expert_iteration.completions.sample

    def sample_and_set_logps(*args, between_tokens=None):
        """The first completion's tokens get -1 nat, all others 0, and padding a wrong value."""
        rollout = sample(*args, between_tokens=between_tokens)
        rollout.sampled_logps[:] = 0.0
        rollout.sampled_logps[0] = -1.0
        rollout.sampled_logps[~rollout.completion_mask.bool()] = 100.0
        if between_tokens is None:  # not of an evaluation
            sampled.append(rollout)
        return rollout

    monkeypatch.setattr(expert_iteration.completions, "sample", sample_and_set_logps)
    flags = "--dataset_name arithmetic --n_ei_steps 3 --num_questions 8 --group_size 4"
    flags += " --learning_rate 1e-4 --train_batch_size 4 --max_completion_length 96"
    flags += " --eval_ei_steps 2 --eval_size 2 --device cpu"
    flags += f" --model_name {ROOT}/tiny/1m --output_dir {tmp_path}/run"
    assert expert_iteration.main(flags.split()) == 0
    train = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert {row["ei_step"] for row in train} == {1, 2, 3}
    assert all(row["entropy"] > 0 for row in train)
    for step in (1, 2, 3):
        rows = jsonl.read(tmp_path / "run" / "rollouts" / f"step_{step:06d}.jsonl")
        assert len(rows) == 32
        num_right = sum(row["correct_strict"] for row in rows)
        updates = [row for row in train if row["ei_step"] == step]
        assert {row["kept"] for row in updates} == {num_right}
        assert {row["accuracy"] for row in updates} == {num_right / 32}
        lengths = sampled[step - 1].lengths
        (entropy,) = {row["sample_entropy"] for row in updates}
        assert entropy == pytest.approx(lengths[0].item() / lengths.sum().item())
    last_update = {row["ei_step"]: row["step"] for row in train}
    evaluations = jsonl.read(tmp_path / "run" / "eval_log.jsonl")
    assert [row["step"] for row in evaluations] == [0, last_update[2], last_update[3]]
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == [f"step_{last_update[ei_step]:06d}" for ei_step in (2, 3)]


@pytest.mark.slow
def test_every_command_of_the_cs336_page_runs(tmp_path, monkeypatch, capsys):
    """They run in this process, with a tiny model, two problems and small sizes.

    Of a flag that is given twice the last one counts.
    """
    rows = [{"problem": "1 + 1?", "solution": "It is \\boxed{2}."}] * 2
    for split in ("train", "test"):
        jsonl.write(tmp_path / "data" / f"{split}.jsonl", rows)
    data = f"--dataset_path {tmp_path}/data"
    model = f"{data} --model_name tiny/1m --device cpu --max_completion_length 64 --eval_size 2"
    grpo = f"{model} --num_train_iters 1 --rollout_batch_size 32 --train_batch_size 32"
    programs = {
        "main.py": (main.main, grpo),
        "generate_gold.py": (generate_gold.main, data),
        "sft.py": (sft.main, f"{model} --num_examples 2 --num_updates 1"),
        "experiments/expert_iteration.py": (
            expert_iteration.main,
            f"{model} --n_ei_steps 1 --num_questions 2",
        ),
        "plotter.py": (plotter.main, ""),
    }
    page = (ROOT / "experiments" / "cs336.md").read_text("utf-8").replace("output/", f"{tmp_path}/")
    code = "\n".join(re.findall("^    (.*)$", page, re.MULTILINE))
    # The shell puts its variables into the commands, and only prints them.
    script = ["bash", "-c", f'python() {{ echo "$*"; }}\n{code}']
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert printed.count("\n") == 13
    monkeypatch.chdir(ROOT)
    for command in printed.splitlines():
        program, _, flags = command.partition(" ")
        run, small_sizes = programs[program]
        exit_code = run(f"{flags} {small_sizes}".split())
        assert exit_code == 0, (command, capsys.readouterr().err)


@pytest.mark.slow
def test_a_hundredfold_learning_rate_is_reported_as_diverged(tmp_path, capsys):
    """The demo's learning rate times 100: one clear line, exit code 1, logs kept."""
    flags = dict(
        evaluator="gsm8k",
        num_train_iters=60,
        rollout_batch_size=32,
        max_completion_length=64,
        learning_rate=1e-2,
        eval_iterations=100,
        save_iterations=100,
    )
    assert main.main(run_flags(ROOT / "tiny" / "1m", tmp_path / "run", **flags)) == 1
    error_lines = []
    for line in capsys.readouterr().err.replace("\r", "\n").splitlines():
        if line.startswith("error:"):
            error_lines.append(line)
    assert len(error_lines) == 1 and "the run has diverged" in error_lines[0]
    assert jsonl.read(tmp_path / "run" / "train_log.jsonl")
