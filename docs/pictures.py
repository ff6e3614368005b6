"""Draws the pictures of the README from runs of the project:

    python -m trainer.task --recipe=wgan_gp_digits --job_dir=runs/digits
    python -m trainer.task --recipe=wgan_gp_fashion --data=FOLDER --job_dir=runs/clothes
    python -m deploy compare cpu cpu-2workers --recipe=wgan_gp_digits --steps=120 --report_every_steps=10 \
        --sample_every_steps=0 --out=runs/tiers
    python -m docs.pictures runs/digits runs/clothes runs/tiers
"""

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import colors
from matplotlib.figure import Figure
from PIL import Image

from deploy.report import plots
from deploy.report.collection import collect
from deploy.report.measures import summarize
from deploy.report.run_reader import RunRecord

IMAGES = Path(__file__).parent / "images"


def samples(job_dir: Path, out: Path, *, rows: float = 1.0) -> None:
    """Writes the newest sample grid, or its upper rows: a share of them."""
    newest = RunRecord(job_dir).sample
    assert newest, f"{job_dir} has no samples/"
    with Image.open(newest) as grid:
        grid.crop((0, 0, grid.width, min(grid.height, round(grid.height * rows) + 1))).save(out, optimize=True)


def comparison(folder: Path, out: Path) -> None:
    """Draws the losses of a comparison's report, in the light colours of its page."""
    collection = collect([str(folder)])
    [plot] = [plot for title, _, plot in plots.drawings(collection, summarize(collection)) if title == "Loss"]
    with matplotlib.rc_context({**plots.STYLE, "figure.facecolor": "white"}):
        canvas = Figure(figsize=(6, 2.9), layout="constrained")
        axes = canvas.subplots()
        plot(axes)
        axes.set_title("Loss", loc="left", pad=24)
        _colour(canvas)
        canvas.savefig(out, dpi=110, facecolor="white")


def _colour(canvas: Figure) -> None:
    """Replaces placeholders of the page's CSS variables by colours."""
    style = (Path(plots.__file__).parent / "page.css").read_text(encoding="utf-8")
    light = style.partition("@media")[0]
    real = {f"#0102{number}": value for number, value in re.findall(r"--c(\d\d): *(#[0-9a-f]{6})", light)}
    assert real, "page.css defines no colours"
    real["#010202"] = "#ffffff"
    for artist in canvas.findobj():
        for name in ("color", "facecolor", "edgecolor"):
            getter, setter = getattr(artist, f"get_{name}", None), getattr(artist, f"set_{name}", None)
            with suppress(ValueError, TypeError, IndexError):  # the artist has no colour
                if getter and setter:
                    _replace(getter(), setter, real)


def _replace(colour: Any, setter: Any, real: dict[str, str]) -> None:
    red, green, blue, alpha = colors.to_rgba(colour[0] if getattr(colour, "ndim", 1) == 2 else colour)
    found = real.get(colors.to_hex((red, green, blue)))
    if found:
        setter((*colors.to_rgb(found), alpha))


if __name__ == "__main__":
    samples(Path(sys.argv[1]), IMAGES / "digits.png")
    samples(Path(sys.argv[2]), IMAGES / "clothes.png", rows=0.5)
    comparison(Path(sys.argv[3]), IMAGES / "tiers.png")
