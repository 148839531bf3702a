"""Each check passes on a sound setting and fails on a model, tokenizer or setting that is broken in just its way."""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import llms
import main
import selfcheck
from sampling import decoding, generation


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    args = main.parse_args(
        [
            "--model_name",
            str(ROOT / "tiny" / "1m"),
            "--dataset_name",
            "arithmetic",
            "--max_completion_length",
            "96",
            "--group_size",
            "4",
            "--rollout_batch_size",
            "16",
            "--device",
            "cpu",
        ]
    )
    return args, main.setup(args)


@pytest.fixture
def setting(prepared):
    """Fresh copies of what a check might break."""
    args, run = prepared
    run = copy.copy(run)
    run.model = copy.deepcopy(run.model)
    run.base_model, run.sampler = llms.get_base_model(run.model), run.model
    run.tokenizer, run.train_loader = copy.deepcopy(run.tokenizer), copy.deepcopy(run.train_loader)
    run.optimizer = torch.optim.AdamW(run.model.parameters())
    return copy.copy(args), run


def break_template(args, run, monkeypatch):
    opening = "{{ '<|im_start|>assistant\n' }}"
    assert opening in run.tokenizer.chat_template
    run.tokenizer.chat_template = run.tokenizer.chat_template.replace(
        opening, "{{ '<|im_start|>assistant: ' }}"
    )
    for example in run.train_loader.examples:
        example["prompt"] = run.train_loader.prompt.render(run.tokenizer, example["question"])


def break_masks(args, run, monkeypatch):
    original = generation.generate

    def without_eos(*args, **kwargs):  # what a mask by token id does when pad == eos
        rollout = original(*args, **kwargs)
        keep = torch.arange(rollout.completion_mask.shape[1]) < (rollout.lengths - 1).unsqueeze(1)
        rollout.completion_mask = rollout.completion_mask * keep
        return rollout

    monkeypatch.setattr(generation, "generate", without_eos)


def break_sampled_logps(args, run, monkeypatch):
    original = generation.generate
    monkeypatch.setattr(
        generation,
        "generate",
        lambda *a, **k: original(*a, **k | {"temperature": 0.7 * k["temperature"]}),
    )


def break_gold(args, run, monkeypatch):
    for example in run.train_loader.examples[:3]:
        example["solution"] += "\n</reasoning>"  # a tag that stands twice is no valid form


def break_spread(args, run, monkeypatch):
    original = run.evaluator.compute_rewards

    def flat(prompts, completions, answers):
        rewards = original(prompts, completions, answers)
        return type(rewards)(torch.ones_like(rewards.per_function), rewards.details)

    run.evaluator = copy.copy(run.evaluator)
    run.evaluator.compute_rewards = flat


def break_graphs(args, run, monkeypatch):
    decoder, original = SimpleNamespace(uses_graphs=True), generation.generate
    monkeypatch.setitem(decoding.CAPTURED_DECODERS, run.sampler, decoder)
    different = lambda *a, **k: original(*a, **k | {"temperature": 1.0 if decoder.uses_graphs else 0.3})  # noqa: E731
    monkeypatch.setattr(generation, "generate", different)


def break_memory(args, run, monkeypatch):
    peak, _ = selfcheck.memory("cpu")
    monkeypatch.setattr(selfcheck, "memory", lambda device: (peak, peak))


@pytest.mark.parametrize("check", selfcheck.CHECKS)
def test_each_check_fails_on_what_it_is_there_for(check, setting, monkeypatch, capsys):
    name = check.__name__.removeprefix("check_")
    globals()[f"break_{name}"](*setting, monkeypatch)
    monkeypatch.setattr(selfcheck, "CHECKS", [check])
    assert selfcheck.run_checks(*setting) == [name.replace("_", " ")]
    assert "To do: " in capsys.readouterr().out


def test_a_mean_gap_of_a_bfloat16_copy_is_within_its_limit(setting):
    args, run = setting
    run.sampler = llms.get_sampler(run.model, "bfloat16")
    sampled = selfcheck.Sampled(args, run)
    ok, figure, _ = selfcheck.check_sampled_logps(args, run, sampled)
    assert ok, figure
    assert float(figure.split("worst ")[1].split()[0]) > 1e-3, (
        "the copy should differ, or nothing was tested"
    )


def test_all_checks_pass_on_a_sound_setting(capsys):
    flags = "--dataset_name arithmetic --device cpu --max_completion_length 96 --rollout_batch_size 16 --group_size 4"
    assert selfcheck.run(["--model_name", str(ROOT / "tiny" / "1m"), *flags.split()]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("pass ") for line in lines) == len(selfcheck.CHECKS)
    assert last == f"{len(selfcheck.CHECKS)} of {len(selfcheck.CHECKS)} checks hold"


def test_several_processes_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert selfcheck.run([]) == 2
    assert "start it with python, not with torchrun" in capsys.readouterr().err
