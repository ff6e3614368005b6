"""Draws the figures of a report as SVG inside an HTML page.

Colours become CSS variables of the page (`--c00` …), so that one figure suits light and dark mode.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from deploy.report.collection import Collection
from deploy.report.measures import LOSSES, TierSummary, in_units
from deploy.report.run_reader import RunRecord
from trainer.base.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _SOFT, _PAPER = "#010200", "#010201", "#010202"  # placeholders: #0102NN becomes var(--cNN), set by the page
LOOKS: list[dict[str, Any]] = [
    {"color": f"#0102{number:02x}", "linestyle": dashes, "marker": mark}
    for dashes, mark in (("-", "o"), ("--", "s"), (":", "^")) for number in range(16, 24)
]  # fmt: skip
STYLE: Any = {
    "svg.fonttype": "none", "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "text.color": _INK,
    "axes.edgecolor": _SOFT, "axes.labelcolor": _INK, "axes.titlecolor": _INK, "xtick.color": _SOFT,
    "ytick.color": _SOFT, "xtick.labelcolor": _INK, "ytick.labelcolor": _INK, "axes.grid": True, "grid.color": _SOFT,
    "grid.alpha": 0.25, "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False, "lines.linewidth": 1.8,
    "patch.edgecolor": _PAPER, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "path.simplify_threshold": 0.5, "text.parse_math": False,
}  # fmt: skip


def axes(title: str, of: str) -> Any:
    """Returns matplotlib's axes for a picture in a notebook. `of`: the label of the x axis.

    Raises UserError if matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError:
        raise UserError("matplotlib is not installed: pip install matplotlib") from None
    drawn = pyplot.subplots(figsize=(6, 3.5))[1]
    drawn.set(title=title, xlabel=of)
    return drawn


def draw(collection: Collection, rows: Sequence[TierSummary]) -> list[tuple[str, str, str]]:
    """Returns title, caption and <svg> element of every figure for which the runs have values.

    Raises UserError if matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise UserError("the report needs matplotlib for its figures: pip install matplotlib") from None
    figures = []
    for title, caption, plot in drawings(collection, rows):
        with matplotlib.rc_context({**STYLE, "svg.hashsalt": title}):  # salted: ids of two figures never collide
            figure = Canvas(figsize=(5.6, 3.6), layout="constrained")
            plot(figure.add_subplot())
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        svg = file.getvalue()
        # Remove the XML head, unused ids, fixed sizes and fonts, and turn colours into variables of the page.
        for pattern, text in (
            (r"(?s)^.*?(?=<svg)", ""),
            (r"(?s)<metadata>.*?</metadata>", ""),
            (r'<g id="[^"]*"', "<g"),
            (r'(<svg[^>]*?) width="[^"]*"', rf'\1 role="img" aria-label="{title}"'),
            (r'(<svg[^>]*?) height="[^"]*"', r"\1"),
            (r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px"),
            (r"#0102([0-9a-f]{2})", r"var(--c\1)"),
        ):
            svg = re.sub(pattern, text, svg)
        figures.append((title, in_units(caption, rows), svg))
    return figures


def drawings(
    collection: Collection, rows: Sequence[TierSummary]
) -> Iterator[tuple[str, str, Callable[["Axes"], None]]]:
    """Yields title, caption and drawing function of the figures for which the runs have values.

    The most important one comes first; colours are placeholders.
    """
    speeds = {row.tier: row.images_per_second.median for row in rows if row.images_per_second}
    groups = [group for group in collection.tiers if group.runs]
    scaled = [row for row in rows if row.speed_up is not None and not (row.simulated or row.base.simulated)]
    priced = [row for row in rows if row.cost_per_million_images is not None and row.tier in speeds]
    looks = {group.name: LOOKS[index % len(LOOKS)] for index, group in enumerate(collection.tiers)}

    def cost_against_time(axes: "Axes") -> None:
        points = [(1e6 / speeds[row.tier], row.cost_per_million_images) for row in priced]
        front = pareto_front(points)
        axes.plot(*zip(*(points[index] for index in front), strict=True), color=_SOFT, linewidth=1.2, zorder=1)
        for point, row in zip(points, priced, strict=True):
            axes.plot(*point, **{**looks[row.tier], "linestyle": "", "label": f" {row.tier}"})
        axes.set(xlabel="s per million images", ylabel="USD per million images", xlim=(0, None), ylim=(0, None))
        _legend_above(axes)

    def speed_ups(axes: "Axes") -> None:
        axes.figure.set(figheight=max(3.6, 0.2 * len(scaled) + 1))
        colors = [looks[row.tier]["color"] for row in scaled]
        axes.barh(range(len(scaled)), [row.speed_up for row in scaled], color=colors, height=0.6)
        axes.set_yticks(range(len(scaled)), [f"{row.tier}  {row.speed_up:.2f} x" for row in scaled])
        axes.set(xlabel="x")
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")

    def loss_curves(axes: "Axes") -> None:
        for index, group in enumerate(groups):
            width = 3.5 - 2 * index / len(groups)  # wide lines come first, so that equal curves all stay visible
            steps, losses = _losses(group.runs[0])
            marker = looks[group.name]["marker"] if len(steps) == 1 else ""
            look = {**looks[group.name], "marker": marker, "linewidth": width}
            axes.plot(steps, losses, label=f" {group.name}", **look)  # a name with _ in front would have no legend
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.set(xlabel="step")
        axes.locator_params("x", integer=True)
        _legend_above(axes)

    if len(priced) > 1:
        caption = "for a million images; no tier is both faster and cheaper than the line"
        yield "Cost against time", caption, cost_against_time
    if len(scaled) > 1:
        yield "Speed-up", "images/s relative to the baseline", speed_ups
    if any(_losses(run)[1] for run in collection.runs):
        yield "Loss", "by step, for the first repeat of each tier", loss_curves


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the indices of the points that no other point dominates, in the order of their first value.

    A point dominates another if none of its two values is higher and one is lower.
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return front


def _losses(run: RunRecord) -> tuple[list[float], list[float]]:
    """Returns the steps and the values of the first of LOSSES that the run reports; empty lists if it reports none."""
    lines = run.reports or run.epochs
    name = next((name for name in LOSSES if any(name in line.scalars for line in lines)), "")
    reports = [line for line in lines if name in line.scalars]
    return [float(line.step) for line in reports], [line.scalars[name] for line in reports]


def _legend_above(axes: "Axes") -> None:
    """Puts the legend above the axes, where it covers no line, and makes room for it: four names a row."""
    axes.figure.set(figheight=3.6 + 0.2 * (len(axes.lines) // 4))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=9, handlelength=1.4, columnspacing=1)
