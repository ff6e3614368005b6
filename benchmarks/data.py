"""Measures `prepare` against plain Pillow, and the input pipeline alone against the images/s that its model takes:
`python -m benchmarks.data PHOTOS [--mnist=FOLDER]`, with a folder of image files and one of MNIST's four idx files.
"""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image, ImageOps

from benchmarks import input_pipeline
from benchmarks.runner import compare, elapsed, make_parser, print_table, program, save
from trainer.base.settings.request import resolve
from trainer.base.settings.train_config import TrainConfig
from trainer.data.image_files import find_images
from trainer.data.prepare import write_pieces

SIZE = 64
MNIST_RECIPES = ("mlp_mnist", "cnn_mnist", "wgan_gp_mnist")
GOAL = 10  # times the images/s of the model
PARSER = make_parser(__doc__, repeats=5, seconds=2.0)
PARSER.add_argument("photos", type=Path)
PARSER.add_argument("--mnist", type=Path, help="without it only the recipe of the photos is measured")


def decode_with_pillow(files: list[Path]) -> None:
    """Decodes and resizes `files` on all cores."""

    def decode(path: Path) -> bytes:
        with Image.open(path) as image:
            return ImageOps.fit(image.convert("RGB"), (SIZE, SIZE), method=Image.Resampling.BICUBIC).tobytes()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assert all(pool.map(decode, files))


def seconds_of_prepare(config: TrainConfig) -> float:
    """Measures `prepare`, which also computes checksums and writes files."""
    with tempfile.TemporaryDirectory() as folder:
        return elapsed(lambda: write_pieces(config, Path(folder) / "prepared"))


@program
def main() -> None:
    """Prints the tables and saves the raw numbers."""
    options = PARSER.parse_args()
    config = TrainConfig(data=f"folder:{options.photos}", image_size=SIZE, channels=3)
    files = [file for part in find_images(options.photos) if part for file in part.sources if isinstance(file, Path)]
    candidates = {
        "prepare": lambda: seconds_of_prepare(config),
        "plain Pillow": lambda: elapsed(lambda: decode_with_pillow(files)),
    }
    raw = compare(f"{len(files):,} photos to {SIZE}x{SIZE}", candidates, options.repeats)
    speed, mnist = {}, MNIST_RECIPES if options.mnist else ()
    for recipe, data in {"wgan_gp_photos": config.data, **dict.fromkeys(mnist, f"idx:{options.mnist}")}.items():
        with tempfile.TemporaryDirectory() as folder:
            flag = f"--recipe={recipe}"
            write_pieces(resolve([flag, f"--data={data}"]).config, Path(folder))
            inputs = {"in memory": [f"--data={folder}"], "row by row": [f"--data={folder}", "--data_memory_mib=0"]}
            found = input_pipeline.measure_with_model([flag], inputs, options.repeats, options.seconds)
        print_table(f"Input pipeline of {recipe} alone, prepared data", input_pipeline.table(found, GOAL))
        speed[recipe] = found
    save("data", seconds=raw, images_per_second=speed)
