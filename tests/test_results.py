"""results/: a figure is drawn, and the tables say what analysis.md says."""

import re

from conftest import ROOT, run_script

from results import claims, figures

REPORT = " ".join((ROOT / "analysis.md").read_text("utf-8").split())


def test_every_figure_of_the_report_can_be_drawn(tmp_path):
    shown = set(re.findall(r"\(results/(\w+)\.png\)", REPORT))
    stored = {path.stem for path in (ROOT / "results").glob("*.png")}
    drawn = {name.removeprefix("draw_") for name in vars(figures) if name.startswith("draw_")}
    assert shown == stored == set(figures.FIGURES) <= drawn | set(figures.ABLATIONS)
    for name in ("qwen", "judge", "grpo_normalization"):  # the others take half a minute
        run = run_script("results/figures.py", name, "--folder", tmp_path)
        assert run.returncode == 0, run.stderr
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def ends_of_lines(ax):
    """Where the lines and dots of a panel end, rounded."""
    return [round(float(line.get_ydata()[-1]), 1) for line in ax.lines]


def test_figures_show_these_numbers():
    """Where their lines end: a table that changes, or a mean over other seeds, is seen."""
    accuracy, careful, reward, *_, length = figures.draw_training().axes
    assert ends_of_lines(accuracy) == [91.7, 42.0, 20.8]
    band_of_grpo = accuracy.collections[0].get_paths()[0].vertices
    accuracies_at_40 = {round(float(y), 1) for x, y in band_of_grpo if x == 40}
    assert accuracies_at_40 == {56.6, 69.8}
    assert ends_of_lines(careful) == [98.2, 22.1, 19.8]
    assert ends_of_lines(reward) == [88.3, 95.8, 99.2, 100.0, 50.0, 52.1]  # curves and circles
    assert ends_of_lines(length) == [74.0, 53.8, 31.4]
    _, by_size = figures.draw_scaling().axes
    after_and_before = [93.8, 25.2, 92.5, 24.4, 48.5, 12.8, 15.2, 9.4, 0.7, 0.4]
    assert ends_of_lines(by_size) == after_and_before
    parameters = [line.get_xdata()[0] for line in by_size.lines[::2]]
    assert parameters == [2_775_936, 1_018_496, 585_696, 271_680, 91_920]
    greedy, solutions = figures.draw_smollm2().axes
    assert ends_of_lines(greedy) == [25.5, 16.9, 6.8]
    means_by_solutions = solutions.lines[-1].get_ydata()
    assert [round(float(mean)) for mean in means_by_solutions] == [1, 19, 34, 40]
    _, worth, _, filtered = figures.draw_sft().axes
    assert ends_of_lines(filtered)[0] == 55.8  # of seed 0
    assert {41.9, 61.7, 80.7, 86.4, 91.9} < set(ends_of_lines(worth))
    names = [text.get_text() for text in worth.texts]
    assert "10 careful: 47 (39 to 54)" in names and "100 careful" in names


def test_figures_of_ablations_show_these_numbers():
    """An arm is at its best rate, with the four seeds that all arms have."""
    accuracy, grad_norm, _ = figures.draw_ablation(*figures.ABLATIONS["grpo_baselines"]).axes
    assert ends_of_lines(accuracy) == [83.2, 44.1]
    assert ends_of_lines(grad_norm) == [0.2, 0.4]
    accuracy, *_ = figures.draw_ablation(*figures.ABLATIONS["grpo_learning_rate"]).axes
    assert ends_of_lines(accuracy) == [76.9, 85.9, 76.2, 2.8]
    accuracy, *_ = figures.draw_ablation(*figures.ABLATIONS["grpo_off_policy_clip_ablation"]).axes
    assert ends_of_lines(accuracy) == [87.3, 87.4, 80.4, 84.0]
    accuracy, by_second, *_ = figures.draw_grpo_off_policy().axes
    assert ends_of_lines(accuracy) == ends_of_lines(by_second) == [83.2, 84.9, 87.3, 83.5]
    seconds = [round(float(line.get_xdata()[-1])) for line in by_second.lines]
    assert seconds == [110, 140, 157, 296]
    accuracy, _ = figures.draw_expert_iteration().axes
    assert ends_of_lines(accuracy) == [75.9, 67.1, 73.3, 71.3, 70.3, 71.9]


def test_headline_numbers_are_those_of_the_report():
    demo = figures.accuracies_on_test("dynamics", "grpo")
    assert f"93.0% ({demo.min():.1f}% to {demo.max():.1f}%)" in REPORT
    assert abs(demo.mean() - 93.0) <= 0.051  # a tie
    choices = figures.choices.set_index(["choice", "reference", "measure"])
    raw = choices.loc["raw rewards", "the baseline", "averaged over the run"]
    loss = f"{-raw['mean']:.1f} points over the run [{-raw['high']:.1f}, {-raw['low']:.1f}]"
    assert loss in REPORT
    last = figures.by_seed("dynamics", "grpo", "kl_per_token").loc[96:].mean().mean()
    assert f"{last:.2f} nats per token" in REPORT


def test_bold_sentences_on_qwen_have_the_numbers_of_its_answers():
    """Counted anew from the answers that are kept."""
    counted = claims.claims()
    section = REPORT.partition("# What do solutions and GRPO do for a real Qwen?")[2]
    one_line = " ".join(section.split())
    bold = one_line.partition("**")[2].partition("**")[0]
    for name in ("sheet_format", "sheet_calculates"):
        assert counted[name].partition(",")[0] in bold, name
    for name in (
        "calculation_last_number",
        "calculation_strict",
        "calculation_or_random_last_number",
        "calculation_or_asked_last_number",
        "calculation_or_asked_strict",
        "answer_strict",
        "sheet_last_number",
        "primary_last_number",
    ):
        shares, gained, lost, *_ = counted[name].split(", ")
        assert shares in bold and f"{gained}, {lost}" in bold, name
    assert "3 -> 30 right of 66" in counted["calculation_where_no_equals_was"]
    assert "after that for calculations 30" in one_line
    assert "28 gained, 17 lost" in counted["older_last_number"] and "28 gained, 17 lost" in section
    assert "4 -> 17 right of 51" in counted["older_where_it_calculates"] and "4 to 17" in section
