"""Supervised fine-tuning: its loss and update against float64, and which examples it takes."""

import copy
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, VOCAB, as_flags, assert_same_gradient, flat_gradient, small_tokenizer
from sampling.rollout import as_rollout
from tokenizers import Tokenizer, models, pre_tokenizers
from training import checkpoints
from training.schedule import learning_rate_factor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import main
import sft
import utils
from config import FineTuningConfig, OptimiserConfig, SFTConfig, parse
from evaluator import get_evaluator
from grpo import jsonl
from rl_datasets import PROMPTS

NORMALIZATIONS = [("masked_mean", None), ("masked_normalize", 7), ("token_mean", None)]
PAD = 0
EOS = 1
EXAMPLES = [{"prompt": f"after {i} comes ", "completion": str(i + 1)} for i in range(10)]


@pytest.fixture
def batch():
    """Pairs of prompt ids and completion ids, of unequal lengths.

    One completion is the end-of-sequence token alone, and one holds the padding token itself.
    """
    lengths = [(3, 6), (9, 1), (1, 4), (5, 11), (7, 2)]
    generator = torch.Generator().manual_seed(1)

    def draw(num_tokens):
        return torch.randint(2, VOCAB, (num_tokens,), generator=generator).tolist()

    sequences = []
    for prompt_length, completion_length in lengths:
        prompt = draw(prompt_length)
        completion = draw(completion_length - 1) + [EOS]
        sequences.append((prompt, completion))
    first_completion = sequences[0][1]
    first_completion[2] = PAD
    return sequences


def reference_loss(model, batch, length_normalization, constant):
    """Row by row, unpadded, in the model's own precision, through the plain forward pass."""
    losses_of_sequences = []
    lengths = []
    for prompt, completion in batch:
        ids = torch.tensor([prompt + completion])
        log_probs = model(input_ids=ids).logits[0].log_softmax(-1)
        loss = 0.0
        for i, token in enumerate(completion):
            loss = loss - log_probs[len(prompt) + i - 1, token]
        losses_of_sequences.append(loss)
        lengths.append(len(completion))
    if length_normalization == "token_mean":
        return sum(losses_of_sequences) / sum(lengths)
    if length_normalization == "masked_normalize":
        return sum(losses_of_sequences) / constant / len(batch)
    means = [loss / length for loss, length in zip(losses_of_sequences, lengths, strict=True)]
    return sum(means) / len(batch)


def accumulate(model, batch, length_normalization="masked_mean", constant=512, budget=1000):
    """The metrics of an update, and its gradient as one vector.

    budget: the greatest number of tokens of a micro-batch.
    """
    model.zero_grad()
    loss = replace(
        sft.SFT_LOSS, length_normalization=length_normalization, max_completion_length=constant
    )
    rollout = sft.rollout_of_solutions(batch, PAD, "cpu")
    rows = list(range(len(batch)))
    metrics = main.accumulate_gradient(model, None, rollout, rows, loss, budget)
    return metrics, flat_gradient(model)


@pytest.mark.parametrize("budget", [1, 20, 40, 1000])
@pytest.mark.parametrize(("length_normalization", "constant"), NORMALIZATIONS)
def test_update_equals_an_independent_float64_computation_whatever_the_micro_batches(
    model, batch, length_normalization, constant, budget
):
    float64_model = copy.deepcopy(model).double()
    expected = reference_loss(float64_model, batch, length_normalization, constant)
    expected.backward()
    metrics, gradient = accumulate(model, batch, length_normalization, constant, budget)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradient(gradient, flat_gradient(float64_model))


