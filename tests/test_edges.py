"""What once went wrong at the edges: wrong numbers, lost work, tracebacks for a user's mistake."""

import pytest
import torch
from conftest import (
    VOCAB,
    as_flags,
    completions_of,
    ragged_batch,
    run_flags,
    sampling_gaps,
    small_tokenizer,
    update_gradient,
)
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, MixtralConfig

import llms
import main
import sft
import utils
from config import FineTuningConfig, GRPOConfig, parse
from grpo import generation, jsonl
from losses import LENGTH_NORMALIZATIONS


def save(model, folder):
    """Save a model with the small tokenizer, and return the folder's name."""
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return str(folder)


def copy_parameters(model):
    return [parameter.clone() for parameter in model.parameters()]


def are_equal(tensors, expected_tensors):
    return all(map(torch.equal, tensors, expected_tensors))


def only_error(capsys):
    """The only line on stderr."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert "Traceback" not in lines[0], lines
    return lines[0]


# --- Silently wrong numbers -----------------------------------------------------------------------


def test_a_shared_prompt_longer_than_a_sliding_window():
    """The prompt's cache was cropped to the window: left-padded rows were off by 3 to 5.6 nats."""
    config = AutoConfig.for_model(
        "mistral",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=3,
        initializer_range=0.25,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    batch = ragged_batch()
    ids = batch["prompt_completion_ids"]
    mask = batch["attention_mask"]
    C = batch["completion_ids"].shape[1]
    shared_logps = utils.get_per_token_logps(model, ids, mask, C, group_size=4)
    for i in range(len(ids)):
        row_logps = utils.get_per_token_logps(model, ids[i : i + 1], mask[i : i + 1], C)
        torch.testing.assert_close(shared_logps[i], row_logps[0], atol=1e-5, rtol=0)


NOISY_CONFIGS = {
    "resid_pdrop 0.1": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=1
    ),
    "router_jitter_noise 0.5": MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        router_jitter_noise=0.5,
    ),
}


@pytest.mark.parametrize("rate", NOISY_CONFIGS)
def test_dropout_and_noise_are_set_to_zero_at_load(rate, tmp_path):
    """GPT-2 was scored and trained with its dropout on, so on-policy ratios were 0.02 to 21."""
    noisy = AutoModelForCausalLM.from_config(NOISY_CONFIGS[rate])
    model, _ = llms.get_llm_tokenizer(save(noisy, tmp_path))
    assert model.training
    batch = ragged_batch()
    ids = batch["prompt_completion_ids"]
    C = batch["completion_ids"].shape[1]
    first_logps = utils.get_per_token_logps(model, ids, batch["attention_mask"], C)
    second_logps = utils.get_per_token_logps(model, ids, batch["attention_mask"], C)
    assert torch.equal(first_logps, second_logps)


def test_an_update_without_a_token_to_learn_from_moves_nothing(model, base_model, tmp_path):
    """Where every completion was cut and masked, AdamW's momentum alone moved the weights."""
    masked_flags = run_flags("m", tmp_path, warmup_steps=1, mask_truncated_completions="")
    config = parse(GRPOConfig, masked_flags)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = ragged_batch(groups=2) | {"advantages": torch.linspace(-1, 1, 8)}
    completions = completions_of(batch)

    def update():
        metrics = update_gradient(model, base_model, completions, config)
        main.take_step(model, optimizer, 1e-2, metrics["loss"])
        return metrics

    initial_parameters = copy_parameters(model)
    update()
    updated_parameters = copy_parameters(model)
    assert not are_equal(updated_parameters, initial_parameters)
    for completion in completions:
        completion.finished = False
    assert update() == {"loss": 0.0}
    assert are_equal(model.parameters(), updated_parameters)


def test_fine_tuning_skips_an_update_that_is_not_finite(model, tokenizer, monkeypatch):
    """sft.py stepped on a NaN gradient, and saved weights that were all NaN."""
    initial_parameters = copy_parameters(model)
    solutions = [sft.encode(tokenizer, "ab", "c", {})]
    config = FineTuningConfig(learning_rate=1.0)
    monkeypatch.setitem(
        LENGTH_NORMALIZATIONS,
        "masked_mean",
        lambda per_token, mask, config: per_token.sum() * torch.nan,
    )
    (row,) = sft.fine_tune(model, solutions, config, num_updates=1)
    assert row["skipped_updates"] == 1
    assert are_equal(model.parameters(), initial_parameters)


