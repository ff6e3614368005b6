"""Draws the figure of quality.md: `python -m docs.quality_figure`.

Each data set is shown with its longest runs in benchmarks/results/gan_quality_*.json.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.gan_quality import AUGMENTED
from deploy.report import plots

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
IMAGE = Path(__file__).parent / "images" / "quality.png"
COLOURS = {"wgan_gp": "#3b6fb6", "dcgan": "#c2571a", "r3gan": "#3a8a4d"}
DATA = {"fashion": "Fashion-MNIST", "photos": "grocery photos"}


def draw(
    axes: Any, curves: dict[str, list[list[dict[str, float]]]], data: str, metric: str
) -> None:
    """Draws the median of each model over its seeds, in processor minutes, with the lowest and the
    highest."""
    for model, colour in COLOURS.items():
        points = list(zip(*curves[f"{data}/{model}"], strict=True))
        minutes = [statistics.median(each["seconds"] for each in one) / 60 for one in points]
        values = [[each[metric] for each in one] for one in points]
        middle = [statistics.median(one) for one in values]
        axes.fill_between(
            minutes,
            [min(one) for one in values],
            [max(one) for one in values],
            color=colour,
            alpha=0.2,
        )
        axes.plot(minutes, middle, color=colour, marker="o", label=model)
    axes.set(xlabel="processor minutes", ylim=(0, None))
    axes.set_title(f"{'FID' if metric == 'fid' else metric}, {DATA[data]}", loc="left")


def main() -> None:
    """Writes the picture."""
    results = [json.loads(file.read_text("utf-8")) for file in RESULTS.glob("gan_quality_*.json")]
    curves: dict[str, Any] = {}
    for result in sorted(results, key=lambda result: float(result["minutes"])):
        curves |= {case: runs for case, runs in result["curves"].items() if AUGMENTED not in case}
    shown = [data for data in DATA if f"{data}/dcgan" in curves]
    with matplotlib.rc_context({**plots.STYLE, "figure.facecolor": "white"}):
        canvas = Figure(figsize=(4.5 * len(shown), 5.6), layout="constrained")
        grid = canvas.subplots(2, len(shown), squeeze=False, sharex="col")
        for row, metric in zip(grid, ("fid", "coverage"), strict=True):
            for axes, data in zip(row, shown, strict=True):
                draw(axes, curves, data, metric)
        grid[0][0].legend(frameon=False)
        canvas.savefig(IMAGE, dpi=110, facecolor="white")


if __name__ == "__main__":
    main()
