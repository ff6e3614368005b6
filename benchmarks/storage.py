"""Measures staging against the SDK's own call, and uploads beside training: `python -m benchmarks.storage`."""

import os
import threading
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.emulated_bucket import emulated_bucket
from benchmarks.runner import compare, elapsed, make_parser, program, quartiles, save
from benchmarks.trainer_loop import TrainingLoop, setup_of
from trainer.base.storage import Address
from trainer.base.storage.gcs import connect, crc32c_of
from trainer.base.storage.staging import stage

OBJECTS, SIZE = 64, 4 * 2**20
# The steps of a measurement take longer than the uploads beside them, and are short enough that other load on the
# machine disturbs both of a pair alike; each repeat has PAIRS.
UPLOADS, STEPS, PAIRS = 2, 100, 8
PARSER = make_parser(__doc__, repeats=5)


def download_with_sdk(bucket: Any, folder: Path) -> None:
    """Downloads as a user of the SDK would: list, then transfer_manager.download_many with checksums."""
    from google.cloud.storage import transfer_manager

    (target := folder / uuid.uuid4().hex).mkdir()
    pairs = [(blob, str(target / Path(blob.name).name)) for blob in bucket.list_blobs(prefix="d/")]
    transfer_manager.download_many(
        pairs, worker_type=transfer_manager.THREAD, max_workers=16, raise_exception=True,
        download_kwargs={"checksum": "crc32c"},
    )  # fmt: skip


def beside_uploads(work: Callable[[], object], address: Address, file: Path) -> Callable[[], float]:
    """Returns a measurement of `work` with a thread that uploads `file` UPLOADS times, one after the other."""
    generation = 0  # each upload replaces the last, to save memory

    def upload() -> None:
        nonlocal generation
        for _ in range(UPLOADS):
            generation = connect().upload(file, address, generation)

    def both() -> None:
        thread = threading.Thread(target=upload)
        thread.start()
        work()
        thread.join()  # the work takes longer

    return partial(elapsed, both)


@program
def main() -> None:
    """Prints the tables and saves the raw numbers."""
    repeats = PARSER.parse_args().repeats
    with emulated_bucket() as (bucket, client, folder):
        for number in range(OBJECTS):
            client.bucket(bucket).blob(f"d/{number:03d}").upload_from_string(os.urandom(SIZE))
        address, warm = f"gs://{bucket}/d", str(folder / "warm")
        local = stage(address, "data", warm)
        work: dict[str, Callable[[], object]] = {
            "staged, cold": lambda: stage(address, "data", str(folder / uuid.uuid4().hex)),
            "transfer_manager, 16 threads, crc32c": lambda: download_with_sdk(client.bucket(bucket), folder),
            "staged, warm": lambda: stage(address, "data", warm),
            "checksums of the local files alone": lambda: [crc32c_of(file) for file in local.iterdir()],
        }
        timed = {name: partial(elapsed, each) for name, each in work.items()}
        raw = compare(f"Staging {OBJECTS} objects of {SIZE // 2**20} MiB", timed, repeats)
        checkpoint = folder / "checkpoint.data"
        checkpoint.write_bytes(os.urandom(100_000_000))
        training = TrainingLoop(setup_of("--recipe=wgan_gp_digits", "--replicas=1"))
        training(STEPS)  # traces
        alone: Callable[[], float] = partial(training, STEPS)
        both = beside_uploads(alone, Address(bucket, "up/checkpoint"), checkpoint)
        pair = {f"training, {UPLOADS} uploads of 100 MB beside it": both, "training alone": alone}
        loop = compare(f"{STEPS} steps with and without uploads", pair, PAIRS * repeats)
    low, median, high = quartiles([(one - other) / UPLOADS for one, other in zip(*loop.values(), strict=True)])
    print(f"\nAn upload of 100 MB costs the loop {median:.2f} s (quartiles {low:.2f} to {high:.2f}).")
    print(f"At one checkpoint per minute that is {median / 60:.1%} ({low / 60:.1%} to {high / 60:.1%}).")
    save("storage", seconds=raw, loop_seconds=loop)
