"""What the tests share: small random models, ragged batches, and where real data can be found.

Shapes: B sequences, P prompt tokens, C completion tokens.
"""

import dataclasses
import multiprocessing
import os
import random
import socket
import subprocess
import sys
from itertools import chain
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a network
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import main
import utils
from config import LossConfig
from evaluator import EVALUATORS, RewardEvaluator, Rewards
from grpo import jsonl
from grpo.rollout import Completion, compute_logps, split_into_groups
from rl_datasets import DATASETS, PROMPTS

ARITHMETIC = DATASETS["arithmetic"]
# The first 200 of 10,000 and 2,000 problems, whose prompts take longer than most tests.
DATASETS["arithmetic"] = dataclasses.replace(
    ARITHMETIC,
    read_rows=lambda split: ARITHMETIC.read_rows(split)[: None if split == "test" else 200],
)
# What is compared bit by bit must be added up in one order; subprocesses have one thread as well.
torch.set_num_threads(1)
VOCAB = 48
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class LettersEvaluator(RewardEvaluator):
    """A reward that even a random model can learn: the share of vowels. It differs in any group."""

    reward_names = ("vowels", "long")

    def __init__(self, **_):
        pass

    def compute_rewards(self, prompts, completions, answers, **columns):
        rewards = []
        details = []
        for text in completions:
            num_vowels = sum(letter in "aeiou" for letter in text)
            vowel_share = num_vowels / max(1, len(text))
            rewards.append([vowel_share, float(len(text) > 3)])
            details.append(
                {
                    "parsed": text[:1],
                    "format": vowel_share > 0.3,
                    "correct_strict": vowel_share > 0.3,
                    "correct_flexible": vowel_share > 0.2,
                }
            )
        return Rewards(torch.tensor(rewards), details)


EVALUATORS["letters"] = LettersEvaluator


def random_model(seed=0, **overrides):
    """A Qwen2 of some 20,000 weights, so large that its distributions are far from uniform."""
    torch.manual_seed(seed)
    settings = SIZES | dict(initializer_range=0.25, tie_word_embeddings=True) | overrides
    config = Qwen2Config(**settings)
    config.eos_token_id = 1
    config.pad_token_id = 0
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = 1
    return model


def small_tokenizer():
    """One token for each character, and a few of several that only sampling produces."""
    tokens = ["<pad>", "<eos>", "</answer", ">", "><", "é", "<end>"]
    tokens += list("abcdefghijklmnopqrstuvwxyz 0123456789</.\n")
    vocabulary = {token: i for i, token in enumerate(tokens[:VOCAB])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token=" ",
        additional_special_tokens=["<end>"],
    )


@pytest.fixture
def tokenizer():
    return small_tokenizer()


@pytest.fixture
def model():
    return random_model(0)


@pytest.fixture
def base_model():
    return random_model(1).requires_grad_(False)


@pytest.fixture
def batch():
    return ragged_batch()


def ragged_batch(groups=3, group_size=4, seed=0):
    """A batch as sampling leaves it, as the arguments of compute_loss by name.

    Prompts are left-padded, of unequal lengths, and shared by group_size rows each. Completions
    have 1 token (they ended at once) to 7 tokens (they were cut at the maximum length).
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randint(2, VOCAB, shape, generator=generator)

    P = 6
    C = 7
    B = groups * group_size
    prompt_lengths = torch.tensor([2 + (3 * group) % 5 for group in range(groups)])
    prompt_lengths = prompt_lengths.repeat_interleave(group_size)  # (B,)
    lengths = torch.tensor([1 + (i * 5) % C for i in range(B)])
    prompts = draw(groups, P).repeat_interleave(group_size, dim=0)  # (B, P)
    prompt_mask = (torch.arange(P) >= P - prompt_lengths.unsqueeze(1)).long()
    completion_mask = (torch.arange(C) < lengths.unsqueeze(1)).long()
    completion_ids = draw(B, C) * completion_mask
    return dict(
        prompt_completion_ids=torch.cat([prompts * prompt_mask, completion_ids], dim=1),
        completion_ids=completion_ids,
        attention_mask=torch.cat([prompt_mask, completion_mask], dim=1),
        completion_mask=completion_mask,
        advantages=torch.randn(B, generator=generator),
    )


def loss_of(
    model,
    base_model,
    batch,
    *,
    group_size=1,
    old_logps=None,
    sampled_logps=None,
    **settings,
):
    """main.compute_loss of a batch such as ragged_batch's; settings are fields of LossConfig."""
    return main.compute_loss(
        model,
        base_model,
        **batch,
        config=LossConfig(**settings),
        group_size=group_size,
        old_logps=old_logps,
        sampled_logps=sampled_logps,
    )


