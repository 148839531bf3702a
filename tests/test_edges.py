"""What once went wrong at the edges: silently wrong numbers, lost work, tracebacks for what a user did."""

import json
import os
import signal

import pytest
import torch
from conftest import (
    VOCAB,
    LettersEvaluator,
    ragged_batch,
    random_model,
    rollout_of,
    run_flags,
    small_tokenizer,
)
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import evaluator
import flags
import llms
import main
import sft
import utils
from data.rows import find_files
from grading.extraction import only_number
from logs import jsonl
from rl_datasets import PROMPTS
from sampling import generation
from sampling.rollout import compute_rollout_logps
from training import signals
from training.lock import Lock
from training.run import Run, run_description

MASKED = "--mask_truncated_completions"


def save(model, folder):
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return str(folder)


def one_line(capsys):
    """The only line on stderr."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and "Traceback" not in lines[0], lines
    return lines[0]


# --- Silently wrong numbers -----------------------------------------------------------------------


def test_a_shared_prompt_longer_than_a_sliding_window():
    """The prompt's cache was cropped to the window: log-probs were off by 3 to 5.6 where rows were left-padded."""
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    config = AutoConfig.for_model(
        "mistral", **sizes, num_key_value_heads=2, sliding_window=3, initializer_range=0.25
    )
    torch.manual_seed(0)
    model, batch = AutoModelForCausalLM.from_config(config), ragged_batch()
    ids, mask, C = (
        batch["prompt_completion_ids"],
        batch["attention_mask"],
        batch["completion_ids"].shape[1],
    )
    shared = utils.get_per_token_logps(model, ids, mask, C, group_size=4)
    for row in range(len(ids)):
        alone = utils.get_per_token_logps(model, ids[row : row + 1], mask[row : row + 1], C)
        torch.testing.assert_close(shared[row], alone[0], atol=1e-5, rtol=0)


def test_dropout_is_set_to_zero_at_load(tmp_path, capsys):
    """GPT-2 was scored and trained with its dropout on: ratios of 0.02 to 21 on policy."""
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=1
    )
    model, _ = llms.get_llm_tokenizer(save(GPT2LMHeadModel(config), tmp_path))
    assert "dropout set to 0 (" in capsys.readouterr().out and model.training
    batch = ragged_batch()
    arguments = (
        model,
        batch["prompt_completion_ids"],
        batch["attention_mask"],
        batch["completion_ids"].shape[1],
    )
    assert torch.equal(utils.get_per_token_logps(*arguments), utils.get_per_token_logps(*arguments))


@pytest.mark.parametrize("with_eos", [False, True])
@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_has_the_bos_that_its_tokenizer_adds(name, with_eos):
    """Plain prompts left the BOS out; a chat template brings its own, and an EOS would end the prompt."""
    tokenizer, question = small_tokenizer(), "2 and 3"
    tokenizer.bos_token = "<end>"
    ids = [("<end>", tokenizer.bos_token_id), ("<eos>", 1)]
    ends = "<end> $A <eos>" if with_eos else "<end> $A"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=ends, pair=f"{ends} $B", special_tokens=ids
    )
    plain = f"{PROMPTS[name].prefix}{question}{PROMPTS[name].suffix}"
    expected = tokenizer(plain)["input_ids"][: -1 if with_eos else None]
    rendered = PROMPTS[name].render(tokenizer, question)
    assert tokenizer(rendered, add_special_tokens=False)["input_ids"] == expected
    tokenizer.chat_template = "<end>{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert PROMPTS[name].render(tokenizer, question).count("<end>") == 1


def test_an_update_without_a_token_to_learn_from_moves_nothing(model, base_model, tmp_path):
    """With every completion truncated and masked the gradient was 0, and AdamW's momentum moved the weights."""
    args = main.parse_args([*run_flags("m", tmp_path, warmup_steps=1), MASKED])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    run = Run(model, None, None, None, None, model, base_model, optimizer, scheduler)
    rollout, signal_ = rollout_of(ragged_batch(groups=2)), torch.linspace(-1, 1, 8)
    before = [p.clone() for p in model.parameters()]
    main.take_step(
        args, run, main.accumulate_gradient(args, run, rollout, signal_, list(range(8)))["loss"]
    )
    moved = [p.clone() for p in model.parameters()]
    assert not all(map(torch.equal, before, moved))
    rollout.finished[:] = False
    metrics = main.accumulate_gradient(args, run, rollout, signal_, list(range(8)))
    main.take_step(args, run, metrics["loss"])
    assert metrics == {"loss": 0.0} and all(map(torch.equal, moved, model.parameters()))


