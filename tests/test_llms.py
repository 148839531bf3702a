"""Sampling against a plain loop, and what must not change it."""

import pytest
import torch
from conftest import VOCAB, random_model, small_tokenizer
from transformers import AutoModelForCausalLM, CohereConfig, Gemma3TextConfig, GraniteConfig

import llms
import utils
from sampling import generation

PROMPTS = ["a", "hello there", "one two three", "z9"]


def plain_greedy(model, tokenizer, prompt, max_new_tokens, eos_ids=(1,)):
    """One unpadded prompt, no cache: the whole text through the model at every step."""
    ids = tokenizer(prompt)["input_ids"]
    completion = []
    while len(completion) < max_new_tokens:
        with torch.no_grad():
            completion.append(model(torch.tensor([ids + completion])).logits[0, -1].argmax().item())
        if completion[-1] in eos_ids:
            break
    return completion


def completions(rollout):
    return [
        row[:n].tolist() for row, n in zip(rollout.completion_ids, rollout.lengths, strict=True)
    ]


def test_greedy_equals_a_plain_loop_over_each_prompt(tokenizer):
    """Unequal prompts and ends: padding, the shared prompt, the cache and rows that leave must change nothing."""
    lengths, eos_ids = set(), [1, 5, 9, 13]
    for seed in range(4):
        model = random_model(seed)
        model.generation_config.eos_token_id = eos_ids
        expected = [plain_greedy(model, tokenizer, prompt, 40, eos_ids) for prompt in PROMPTS]
        lengths |= {len(row) for row in expected}
        for max_concurrent_sequences in (1, 3, 512):
            rollout = generation.generate(
                model,
                tokenizer,
                PROMPTS,
                max_new_tokens=40,
                temperature=0,
                num_samples=2,
                max_concurrent_sequences=max_concurrent_sequences,
            )
            assert completions(rollout) == [row for row in expected for _ in range(2)]
            assert rollout.finished.tolist() == [
                row[-1] in eos_ids for row in expected for _ in range(2)
            ]
    assert len(lengths) > 2 and 40 in lengths, "every case should occur: early, late, never"


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_sampled_logps_are_those_that_the_loss_recomputes(temperature, model, tokenizer):
    torch.manual_seed(0)
    settings = dict(
        num_samples=6, max_new_tokens=70, temperature=temperature, stop_strings=("</answer>",)
    )
    rollout = generation.generate(model, tokenizer, PROMPTS, **settings)
    assert len(set(rollout.lengths.tolist())) > 5
    C = rollout.completion_ids.shape[1]
    for group_size in (1, 6):
        ids, mask = rollout.prompt_completion_ids, rollout.attention_mask
        logps = utils.get_per_token_logps(
            model, ids, mask, C, group_size=group_size, temperature=temperature
        )
        torch.testing.assert_close(
            logps * rollout.completion_mask, rollout.sampled_logps, rtol=0, atol=2e-5
        )
    assert logps.requires_grad, "tensors of a rollout must be usable under autograd"


def test_samples_follow_the_distribution(model, tokenizer):
    """20,000 first tokens against softmax(logits / temperature): each frequency within 4 standard errors."""
    torch.manual_seed(0)
    n, temperature = 20_000, 0.8
    settings = dict(
        num_samples=n, max_new_tokens=1, temperature=temperature, max_concurrent_sequences=n
    )
    rollout = generation.generate(model, tokenizer, ["hello"], **settings)
    with torch.no_grad():
        p = (
            model(torch.tensor([tokenizer("hello")["input_ids"]])).logits[0, -1] / temperature
        ).softmax(-1)
    frequency = rollout.completion_ids[:, 0].bincount(minlength=len(p)) / n
    assert ((frequency - p).abs() <= 4 * (p * (1 - p) / n).sqrt() + 1e-4).all()


def test_masks_go_through_the_first_terminator_whatever_the_pad(tokenizer):
    """pad == eos: a mask by token id would cut the EOS from the loss, and stopping would never be trained."""
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(1)
    rollout = generation.generate(
        random_model(2), tokenizer, PROMPTS, num_samples=8, max_new_tokens=60
    )
    assert rollout.finished.any() and not rollout.finished.all()
    P = rollout.prompt_ids.shape[1]
    assert torch.equal(rollout.attention_mask[:, P:], rollout.completion_mask)
    for ids, mask, finished in zip(
        rollout.completion_ids, rollout.completion_mask, rollout.finished, strict=True
    ):
        n = int(mask.sum())
        assert mask[:n].all() and (1 in ids[:n].tolist()) == bool(finished)
        assert ids[n - 1] == 1 or not finished
        assert 1 not in ids[: n - 1].tolist()


