"""tiny/tiny_grpo.ipynb: its step is that of main.py, its text fits its outputs, and it runs."""

import ast
import json
import re

import nbclient
import nbformat
import pytest
import torch
from conftest import (
    ROOT,
    assert_same_gradient,
    completions_of,
    flat_gradient,
    gradients,
    logps_of,
    loss_of,
)

import main
from config import LossConfig

PATH = ROOT / "tiny" / "tiny_grpo.ipynb"
NOTEBOOK = json.loads(PATH.read_text("utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
PROMPTS = ["one and two", "a", "the third prompt", "ten"]  # of several lengths


def source_of(cell):
    return "".join(cell["source"])


def text_of(cell):
    """What a cell shows as text: printed lines, and the text of displayed values."""
    shown_lines = []
    for output in cell.get("outputs", []):
        shown_lines += output.get("text") or output.get("data", {}).get("text/plain", [])
    return "".join(shown_lines)


def is_definition(node):
    """Whether it is an import, a function, or a constant in capitals."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]).isupper()
    return isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)


@pytest.fixture
def notebook(model, base_model, tokenizer):
    """The notebook's definitions by name, with a small random model in the place of its own."""
    tokenizer.padding_side = "left"
    names = {"model": model, "base_model": base_model, "tokenizer": tokenizer, "device": "cpu"}
    for cell in CODE:
        tree = ast.parse(source_of(cell))
        tree.body = [node for node in tree.body if is_definition(node)]
        exec(compile(tree, PATH.name, "exec"), names)
    names["MAX_NEW_TOKENS"] = 40
    return names


def count_letters(prompts, responses):
    """A reward that depends on the prompt, too, to show when rows and prompts are mixed up."""
    rewards = []
    for prompt, response in zip(prompts, responses, strict=True):
        num_shared = sum(letter in prompt for letter in response)
        rewards.append(num_shared / (len(response) + 1))
    return torch.tensor(rewards)


def plain_logps(model, row_ids, row_mask):
    """(tokens, vocabulary): the log-probs after each token of a row, alone and without padding."""
    ids = row_ids[row_mask.bool()]
    with torch.no_grad():
        return model(ids.unsqueeze(0)).logits[0].log_softmax(-1)


# --- Its step -------------------------------------------------------------------------------------


def test_its_loss_and_gradient_are_those_of_main(notebook, model, base_model, batch):
    """The notebook writes GRPO out again, and two copies drift apart."""
    logps = logps_of(model, batch)
    noise = 0.4 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(5))
    for old_logps in (None, logps + noise):  # the second one takes every branch of the clip
        loss, kl = notebook["compute_loss"](
            model,
            base_model,
            batch["prompt_completion_ids"],
            batch["attention_mask"],
            batch["completion_ids"].shape[1],
            batch["advantages"],
            old_logps,
        )
        expected, metrics = loss_of(model, base_model, batch, old_logps=old_logps)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert kl == pytest.approx(metrics["kl"], rel=1e-5) and kl > 0.01
        assert_same_gradient(gradients(model, loss), gradients(model, expected))
    assert metrics["clip_fraction_low"] > 0 and metrics["clip_fraction_high"] > 0


def test_its_advantages_are_those_of_main(notebook):
    # The second group is flat. Its mean is rounded, so only a test for it makes its advantages 0.
    rewards = torch.tensor([0.0, 4.0, 0.375, 2.0, 0.1, 0.7] + 6 * [0.9])
    assert rewards[6:].mean() != rewards[6]
    expected = main.compute_group_normalized_rewards(rewards, group_size=6)
    actual = notebook["compute_advantages"](rewards, group_size=6)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    assert actual[:6].abs().min() > 0 and not actual[6:].any()


def test_its_whole_step_has_the_gradient_of_main(notebook, model, base_model):
    """From the sampled ids on: who is in which group, the masks, and the loss."""
    notebook["get_reward"] = count_letters
    torch.manual_seed(3)
    loss, advantages, metrics = notebook["grpo_step"](PROMPTS)
    actual = gradients(model, loss)

    torch.manual_seed(3)
    group_size = notebook["GROUP_SIZE"]
    ids, mask, C = notebook["sample"](model, PROMPTS, group_size)
    prompts_of_rows = [prompt for prompt in PROMPTS for _ in range(group_size)]
    rewards = count_letters(prompts_of_rows, notebook["decode"](ids, C))
    expected_advantages = main.compute_group_normalized_rewards(rewards, group_size)
    torch.testing.assert_close(advantages, expected_advantages, rtol=1e-5, atol=1e-6)
    assert metrics["reward"] == pytest.approx(rewards.mean().item())
    completions = completions_of(
        {
            "prompt_completion_ids": ids,
            "completion_ids": ids[:, -C:],
            "attention_mask": mask,
            "completion_mask": mask[:, -C:],
            "advantages": expected_advantages,
        }
    )
    config = LossConfig(group_size=group_size)
    main.accumulate_gradient(model, base_model, completions, config, 1024)
    assert_same_gradient(actual, flat_gradient(model))


# --- Its sampling ---------------------------------------------------------------------------------


def test_the_mask_includes_the_end_token_and_nothing_after_it(notebook, model, tokenizer):
    ids, mask, C = notebook["sample"](model, PROMPTS, 8)
    prompt_ids = tokenizer(PROMPTS, padding=True, return_tensors="pt").input_ids
    assert torch.equal(ids[:, :-C], prompt_ids.repeat_interleave(8, dim=0))
    num_finished = 0
    for row_ids, row_mask in zip(ids[:, -C:].tolist(), mask[:, -C:].tolist(), strict=True):
        length = C
        if tokenizer.eos_token_id in row_ids:
            length = row_ids.index(tokenizer.eos_token_id) + 1
            num_finished += 1
        assert row_mask == length * [1] + (C - length) * [0]
        assert set(row_ids[length:]) <= {tokenizer.pad_token_id}
    assert 0 < num_finished < len(ids), "some completions are cut off"


def test_with_a_cache_and_padding_it_samples_what_a_plain_pass_predicts(notebook, model):
    ids, mask, C = notebook["sample"](model, PROMPTS, greedy=True)
    for row in range(len(ids)):
        best = plain_logps(model, ids[row], mask[row]).argmax(-1)
        length = mask[row, -C:].sum()
        assert torch.equal(ids[row, -C:][:length], best[-length - 1 : -1])


def test_samples_come_from_the_whole_distribution(notebook, model):
    """At temperature 1, and whatever the model's own generation config says."""
    model.generation_config.update(do_sample=True, temperature=0.7, top_k=5, top_p=0.8)
    notebook["MAX_NEW_TOKENS"] = 1
    num_samples = 4_000
    torch.manual_seed(0)
    ids, mask, _ = notebook["sample"](model, PROMPTS[:1], num_samples)
    probs = plain_logps(model, ids[0, :-1], mask[0, :-1])[-1].exp()
    counts = ids[:, -1].bincount(minlength=len(probs))
    standard_errors = (num_samples * probs * (1 - probs)).sqrt() + 1
    assert ((counts - num_samples * probs) / standard_errors).abs().max() < 4
    assert probs.topk(5).values.sum() < 0.9, "a cut at the fifth token would show"


# --- Its form -------------------------------------------------------------------------------------


def test_it_has_the_cells_of_its_assignment():
    """Nine cells, where that of the step is led by its formula, and few characters as Markdown.

    nbconvert writes every source, fenced if it is code, and every output, indented by four.
    """
    starts = [source_of(cell).split("\n")[0] for cell in NOTEBOOK["cells"]]
    assert starts[0] == "---" and "jupyter: python3" in source_of(NOTEBOOK["cells"][0])
    numbers = [int(re.search(r"\d", start)[0]) for start in starts[1:]]
    assert numbers == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    for topic in ("**Model.**", "**Task.**", "**Reward.**", "**Hypothesis.**"):
        assert topic in source_of(NOTEBOOK["cells"][1])
    num_characters = sum(len(source_of(cell)) + 2 for cell in NOTEBOOK["cells"])
    for cell in CODE:
        text = text_of(cell)
        num_characters += len("```python\n\n```\n\n") + len(text) + 4 * text.count("\n") + 8
    assert num_characters < 40_000


def test_it_is_stored_with_the_outputs_of_one_clean_run():
    execution_counts = [cell["execution_count"] for cell in CODE]
    assert execution_counts == list(range(1, len(CODE) + 1)), "top to bottom, once"
    for cell in CODE:
        assert cell["outputs"]
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr", "warnings and progress bars"
    all_text = "".join(text_of(cell) for cell in CODE)
    assert not re.search(
        r"/(home|root|tmp|work|usr|opt|Users|mnt)/|site-packages|\r|\x1b", all_text
    )
    assert PATH.stat().st_size < 200_000


def test_every_measured_number_in_its_analysis_is_in_its_outputs():
    """The analysis is written by hand: after a new run its numbers must be read again."""
    all_text = "".join(text_of(cell) for cell in CODE)
    analysis, _ = source_of(NOTEBOOK["cells"][-1]).split("**Group size.**")  # computed from there
    measured = set(re.findall(r"\d+\.\d+%?|\d+%", analysis))
    assert len(measured) > 5
    assert measured <= set(re.findall(r"\d+(?:\.\d+)?%?", all_text))


@pytest.mark.slow
def test_it_runs_outside_the_repository_and_training_helps(tmp_path):
    """The file and the model's folder are enough. Training is shortened."""
    (tmp_path / "1m").symlink_to(ROOT / "tiny" / "1m")
    notebook = nbformat.read(PATH, as_version=4)
    (training,) = [cell for cell in notebook.cells if "NUM_UPDATES = 40" in cell.source]
    training.source = training.source.replace("NUM_UPDATES = 40", "NUM_UPDATES = 20")
    checks = """
base_reward = get_reward(eval_prompts, before).mean()
reward = get_reward(eval_prompts, after).mean()
assert reward > base_reward + 0.15, (reward, base_reward)
for row in log:
    assert torch.tensor(list(row.values())).isfinite().all()
"""
    notebook.cells.append(nbformat.v4.new_code_cell(checks))
    resources = {"metadata": {"path": str(tmp_path)}}  # where Jupyter would start it
    client = nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources=resources
    )
    client.execute()  # raises if a cell fails
