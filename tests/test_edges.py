"""What once went wrong at the edges: wrong numbers, lost work, tracebacks for a user's mistake."""

import os
import re
import shutil
import signal

import pytest
import signals
import torch
from conftest import (
    VOCAB,
    LettersEvaluator,
    as_flags,
    assert_same_run,
    loss_of,
    ragged_batch,
    random_model,
    rollout_of,
    run_flags,
    small_tokenizer,
    training_rollout,
    update_gradient,
)
from filelock import FileLock
from sampling.rollout import compute_rollout_logps
from training import checkpoints
from training.guard import Diverged, Guard
from training.run import run_description
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, MixtralConfig

import distributed
import evaluator
import llms
import main
import sft
import utils
from config import FineTuningConfig, GRPOConfig, parse
from grpo import jsonl
from losses import LENGTH_NORMALIZATIONS
from sampling import generation


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
def test_dropout_and_noise_are_set_to_zero_at_load(rate, tmp_path, capsys):
    """GPT-2 was scored and trained with its dropout on, so on-policy ratios were 0.02 to 21."""
    noisy = AutoModelForCausalLM.from_config(NOISY_CONFIGS[rate])
    model, _ = llms.get_llm_tokenizer(save(noisy, tmp_path))
    assert re.search(rf"set to 0 \(.*{rate}", capsys.readouterr().out)
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
    rollout = rollout_of(batch)

    def update():
        masked_rollout = training_rollout(batch, config, rollout)
        metrics = update_gradient(model, base_model, masked_rollout, config)
        main.take_step(model, optimizer, config, 1e-2, metrics["loss"])
        return metrics

    initial_parameters = copy_parameters(model)
    update()
    updated_parameters = copy_parameters(model)
    assert not are_equal(updated_parameters, initial_parameters)
    rollout.finished[:] = False
    assert update() == {"loss": 0.0}
    assert are_equal(model.parameters(), updated_parameters)


def test_fine_tuning_skips_an_update_that_is_not_finite(model, tokenizer, monkeypatch):
    """sft.py stepped on a NaN gradient, and saved weights that were all NaN."""
    initial_parameters = copy_parameters(model)
    examples = [{"prompt": "ab", "completion": "c"}]
    config = FineTuningConfig(learning_rate=1.0)
    monkeypatch.setitem(
        LENGTH_NORMALIZATIONS,
        "masked_mean",
        lambda per_token, *_, **__: per_token.sum() * torch.nan,
    )
    (row,) = sft.fine_tune(model, tokenizer, examples, config, num_updates=1)
    assert row["skipped_updates"] == 1
    assert are_equal(model.parameters(), initial_parameters)


def test_an_evaluator_made_from_another_has_weights_of_its_own():
    """A subclass with other rewards kept GSM8kEvaluator's five weights, and its total failed."""

    class ShortEvaluator(evaluator.GSM8kEvaluator):
        reward_names = ("short",)

    assert ShortEvaluator.reward_weights == (1.0,)
    assert evaluator.MathEvaluator.reward_weights == (0.0, 1.0)


def test_the_guard_reads_nats_whatever_the_length_normalization(model, base_model):
    """With masked_normalize `kl` is divided by a constant, so --max_kl meant something else."""
    batch = ragged_batch()
    kls_per_token = []
    for normalization in LENGTH_NORMALIZATIONS:
        _, metrics = loss_of(
            model,
            base_model,
            batch,
            length_normalization=normalization,
            max_completion_length=100,
        )
        kls_per_token.append(metrics["kl_per_token"])
        if normalization == "token_mean":
            assert metrics["kl"] == pytest.approx(metrics["kl_per_token"], rel=1e-5)
    assert kls_per_token == pytest.approx([kls_per_token[0]] * 3, rel=1e-6)
    guard = Guard(max_kl=1.0)
    for _ in range(3):
        guard.check({"kl": 50.0, "kl_per_token": 0.9, "skipped_updates": 0})
    with pytest.raises(Diverged, match="above 1 nats"):
        for _ in range(3):
            guard.check({"kl": 0.1, "kl_per_token": 1.1, "skipped_updates": 0})


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
    rollout = generation.generate(
        model,
        tokenizer,
        ["ab", "c"],
        num_samples=8,
        max_completion_length=4,
        max_concurrent_sequences=3,
        progress=num_ended.append,
    )
    assert sum(num_ended) == 16
    assert len(num_ended) > len(sizes)
    assert sizes == [3, 3, 3, 3, 3, 1]
    assert len(rollout.texts) == 16
    logps = compute_rollout_logps(
        model, rollout, group_size=8, temperature=1.0, micro_batch_tokens=1000
    )
    torch.testing.assert_close(logps, rollout.sampled_logps, atol=2e-5, rtol=0)


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


