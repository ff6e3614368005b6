"""Draws the pictures of the README from runs of the project:

    python -m trainer.task --recipe=wgan_gp_digits --job_dir=runs/digits
    python -m trainer.task --recipe=wgan_gp_fashion --data=FOLDER --job_dir=runs/clothes
    python -m deploy compare cpu cpu-2workers --recipe=wgan_gp_digits --steps=120 \
        --report_every_steps=10 --sample_every_steps=0 --out=runs/tiers
    python -m docs.pictures runs/digits runs/clothes runs/tiers
"""

import sys
from functools import partial
from pathlib import Path

from PIL import Image

from deploy.report import plots
from deploy.report.collection import collect
from deploy.report.run_reader import RunRecord

IMAGES = Path(__file__).parent / "images"


def samples(job_dir: Path, out: Path, *, rows: float = 1.0) -> None:
    """Writes the newest sample grid, or its upper rows: a share of them."""
    newest = RunRecord(job_dir).sample
    assert newest, f"{job_dir} has no samples/"
    with Image.open(newest) as grid:
        grid.crop((0, 0, grid.width, min(grid.height, round(grid.height * rows) + 1))).save(
            out, optimize=True
        )


def comparison(folder: Path, out: Path) -> None:
    """Draws the losses of a comparison's report."""
    groups = collect([str(folder)]).tiers
    out.write_bytes(plots.picture(partial(plots.losses, groups=groups), 6, "png"))


if __name__ == "__main__":
    samples(Path(sys.argv[1]), IMAGES / "digits.png")
    samples(Path(sys.argv[2]), IMAGES / "clothes.png", rows=0.5)
    comparison(Path(sys.argv[3]), IMAGES / "tiers.png")
