"""results/: a figure is drawn, and the tables say what analysis.md says."""

from conftest import ROOT, run_script

from results import figures

REPORT = (ROOT / "analysis.md").read_text("utf-8")


def test_a_figure_is_drawn(tmp_path):
    result = run_script("results/figures.py", "scaling", "--folder", tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def ends_of_lines(ax):
    """Where the lines and dots of a panel end, rounded."""
    return [round(float(line.get_ydata()[-1]), 1) for line in ax.lines]


def test_figures_end_where_the_report_says():
    """Accuracies and worths are those of its captions and tables."""
    accuracy, careful, reward, *_, length = figures.draw_training().axes
    assert ends_of_lines(accuracy) == [91.7, 42.0, 20.8]
    band_of_grpo = accuracy.collections[0].get_paths()[0].vertices
    accuracies_at_40 = {round(float(y), 1) for x, y in band_of_grpo if x == 40}
    assert accuracies_at_40 == {56.6, 69.8}
    assert ends_of_lines(careful) == [98.2, 22.1, 19.8]
    assert ends_of_lines(reward) == [88.3, 95.8, 99.2, 100.0, 50.0, 52.1]  # curves and circles
    assert ends_of_lines(length) == [74.0, 53.8, 31.4]
    _, by_size = figures.draw_scaling().axes
    after_and_before = [93.8, 25.2, 92.5, 24.4, 15.2, 9.4, 0.7, 0.4]
    assert ends_of_lines(by_size) == after_and_before
    parameters = [line.get_xdata()[0] for line in by_size.lines[::2]]
    assert parameters == [2_775_936, 1_018_496, 271_680, 91_920]
    greedy, samples, _, entropy = figures.draw_real_model().axes
    assert ends_of_lines(greedy) == [25.5, 16.9, 6.8]
    assert ends_of_lines(samples) == [28.3, 15.4, 6.5]
    assert len(entropy.lines) == 2
    _, worth = figures.draw_sft().axes
    assert {41.9, 61.7, 80.7, 86.4, 91.9} < set(ends_of_lines(worth))
    names = [text.get_text() for text in worth.texts]
    assert "10 careful: 47 (39 to 54)" in names and "100 careful" in names


def test_headline_numbers_are_those_of_the_report():
    demo = figures.accuracies_on_test("dynamics", "grpo")
    assert f"| 93.0 ({demo.min():.1f} to {demo.max():.1f}) |" in REPORT
    assert abs(demo.mean() - 93.0) <= 0.051  # a tie
    choices = figures.choices.set_index(["choice", "reference", "measure"])
    raw = choices.loc["raw rewards", "the baseline", "averaged over the run"]
    assert f"{raw['mean']:+.1f} [{raw['low']:.1f}, {raw['high']:.1f}] | significant |" in REPORT
    last = figures.by_seed("dynamics", "random", "kl_per_token").loc[96:].mean().mean()
    assert f"to {last:.2f} nats per token" in REPORT
