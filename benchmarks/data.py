"""The ways in: `prepare` against plain Pillow, and the input side alone against what models consume.

`python -m benchmarks.data FOLDER`, a folder of image files.
"""

import argparse
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image, ImageOps

from benchmarks.measure import alternate, base_parser, images_per_second, keep, run_main, table
from trainer.config import TrainConfig
from trainer.data import image_folder
from trainer.data.batches import Schedule, batches
from trainer.data.prepare import prepare
from trainer.data.sources import load_dataset
from trainer.distribution.strategy import make_replicas

SIZE = 64


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


def input_side(config: TrainConfig) -> dict[str, float]:
    """images/s that the pipeline gives when no model takes part, in memory and row by row."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(config, Path(folder), 64, lambda done, total: None)
        for name, memory in (("in memory", 4096), ("row by row", 0)):
            given = TrainConfig(data=folder, image_size=SIZE, channels=3, data_memory_mib=memory, global_batch_size=128)
            dataset = load_dataset(given)
            schedule = Schedule(dataset.train.count, 128, 5, 0)
            rows = iter(batches(dataset.train, schedule, make_replicas(given)))

            def run(steps: int, rows: object = rows) -> int:
                for _ in range(steps):
                    next(rows)  # type: ignore[call-overload]
                return steps * 5 * 128

            run(5)
            found[name] = images_per_second(run, 3.0)()
    return found


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = base_parser(__doc__, repeats=5)
    parser.add_argument("folder", type=Path)
    return parser


def main() -> None:
    """Prints the tables and keeps the raw numbers."""
    options = make_parser().parse_args()
    config = TrainConfig(data=f"folder:{options.folder}", image_size=SIZE, channels=3)
    files = [file for part in image_folder.find(options.folder) if part for file in part.files]
    raw = alternate({"prepare": lambda: ours(config), "plain Pillow": lambda: plain_pillow(files)}, options.repeats)
    print("\n".join([f"\n{len(files):,} photos to {SIZE}x{SIZE}", "", *table(raw, "prepare", "seconds")]))
    speed = input_side(config)
    shown = ", ".join(f"{value:,.0f} images/s {name}" for name, value in speed.items())
    print(f"\nInput side alone, {SIZE}x{SIZE}x3, batch 128: {shown}")
    command = f"python -m benchmarks.data {options.folder.name}"
    keep("data", {"command": command, "seconds": raw, "images_per_second": speed})


if __name__ == "__main__":
    run_main(main)