def logps_of(model, batch, temperature=1.0):
    """(B, C) log-probs of a batch's completion tokens, without gradient."""
    with torch.no_grad():
        return utils.get_per_token_logps(
            model,
            batch["prompt_completion_ids"],
            batch["attention_mask"],
            batch["completion_ids"].shape[1],
            temperature=temperature,
        )


def unpadded_logps(model, ids, num_tokens, temperature=1.0):
    """The log-probs of a sequence's last num_tokens tokens, by the model's own forward pass."""
    logits = model(ids.unsqueeze(0), use_cache=False).logits[0, -num_tokens - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[-num_tokens:].unsqueeze(-1)).squeeze(-1)


def plain_logps(model, ids, mask, C):
    """(B, C) by the model's own forward pass on each row without its padding."""
    rows = []
    for padded_ids, row_mask in zip(ids, mask.bool(), strict=True):
        length = int(row_mask[-C:].sum())  # of the completion
        logps = unpadded_logps(model, padded_ids[row_mask], length)
        rows.append(torch.nn.functional.pad(logps, (0, C - length)))
    return torch.stack(rows)


def sampled_logps_of(completions):
    """The sampler's log-probs of all tokens, one completion after the other."""
    return torch.tensor([*chain.from_iterable(row.sampled_logps for row in completions)])


def sampling_gaps(model, completions, group_size=1, temperature=1.0):
    """How far these are from the log-probs of a forward pass, for each token."""
    groups = split_into_groups(completions, group_size)
    logps = compute_logps(model, groups, temperature=temperature, max_tokens=10_000)
    return (sampled_logps_of(completions) - torch.tensor([*chain.from_iterable(logps)])).abs()


def completions_of(batch):
    """The completions of a ragged batch, as training has them after their rewards.

    A row whose tokens are all masked was cut off. A row whose advantage is NaN has no reward.
    """
    C = batch["completion_ids"].shape[1]
    completions = []
    for row, advantage in enumerate(batch["advantages"].tolist()):
        is_token = batch["attention_mask"][row].bool()
        is_prompt = is_token.clone()
        is_prompt[-C:] = False
        ids = batch["completion_ids"][row, is_token[-C:]].tolist()
        completions.append(
            Completion(
                prompt_ids=batch["prompt_completion_ids"][row, is_prompt].tolist(),
                ids=ids,
                sampled_logps=[0.0] * len(ids),
                finished=bool(batch["completion_mask"][row].any()),
                reward=advantage,
                advantage=advantage,
            )
        )
    return completions


def gradients(model, loss):
    """The gradient of a loss as one float64 vector; the model is left without gradients."""
    model.zero_grad()
    loss.backward()
    vector = flat_gradient(model)
    model.zero_grad()
    return vector


