"""What the transcripts say of each token: against naive code, and the pieces of a text."""

import pytest
import torch
from conftest import ROOT, logs_of, run_flags, unpadded_logps
from transformers import AutoModelForCausalLM, AutoTokenizer

import main
from grpo import jsonl, token_colours
from grpo.token_colours import split_text


def logps_of_checkpoint(folder, ids, num_tokens):
    """Log-probs at temperature 0.7 of the last tokens under a saved model."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return unpadded_logps(model, torch.tensor(ids), num_tokens, temperature=0.7)


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
        checkpoints = [tmp_path / f"checkpoints/step_00000{step}" for step in (1, 2)]
        before, after, reference = [
            logps_of_checkpoint(folder, prompt_ids + ids, len(ids))
            for folder in (*checkpoints, model_folder)
        ]
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


def test_a_character_of_several_tokens_by_hand():
    """In the tiny model's tokenizer an emoji is a token for each of its four bytes."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "1m")
    a, *emoji, b = tokenizer("a😀b", add_special_tokens=False)["input_ids"]
    assert split_text(tokenizer, []) == []
    assert split_text(tokenizer, [a, *emoji, *emoji, b])[4:] == ["😀", "\ufffd", "", "", "😀", "b"]
    assert split_text(tokenizer, [a, *emoji[:3], b]) == ["a", "\ufffd", "", "", "b"]
