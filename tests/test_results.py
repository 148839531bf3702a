"""results/: a figure is drawn, and the tables say what analysis.md says."""

import pandas as pd
from conftest import ROOT, run_script

RESULTS = ROOT / "results"
REPORT = (ROOT / "analysis.md").read_text("utf-8")


def test_a_figure_is_drawn(tmp_path):
    result = run_script("results/figures.py", "scaling", "--folder", tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_headline_numbers_are_those_of_the_report():
    test = pd.read_csv(RESULTS / "test.csv")
    demo = test.query("study == 'dynamics' and arm == 'grpo' and temperature == 0")["accuracy"]
    low, high = 100 * demo.min(), 100 * demo.max()
    assert f"| 93.0 ({low:.1f} to {high:.1f}) |" in REPORT
    assert abs(100 * demo.mean() - 93.0) <= 0.051  # a tie
    choices = pd.read_csv(RESULTS / "choices.csv").set_index(["choice", "reference", "measure"])
    raw = choices.loc["raw rewards", "the baseline", "averaged over the run"]
    assert f"{raw['mean']:+.1f} [{raw['low']:.1f}, {raw['high']:.1f}] | significant |" in REPORT
    curves = pd.read_csv(RESULTS / "curves.csv.gz", low_memory=False)
    iterations = curves.query("study == 'dynamics' and arm == 'random' and split == 'train'")
    last = iterations.query("step > 95")["kl_per_token"].mean()
    assert f"to {last:.2f} nats per token" in REPORT