def test_concurrency_is_bounded_below_the_group_size(model, tokenizer, monkeypatch):
    """A bound of 3 was ignored where a group has 8: all were sampled at once.

    How many have ended was said only once a batch, which can take minutes.
    """
    sizes = []
    num_ended = []
    decode = generation._decode

    def decode_and_note_size(model, decoder, hidden, completions, *arguments):
        sizes.append(len(completions))
        decode(model, decoder, hidden, completions, *arguments)

    monkeypatch.setattr(generation, "_decode", decode_and_note_size)
    completions = generation.generate(
        model,
        tokenizer,
        ["ab", "c"],
        num_samples=8,
        max_completion_length=12,
        max_concurrent_sequences=3,
        progress=num_ended.append,
    )
    assert sum(num_ended) == 16
    assert len(num_ended) > len(sizes)
    assert sizes == [3, 3, 3, 3, 3, 1]
    assert len(completions) == 16
    assert sampling_gaps(model, completions, group_size=8).max() < 2e-5


@pytest.mark.parametrize(
    "eval_flags, expected",
    [("", 0.0), ("--eval_samples 4", 0.7), ("--eval_samples 4 --eval_temperature 0.2", 0.2)],
)
def test_several_samples_are_not_one_greedy_answer_several_times(eval_flags, expected):
    """--eval_samples 4 gave the greedy answer four times."""
    args = parse(GRPOConfig, ["--temperature", "0.7", *eval_flags.split()])
    assert args.eval_temperature == expected


# --- Nothing lost ---------------------------------------------------------------------------------


def sft_flags(model_folder, output_dir, gold_file):
    return as_flags(
        model_name=model_folder,
        output_dir=output_dir,
        train_file=gold_file,
        dataset_name="arithmetic",
        evaluator="letters",
        max_completion_length=6,
        eval_size=4,
        learning_rate=1e-3,
        device="cpu",
    )


@pytest.mark.parametrize("script", [main, sft])
def test_two_processes_cannot_share_an_output_directory(script, model_folder, tmp_path, capsys):
    """Two starts at once, or --resume while the first still ran, corrupted logs and checkpoints."""
    folder = tmp_path / "run"
    gold_file = tmp_path / "gold.jsonl"
    jsonl.write(gold_file, [{"question": "a", "completion": "b", "answer": "1"}])
    command = run_flags(model_folder, folder, num_train_iters=1)
    if script is sft:
        command = sft_flags(model_folder, folder, gold_file)
    folder.mkdir()
    lock = FileLock(folder / "lock")
    with lock:
        assert script.main(command) == 2
        assert f"--output_dir {folder} is in use by another process" in only_error(capsys)
        assert [path.name for path in folder.iterdir()] == ["lock"]
    assert script.main(command) == 0
    lock.acquire(timeout=0)  # nobody holds it any more


def test_a_gpu_without_bfloat16_is_used_in_float32(model, monkeypatch):
    """It was given bfloat16 all the same."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    assert not isinstance(utils.autocast("cuda"), torch.autocast)


# --- One clear line -------------------------------------------------------------------------------


def test_a_model_directory_without_a_tokenizer(model, tmp_path):
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer files") as error:
        llms.get_llm_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("num_processes, rank, num_lines", [("2", "0", 1), ("2", "1", 0)])
def test_under_torchrun_a_wrong_flag_is_said_once(
    num_processes, rank, num_lines, capsys, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", num_processes)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as system_exit:
        parse(GRPOConfig, ["--no_such_flag"])
    assert system_exit.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == num_lines


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    """A shell leaves it in --output_dir=~/run, and a folder named ~ was made."""
    monkeypatch.setenv("HOME", "/home/ada")
    config = parse(GRPOConfig, ["--output_dir=~/run"])
    assert str(config.output_dir) == "/home/ada/run"


def test_a_resumed_run_can_leave_out_what_it_had(tmp_path):
    """A switch that was on, or a tracker, could not be taken back."""
    saved = {"args": {"gradient_checkpointing": True, "report_to": "wandb", "beta": 0.1}}
    jsonl.write_json(tmp_path / "args.json", saved)
    resume = ["--resume", "--output_dir", str(tmp_path)]
    config = parse(GRPOConfig, [*resume, "--no-gradient_checkpointing", "--report_to", "none"])
    assert not config.gradient_checkpointing
    assert config.report_to == "none"
    assert config.beta == 0.1