def test_every_eos_id_of_the_generation_config_ends_a_completion(tokenizer):
    model = random_model(2)
    model.generation_config.eos_token_id = [1, 20, 21]
    torch.manual_seed(0)
    rollout = generation.generate(model, tokenizer, PROMPTS, num_samples=16, max_new_tokens=60)
    last = {
        row[-1]
        for row, finished in zip(completions(rollout), rollout.finished, strict=True)
        if finished
    }
    assert last == {1, 20, 21}
    for row, text in zip(completions(rollout), rollout.texts, strict=True):
        assert not {1, 20, 21} & set(row[:-1])
        assert text == tokenizer.decode(row[:-1] if row[-1] in (1, 20, 21) else row)


@pytest.mark.parametrize(
    ("pieces", "kept"),
    [
        (["a", "</answer", ">", "b"], "a</answer>"),  # two tokens
        (
            ["a", "</answer", "><", "b"],
            "a</answer>",
        ),  # the last token holds the end and what follows
        (list("x</answer>yz"), "x</answer>"),  # one character at a time
        (["</answer", "é", ">", "b"], None),  # interrupted: no stop string
    ],
)
def test_stop_strings_are_found_in_decoded_text(pieces, kept, tokenizer, monkeypatch):
    """The ids that were sampled stay whole; the text is cut at the end of the stop string."""
    vocabulary = tokenizer.get_vocab()
    script = [vocabulary[piece] for piece in pieces] + [1]
    model, step = random_model(), iter(range(100))
    monkeypatch.setattr(model, "get_output_embeddings", lambda: forced(script, step))
    rollout = generation.generate(
        model,
        tokenizer,
        ["q"],
        max_new_tokens=30,
        temperature=1.0,
        stop_strings=("</answer>", "###"),
    )
    n = int(rollout.lengths[0])
    assert rollout.completion_ids[0, :n].tolist() == script[:n] and rollout.finished.all()
    if kept is None:
        assert n == len(script) and rollout.texts == ["".join(pieces)]
    else:
        assert rollout.texts == [kept]
        assert kept not in "".join(pieces[: n - 1]) and kept in "".join(pieces[:n])


def forced(script, step):
    """An output layer that puts all probability on the next token of a script."""

    class Layer(torch.nn.Module):
        weight = torch.zeros(48, 1)

        def forward(self, hidden):
            logits = torch.full((len(hidden), 48), -1e4)
            logits[:, script[next(step)]] = 0
            return logits

    return Layer()


def test_samples_of_a_prompt_are_consecutive_and_in_the_order_of_prompts(model, tokenizer):
    rollout = generation.generate(
        model, tokenizer, PROMPTS, num_samples=3, max_new_tokens=5, max_concurrent_sequences=6
    )
    P = rollout.prompt_ids.shape[1]
    prompts = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(rollout.prompt_ids, rollout.attention_mask[:, :P], strict=True)
    ]
    assert prompts == [tokenizer(prompt)["input_ids"] for prompt in PROMPTS for _ in range(3)]
    assert all(row[-1] for row in (rollout.prompt_ids != 0).tolist()), "prompts are left-padded"


def test_generation_config_is_not_inherited(tokenizer):
    """Qwen2 ships top_k 20, top_p 0.8 and repetition_penalty 1.1: sampled so, but scored by the plain softmax."""
    plain, with_config = random_model(), random_model()
    config = with_config.generation_config
    config.do_sample, config.top_k, config.top_p, config.repetition_penalty, config.temperature = (
        True,
        1,
        0.1,
        5.0,
        0.1,
    )
    rollouts = []
    for model in (plain, with_config):
        torch.manual_seed(0)
        rollouts.append(
            completions(
                generation.generate(model, tokenizer, PROMPTS, num_samples=4, max_new_tokens=20)
            )
        )
    assert rollouts[0] == rollouts[1]