def test_fine_tuning_skips_an_update_that_is_not_finite(model, tokenizer, monkeypatch):
    """sft.py stepped on a NaN gradient, and saved weights that were all NaN."""
    before = [p.clone() for p in model.parameters()]
    monkeypatch.setattr(
        utils, "aggregate_tokens", lambda per_token, *_: per_token.sum() * torch.nan
    )
    (row,) = sft.fine_tune(
        model, tokenizer, [{"prompt": "ab", "completion": "c"}], num_updates=1, learning_rate=1.0
    )
    assert row["skipped_updates"] == 1 and all(map(torch.equal, before, model.parameters()))


def test_an_evaluator_made_from_another_has_weights_of_its_own():
    """A subclass with other rewards kept the five weights of GSM8kEvaluator, and its total failed."""
    sub = type("Sub", (evaluator.GSM8kEvaluator,), {"reward_names": ("short",)})
    assert sub.reward_weights == (1.0,) and evaluator.MathEvaluator.reward_weights == (0.0, 1.0)


def test_the_guard_reads_nats_whatever_the_length_normalization(model, base_model):
    """With masked_normalize `kl` is a sum over a constant, so --max_kl meant something else."""
    batch, per_token = ragged_batch(), []
    for normalization in utils.LENGTH_NORMALIZATIONS:
        options = dict(length_normalization=normalization, normalization_constant=100)
        metrics = main.compute_loss(model, base_model, *batch.values(), **options)[1]
        per_token.append(metrics["kl_per_token"])
        if normalization == "token_mean":
            assert metrics["kl"] == pytest.approx(metrics["kl_per_token"], rel=1e-5)
    assert per_token == pytest.approx([per_token[0]] * 3, rel=1e-6)
    guard = signals.Guard(max_kl=1.0, patience=1)
    guard.check({"kl": 50.0, "kl_per_token": 0.9, "skipped_updates": 0})
    with pytest.raises(signals.Diverged, match="above 1 nats"):
        guard.check({"kl": 0.1, "kl_per_token": 1.1, "skipped_updates": 0})


def test_what_is_written_beside_a_number_can_change_it():
    """`72²`, `√72`, `72!`, `72k` and `72 thousand` were taken for 72, and so were full-width digits."""
    changed = "72² √72 72! 72k ７２ 7２ 72½ 72e3 x72 72^ ~72 minus_72 72_thousand half_of_72 two_dozen_72 72_squared".split()
    for text in changed:
        assert only_number(text.replace("_", " ")) is None, text
    for text in (
        "72",
        "$72",
        "72 eggs",
        "72 eggs.",
        "72.",
        "**72**",
        "The answer is 72",
        "x = 72",
        "72 or so",
        "\\$72",
    ):
        assert only_number(text) == 72, text
    assert only_number("1,234.50") == 1234.5 and only_number("-$5") == -5


def test_concurrency_is_bounded_below_the_group_size(model, tokenizer):
    """A bound of 3 was ignored where a group has 8: all were sampled at once."""
    sizes = []
    rollout = generation.generate(
        model,
        tokenizer,
        ["ab", "c"],
        num_samples=8,
        max_new_tokens=4,
        max_concurrent_sequences=3,
        progress=sizes.append,
    )
    assert sizes == [3, 3, 2] * 2 and len(rollout.texts) == 16
    logps = compute_rollout_logps(
        model, rollout, group_size=8, temperature=1.0, micro_batch_tokens=1000
    )
    torch.testing.assert_close(logps, rollout.sampled_logps, atol=2e-5, rtol=0)


@pytest.mark.parametrize("given, expected", [([], 0.0), ([4], 0.7), ([4, 0.2], 0.2)])
def test_several_samples_are_not_one_greedy_answer_several_times(given, expected):
    """--eval_samples 4 gave the greedy answer four times."""
    given = dict(zip(("--eval_samples", "--eval_temperature"), given, strict=False))
    args = main.parse_args(
        ["--temperature", "0.7", *(str(x) for pair in given.items() for x in pair)]
    )
    assert args.eval_temperature == expected


