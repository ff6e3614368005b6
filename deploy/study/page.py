"""Writes the results of a study: tables, and one self-contained tune.html with figures."""

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.report.html_page import TEMPLATE, figure, items, page, section
from deploy.report.plots import LOOKS, svg
from deploy.study.outcome import Outcome, to_csv, to_json, to_markdown, to_terminal
from deploy.study.trials import Trial
from trainer.config.fields import as_text
from trainer.storage import make_writable, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = "tune.html"
_SOFT = "#010201"  # placeholder of the page's grey, as in deploy.report.plots


def write_outcome(outcome: Outcome, out: Path, title: str, command: str) -> None:
    """Writes table.md, table.csv, table.json and tune.html into `out`, and prints the table and the verdict.

    tune.html comes last: if matplotlib is missing, UserError is raised after the tables.
    """
    make_writable(out, "out")
    write_whole(out / "table.md", to_markdown(outcome))
    write_whole(out / "table.csv", to_csv(outcome))
    write_whole(out / "table.json", to_json(outcome))
    try:
        write_whole(out / PAGE, to_html(outcome, title, command))
    finally:
        lines = [to_terminal(outcome), *outcome.verdict(), "", *outcome.notes()]
        print("\n".join([*lines, *(["", outcome.best_command] if outcome.best else [])]))
    print(f"\n{out / PAGE}")


def to_html(outcome: Outcome, title: str, command: str) -> str:
    """Returns one HTML page that needs no other file. `command`: of the study."""
    figures = [figure(name, caption, svg(name, plot)) for name, caption, plot in _drawings(outcome)]
    commands = {"The best trial": outcome.best_command, "The study": command}
    return page(
        TEMPLATE,
        title=html.escape(title),
        about=html.escape(f"{len(outcome.trials)} trials by {outcome.metric} ({outcome.goal})"),
        simulated="",
        verdict=items(outcome.verdict()),
        table=_table(*outcome.rows()),
        notes=items(outcome.notes()),
        figures=section("Figures", figures),
        samples="",
        commands="\n".join(
            f"<details open><summary>{name}</summary><pre>{html.escape(text)}</pre></details>"
            for name, text in commands.items()
            if text
        ),
    )


def _table(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in titles)
    lines = "\n".join(
        f'<tr><th scope="row">{html.escape(first)}</th>{"".join(f"<td>{html.escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in cells
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n</table>"


def _drawings(outcome: Outcome) -> "list[tuple[str, str, Callable[[Axes], None]]]":
    """Returns title, caption and function of each figure that has values."""
    trials = [trial for trial in outcome.trials if trial.value is not None]
    if not trials:
        return []
    by_setting = [
        (f"{outcome.metric} by {name}", "each trial; pruned ones at their last report",
         lambda axes, name=name: _by_setting(axes, trials, name, outcome.metric))
        for name in outcome.names
    ]  # fmt: skip
    first = (f"{outcome.metric} by trial", "the line is the best so far; pruned trials at their last report",
             lambda axes: _by_trial(axes, trials, outcome))  # fmt: skip
    return [first, *by_setting]


def _by_trial(axes: "Axes", trials: Sequence[Trial], outcome: Outcome) -> None:
    complete = [(trial.number, float(trial.value or 0.0)) for trial in trials if trial.state == "complete"]
    _points(axes, trials, [float(trial.number) for trial in trials])
    if complete:
        better, best = (min if outcome.goal == "minimize" else max), list[float]()
        for _, value in complete:
            best.append(better([*best[-1:], value]))
        axes.step([number for number, _ in complete], best, where="post", color=LOOKS[0]["color"], label="best so far")
    axes.set(xlabel="trial", ylabel=outcome.metric.replace("$", r"\$"))
    axes.locator_params("x", integer=True)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=9, handlelength=1.4, columnspacing=1)


def _by_setting(axes: "Axes", trials: Sequence[Trial], name: str, metric: str) -> None:
    values = [trial.settings.get(name) for trial in trials]
    numbers = [float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if len(numbers) == len(values):
        _points(axes, trials, numbers)
        if max(numbers) > 8 * min(numbers) > 0:
            axes.set_xscale("log")
    else:
        names = sorted({as_text(value) for value in values})
        _points(axes, trials, [float(names.index(as_text(value))) for value in values])
        axes.set_xticks(range(len(names)), [text.replace("$", r"\$") for text in names])
    axes.set(xlabel=name, ylabel=metric.replace("$", r"\$"))


def _points(axes: "Axes", trials: Sequence[Trial], places: Sequence[float]) -> None:
    """Draws the metric of each trial at a place of the x axis, with its spread, in a look of its state."""
    looks: dict[str, dict[str, Any]] = {
        "complete": {"color": LOOKS[0]["color"], "marker": "o"},
        "pruned": {"color": _SOFT, "marker": "x"},
    }
    for state in sorted({trial.state for trial in trials}):
        found = [(at, trial) for at, trial in zip(places, trials, strict=True) if trial.state == state]
        look = looks.get(state, {"color": LOOKS[1]["color"], "marker": "s"})
        spreads = [trial.spread or 0.0 for _, trial in found]
        axes.errorbar(
            [at for at, _ in found], [trial.value or 0.0 for _, trial in found],
            yerr=spreads if any(spreads) else None, linestyle="", capsize=2, label=state, markersize=5, **look,
        )  # fmt: skip
