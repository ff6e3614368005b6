"""The figures of a report, as SVG to stand inside an HTML page.

Colours are written as CSS variables of the page (`--c00` …), so that one figure is right in light and in dark.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deploy.report.collection import Collection, TierRuns
from deploy.report.rows import LOSSES, Row
from deploy.report.run_reader import Run
from deploy.report.timing import after_warm_up, epoch_seconds
from trainer.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_INK, _SOFT, _PAPER = "#010200", "#010201", "#010202"  # placeholders: each becomes var(--c…) of the page
_SERIES = tuple(f"#0102{number:02x}" for number in range(16, 24))
_DASHES = ("-", "--", ":")  # with eight colours, for up to 24 tiers
STYLE: Any = {
    "svg.fonttype": "none", "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "text.color": _INK,
    "axes.edgecolor": _SOFT, "axes.labelcolor": _INK, "axes.titlecolor": _INK, "xtick.color": _SOFT,
    "ytick.color": _SOFT, "xtick.labelcolor": _INK, "ytick.labelcolor": _INK, "axes.grid": True, "grid.color": _SOFT,
    "grid.alpha": 0.25, "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False, "lines.linewidth": 1.8,
    "patch.edgecolor": _PAPER, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "path.simplify_threshold": 0.5,
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A drawing with what it shows. `svg`: an <svg> element without fixed size."""

    title: str
    caption: str
    svg: str


Drawing = tuple[str, str, Callable[["Axes"], None]]  # title, caption, and what draws it


def draw(collection: Collection, rows: Sequence[Row]) -> list[Figure]:
    """Every figure for which the runs hold values; UserError where matplotlib is not installed."""
    return [Figure(title, caption, _svg(title, plot)) for title, caption, plot in drawings(collection, rows)]


def drawings(collection: Collection, rows: Sequence[Row]) -> list[Drawing]:
    """What there is to draw, in placeholders for colours."""
    groups, runs = [group for group in collection.tiers if group.runs], collection.runs
    by_epoch = any(_epoch_times(run)[1] for run in runs)
    unit, noun, times = ("s", "epoch", _epoch_times) if by_epoch else ("ms", "step", _step_times)
    scaled = [row for row in rows if row.speed_up is not None]
    priced = [row for row in rows if row.cost_per_million_images is not None and row.images_per_second is not None]
    colours = {group.name: index for index, group in enumerate(collection.tiers)}
    found: list[Drawing] = []
    if any(times(run)[1] for run in runs):
        found.append((f"Time of each {noun}", "time in training alone, after the warm-up",
                      lambda axes: _lines(axes, groups, colours, times, unit)))  # fmt: skip
        found.append((f"How {noun} times are spread", f"how many {noun}s took how long",
                      lambda axes: _histogram(axes, groups, colours, times, unit)))  # fmt: skip
    if len(scaled) > 1:
        simulated = sum(bool(row.simulated) for row in scaled)
        whose = f"{', in part' if simulated < len(scaled) else ''} of simulated devices" if simulated else ""
        marks = "; upright lines mark the ideal of devices of its kind" if _ideals(scaled) else ""
        found.append((f"Speed-up{whose}", f"images/s against the baseline{marks}",
                      lambda axes: _speed_up(axes, scaled, colours)))  # fmt: skip
    if any(_losses(run)[1] for run in runs):
        found.append(("Loss", "over the steps, the first repeat of each tier",
                      lambda axes: _loss_curves(axes, groups, colours)))  # fmt: skip
    if len(priced) > 1:
        found.append(("Cost against time", "of a million images; no tier is both faster and cheaper than the line",
                      lambda axes: _pareto(axes, priced, colours)))  # fmt: skip
    return found


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points of which no other is as low in both values and lower in one, by the first value."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return front


def _svg(title: str, plot: "Callable[[Axes], None]") -> str:
    try:
        import matplotlib
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise UserError("the report needs matplotlib for its figures: pip install matplotlib") from None
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": title}):  # salted: parts of two figures never share an id
        figure = Canvas(figsize=(5.6, 3.6), layout="constrained")
        plot(figure.add_subplot())
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(file.getvalue(), title)