def test_prompts_are_padded_left_and_completions_right():
    rollout = as_rollout([([5, 6], [7, EOS]), ([8], [9, PAD, EOS])], PAD, "cpu")
    assert rollout.completion_ids.shape == (2, 3)
    assert rollout.prompt_completion_ids.tolist() == [[5, 6, 7, EOS, PAD], [PAD, 8, 9, PAD, EOS]]
    assert rollout.attention_mask.tolist() == [[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]
    assert rollout.completion_mask.tolist() == [[1, 1, 0], [1, 1, 1]]


def test_entropy_is_the_mean_over_completion_tokens(model, batch):
    total_entropy = 0.0
    for prompt, completion in batch:
        log_probs = model(input_ids=torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        total_entropy += entropy[len(prompt) - 1 : -1].sum().item()
    num_tokens = sum(len(completion) for _, completion in batch)
    metrics, _ = accumulate(model, batch, budget=20)
    assert metrics["entropy"] == pytest.approx(total_entropy / num_tokens, rel=1e-5)


def test_encode_ends_the_completion_with_the_eos_and_leaves_the_prompt_alone(tokenizer):
    ((prompt, completion),) = sft.encode(tokenizer, [{"prompt": "2 and 2 is ", "completion": "4"}])
    assert tokenizer.decode(prompt) == "2 and 2 is "
    assert tokenizer.decode(completion) == "4<eos>"
    assert completion[-1] == EOS


@pytest.mark.parametrize("scheme", ["first", "always"])
@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("is it.", "5 is", ["5", "▁", "i", "s"]),
        ("is it.", " 5 is", ["▁", "5", "▁", "i", "s"]),
        ("is it.\n", "\n5", ["\n", "5"]),  # the two line breaks are one token
        ("is i", "t", ["t"]),
    ],
)
def test_a_completion_goes_on_after_its_prompt(scheme, prompt, completion, expected):
    """Alone it began with the space that Llama's tokenizer puts before a text."""
    tokens = ["<eos>", *"▁ist.5\n", "\n\n", "it"]
    merges = [("\n", "\n"), ("i", "t")]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    llama = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")
    ((prompt_ids, ids),) = sft.encode(llama, [{"prompt": prompt, "completion": completion}])
    assert llama.convert_ids_to_tokens(ids) == [*expected, "<eos>"]
    assert llama.convert_ids_to_tokens(prompt_ids)[0] == "▁"


@pytest.mark.parametrize("folder", ["tiny/1m", "models/qwen2"])
def test_a_completion_has_the_tokens_that_it_has_alone(folder, request):
    """So it is for byte-level tokenizers, which put nothing before a text."""
    root = ROOT if folder == "tiny/1m" else request.getfixturevalue("data_folder")
    byte_level = AutoTokenizer.from_pretrained(root / folder)
    for prompt in PROMPTS.values():
        for solution in ("5 + 2 = 7.", "\nIt is\n\n 7", " 7", "  7", "'s", "\n\n", "12", ""):
            completion = prompt.format_solution(solution, "7")
            for question in ("How many?", "It is 1", "12 \n"):
                texts = {"prompt": prompt.render(byte_level, question), "completion": completion}
                ((prompt_ids, ids),) = sft.encode(byte_level, [texts])
                alone = [byte_level(text, add_special_tokens=False) for text in texts.values()]
                assert prompt_ids == alone[0]["input_ids"]
                assert ids == alone[1]["input_ids"] + [byte_level.eos_token_id]


def test_eos_is_trained_and_prompt_tokens_are_not(model, tokenizer):
    """The loss has a log-prob for each completion token and the EOS, and none for the prompt."""
    sequences = sft.encode(tokenizer, [{"prompt": "ab", "completion": "cd"}])
    rollout = as_rollout(sequences, PAD, "cpu")
    ids = rollout.prompt_completion_ids
    C = rollout.completion_ids.shape[1]
    assert C == 3, "c, d and EOS, without b"
    ((_, completion),) = sequences
    assert completion[-1] == EOS
    logps = utils.get_per_token_logps(model, ids, rollout.attention_mask, C)
    expected = model(ids).logits[0, 1:-1].log_softmax(-1)[range(3), completion]
    torch.testing.assert_close(logps[0], expected)


def test_training_learns_to_answer_and_to_stop(model, tokenizer):
    config = FineTuningConfig(train_batch_size=10, learning_rate=0.02)
    log = list(sft.fine_tune(model, tokenizer, EXAMPLES, config, num_updates=60))
    assert log[-1]["loss"] < 0.05 < 2 < log[0]["loss"]
    prompt = torch.tensor([tokenizer("after 3 comes ")["input_ids"]])
    completion = model.generate(
        prompt, max_new_tokens=5, do_sample=False, eos_token_id=EOS, pad_token_id=PAD
    )
    assert tokenizer.decode(completion[0]) == "after 3 comes 4<eos>"


def test_one_update_equals_adamw_by_hand(model, tokenizer):
    """The first step of AdamW with bias correction, and with weight decay.

    It moves a weight by the clipped gradient over its own absolute value.
    """
    weights_before = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    # This leaves a gradient in the parameters, to which training must not add.
    _, gradient = accumulate(model, sft.encode(tokenizer, EXAMPLES))
    norm = gradient.norm().item()
    config = FineTuningConfig(
        train_batch_size=10,
        learning_rate=0.01,
        warmup_steps=2,
        max_grad_norm=norm / 1000,
    )
    optimizer = main.get_optimizer(model, OptimiserConfig(weight_decay=10.0))
    (row,) = sft.fine_tune(model, tokenizer, EXAMPLES, config, num_updates=1, optimizer=optimizer)
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert row["learning_rate"] == pytest.approx(0.005)
    assert row["examples"] == 10
    # The answer and the EOS, and one digit more in the answer 10.
    assert row["tokens"] == 10 * (len("after 1 comes ") + 2) + 1
    clipped = gradient / 1000
    decayed = weights_before * (1 - 0.005 * 10)
    expected = decayed - 0.005 * clipped / (clipped.abs() + 1e-8)
    weights = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda")])
