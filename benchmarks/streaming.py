"""Measures the input pipeline with `--stream` against staged shards and the model: `python -m benchmarks.streaming`."""

import numpy as np

from benchmarks.emulated_bucket import emulated_bucket
from benchmarks.input_pipeline import measure_with_model, table
from benchmarks.processes import images_per_step
from benchmarks.runner import make_parser, print_table, program, quartiles, ratios, save
from trainer.config.overrides import resolve
from trainer.data.prepare import prepare
from trainer.storage import Address
from trainer.storage.staging import stage

RECIPE = "--recipe=wgan_gp_photos"
ROW_BY_ROW, STREAMED = "staged, row by row", "streamed"
SHARDS, SHARD_MIB = 64, 4  # some 12 shards of an epoch stay on the disk for the next one: few of 64
PARSER = make_parser(__doc__, repeats=5, seconds=3.0)


@program
def main() -> None:
    """Prints the table and saves the raw numbers."""
    options = PARSER.parse_args()
    with emulated_bucket() as (bucket, _, folder):
        file, address = folder / "images.npz", Address(bucket, "shards")
        config = resolve([RECIPE, f"--data={file}"]).config
        pixels = (config.image_size, config.image_size, config.channels)
        images = SHARDS * (SHARD_MIB * 2**20 // int(np.prod(pixels)))
        np.savez(file, images=np.random.default_rng(0).integers(0, 256, (images, *pixels), np.uint8))
        prepare(config, address, SHARD_MIB, lambda done, total: None)
        staged = f"--data={stage(str(address), 'data', str(folder / 'staged'))}"
        inputs = {
            "staged, in memory": [staged],
            ROW_BY_ROW: [staged, "--data_memory_mib=0"],
            STREAMED: [f"--data={address}", "--stream", f"--cache_dir={folder / 'streamed'}"],
        }
        epoch = images // images_per_step(config)  # in steps: a turn ends where it began
        found = measure_with_model([RECIPE], inputs, options.repeats, options.seconds, multiple=epoch)
    print_table(f"Input pipeline of wgan_gp_photos alone, {SHARDS} shards of {SHARD_MIB} MiB", table(found))
    low, median, high = quartiles(ratios(found, STREAMED, ROW_BY_ROW))
    print(
        f"\nStreamed: {median:.2f} times the images/s of staged shards row by row (quartiles {low:.2f} to {high:.2f})"
    )
    save("streaming", images_per_second=found)
