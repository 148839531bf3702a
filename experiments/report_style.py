"""What the figures of the report share: their colours, their panels, and curves with bands."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import plotter

# A method has one colour in all figures.
COLORS = {
    "GRPO": plotter.COLORS[0],
    "SFT": plotter.COLORS[1],
    "expert iteration": plotter.COLORS[2],
    "format only": plotter.COLORS[3],  # and other controls
    "random reward": plotter.COLORS[4],
    "before training": "0.5",
}


def new_figure(
    titles: list[str], size: tuple[float, float], num_rows: int = 1
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each title. Several panels have letters.

    Args:
        size: width and height in inches.
    """
    figure = Figure(size, layout="constrained")
    panels = figure.subplots(num_rows, len(titles) // num_rows, squeeze=False).flatten().tolist()
    for letter, ax, title in zip("abcdefghi", panels, titles, strict=False):
        ax.set_title(f"({letter}) {title}" if len(titles) > 1 else title, loc="left")
    return figure, panels


def draw_mean_and_range(ax: Axes, curves: pd.DataFrame, color: str, **style) -> None:
    """Draw the mean of several curves, and a band from the lowest to the highest.

    Args:
        curves: a column for each seed; the index is x.
    """
    low = curves.min(axis="columns")
    high = curves.max(axis="columns")
    ax.fill_between(curves.index, low, high, color=color, alpha=0.15, linewidth=0)
    ax.plot(curves.index, curves.mean(axis="columns"), color=color, **style)


def label_lines(ax: Axes) -> None:
    """Write the label of each line where it ends."""
    ends = {}
    for line in ax.lines:
        if not line.get_label().startswith("_"):
            ends[line.get_label()] = line.get_color(), line.get_ydata()[-1]
    plotter.label_ends(ax, ends)


def label_end(ax: Axes, curve: pd.Series, text: str, color: str, above: float = 0) -> None:
    """Write a text beside the last point of a curve, or so many printer's points above that."""
    end = (curve.index[-1], curve.iloc[-1])
    ax.annotate(text, end, (5, above), textcoords="offset points", color=color, va="center")


def rate_text(learning_rate: float) -> str:
    return np.format_float_scientific(learning_rate, trim="-", exp_digits=1)


def mean_and_range(values: pd.Series, decimals: int = 1) -> str:
    """A cell such as `93.0 (92.5 to 93.7)`: the mean over seeds, the lowest and the highest."""
    # Means of three seeds are often ties, such as 92.95, which the last bit shall not decide.
    mean = f"{values.mean() + 1e-9:.{decimals}f}"
    low = f"{values.min():.{decimals}f}"
    high = f"{values.max():.{decimals}f}"
    return mean if low == high else f"{mean} ({low} to {high})"