def test_optimiser_state_of_another_device_continues(devices, model):
    """On CUDA AdamW is fused, as its state says. PyTorch has a fused AdamW on the CPU as well."""
    config = OptimiserConfig(weight_decay=0.1)
    by_hand = copy.deepcopy(model)
    optimizer_without_a_break = main.get_optimizer(by_hand, config)
    state = None
    for step, device in enumerate(devices):
        on_device = SimpleNamespace(device=torch.device(device), parameters=model.parameters)
        optimizer = main.get_optimizer(on_device, config)
        assert bool(optimizer.param_groups[0]["fused"]) == (device == "cuda")
        if state is not None:
            optimizer.load_state_dict(state)
        for weights, updating in ((model, optimizer), (by_hand, optimizer_without_a_break)):
            updating.param_groups[0]["lr"] = 0.01
            generator = torch.Generator().manual_seed(step)
            for weight in weights.parameters():
                weight.grad = torch.randn(weight.shape, generator=generator)
            updating.step()
        state = copy.deepcopy(optimizer.state_dict())
    for weight, expected in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


def test_an_update_does_not_add_to_the_gradient_of_the_one_before(model, tokenizer):
    """At learning rate 0 every update over all examples has the same gradient."""
    config = FineTuningConfig(train_batch_size=10, learning_rate=0, max_grad_norm=1e9)
    log = list(sft.fine_tune(model, tokenizer, EXAMPLES, config, num_updates=3))
    assert [row["grad_norm"] for row in log] == pytest.approx([log[0]["grad_norm"]] * 3, rel=1e-4)


def test_order_depends_on_the_seed_alone_and_covers_each_epoch():
    def first_20(seed):
        return list(itertools.islice(sft.example_order(10, seed), 20))

    order = first_20(0)
    assert first_20(0) == order
    assert first_20(1) != order
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]


def test_learning_rate_rises_linearly_and_falls_as_a_cosine():
    rates = [learning_rate_factor(update, 10, 4, final_factor=0.2) for update in range(10)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0.2 < rates[-1] < 0.3
    # The decay has 7 intervals, from update 4 to update 11: update 8 is 4/7 of the way.
    assert rates[7] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * 4 / 7)) / 2)
    assert learning_rate_factor(0, num_updates=3, warmup_steps=0) == 1.0
    assert learning_rate_factor(2, num_updates=3, warmup_steps=3) == 1.0


def test_no_examples_are_refused_in_one_line(model, tokenizer):
    with pytest.raises(ValueError, match="no examples"):
        next(sft.fine_tune(model, tokenizer, [], FineTuningConfig(), num_updates=1))


# --- the command line -----------------------------------------------------------------------------


def selected_ids(gold_file, **flags):
    """Ids of the examples that sft.py would train on, in order."""
    flags = dict(model_name="unused", train_file=gold_file, max_completion_length=300) | flags
    args = parse(SFTConfig, as_flags(**flags))
    prompt = PROMPTS["reasoning_answer"]
    rows = sft.read_gold(gold_file, prompt.name)
    evaluator = get_evaluator("gsm8k", prompt=prompt.name)
    examples = sft.select_examples(rows, args, prompt, small_tokenizer(), evaluator)
    return [example["id"] for example in examples]


def test_subsets_are_nested_and_drawn_by_the_seed(gold_file):
    ten = selected_ids(gold_file, num_examples=10)
    twenty_five = selected_ids(gold_file, num_examples=25)
    assert twenty_five[:10] == ten
    assert len(set(twenty_five)) == 25
    assert set(selected_ids(gold_file, seed=1, num_examples=10)) != set(ten)


def test_filter_correct_leaves_out_wrong_answers_and_says_how_many(gold_file, capsys):
    assert len(selected_ids(gold_file)) == 60
    capsys.readouterr()
    correct = selected_ids(gold_file, filter_correct="")
    assert len(correct) == 54
    assert "6 incorrect, left out" in capsys.readouterr().out
    wrong = {row["id"] for row in jsonl.read(gold_file)[::10]}
    assert not wrong & set(correct)


def test_a_gold_answer_that_cannot_be_read_is_named_with_its_row(gold_file, tmp_path):
    rows = jsonl.read(gold_file)[:2]
    rows[1]["answer"] = "seven"
    del rows[1]["id"]  # a file of one's own may have none
    jsonl.write(tmp_path / "gold.jsonl", rows)
    with pytest.raises(ValueError, match=r"gold\.jsonl, row 2: the gold answer 'seven'"):
        selected_ids(tmp_path / "gold.jsonl", filter_correct="")


