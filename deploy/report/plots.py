"""Draws the pictures of a report with matplotlib: time and money of the tiers, and their losses."""

import io
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from deploy.report.collection import TierRuns
from deploy.report.formatting import figures, money, unit_of_time
from deploy.report.measures import Rows, TierSummary, loss_curve
from trainer.base.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: Any = {
    "font.size": 10,
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
}


def axes(title: str, label: str) -> Any:
    """Returns matplotlib's axes for a picture in a notebook. `label`: that of the x axis.

    Raises UserError if matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError:
        raise UserError("matplotlib is not installed: pip install matplotlib") from None
    chart = pyplot.subplots(figsize=(6, 3.5))[1]
    chart.set(title=title, xlabel=label)
    return chart


def picture(
    plot: Callable[["Figure"], None], width: float, form: str = "svg", *, dark: bool = False
) -> bytes:
    """Returns a picture as SVG with a transparent background, or as PNG on paper; `width` is in
    inches.

    Raises UserError if matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "the report needs matplotlib for its pictures: pip install matplotlib"
        ) from None
    with style.context("dark_background" if dark else "default"), matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, 3.4), layout="constrained")
        plot(figure)
        file = io.BytesIO()
        metadata = {"Date": None} if form == "svg" else {}
        figure.savefig(file, format=form, dpi=150, transparent=form == "svg", metadata=metadata)
    return file.getvalue()


def measured(rows: Rows) -> list[TierSummary]:
    """Returns the tiers of which the time of a run was measured, on their own machines."""
    real = [row for row in rows if row.done and not row.simulated]
    return [row for row in real if None not in map(row.seconds_of, row.done)]


def time_and_money(figure: "Figure", rows: Rows) -> None:
    """Draws a bar for the time of each tier's runs and one for their cost, side by side.

    Bars end at medians; whiskers reach from the lowest to the highest repeat.
    """
    import numpy as np

    colors = {row: f"C{index}" for index, row in enumerate(rows)}  # as in `losses`
    rows = measured(rows)
    unit, unit_hours = unit_of_time(max(row.total_seconds or 0.0 for row in rows) / 3600)
    usd = [[row.usd_of(run) or 0.0 for run in row.done] for row in rows]
    times = []
    for row in rows:
        times.append([(row.seconds_of(run) or 0.0) / 3600 / unit_hours for run in row.done])
    # A panel for the time, in the unit of the longest, and one for the cost if any is known.
    panels: list[tuple[str, list[list[float]], Callable[[float], str]]] = [
        (f"Time of a run, {unit}", times, figures)
    ]
    if any(map(any, usd)):
        panels.append(("Cost of a run, USD", usd, money))
    figure.set_figheight(1.1 + 0.36 * len(rows))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, values, show) in zip(grid, panels, strict=True):
        ends = [(min(runs), statistics.median(runs), max(runs)) for runs in values]
        low, middle, high = np.array(ends).T
        bar_colors = {"color": [colors[row] for row in rows], "ecolor": "grey"}
        whiskers = (middle - low, high - middle)
        axes.barh(range(len(rows)), middle, height=0.6, xerr=whiskers, capsize=3, **bar_colors)
        # The number stands beside the whisker, for which the axis has room.
        for place, value in enumerate(middle):
            text = show(value) if value else "no price"
            beside = {"textcoords": "offset points", "va": "center"}
            axes.annotate(text, (high[place], place), (5, 0), **beside)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlim(0, 1.35 * max(high))
        axes.locator_params("x", nbins=4)
        axes.tick_params("y", length=0)
    grid[0].set_yticks(range(len(rows)), [row.tier for row in rows])
    grid[0].invert_yaxis()


def losses(figure: "Figure", groups: Sequence[TierRuns]) -> None:
    """Draws the loss by step of the first repeat of each tier over the whole width."""
    axes = figure.subplots()
    for index, group in enumerate(groups):
        steps, values = loss_curve(group.runs[0]) if group.runs else ([], [])
        if not steps:
            continue
        # wide lines come first, so that equal curves all stay visible
        width = 3.5 - 2 * index / len(groups)
        marker = "o" if len(steps) < 30 else ""
        axes.plot(
            steps, values, color=f"C{index}", marker=marker, linewidth=width, label=f" {group.name}"
        )
    axes.margins(x=0.01)
    axes.grid()
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set(xlabel="step", ylabel="loss")
    axes.locator_params("x", integer=True, nbins=5)
    axes.figure.legend(
        loc="outside upper left", ncols=max(1, int(figure.get_figwidth() // 1.7)), fontsize=9
    )
