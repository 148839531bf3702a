"""What the tests share: small random models, ragged batches, and where real data can be found."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a network
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import main
from evaluator import EVALUATORS, RewardEvaluator, Rewards
from logs import jsonl
from rl_datasets import PROMPTS, ArithmeticLoader
from sampling.rollout import Rollout

ArithmeticLoader.sizes["train"] = 200  # of 10,000, whose making takes longer than most tests
torch.set_num_threads(
    1
)  # as in the subprocesses: what is compared bit by bit must be added up in one order
signal.signal(
    signal.SIGHUP, signal.SIG_DFL
)  # ignored under nohup, where a run would rightly ignore it as well
VOCAB = 48


class LettersEvaluator(RewardEvaluator):
    """A reward that even a random model can learn: the share of vowels. It spreads in every group."""

    reward_names = ("vowels", "long")

    def __init__(self, **_):
        pass

    def compute_rewards(self, prompts, completions, answers):
        vowels = [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]
        rows = [[v, float(len(text) > 3)] for v, text in zip(vowels, completions, strict=True)]
        details = [
            {
                "parsed": text[:1],
                "format": v > 0.3,
                "correct_strict": v > 0.3,
                "correct_flexible": v > 0.2,
            }
            for v, text in zip(vowels, completions, strict=True)
        ]
        return Rewards(torch.tensor(rows), details)


EVALUATORS["letters"] = LettersEvaluator


def random_model(seed=0, **overrides):
    """A Qwen2 of some 20,000 random weights, wide enough in scale that its distributions are far from uniform."""
    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    config = Qwen2Config(
        **sizes
        | dict(num_key_value_heads=2, initializer_range=0.25, tie_word_embeddings=True)
        | overrides
    )
    config.eos_token_id, config.pad_token_id = 1, 0
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = 1
    return model


def small_tokenizer():
    """One token per character, and some of several characters that only sampling can bring up; its EOS is no pad."""
    pieces = ["<pad>", "<eos>", "</answer", ">", "><", "é", "<end>"] + list(
        "abcdefghijklmnopqrstuvwxyz 0123456789</.\n"
    )
    vocabulary = {piece: i for i, piece in enumerate(pieces[:VOCAB])}
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
    """A batch as sampling leaves it: left-padded prompts of unequal length, shared by group_size rows each, completions
    from 1 token (ended at once) to the full 7 (never ended), in the arguments that compute_loss takes."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(2, VOCAB, shape, generator=generator)  # noqa: E731
    P, C, B = 6, 7, groups * group_size
    prompt_lengths = torch.tensor([2 + (3 * g) % 5 for g in range(groups)]).repeat_interleave(
        group_size
    )
    lengths = torch.tensor([1 + (i * 5) % C for i in range(B)])
    prompts = draw(groups, P).repeat_interleave(group_size, dim=0)
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


def rollout_of(batch):
    """A Rollout made of a ragged batch, for accumulate_gradient."""
    C = batch["completion_ids"].shape[1]
    return Rollout(
        prompt_ids=batch["prompt_completion_ids"][:, :-C],
        completion_ids=batch["completion_ids"],
        attention_mask=batch["attention_mask"],
        completion_mask=batch["completion_mask"],
        sampled_logps=torch.zeros(batch["completion_ids"].shape),
        finished=batch["completion_mask"].sum(1) < C,
        texts=[""] * len(batch["advantages"]),
    )


def gradients(model, loss):
    """All parameters' gradients of a loss as one float64 vector; the model is left without gradients."""
    model.zero_grad()
    loss.backward()
    flat = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    model.zero_grad()
    return flat


def assert_same_gradient(actual, expected, tolerance=1e-5):
    """Relative distance of two gradients. Float32 rounding of these small models stays near 1e-6."""
    assert expected.norm() > 0, "a zero gradient proves nothing"
    distance = ((actual - expected).norm() / expected.norm()).item()
    assert distance < tolerance, distance


