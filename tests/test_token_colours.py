"""What the transcripts say of each token: against naive code, and the pieces of a text."""

import math
import random

import pytest
import torch
from conftest import ROOT, logs_of, run_flags, trainer_state
from transformers import AutoModelForCausalLM, AutoTokenizer

import main
from grpo import token_colours
from grpo.rollout import Completion
from grpo.token_colours import choose, split_text
from logs import jsonl


@pytest.fixture
def in_every_iteration(monkeypatch):
    monkeypatch.setattr(token_colours, "EVERY", 1)


# --- Their numbers --------------------------------------------------------------------------------


def naive_logps(folder, prompt_ids, completion_ids, temperature):
    """Log-probs of a completion's tokens under a saved model, by its own forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([prompt_ids + completion_ids])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0].double()
    logps = (logits / temperature).log_softmax(-1)
    start = len(prompt_ids)
    return torch.stack(
        [logps[start + i - 1, token_id] for i, token_id in enumerate(completion_ids)]
    )


@pytest.mark.parametrize(
    "flags",
    [
        dict(),
        dict(epochs_per_rollout_batch=2, train_batch_size=4),
        dict(sampling_dtype="bfloat16", beta=0.0),
    ],
    ids=["one update", "several updates", "another sampler"],
)
def test_tokens_are_those_of_naive_code(flags, model_folder, tmp_path, in_every_iteration):
    """Of the second iteration, before which the policy is no longer the reference.

    A sampler in bfloat16 must not count as the policy before the update.
    """
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
        completion_ids = tokenizer.convert_tokens_to_ids(tokens["text"])
        assert len(completion_ids) == record["length"]
        prompt_ids = tokenizer(record["prompt"], add_special_tokens=False)["input_ids"]
        before, after, reference = [
            naive_logps(folder, prompt_ids, completion_ids, temperature=0.7)
            for folder in (
                tmp_path / "checkpoints" / "step_000001",
                tmp_path / "checkpoints" / "step_000002",
                model_folder,
            )
        ]
        expected = {"logp": before, "change": after - before, "log_ratio": after - reference}
        if "sampling_dtype" in flags:
            assert (torch.tensor(tokens.pop("logp")) - expected.pop("logp")).abs().max() > 1e-3
        if "beta" in flags:
            del expected["log_ratio"]
        assert tokens.keys() == {"text", *expected}
        for name, values in expected.items():
            assert values.abs().max() > 0.01
            assert tokens[name] == pytest.approx(values.tolist(), abs=1e-4), name


def test_an_update_raises_the_log_probs_of_good_completions(
    model_folder, tmp_path, in_every_iteration
):
    """To first order a small step moves sum A * mean change by its length along the gradient."""
    sizes = dict(num_train_iters=1, save_iterations=9, eval_size=1, eval_iterations=9)
    # A single group, no KL and no warm-up: the gradient is that of this sum alone.
    flags = dict(rollout_batch_size=4, group_size=4, beta=0.0, warmup_steps=0)
    assert main.main(run_flags(model_folder, tmp_path, **sizes, **flags)) == 0
    total = 0
    for record in jsonl.read(tmp_path / "rollouts" / "step_000001.jsonl"):
        changes = record["tokens"]["change"]
        total += record["advantage"] * sum(changes) / len(changes)
    assert total > 0.01


def test_tokens_are_shown_now_and_then_and_change_nothing_else(
    whole_run, model_folder, tmp_path, monkeypatch
):
    """Not the logs, nor the weights, nor the random numbers."""
    assert token_colours.EVERY == 10
    monkeypatch.setattr(token_colours, "EVERY", 3)
    assert main.main(run_flags(model_folder, tmp_path)) == 0
    logs = logs_of(tmp_path)
    for step in (1, 2, 3, 4):
        records = logs[f"rollouts/step_{step:06d}.jsonl"]
        has_tokens = [record.pop("tokens", None) is not None for record in records]
        assert sum(has_tokens) == (4 if step == 3 else 0)
    assert logs == logs_of(whole_run)
    for folder in ("step_000002", "step_000004"):
        weights = (tmp_path / "checkpoints" / folder / "model.safetensors").read_bytes()
        assert weights == (whole_run / "checkpoints" / folder / "model.safetensors").read_bytes()
    state = trainer_state(tmp_path / "checkpoints" / "step_000004")
    expected_state = trainer_state(whole_run / "checkpoints" / "step_000004")
    assert torch.equal(state["rng"][0]["torch"], expected_state["rng"][0]["torch"])


# --- Which completions ----------------------------------------------------------------------------


def completions_of(groups):
    """Completions of groups of rewards, of which some may be NaN."""
    completions = []
    for rewards in torch.tensor(groups):
        advantages = rewards - rewards.nanmean()
        for reward, advantage in zip(rewards.tolist(), advantages.tolist(), strict=True):
            completions.append(Completion([1], reward=reward, advantage=advantage))
    return completions


def rewards_of_chosen(groups):
    completions = completions_of(groups)
    return [completion.reward for completion in choose(completions, len(groups[0]))]


def test_the_group_with_the_largest_spread_of_rewards_is_chosen():
    """Equal rewards, or fewer than two, have no spread; of equal spreads the first one counts."""
    nan = math.nan
    groups = [[0.1, 0.1, 0.1], [nan, 5, nan], [0, 1, nan], [0, 2, 1], [2, 0, 1], [nan, nan, nan]]
    assert rewards_of_chosen(groups) == [0, 2, 1]
    assert rewards_of_chosen(groups[:3])[:2] == [0, 1]
    assert rewards_of_chosen(groups[:2]) == pytest.approx([0.1, 0.1, 0.1])


def test_of_a_large_group_the_largest_advantages_are_shown():
    rewards = [0.0] * 12
    rewards[5] = -3.0
    rewards[9] = 2.0
    rewards[11] = math.nan
    assert rewards_of_chosen([rewards]) == [-3.0, 2.0] + [0.0] * 6


# --- Texts ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tiny", "qwen2", "stories260K"])
def real_tokenizer(request):
    """Byte-level tokenizers, and one of SentencePiece's kind, whose texts begin with a space."""
    if request.param == "tiny":
        return AutoTokenizer.from_pretrained(ROOT / "tiny" / "1m")
    data_folder = request.getfixturevalue("data_folder")
    return AutoTokenizer.from_pretrained(data_folder / "models" / request.param)