class FailingEvaluator(LettersEvaluator):
    """Raises when it is called for the fifth time: in iteration 3, after two evaluations."""

    num_calls = 0

    def compute_rewards(self, prompts, completions, answers):
        type(self).num_calls += 1
        if self.num_calls == 5:
            raise ZeroDivisionError("a bug of this evaluator")
        return super().compute_rewards(prompts, completions, answers)


def test_an_exception_leaves_the_newest_checkpoint(
    whole_run, model_folder, tmp_path, capsys, monkeypatch
):
    """A traceback filled the screen, and nothing said how to go on."""
    monkeypatch.setitem(evaluator.EVALUATORS, "letters", FailingEvaluator)
    monkeypatch.setattr(FailingEvaluator, "num_calls", 0)
    folder = tmp_path / "run"
    assert main.main(run_flags(model_folder, folder)) == 1
    error = only_error(capsys)
    assert "ZeroDivisionError: a bug of this evaluator" in error
    checkpoint = folder / "checkpoints" / "step_000002"
    assert f"the newest checkpoint is {checkpoint}, and --resume continues from there" in error
    assert list(checkpoints.finished(folder).values()) == [checkpoint]
    assert "a bug of this evaluator" in (folder / "traceback.txt").read_text()
    monkeypatch.undo()
    # Every flag but these two comes from args.json.
    assert main.main(["--resume", "--output_dir", str(folder)]) == 0
    assert_same_run(folder, whole_run)


def test_a_closed_terminal_stops_a_run_unless_nohup_has_started_it():
    """SIGHUP (the closed ssh window) lost what SIGTERM kept; under nohup it must stay ignored."""
    with signals.handled(signals.stop_at_once), pytest.raises(signals.Stopped, match="SIGHUP"):
        os.kill(os.getpid(), signal.SIGHUP)
    previous_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.handled(signals.stop_at_once):
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.signal(signal.SIGHUP, previous_handler) == signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_loading_is_one_line(number, model_folder, tmp_path, capsys, monkeypatch):
    """It ended in a traceback, or in silence with a directory left behind."""

    def send_signal(*args, **kwargs):
        os.kill(os.getpid(), number)

    monkeypatch.setattr(llms, "get_llm_tokenizer", send_signal)
    assert main.main(run_flags(model_folder, tmp_path / "run")) == 128 + number
    assert f"stopped by {number.name} while loading" in only_error(capsys)
    assert not (tmp_path / "run").exists()


def test_checkpoints_that_cannot_be_read_stop_nothing_until_none_is_left(
    whole_run, tmp_path, capsys
):
    """A damaged checkpoint ended every attempt to resume.

    Lines and transcripts that are later than the checkpoint are removed, and made again.
    """
    folder = shutil.copytree(whole_run, tmp_path / "run")
    newest_weights = folder / "checkpoints" / "step_000004" / "model.safetensors"
    newest_weights.write_bytes(b"x")
    (folder / "rollouts" / "step_000005.jsonl").write_text("")  # as after a kill
    (folder / "rollouts" / "step_000003.jsonl.bak").write_text("a file of somebody else's")
    assert main.main(["--resume", "--output_dir", str(folder)]) == 0
    assert_same_run(folder, whole_run)
    capsys.readouterr()
    newest_weights.write_bytes(b"x")
    (folder / "checkpoints" / "step_000002" / "trainer.pt").write_text("[]")
    log_before = (folder / "train_log.jsonl").read_bytes()
    assert main.main(["--resume", "--output_dir", str(folder)]) == 2
    error = only_error(capsys)
    assert f"no checkpoint in {folder} can be read" in error
    assert "--output_dir" in error
    assert (folder / "train_log.jsonl").read_bytes() == log_before