@pytest.fixture
def data_folder():
    """The folder that GRPO_LITE_DATA names: data/gsm8k, data/math, models/qwen2, models/stories260K."""
    folder = os.environ.get("GRPO_LITE_DATA")
    if not folder:
        pytest.skip(
            "set GRPO_LITE_DATA to a folder with data/ and models/ to test on real GSM8K, MATH and Qwen2 files"
        )
    return Path(folder).resolve()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A random model and its tokenizer on disk, small enough that a run of several iterations takes a second."""
    folder = tmp_path_factory.mktemp("model")
    random_model(max_position_embeddings=1024).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gold_file(tmp_path_factory):
    """60 gold rows of `arithmetic`, of which every tenth has a wrong answer in its completion."""
    prompt, path = PROMPTS["reasoning_answer"], tmp_path_factory.mktemp("gold") / "gold.jsonl"
    rows = ArithmeticLoader.read("train")[:60]
    for i, row in enumerate(rows):
        row["completion"] = prompt.format_solution(
            row["solution"], row["answer"] if i % 10 else "0"
        )
    jsonl.write(path, rows)
    return path


def as_flags(**flags):
    """A command line of these flags; one whose value is "" takes none."""
    return [text for name, value in flags.items() for text in (f"--{name}", str(value)) if text]


def run_flags(model_folder, output_dir, **flags):
    """main.py's flags for a small run on `arithmetic`, as a list of text."""
    small = dict(
        model_name=model_folder,
        output_dir=output_dir,
        dataset_name="arithmetic",
        evaluator="letters",
    )
    small |= dict(
        rollout_batch_size=8, group_size=4, max_completion_length=6, eval_size=4, num_train_iters=4
    )
    small |= dict(eval_iterations=2, save_iterations=2, learning_rate=1e-3, device="cpu")
    return as_flags(**small | flags)


@pytest.fixture(scope="session")
def whole_run(model_folder, tmp_path_factory):
    """The folder of a small run that nothing has disturbed; read only."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main.main(run_flags(model_folder, folder)) == 0
    return folder


def logs_of(folder):
    """Every log and transcript of a run, without its times."""
    return {
        str(file.relative_to(folder)): [
            {key: value for key, value in row.items() if not key.startswith(("time/", "elapsed"))}
            for row in jsonl.read(file)
        ]
        for file in folder.rglob("*.jsonl")
    }


def assert_same_run(actual, expected):
    """Two runs have equal logs and transcripts, and bit for bit equal weights and trainer's states at their ends."""
    assert logs_of(actual) == logs_of(expected)
    newest = [max((folder / "checkpoints").iterdir()) for folder in (actual, expected)]
    assert newest[0].name == newest[1].name
    assert (newest[0] / "model.safetensors").read_bytes() == (
        newest[1] / "model.safetensors"
    ).read_bytes()
    states = [
        torch.load(path / "trainer.pt", weights_only=True) | {"elapsed": 0} for path in newest
    ]
    assert str(states[0]) == str(states[1])  # shapes and counters, then every number of it
    for a, b in zip(*map(torch.utils._pytree.tree_leaves, states), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# Processes to be killed or connected are forked from one that has done the slow imports (from the repository's root).
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["main", "sft"])


def start(function, *args, **environment):
    """sys.exit(function(*args)) in a process of its own; returns it, and all that it prints as a file of lines."""
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


def run_script(script, *flags, **options):
    """Run one of the project's scripts as its users do, in a subprocess."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, str(ROOT / script), *map(str, flags)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, **options
    )


def closed_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def transformers_serve(model, lines=None):
    """The base URL of a `transformers serve` of this model on loopback; what it prints is appended to lines."""
    pytest.importorskip(
        "uvicorn", reason="pip install 'transformers[serving]' to test against transformers serve"
    )
    port, lines = closed_port(), [] if lines is None else lines
    command = [
        str(Path(sys.executable).parent / "transformers"),
        "serve",
        str(model),
        "--device",
        "cpu",
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "info"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in server.stdout:
            lines.append(line)
            if "Uvicorn running on" in line:
                break
        else:
            pytest.fail("transformers serve did not start: " + "".join(lines))
        threading.Thread(target=lambda: lines.extend(server.stdout), daemon=True).start()
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()