def test_same_seed_same_samples_and_mode_is_restored(model, tokenizer):
    results = []
    for training in (True, False):
        model.train(training)
        torch.manual_seed(3)
        results.append(
            generation.generate(model, tokenizer, PROMPTS, num_samples=4, max_new_tokens=20)
        )
        assert model.training == training
    assert torch.equal(results[0].completion_ids, results[1].completion_ids)


def test_special_tokens_stay_visible_in_text(tokenizer, monkeypatch):
    """A completion can hold anything; what a reward or a reader sees must not hide it."""
    script = [tokenizer.get_vocab()[piece] for piece in ("a", "<end>", "b", "<eos>")]
    model, step = random_model(), iter(range(9))
    monkeypatch.setattr(model, "get_output_embeddings", lambda: forced(script, step))
    assert generation.generate(model, tokenizer, ["q"], max_new_tokens=9).texts == ["a<end>b"]


def test_select_cuts_padding_on_both_sides(model, tokenizer):
    torch.manual_seed(0)
    rollout = generation.generate(model, tokenizer, PROMPTS, num_samples=4, max_new_tokens=50)
    rows = sorted(range(4, 12), key=lambda i: rollout.lengths[i])[:3]
    part = rollout.select(rows)
    assert part.prompt_ids.shape[1] == max(len(PROMPTS[i // 4]) for i in rows)
    assert (
        part.completion_ids.shape[1] == max(rollout.lengths[rows]) < rollout.completion_ids.shape[1]
    )
    assert part.texts == [rollout.texts[i] for i in rows]
    logps = utils.get_per_token_logps(
        model, part.prompt_completion_ids, part.attention_mask, part.completion_ids.shape[1]
    )
    torch.testing.assert_close(logps, part.sampled_logps, rtol=0, atol=2e-5)


def test_bfloat16_sampling_copy_follows_the_policy(model, tokenizer):
    sampler = llms.get_sampler(model, "bfloat16")
    assert sampler is not model and next(sampler.parameters()).dtype == torch.bfloat16
    assert all(b.dtype == torch.float32 for b in sampler.buffers()), (
        "rounded rotary frequencies: off by 0.1 nats"
    )
    assert list(sampler.buffers()) and sampler.dtype == torch.bfloat16
    assert llms.get_sampler(model) is model  # on CPU the policy itself samples
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    llms.refresh_sampler(sampler, model)
    for copied, p in zip(sampler.parameters(), model.parameters(), strict=True):
        assert torch.equal(copied, p.to(torch.bfloat16))
    generation.generate(sampler, tokenizer, PROMPTS, max_new_tokens=3)


def test_loading_round_trip_and_its_errors(tmp_path, tokenizer, capsys):
    model = random_model()
    model.save_pretrained(tmp_path / "good")
    tokenizer.save_pretrained(tmp_path / "good")
    loaded, loaded_tokenizer = llms.get_llm_tokenizer(str(tmp_path / "good"))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True)
    )
    assert loaded_tokenizer("hello")["input_ids"] == tokenizer("hello")["input_ids"]
    assert "attention sdpa" in capsys.readouterr().out

    with pytest.raises(ValueError, match="no such directory"):
        llms.get_llm_tokenizer(str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="--model_name .* cannot be loaded"):
        llms.get_llm_tokenizer(str(tmp_path / "empty"))

    pickled = tmp_path / "pickled"  # weights as a pickle could run code: they are refused
    model.save_pretrained(pickled)
    tokenizer.save_pretrained(pickled)
    (pickled / "model.safetensors").unlink()
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be loaded.*safetensors"):
        llms.get_llm_tokenizer(str(pickled))


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    tokenizer = small_tokenizer()
    tokenizer.eos_token = None
    random_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no EOS"):
        llms.get_llm_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(logit_scale=0.5),
        Gemma3TextConfig(final_logit_softcapping=9.0),
        GraniteConfig(logits_scaling=2.0),
    ],
)
def test_models_whose_logits_are_not_those_of_the_output_layer_are_refused(
    config, tmp_path, tokenizer
):
    """Log-probs here come from the output layer itself: a factor or a cap behind it would be left out, unseen."""
    small = dict(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    small |= dict(num_key_value_heads=2, head_dim=4, layer_types=None)
    config = type(config)(**config.to_dict() | small)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="it rescales its logits"):
        llms.get_llm_tokenizer(str(tmp_path))