class Wrong(LettersEvaluator):
    """Returns `per_function` and the first row of `details` as the test asks."""

    change = staticmethod(lambda rewards: None)

    def compute_rewards(self, prompts, completions, answers):
        rewards = super().compute_rewards(prompts, completions, answers)
        self.change(rewards)
        return rewards


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda r: r.per_function.__setitem__((1, 0), torch.inf),
            "reward vowels is infinite for completion 1",
        ),
        (
            lambda r: setattr(r, "per_function", r.per_function[:, :1]),
            r"per_function must be floats \(2, 2\)",
        ),
        (lambda r: setattr(r, "per_function", r.per_function.long()), "must be floats"),
        (lambda r: r.details.pop(), "details must be 2 dicts"),
        (
            lambda r: r.details[0].pop("format"),
            r"details\['format'\] must be True or False, not None",
        ),
        (
            lambda r: r.details[0].update(correct_strict=torch.tensor(True)),
            r"details\['correct_strict'\] must be True",
        ),
    ],
)
def test_an_evaluator_is_held_to_its_contract(change, message, monkeypatch):
    """An infinite reward trained on without a word; other slips ended in a traceback far away."""
    monkeypatch.setattr(Wrong, "change", staticmethod(change))
    with pytest.raises(ValueError, match=f"Wrong: .*{message}"):
        Wrong().check_rewards(["", ""], ["ab", "cd"], ["", ""])


# --- Nothing lost ---------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [main, sft])
def test_two_processes_cannot_share_an_output_directory(script, model_folder, tmp_path, capsys):
    """Two starts at once, or --resume while the first still ran, corrupted logs and checkpoints without a word."""
    gold = tmp_path / "gold.jsonl"
    jsonl.write(gold, [{"question": "a", "completion": "b", "answer": "1"}])
    more = {} if script is main else {"train_file": gold}
    keep = "model_name output_dir dataset_name evaluator max_completion_length eval_size learning_rate device".split()
    arguments = run_flags(model_folder, tmp_path / "run", **more)
    if script is sft:
        pairs = zip(arguments[::2], arguments[1::2], strict=True)
        arguments = [x for pair in pairs if pair[0][2:] in [*keep, "train_file"] for x in pair]
    lock = Lock(tmp_path / "run")
    assert script.main(arguments) == 2
    assert f"is in use by process {os.getpid()} on " in one_line(capsys)
    lock.release()
    assert not (tmp_path / "run").exists()
    assert script.main(arguments) == 0 and not (tmp_path / "run" / "lock").exists()


class Raises(LettersEvaluator):
    """Raises in its n-th batch."""

    calls, at = 0, 4

    def compute_rewards(self, prompts, completions, answers):
        type(self).calls += 1
        if self.calls == self.at:
            raise ZeroDivisionError("a bug of this evaluator")
        return super().compute_rewards(prompts, completions, answers)


