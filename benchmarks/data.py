"""The ways in: `prepare` against plain Pillow, and the input side alone against what the model of its recipe takes.

`python -m benchmarks.data PHOTOS [--mnist=FOLDER]`: a folder of image files, and one of MNIST's four idx files.
"""

import argparse
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image, ImageOps

from benchmarks import input_side
from benchmarks.measure import alternate, base_parser, keep, run_main, table
from trainer.config.recipe import resolve
from trainer.config.train_config import TrainConfig
from trainer.data import image_folder
from trainer.data.prepare import prepare

SIZE = 64
ON_PHOTOS, ON_MNIST = ("wgan_gp_photos",), ("mlp_mnist", "cnn_mnist", "wgan_gp_mnist")
GOAL = 10  # times what the model takes


def plain_pillow(files: list[Path]) -> float:
    """Seconds to decode and resize `files` on all cores, by nothing but Pillow."""

    def one(path: Path) -> bytes:
        with Image.open(path) as image:
            return ImageOps.fit(image.convert("RGB"), (SIZE, SIZE), method=Image.Resampling.BICUBIC).tobytes()

    began = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assert all(pool.map(one, files))
    return time.perf_counter() - began


def ours(config: TrainConfig) -> float:
    """Seconds of `prepare`, checksums and writing included."""
    folder = Path(tempfile.mkdtemp())
    began = time.perf_counter()
    prepare(config, folder / "shards", 64, lambda done, total: None)
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds


def input_side_of(recipe: str, data: str, repeats: int, seconds: float) -> dict[str, list[float]]:
    """images/s of the model of `recipe` and of its input side alone, on shards prepared from `data`."""
    flags = [f"--recipe={recipe}"]
    with tempfile.TemporaryDirectory() as folder:
        prepare(resolve([*flags, f"--data={data}"]).config, Path(folder), 64, lambda done, total: None)
        inputs = {
            "in memory": [f"--data={folder}"],
            "row by row": [f"--data={folder}", "--data_memory_mib=0"],
        }
        return input_side.against_the_model(flags, inputs, repeats, seconds)


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = base_parser(__doc__, repeats=5, seconds=2.0)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--mnist", type=Path, help="without it only the recipe of the photos is measured")
    return parser


def main() -> None:
    """Prints the tables and keeps the raw numbers."""
    options = make_parser().parse_args()
    config = TrainConfig(data=f"folder:{options.photos}", image_size=SIZE, channels=3)
    files = [file for part in image_folder.find(options.photos) if part for file in part.files]
    raw = alternate({"prepare": lambda: ours(config), "plain Pillow": lambda: plain_pillow(files)}, options.repeats)
    print("\n".join([f"\n{len(files):,} photos to {SIZE}x{SIZE}", "", *table(raw, "prepare", "seconds")]), flush=True)
    data = dict.fromkeys(ON_PHOTOS, config.data)
    if options.mnist:
        data |= dict.fromkeys(ON_MNIST, f"idx:{options.mnist}")
    speed = {}
    for recipe, source in data.items():
        speed[recipe] = input_side_of(recipe, source, options.repeats, options.seconds)
        title = f"\nInput side alone of {recipe}, prepared shards"
        print("\n".join([title, "", *input_side.table(speed[recipe], GOAL)]), flush=True)
    command = f"python -m benchmarks.data {options.photos.name}"
    command += f" --mnist={options.mnist.name}" if options.mnist else ""
    keep("data", {"command": command, "seconds": raw, "images_per_second": speed})


if __name__ == "__main__":
    run_main(main)
