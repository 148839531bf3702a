"""Each check passes on a sound setting and fails on one that is broken in just its way."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import llms
import main
import selfcheck
from config import GRPOConfig, parse
from sampling import decoding, generation
from training.run import resolve

FLAGS = [
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


@pytest.fixture(scope="module")
def prepared():
    args = resolve(parse(GRPOConfig, FLAGS))
    return args, main.setup(args)


@pytest.fixture
def setting(prepared):
    """The flags and the run, with fresh copies of what a test might break."""
    args, run = prepared
    run = copy.copy(run)
    run.model = copy.deepcopy(run.model)
    run.base_model = llms.get_base_model(run.model)
    run.sampler = run.model
    run.tokenizer = copy.deepcopy(run.tokenizer)
    run.train_loader = copy.deepcopy(run.train_loader)
    run.optimizer = torch.optim.AdamW(run.model.parameters())
    return copy.copy(args), run


def break_template(args, run, monkeypatch):
    """The template opens an assistant's turn in another way than it ends a prompt."""
    opening = "{{ '<|im_start|>assistant\n' }}"
    other_opening = "{{ '<|im_start|>assistant: ' }}"
    assert opening in run.tokenizer.chat_template
    run.tokenizer.chat_template = run.tokenizer.chat_template.replace(opening, other_opening)
    for example in run.train_loader.examples:
        example["prompt"] = run.train_loader.prompt.render(run.tokenizer, example["question"])


def break_masks(args, run, monkeypatch):
    """The mask leaves out the EOS, as a mask by token id does if the padding token is the EOS."""
    original_generate = generation.generate

    def generate_without_eos(*args, **kwargs):
        rollout = original_generate(*args, **kwargs)
        columns = torch.arange(rollout.completion_mask.shape[1])
        is_before_eos = columns < (rollout.lengths - 1).unsqueeze(1)
        rollout.completion_mask = rollout.completion_mask * is_before_eos
        return rollout

    monkeypatch.setattr(generation, "generate", generate_without_eos)


def break_truncation(args, run, monkeypatch):
    """Completions may have two tokens."""
    original_generate = generation.generate

    def generate_short(*args, **kwargs):
        return original_generate(*args, **kwargs | {"max_completion_length": 2})

    monkeypatch.setattr(generation, "generate", generate_short)


def break_sampled_logps(args, run, monkeypatch):
    """The sampler uses another temperature than the loss."""
    original_generate = generation.generate

    def generate_cooler(*args, **kwargs):
        kwargs["temperature"] *= 0.7
        return original_generate(*args, **kwargs)

    monkeypatch.setattr(generation, "generate", generate_cooler)


def break_gold(args, run, monkeypatch):
    """Solutions hold a tag of the format, which must not stand twice."""
    for example in run.train_loader.examples[:3]:
        example["solution"] += "\n</reasoning>"


def break_spread(args, run, monkeypatch):
    """Every completion gets the same reward."""
    original_compute_rewards = run.evaluator.compute_rewards

    def compute_flat_rewards(prompts, completions, answers):
        rewards = original_compute_rewards(prompts, completions, answers)
        return type(rewards)(torch.ones_like(rewards.per_function), rewards.details)

    run.evaluator = copy.copy(run.evaluator)
    run.evaluator.compute_rewards = compute_flat_rewards


def break_graphs(args, run, monkeypatch):
    """Captured steps draw at another temperature than ordinary ones."""
    original_generate = generation.generate
    decoder = SimpleNamespace(uses_graphs=True)
    monkeypatch.setitem(decoding.CAPTURED_DECODERS, run.sampler, decoder)

    def generate_differently(*args, **kwargs):
        kwargs["temperature"] = 1.0 if decoder.uses_graphs else 0.3
        return original_generate(*args, **kwargs)

    monkeypatch.setattr(generation, "generate", generate_differently)


def break_memory(args, run, monkeypatch):
    """The device has no more memory than is in use."""
    peak, _ = selfcheck.memory("cpu")
    monkeypatch.setattr(selfcheck, "memory", lambda device: (peak, peak))


@pytest.mark.parametrize("check", selfcheck.CHECKS)
def test_each_check_fails_on_what_it_is_there_for(check, setting, monkeypatch, capsys):
    name = check.__name__.removeprefix("check_")
    break_setting = globals()[f"break_{name}"]
    break_setting(*setting, monkeypatch)
    monkeypatch.setattr(selfcheck, "CHECKS", [check])
    assert selfcheck.run_checks(*setting) == [name.replace("_", " ")]
    assert " ".join(check.__doc__.split()) in capsys.readouterr().out


def test_a_template_that_does_not_end_a_turn_with_the_eos_is_found(setting, capsys):
    config, run = setting
    run.tokenizer.eos_token = "<|endoftext|>"
    result = selfcheck.check_template(config, run, None)
    assert not result.ok
    assert "reply in '<|im_end|>'" in result.figure


def test_a_mean_gap_of_a_bfloat16_copy_is_within_its_limit(setting):
    args, run = setting
    run.sampler = llms.get_sampler(run.model, "bfloat16")
    groups = selfcheck.sample_groups(args, run)
    result = selfcheck.check_sampled_logps(args, run, groups)
    assert result.ok, result.figure
    worst_gap = float(result.figure.split("worst ")[1].split()[0])
    assert worst_gap > 1e-3, "the copy should differ, or nothing was tested"


def test_completions_of_which_too_many_are_cut_are_found(setting):
    """Only if every one was cut, the check failed."""
    args, run = setting
    args = replace(args, max_completion_length=40)
    groups = selfcheck.sample_groups(args, run)
    share_cut = 1 - groups.rollout.finished.float().mean()
    assert 0.25 < share_cut < 1
    result = selfcheck.check_truncation(args, run, groups)
    assert not result.ok
    assert result.figure == f"{share_cut:.0%} of the completions were cut"


def test_missing_rewards_are_not_called_equal_only(setting):
    args, run = setting
    groups = selfcheck.sample_groups(args, run)
    for record in groups.records:
        record["reward"] = math.nan
    figure = selfcheck.check_spread(args, run, groups).figure
    assert figure.startswith(f"{len(groups.records)} of {len(groups.records)} rewards are")


def test_all_checks_pass_on_a_sound_setting(capsys):
    assert selfcheck.run_selfcheck(FLAGS) == 0
    *lines, last_line = capsys.readouterr().out.splitlines()
    num_checks = len(selfcheck.CHECKS)
    assert sum(line.startswith("pass ") for line in lines) == num_checks
    assert last_line == f"{num_checks} of {num_checks} checks hold"


def test_several_processes_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert selfcheck.run_selfcheck([]) == 2
    assert "start it with python, not with torchrun" in capsys.readouterr().err


def test_a_completion_that_does_not_fit_is_one_line(monkeypatch, capsys):
    def run_out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(generation, "generate", run_out_of_memory)
    assert selfcheck.run_selfcheck(FLAGS) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: out of memory")