def flat_gradient(model):
    """The gradient that lies in a model's parameters, as one float64 vector."""
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def relative_distance(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def assert_same_gradient(actual, expected, tolerance=1e-5):
    """Float32 rounding moves the gradients of these small models by some 1e-6 of their norm."""
    assert expected.norm() > 0, "a zero gradient proves nothing"
    distance = relative_distance(actual, expected)
    assert distance < tolerance, distance


@pytest.fixture(scope="session")
def data_folder():
    """The folder that GRPO_LITE_DATA names, with real data and tokenizers."""
    folder = os.environ.get("GRPO_LITE_DATA")
    if not folder:
        pytest.skip("set GRPO_LITE_DATA to a folder with data/gsm8k, data/math and models/qwen2")
    return Path(folder).resolve()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A random model and its tokenizer on disk; several training iterations take a second."""
    folder = tmp_path_factory.mktemp("model")
    random_model(max_position_embeddings=1024).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gold_file(tmp_path_factory):
    """60 gold rows of `arithmetic`; every tenth has a wrong answer in its completion."""
    prompt = PROMPTS["reasoning_answer"]
    path = tmp_path_factory.mktemp("gold") / "gold.jsonl"
    rows = DATASETS["arithmetic"].read("train")[:60]
    for i, row in enumerate(rows):
        answer = "0" if i % 10 == 0 else row["answer"]
        row["completion"] = prompt.format_solution(row["solution"], answer)
    jsonl.write(path, rows)
    return path


def as_flags(**flags):
    """A command line of these flags; one whose value is "" takes no value."""
    command_line = []
    for name, value in flags.items():
        command_line.append(f"--{name}")
        if value != "":
            command_line.append(str(value))
    return command_line


def run_flags(model_folder, output_dir, **flags):
    """main.py's flags for a small run on `arithmetic`, as a list of text."""
    small = dict(
        model_name=model_folder,
        output_dir=output_dir,
        dataset_name="arithmetic",
        evaluator="letters",
        rollout_batch_size=8,
        group_size=4,
        max_completion_length=6,
        eval_size=4,
        num_train_iters=4,
        eval_iterations=2,
        save_iterations=2,
        learning_rate=1e-3,
        device="cpu",
    )
    return as_flags(**small | flags)


def fixed_sample(run, examples, num_samples, temperature):
    """In place of `Run.sample`: completions that depend on prompt, step and their number alone."""
    completions = []
    for example in examples:
        prompt_ids = run.tokenizer(example["prompt"], add_special_tokens=False)["input_ids"]
        for number in range(num_samples):
            generator = random.Random(f"{example['id']} {run.iteration} {number}")
            length = generator.randint(1, run.config.max_completion_length)
            ids = [generator.randrange(7, VOCAB) for _ in range(length)]
            completions.append(
                Completion(
                    prompt_ids=prompt_ids,
                    ids=ids,
                    sampled_logps=[0.0] * length,
                    finished=length < run.config.max_completion_length,
                    text=run.tokenizer.decode(ids),
                    example=example,
                )
            )
    return completions


@pytest.fixture(scope="session")
def whole_run(model_folder, tmp_path_factory):
    """The folder of a small run that nothing has disturbed; tests only read it."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main.main(run_flags(model_folder, folder)) == 0
    return folder


def logs_of(folder):
    """Every log and transcript of a run, without its times."""
    logs = {}
    for file in folder.rglob("*.jsonl"):
        rows = jsonl.read(file)
        for row in rows:
            for key in [key for key in row if key.startswith(("time/", "elapsed"))]:
                del row[key]
        logs[str(file.relative_to(folder))] = rows
    return logs


def approx(expected):
    """Numbers that differ by float32 rounding alone; NaN equals NaN."""
    return pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True)


def assert_same_run(actual, expected):
    """Two runs have equal logs, and newest checkpoints that are equal bit for bit."""
    assert logs_of(actual) == logs_of(expected)
    actual = max((actual / "checkpoints").iterdir())
    expected = max((expected / "checkpoints").iterdir())
    assert actual.name == expected.name
    weights = (actual / "model.safetensors").read_bytes()
    assert weights == (expected / "model.safetensors").read_bytes()
    state, expected_state = [
        torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, trainer_state(folder))
        for folder in (actual, expected)
    ]
    assert state == expected_state


def trainer_state(checkpoint):
    """The trainer's state in a checkpoint, without times and the sizes of logs that hold times."""
    state = torch.load(checkpoint / "trainer.pt", weights_only=True)
    return state | {"elapsed": 0, "log_sizes": {}}


# Processes that are killed or connected are forked from one that has done the slow imports.
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["main", "sft"])


def start(function, *args, **environment):
    """Run sys.exit(function(*args)) in a process of its own.

    Returns:
        the process, and all that it prints as a file of lines.
    """
    reader, writer = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_child, args=(writer, environment, function, args), daemon=True)
    process.start()
    writer.close()
    return process, os.fdopen(os.dup(reader.fileno()), newline="\n")


def _child(writer, environment, function, args):
    os.environ.update(environment)
    for descriptor in (1, 2):
        os.dup2(writer.fileno(), descriptor)
    writer.close()
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(function(*args))


def run_as_processes(num_processes, function, *args):
    """Run a function in connected processes, as under torchrun; returns what each prints."""
    with socket.socket() as closed_socket:
        closed_socket.bind(("127.0.0.1", 0))
        port = closed_socket.getsockname()[1]  # on which nothing listens
    job = dict(WORLD_SIZE=str(num_processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    started = [start(function, *args, RANK=str(rank), **job) for rank in range(num_processes)]
    outputs = [output.read() for _, output in started]
    for process, _ in started:
        process.join()
        assert process.exitcode == 0, outputs
    return outputs


def run_script(script, *flags, **options):
    """Run one of the project's scripts as its users do, in a subprocess."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, str(ROOT / script), *map(str, flags)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, **options
    )