def test_an_evaluation_claims_no_training_directory(model_folder, tmp_path, capsys):
    """--eval_only could not be repeated, and where a model had been evaluated none could train."""
    command = run_flags(model_folder, tmp_path / "run", num_train_iters=1)
    eval_log = tmp_path / "run" / "eval_log.jsonl"
    for _ in range(2):
        assert main.main([*command, "--eval_only"]) == 0
        assert len(jsonl.read(eval_log)) == 1
    assert main.main([*command, "--eval_only", "--resume"]) == 2
    error = only_error(capsys)
    assert "--eval_only" in error
    assert "--resume" in error
    assert main.main(command) == 0
    assert [row["step"] for row in jsonl.read(eval_log)] == [0, 1]
    assert main.main([*command, "--eval_only"]) == 2
    assert "already holds a run" in only_error(capsys)


def test_the_command_in_args_json_can_be_pasted(monkeypatch):
    """It lacked `python` and its quotes."""
    monkeypatch.setattr("sys.argv", ["main.py", "--output_dir", "my run"])
    description = run_description(parse(GRPOConfig, []), random_model())
    assert description["command"] == "python main.py --output_dir 'my run'"


def test_a_gpu_without_bfloat16_is_used_in_float32(model, monkeypatch):
    """It was given bfloat16 all the same."""
    monkeypatch.setattr(utils, "has_bfloat16", lambda: False)
    assert not isinstance(utils.autocast("cuda"), torch.autocast)


# --- One clear line -------------------------------------------------------------------------------


def test_a_model_directory_without_a_tokenizer(model, tmp_path):
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer files") as error:
        llms.get_llm_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "num_processes, rank, num_lines", [("2", "0", 1), ("2", "1", 0), ("", "1", 1)]
)
def test_under_torchrun_a_wrong_flag_is_said_once(
    num_processes, rank, num_lines, capsys, monkeypatch
):
    """A RANK that another job had left behind silenced the only process."""
    monkeypatch.setenv("WORLD_SIZE", num_processes)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as system_exit:
        parse(GRPOConfig, ["--no_such_flag"])
    assert system_exit.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == num_lines


def test_variables_that_another_job_has_left_are_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK expected.*unset WORLD_SIZE"):
        distributed.init("cpu")


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    """A shell leaves it in --output_dir=~/run, and a folder named ~ was made."""
    monkeypatch.setenv("HOME", "/home/ada")
    (tmp_path / "my.args").write_text("--dataset_path ~/data --model_name ~/model")
    config = parse(GRPOConfig, [f"@{tmp_path / 'my.args'}", "--output_dir=~/run"])
    assert str(config.output_dir) == "/home/ada/run"
    assert config.dataset_path == "/home/ada/data"
    assert config.model_name == "/home/ada/model"


def test_a_resumed_run_can_leave_out_what_it_had(tmp_path):
    """A switch that was on, or a tracker, could not be taken back."""
    saved = {"args": {"gradient_checkpointing": True, "report_to": "wandb", "beta": 0.1}}
    jsonl.write_json(tmp_path / "args.json", saved)
    resume = ["--resume", "--output_dir", str(tmp_path)]
    config = parse(GRPOConfig, [*resume, "--no-gradient_checkpointing", "--report_to", "none"])
    assert not config.gradient_checkpointing
    assert config.report_to == "none"
    assert config.beta == 0.1