def _inline(svg: str, title: str) -> str:
    """Without the XML head, ids that nothing refers to, fixed sizes and fonts; colours as the page's variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', rf'\1 role="img" aria-label="{title}"', svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    return re.sub(r"#0102([0-9a-f]{2})", r"var(--c\1)", svg)


def _look(index: int) -> dict[str, Any]:
    return {"color": _SERIES[index % len(_SERIES)], "linestyle": _DASHES[index // len(_SERIES) % len(_DASHES)]}


def _epoch_times(run: Run) -> tuple[list[float], list[float]]:
    if not run.steps_per_epoch:
        return [], []
    return [window.step / run.steps_per_epoch for window in after_warm_up(run.epochs)], list(epoch_seconds(run))


def _step_times(run: Run) -> tuple[list[float], list[float]]:
    windows = after_warm_up(run.reports)
    return [w.step for w in windows], [1e3 * w.step_seconds for w in windows if w.step_seconds is not None]


def _losses(run: Run) -> tuple[list[float], list[float]]:
    """The curve of the loss that the table shows, where reports have it; else of the first loss."""
    windows = run.reports or run.epochs
    name = next((name for name in LOSSES if any(name in window.scalars for window in windows)), "")
    found = [(float(window.step), window.scalars[name]) for window in windows if name in window.scalars]
    return [step for step, _ in found], [value for _, value in found]


_Times = Callable[[Run], tuple[list[float], list[float]]]


_BINS = 30
_WIDE = 8.0  # where the largest value is this many times the smallest, an axis is logarithmic


def _label(name: str) -> str:
    """A tier's name as matplotlib shows it whole: it leaves what begins with _ out of legends, and reads $ as TeX."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def _legend(axes: "Axes") -> None:
    """Above the axes, where it hides nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=9, handlelength=1.4, columnspacing=1)


def _scale(axes: "Axes", which: str, values: Sequence[float]) -> None:
    """The axis "x" or "y" is logarithmic where `values` lie far apart; else it begins at 0."""
    if max(values) > _WIDE * min(values) > 0:
        axes.set(**{f"{which}scale": "log"})
        axis = axes.xaxis if which == "x" else axes.yaxis
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    else:
        axes.set(**{f"{which}lim": (0, None)})


def _count(axis: "Axis") -> None:
    """Only whole numbers are marked."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def _lines(axes: "Axes", groups: Sequence[TierRuns], colours: dict[str, int], times: _Times, unit: str) -> None:
    for group in groups:
        for number, run in enumerate(group.runs):
            label = _label(group.name) if number == 0 else None
            axes.plot(*times(run), label=label, alpha=1 if number == 0 else 0.5, **_look(colours[group.name]))
    axes.set(xlabel="epoch" if unit == "s" else "step", ylabel=unit)
    _count(axes.xaxis)
    _scale(axes, "y", [value for group in groups for run in group.runs for value in times(run)[1]])
    _legend(axes)


def _histogram(axes: "Axes", groups: Sequence[TierRuns], colours: dict[str, int], times: _Times, unit: str) -> None:
    values = {group.name: [value for run in group.runs for value in times(run)[1]] for group in groups}
    everything = [value for found in values.values() for value in found]
    low, high = min(everything), max(*everything, 1.01 * min(everything))
    wide = high > _WIDE * low
    parts = [number / _BINS for number in range(_BINS + 1)]
    bins = [low * (high / low) ** part if wide else low + (high - low) * part for part in parts]
    for name, found in values.items():
        look = _look(colours[name])
        axes.hist(found, bins=bins, histtype="stepfilled", alpha=0.25, color=look["color"])
        axes.hist(found, bins=bins, histtype="step", label=_label(name), linewidth=1.5, edgecolor=look["color"],
                  linestyle=look["linestyle"])  # fmt: skip
    axes.set(xlabel=unit, ylabel="epochs" if unit == "s" else "reports")
    _count(axes.yaxis)
    if wide:
        _scale(axes, "x", everything)
    _legend(axes)


def _ideals(rows: Sequence[Row]) -> dict[int, float]:
    """By place, the speed-up of as many ideal devices; nothing where none but the baseline is held against it."""
    found = {place: (row.speed_up or 0) / row.efficiency for place, row in enumerate(rows) if row.efficiency}
    return found if len(found) > 1 else {}


def _speed_up(axes: "Axes", rows: Sequence[Row], colours: dict[str, int]) -> None:
    speed_ups = [row.speed_up or 0 for row in rows]
    ideals = _ideals(rows)
    places = range(len(rows))
    axes.barh(places, speed_ups, color=[_SERIES[colours[row.tier] % len(_SERIES)] for row in rows], height=0.6)
    ends = [place - 0.4 for place in ideals], [place + 0.4 for place in ideals]
    axes.vlines(list(ideals.values()), *ends, color=_INK, linewidth=2)
    axes.set_yticks(places, [f"{_label(row.tier)}\n{value:.2f} x" for row, value in zip(rows, speed_ups, strict=True)])
    axes.set(xlabel="x", xlim=(0, 1.05 * max(*speed_ups, *ideals.values())))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def _loss_curves(axes: "Axes", groups: Sequence[TierRuns], colours: dict[str, int]) -> None:
    for group in groups:
        steps, values = _losses(group.runs[0])
        width = 3.5 - 2 * colours[group.name] / len(groups)  # equal curves lie on each other: all of them stay visible
        axes.plot(steps, values, label=_label(group.name), linewidth=width, **_look(colours[group.name]))
    axes.set(xlabel="step")
    _count(axes.xaxis)
    _legend(axes)


def _pareto(axes: "Axes", rows: Sequence[Row], colours: dict[str, int]) -> None:
    points = [(1e6 / row.images_per_second.median, row.cost_per_million_images or 0)
              for row in rows if row.images_per_second]  # fmt: skip
    front = pareto_front(points)
    axes.plot(*zip(*(points[index] for index in front), strict=True), color=_SOFT, linewidth=1.2, zorder=1)
    for place, index in enumerate(sorted(range(len(rows)), key=lambda index: points[index])):
        name, point = rows[index].tier, points[index]
        axes.scatter(*point, s=60, color=_SERIES[colours[name] % len(_SERIES)], zorder=2)
        below = place % 2  # neighbours' names stay apart
        axes.annotate(_label(name), point, xytext=(5, -13 if below else 7), textcoords="offset points")
    axes.set(xlabel="s per million images", ylabel="USD per million images")
    axes.margins(0.18)
    _scale(axes, "x", [seconds for seconds, _ in points])
    _scale(axes, "y", [dollars for _, dollars in points])
