"""`--stream` against the same shards staged, and against what the model takes: `python -m benchmarks.streaming`.

From fake-gcs-server on loopback, whose work the same cores do: this shows what the client costs, not the network.
"""

import argparse
import os
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import input_side
from benchmarks.digits import images_a_step
from benchmarks.measure import base_parser, keep, quartiles, ratios, run_main
from tests.trainer.storage.emulator import fake_gcs
from trainer.config.recipe import resolve
from trainer.config.train_config import TrainConfig
from trainer.data.prepare import prepare
from trainer.storage import Address
from trainer.storage.gcs import connect
from trainer.storage.staging import stage

RECIPE = "--recipe=wgan_gp_photos"
ROW_BY_ROW, STREAMED = "staged, row by row", "streamed"
# Some 12 shards of an epoch are left on the disk for the next one: of so many that is little.
SHARDS, SHARD_MIB = 64, 4


def fill(address: Address, config: TrainConfig, folder: Path) -> int:
    """Puts prepared shards of random images there; how many images."""
    client: Any = connect()._client
    client.create_bucket(address.bucket)
    pixels = config.image_size**2 * config.channels
    images = SHARDS * (SHARD_MIB * 2**20 // pixels)
    shape = (images, config.image_size, config.image_size, config.channels)
    np.savez(folder / "images.npz", images=np.random.default_rng(0).integers(0, 256, shape, np.uint8))
    prepare(resolve([RECIPE, f"--data={folder / 'images.npz'}"]).config, address, SHARD_MIB, lambda done, total: None)
    return images


def measure(folder: Path, repeats: int, seconds: float) -> dict[str, list[float]]:
    """images/s of the model, on staged shards, and of its input side alone, streamed and staged."""
    config = resolve([RECIPE, "--data=digits"]).config
    address = Address(f"b-{uuid.uuid4().hex}", "shards")
    steps = fill(address, config, folder) // images_a_step(config)  # an epoch: a turn ends where it began
    staged = f"--data={stage(str(address), 'data', str(folder / 'staged'))}"
    inputs = {
        "staged, in memory": [staged],
        ROW_BY_ROW: [staged, "--data_memory_mib=0"],
        STREAMED: [f"--data={address}", "--stream", f"--cache_dir={folder / 'streamed'}"],
    }
    return input_side.against_the_model([RECIPE], inputs, repeats, seconds, multiple=steps)


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    return base_parser(__doc__, repeats=5, seconds=3.0)


def main() -> None:
    """Prints the table and keeps the raw numbers."""
    options = make_parser().parse_args()
    with fake_gcs() as url, tempfile.TemporaryDirectory() as folder:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        found = measure(Path(folder), options.repeats, options.seconds)
    what = f"{SHARDS} shards of {SHARD_MIB} MiB"
    print("\n".join([f"\nInput side alone of {RECIPE.partition('=')[2]}, {what}", "", *input_side.table(found)]))
    low, median, high = quartiles(ratios(found, STREAMED, ROW_BY_ROW))
    print(f"\nStreamed: {median:.2f} of what staged ones give row by row (quartiles {low:.2f} to {high:.2f})")
    keep("streaming", {"command": "python -m benchmarks.streaming", "what": what, "images_per_second": found})


if __name__ == "__main__":
    run_main(main)