TEXT = "Zoë said: 好的,饕餮!🫠👩‍🚀 cost $5\n\n  x\ufffdy"


def test_pieces_are_whole_characters(real_tokenizer):
    """A character of several tokens belongs to the last of them."""
    ids = real_tokenizer(TEXT, add_special_tokens=False)["input_ids"] + [
        real_tokenizer.eos_token_id
    ]
    pieces = split_text(real_tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == real_tokenizer.decode(ids)
    assert pieces[-1] == real_tokenizer.eos_token
    assert "".join(pieces).count("\ufffd") == 1
    before_emoji = pieces[: pieces.index("🫠")]
    assert "" in before_emoji[-4:], "it takes several tokens"
    assert "".join(before_emoji).endswith("!")


def test_pieces_by_hand():
    """In the tiny model's tokenizer an emoji is a token for each of its four bytes."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "1m")
    a, *emoji, b = tokenizer("a😀b", add_special_tokens=False)["input_ids"]
    assert split_text(tokenizer, []) == []
    assert split_text(tokenizer, [a, *emoji, b]) == ["a", "", "", "", "😀", "b"]
    # A character that is never completed is one U+FFFD, as in the whole text.
    assert "".join(split_text(tokenizer, [a, *emoji[:3], b])) == "a\ufffdb"
    assert "".join(split_text(tokenizer, [a, *emoji[:3]])) == "a\ufffd"
    assert split_text(tokenizer, [emoji[3], b]) == ["\ufffd", "b"]


def test_pieces_of_any_ids_make_up_the_text(real_tokenizer):
    """Random ids are full of bytes that are no character."""
    generator = random.Random(0)
    ids = real_tokenizer(TEXT * 3, add_special_tokens=False)["input_ids"]
    for _ in range(100):
        shuffled = generator.sample(ids, generator.randint(1, len(ids)))
        pieces = split_text(real_tokenizer, shuffled)
        assert len(pieces) == len(shuffled)
        assert "".join(pieces) == real_tokenizer.decode(shuffled)