@pytest.mark.parametrize("end", ["<eos>", "<eos>\n", "<eos><eos>"])
def test_a_completion_that_ends_in_the_eos_gets_no_second_one(end, tokenizer):
    """With the EOS in its text it was incorrect as well."""
    completion = PROMPTS["reasoning_answer"].format_solution("1 + 1", "2")
    config = parse(SFTConfig, as_flags(model_name="m", train_file="f", filter_correct=""))
    row = {"question": "q", "answer": "2", "completion": completion + end}
    evaluator = get_evaluator("gsm8k")
    examples = sft.select_examples([row], config, PROMPTS["reasoning_answer"], tokenizer, evaluator)
    ((_, ids),) = sft.encode(tokenizer, examples)
    assert ids.count(EOS) == 1
    assert ids[-1] == EOS


def test_a_prompt_of_the_train_file_must_fit_into_the_positions(
    gold_file, model_folder, tmp_path, capsys
):
    """Only the prompts of the data set were checked."""
    rows = jsonl.read(gold_file)[:2]
    rows[1]["question"] *= 8
    jsonl.write(tmp_path / "gold.jsonl", rows)
    flags = as_flags(
        model_name=model_folder,
        dataset_name="arithmetic",
        train_file=tmp_path / "gold.jsonl",
        output_dir=tmp_path / "run",
        eval_size=1,
        max_prompt_length=2000,
        max_completion_length=300,
        num_updates=1,
        device="cpu",
    )
    assert sft.main(flags) == 2
    assert "1,024 positions, of which the longest prompt takes" in capsys.readouterr().err


def test_empty_and_long_rows_are_counted_and_left_out(gold_file, tmp_path, capsys):
    rows = jsonl.read(gold_file)[:5]
    rows[1]["completion"] = " \n"
    rows[2]["completion"] *= 9
    rows[3]["question"] *= 90
    jsonl.write(tmp_path / "gold.jsonl", rows)
    assert len(selected_ids(tmp_path / "gold.jsonl")) == 2
    counts = "5 read, 0 incorrect, left out, 1 empty, left out, 2 too long, left out, 2 used"
    assert counts in capsys.readouterr().out


def test_rows_that_are_marked_as_incorrect_are_left_out(gold_file, tmp_path, capsys):
    """generate_gold.py writes them too. A file without marks is used as it is."""
    rows = jsonl.read(gold_file)[:5]
    rows[1]["correct"] = False
    rows[2]["correct"] = True
    jsonl.write(tmp_path / "gold.jsonl", rows)
    chosen = selected_ids(tmp_path / "gold.jsonl")
    assert set(chosen) == {rows[i]["id"] for i in (0, 2, 3, 4)}
    assert "5 read, 1 incorrect, left out" in capsys.readouterr().out
    jsonl.write(tmp_path / "gold.jsonl", [*rows, rows[0] | {"correct": "false"}])
    with pytest.raises(ValueError, match="row 6: its column 'correct' must be true or false"):
        selected_ids(tmp_path / "gold.jsonl")


def test_a_run_writes_the_files_of_a_run_and_learns(gold_file, model_folder, tmp_path):
    flags = as_flags(
        model_name=model_folder,
        dataset_name="arithmetic",
        train_file=gold_file,
        output_dir=tmp_path / "run",
        evaluator="letters",
        eval_size=4,
        max_completion_length=110,
        train_batch_size=8,
        num_updates=8,
        eval_updates=3,
        learning_rate=1e-2,
        warmup_steps=0,
        device="cpu",
    )
    assert sft.main(flags) == 0
    rows = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rows[-1]["examples"] == 64
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert rows[0]["entropy"] > 0
    assert {"grad_norm", "time/loss", "time/update", "time/total", "elapsed"} <= rows[0].keys()
    evaluations = jsonl.read(tmp_path / "run" / "eval_log.jsonl")
    assert [row["step"] for row in evaluations] == [0, 3, 6, 8]
    assert max(checkpoints.finished(tmp_path / "run")) == 8


def test_a_completion_with_a_special_token_is_refused(tokenizer):
    """An EOS in it was learnt in the middle of the text."""
    row = {"question": "q", "answer": "2", "completion": "a<eos>b", "file_and_row": "f, row 3"}
    config = parse(SFTConfig, as_flags(model_name="m", train_file="f"))
    with pytest.raises(ValueError, match="^f, row 3: the completion holds <eos>, a special token"):
        sft.select_examples([row], config, PROMPTS["r1_zero"], tokenizer, get_evaluator("gsm8k"))
