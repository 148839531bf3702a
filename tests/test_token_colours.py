"""What the transcripts say of each token: against naive code, and the pieces of a text."""

import math

import pytest
import torch
from conftest import ROOT, logs_of, run_flags
from transformers import AutoModelForCausalLM, AutoTokenizer

import main
from grpo import jsonl, token_colours
from grpo.rollout import Completion
from grpo.token_colours import choose, split_text


def naive_logps(folder, prompt_ids, completion_ids):
    """Log-probs at temperature 0.7 of a completion's tokens under a saved model."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + completion_ids])).logits[0].double()
    logps = (logits / 0.7).log_softmax(-1)[len(prompt_ids) - 1 : -1]
    return logps.gather(1, torch.tensor(completion_ids)[:, None])[:, 0]


@pytest.mark.parametrize(
    "flags",
    [
        dict(),
        dict(epochs_per_rollout_batch=2, train_batch_size=4),
        dict(sampling_dtype="bfloat16", beta=0.0),
    ],
    ids=["one update", "several updates", "another sampler"],
)
def test_tokens_are_those_of_naive_code(flags, model_folder, tmp_path, monkeypatch):
    """Of the second iteration, before which the policy is no longer the reference.

    A sampler in bfloat16 must not count as the policy before the update.
    """
    monkeypatch.setattr(token_colours, "EVERY", 1)
    sizes = dict(num_train_iters=2, save_iterations=1, eval_size=1, eval_iterations=9)
    rates = dict(learning_rate=0.01, warmup_steps=0, temperature=0.7)
    assert main.main(run_flags(model_folder, tmp_path, **sizes, **rates, **flags)) == 0
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    records = jsonl.read(tmp_path / "rollouts" / "step_000002.jsonl")
    shown = [record for record in records if "tokens" in record]
    assert len(shown) == 4
    for record in shown:
        tokens = record["tokens"]
        # Each token of this tokenizer has a text of its own.
        ids = tokenizer.convert_tokens_to_ids(tokens.pop("text"))
        assert len(ids) == record["length"]
        prompt_ids = tokenizer(record["prompt"], add_special_tokens=False)["input_ids"]
        before = naive_logps(tmp_path / "checkpoints" / "step_000001", prompt_ids, ids)
        after = naive_logps(tmp_path / "checkpoints" / "step_000002", prompt_ids, ids)
        reference = naive_logps(model_folder, prompt_ids, ids)
        expected = {"logp": before, "change": after - before, "log_ratio": after - reference}
        if "sampling_dtype" in flags:
            assert (torch.tensor(tokens.pop("logp")) - expected.pop("logp")).abs().max() > 1e-3
            del expected["log_ratio"]  # beta is 0
        assert tokens.keys() == expected.keys()
        for name, values in expected.items():
            assert values.abs().max() > 0.01
            assert tokens[name] == pytest.approx(values.tolist(), abs=1e-4), name


def test_tokens_are_shown_now_and_then_and_change_nothing_else(
    whole_run, model_folder, tmp_path, monkeypatch
):
    """Nor do they draw random numbers, with which later iterations would differ."""
    assert token_colours.EVERY == 10
    monkeypatch.setattr(token_colours, "EVERY", 3)
    assert main.main(run_flags(model_folder, tmp_path)) == 0
    logs = logs_of(tmp_path)
    for step in (1, 2, 3, 4):
        records = logs[f"rollouts/step_{step:06d}.jsonl"]
        has_tokens = [record.pop("tokens", None) is not None for record in records]
        assert sum(has_tokens) == (4 if step == 3 else 0)
    assert logs == logs_of(whole_run)


def rewards_of_chosen(groups):
    """The rewards of the completions that are chosen from groups with these rewards."""
    completions = []
    for rewards in torch.tensor(groups):
        advantages = rewards - rewards.nanmean()
        for reward, advantage in zip(rewards.tolist(), advantages.tolist(), strict=True):
            completions.append(Completion([1], reward=reward, advantage=advantage))
    return [completion.reward for completion in choose(completions, len(groups[0]))]


def test_the_group_with_the_largest_spread_of_rewards_is_chosen():
    """Equal rewards, or fewer than two, have no spread; of a large group eight are shown."""
    nan = math.nan
    groups = [[0.1, 0.1, 0.1], [nan, 5, nan], [0, 1, nan], [0, 1, 2], [2, 1, 0], [nan, nan, nan]]
    assert rewards_of_chosen(groups) == [0, 2, 1]
    assert rewards_of_chosen(groups[:3])[:2] == [0, 1]
    assert rewards_of_chosen(groups[:2]) == pytest.approx([0.1, 0.1, 0.1])
    large_group = [0.0] * 12
    large_group[5] = -3.0
    large_group[9] = 2.0
    assert rewards_of_chosen([large_group]) == [-3.0, 2.0] + [0.0] * 6


@pytest.mark.parametrize("name", ["tiny/1m", "models/qwen2", "models/stories260K"])
def test_pieces_make_up_the_text(name, data_folder):
    """Byte-level tokenizers, and one of SentencePiece's kind, whose texts begin with a space."""
    tokenizer = AutoTokenizer.from_pretrained((ROOT if "tiny" in name else data_folder) / name)
    ids = tokenizer("Anne said:  17 apples\n\n cost $5", add_special_tokens=False)["input_ids"]
    ids.append(tokenizer.eos_token_id)
    pieces = split_text(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert pieces[-1] == tokenizer.eos_token


def test_a_character_of_several_tokens_by_hand():
    """In the tiny model's tokenizer an emoji is a token for each of its four bytes."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "1m")
    a, *emoji, b = tokenizer("a😀b", add_special_tokens=False)["input_ids"]
    assert split_text(tokenizer, []) == []
    assert split_text(tokenizer, [a, *emoji, *emoji, b])[4:] == ["😀", "\ufffd", "", "", "😀", "b"]
    assert split_text(tokenizer, [a, *emoji[:3], b]) == ["a", "\ufffd", "", "", "b"]
