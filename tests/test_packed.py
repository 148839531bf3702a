"""A packed row gives the log-probs, entropies and gradients of padded rows."""

import pytest
import torch
from conftest import assert_same_gradient, ragged_batch, random_model

import llms
import utils
from grpo import packed, weights


def passes(model, batch, group_size, temperature=1.0):
    """(log-probs, entropies, gradient) of an arbitrary function of the log-probs."""
    logps, entropy = utils.get_per_token_logps(
        model,
        batch["prompt_completion_ids"],
        batch["attention_mask"],
        batch["completion_ids"].shape[1],
        group_size=group_size,
        temperature=temperature,
        return_entropy=True,
    )
    factors = torch.randn(logps.shape, generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    (factors * logps).sum().backward()
    trained = [weight.grad.flatten() for weight in model.parameters() if weight.requires_grad]
    return logps.detach(), entropy, torch.cat(trained).double()


@pytest.mark.parametrize(
    ("groups", "group_size", "options"),
    [
        (3, 4, {}),
        (3, 1, {"temperature": 0.7}),
        (1, 3, {}),  # of four: a group that was too long for one micro-batch
        (3, 4, {"checkpointing": True}),
        (3, 4, {"lora": True}),
    ],
)
def test_a_packed_row_equals_padded_rows(groups, group_size, options):
    model = random_model(0)
    if options.get("lora"):
        weights.add_adapters(model, rank=2, seed=0)
        for layer in weights.adapted_layers(model).values():  # B begins at 0
            torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    if options.get("checkpointing"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    batch = ragged_batch(groups, group_size)
    temperature = options.get("temperature", 1.0)
    given_size = 4 if groups == 1 else group_size
    expected = passes(model, batch, given_size, temperature)
    model.set_attn_implementation(packed.ATTENTION)
    actual = passes(model, batch, given_size, temperature)
    torch.testing.assert_close(actual[0], expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(actual[1], expected[1], atol=1e-5, rtol=0)
    assert_same_gradient(actual[2], expected[2])


def test_each_prompt_is_packed_once_and_padding_never():
    """Two groups of two: prompts of 1 and 3 tokens, completions of 2, 1, 3 and 3."""
    prompts = torch.tensor([[0, 0, 1], [0, 0, 1], [1, 1, 1], [1, 1, 1]])
    completions = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]])
    packing = packed.pack(torch.cat([prompts, completions], dim=1), C=3, group_size=2)
    assert torch.cat(packing.rows).tolist() == [0, 0, 2, 2, 2, 2, 2, 3, 3]
    assert torch.cat(packing.positions).tolist() == [0, 1, 0, 1, 2, 3, 4, 3, 4]
    assert torch.cat(packing.predicting).tolist() == [0, 1, 0, 4, 5, 6, 4, 7, 8]
    assert packing.query_lengths == [1, 1, 3, 2, 2]
    assert packing.key_lengths == [1, 2, 3, 5, 5]


def test_models_whose_attention_does_more_are_not_packed():
    assert llms.can_pack(random_model(0))
    assert not llms.can_pack(random_model(0, use_sliding_window=True, sliding_window=4))