def test_an_exception_keeps_what_can_be_kept(model_folder, tmp_path, capsys, monkeypatch):
    """An evaluator that raised, or CUDA out of memory, lost every iteration since the last checkpoint."""
    monkeypatch.setitem(evaluator.EVALUATORS, "raises", Raises)
    monkeypatch.setattr(Raises, "calls", 0)
    given = dict(evaluator="raises", num_train_iters=4, eval_iterations=9, save_iterations=2)
    arguments, folder = run_flags(model_folder, tmp_path / "run", **given), tmp_path / "run"
    assert main.main(arguments) == 1  # call 1 is the evaluation, so this is iteration 3's reward
    line = one_line(capsys)
    assert (
        "ZeroDivisionError: a bug of this evaluator" in line
        and "stopped after step 2, which is saved" in line
    )
    assert "a bug of this evaluator" in (folder / "traceback.txt").read_text()
    # After a step of the optimiser the weights are no finished iteration's: nothing is saved, the newest is named.
    monkeypatch.setattr(main.write_logs, "completion_records", lambda *a, **k: 1 / 0)
    assert main.main([*arguments, "--resume"]) == 1
    assert (
        f"the newest checkpoint is {folder / 'checkpoints' / 'step_000002'}, and --resume"
        in one_line(capsys)
    )
    assert not (folder / "checkpoints" / "step_000003").exists()
    monkeypatch.undo()
    monkeypatch.setitem(evaluator.EVALUATORS, "raises", LettersEvaluator)
    assert main.main(["--resume", "--output_dir", str(folder)]) == 0, (
        "every other flag is args.json's"
    )
    assert main.main(run_flags(model_folder, tmp_path / "whole", **given)) == 0
    weights = [
        path / "checkpoints" / "step_000004" / "model.safetensors"
        for path in (folder, tmp_path / "whole")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_gold_answer_that_cannot_be_read_is_found_at_the_start(model_folder, tmp_path, capsys):
    """A non-numeric gold in row 201 ended the run when its turn came."""
    rows = [{"question": f"{n}?", "answer": f"so #### {n}"} for n in range(6)]
    jsonl.write(tmp_path / "data" / "test.jsonl", rows)
    jsonl.write(
        tmp_path / "data" / "train.jsonl", [*rows, {"question": "x?", "answer": "so #### many"}]
    )
    given = dict(dataset_name="gsm8k", dataset_path=tmp_path / "data", evaluator="gsm8k")
    assert main.main(run_flags(model_folder, tmp_path / "run", **given)) == 2
    assert "gsm8k/train/6, row 7: the gold answer 'many' is not a number" in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_a_closed_terminal_is_a_signal_like_others(monkeypatch):
    """SIGHUP (the closed ssh window) lost what SIGTERM kept; under nohup it must stay ignored."""
    interrupts = signals.Interrupts()
    interrupts.install()
    with pytest.raises(signals.Interrupted, match="SIGHUP"):
        os.kill(os.getpid(), signal.SIGHUP)
    interrupts.uninstall()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupts.install()
    os.kill(os.getpid(), signal.SIGHUP)
    interrupts.uninstall()
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


def test_ctrl_c_while_loading_is_one_line(model_folder, tmp_path, capsys, monkeypatch):
    """A traceback, or silence and a directory left behind."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        monkeypatch.setattr(
            llms, "get_llm_tokenizer", lambda *a, number=number, **k: os.kill(os.getpid(), number)
        )
        assert main.main(run_flags(model_folder, tmp_path / "run")) == 130
        assert (
            f"stopped by {number.name} while loading" in one_line(capsys)
            and not (tmp_path / "run").exists()
        )


def test_damaged_checkpoints_are_put_aside_and_stop_nothing(model_folder, tmp_path, capsys):
    """A damaged newest one counted among those to keep, so intact ones went; a damaged manifest ended each run."""
    folder, more = tmp_path / "run", dict(num_train_iters=4, save_iterations=1, keep_checkpoints=3)
    assert main.main(run_flags(model_folder, folder, **more)) == 0
    checkpoints, log = folder / "checkpoints", folder / "train_log.jsonl"
    last = checkpoints / "step_000004" / "model.safetensors"
    weights = last.read_bytes()
    last.write_bytes(b"x")
    (checkpoints / "step_000002" / "manifest.json").write_text("[]")
    (folder / "rollouts" / "step_000003.jsonl.bak").write_text("a file of somebody else's")
    assert main.main(["--resume", "--output_dir", str(folder)]) == 0
    assert last.read_bytes() == weights and (checkpoints / "step_000004.damaged").exists()
    for path in checkpoints.glob("*/model.safetensors"):
        path.write_bytes(b"x")
    before = log.read_bytes()
    assert main.main(["--resume", "--output_dir", str(folder)]) == 2
    assert (
        "has 4 steps, but no intact checkpoint is left" in one_line(capsys)
        and log.read_bytes() == before
    )


@pytest.mark.parametrize("left", ["train_log.jsonl", "checkpoints"])
def test_what_an_unknown_run_has_left_is_not_touched(left, model_folder, tmp_path, capsys):
    """Logs and checkpoints without args.json were appended to, and mixed with those of the new run."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / left).mkdir() if left == "checkpoints" else (
        tmp_path / "run" / left
    ).write_text("{}\n")
    assert main.main(run_flags(model_folder, tmp_path / "run")) == 2
    assert f"holds {left} without the args.json of their run" in one_line(capsys)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [left]


def test_an_evaluation_claims_no_training_directory(model_folder, tmp_path, capsys):
    """--eval_only could not be repeated, and no run could be trained where one had been evaluated."""
    arguments = run_flags(model_folder, tmp_path / "run", num_train_iters=1)
    for _ in range(2):
        assert main.main([*arguments, "--eval_only"]) == 0
        assert len(jsonl.read(tmp_path / "run" / "eval_log.jsonl")) == 1
    assert main.main(
        [*arguments, "--eval_only", "--resume"]
    ) == 2 and "leave one of them out" in one_line(capsys)
    assert main.main(arguments) == 0
    assert [row["step"] for row in jsonl.read(tmp_path / "run" / "eval_log.jsonl")] == [0, 1]
    assert main.main([*arguments, "--eval_only"]) == 2 and "already holds a run" in one_line(capsys)


def test_the_command_in_args_json_can_be_pasted(monkeypatch):
    """It lacked `python` and its quotes."""
    monkeypatch.setattr("sys.argv", ["main.py", "--output_dir", "my run"])
    assert (
        run_description(main.parse_args([]), random_model())["command"]
        == "python main.py --output_dir 'my run'"
    )


def test_a_gpu_without_bfloat16_is_used_in_float32(model, monkeypatch):
    """It was given bfloat16 all the same."""
    monkeypatch.setattr(utils, "has_bfloat16", lambda: False)
    assert not isinstance(utils.autocast("cuda"), torch.autocast)


# --- One clear line -------------------------------------------------------------------------------


@pytest.mark.parametrize("refusing", ["{{ raise_exception('no system role') }}", "{# dropped #}"])
def test_a_chat_template_without_a_system_role(refusing):
    """The one ended in a traceback, the other left the instruction out without a word."""
    tokenizer = small_tokenizer()
    turn = "{% if m['role'] == 'system' %}" + refusing + "{% else %}[{{ m['content'] }}]{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}" + turn + "{% endfor %}"
    form = PROMPTS["reasoning_answer"]
    system, user = (message["content"] for message in form.messages("2 + 3?"))
    assert form.render(tokenizer, "2 + 3?") == f"[{system}\n\n{user}]"
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(ValueError, match=r"chat template fails \(never\)"):
        form.render(tokenizer, "2 + 3?")


def test_a_model_directory_without_a_tokenizer(model, tmp_path):
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer files") as error:
        llms.get_llm_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(model_name="tests/typo"), "tests/typo: there is no such directory"),
        (dict(evaluator="gsm8k", prompt="r1_zero"), "reads only reasoning_answer"),
        (dict(dataset_path="nowhere"), "--dataset_path nowhere is not a folder"),
        (dict(device="mps"), "--device mps cannot be used here; use cpu"),
        (
            dict(dataset_name="creative", evaluator="creative", judge_type="local"),
            "needs --judge_model",
        ),
        (dict(rollout_batch_size=100_004, group_size=8), "100000 or 100008 would be"),
        (dict(rollout_batch_size=4, group_size=8), "--group_size 8; 8 would be"),
    ],
)
def test_what_flags_alone_tell_is_said_before_anything_is_loaded(
    wrong, message, tmp_path, capsys, monkeypatch
):
    """A model was loaded, or a hub asked, before a wrong name was refused."""
    monkeypatch.chdir(os.path.dirname(os.path.dirname(__file__)))
    monkeypatch.setattr(
        llms.AutoConfig, "from_pretrained", lambda *a, **k: pytest.fail("a model was asked for")
    )
    assert main.main(run_flags("unused-model", tmp_path / "run", **wrong)) == 2
    assert message in one_line(capsys) and not (tmp_path / "run").exists()


def test_under_torchrun_a_wrong_flag_is_said_once(capsys, monkeypatch):
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            main.parse_args(["--no_such_flag"])
        assert end.value.code == 2 and len(capsys.readouterr().err.splitlines()) == lines


def test_json_files_are_named_where_jsonl_is_wanted(tmp_path):
    (tmp_path / "test.json").write_text(json.dumps([{}]))
    with pytest.raises(ValueError, match="test.json must have one row a line, and be named .jsonl"):
        find_files(tmp_path, "test")


def test_flags_of_every_script_can_be_resumed(tmp_path, capsys):
    """A damaged args.json is one line too."""
    (tmp_path / "args.json").write_text("{")
    for parse in (main.parse_args, sft.parse_args):
        with pytest.raises(SystemExit) as end:
            parse(["--resume", "--output_dir", str(tmp_path)])
        assert end.value.code == 2 and "not the args.json of a run" in one_line(capsys)
    assert flags.ArgumentParser  # the class whose errors are one line
