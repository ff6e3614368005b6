"""Staging against the bare SDK call, a warm cache, what an upload costs the loop: `python -m benchmarks.storage`.

Against fake-gcs-server on loopback, whose work the same cores do: this shows what the client costs, not the network.
"""

import argparse
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import alternate, base_parser, keep, quartiles, run_main, table
from tests.trainer.storage.emulator import fake_gcs
from trainer.build import build_setup
from trainer.config.recipe import resolve
from trainer.config.train_config import TrainConfig
from trainer.distribution.strategy import make_replicas
from trainer.storage import Address
from trainer.storage.checksum import crc32c_of
from trainer.storage.gcs import connect
from trainer.storage.staging import stage

OBJECTS, SIZE = 64, 4 * 2**20
# Stretches of training are longer than the uploads beside them, and short enough that what else the machine does
# disturbs both of a pair alike; there are PAIRS a repeat.
UPLOADS, STEPS, PAIRS = 2, 100, 8


def fill(bucket: str) -> None:
    """64 objects of 4 MiB."""
    client: Any = connect()._client
    folder = client.create_bucket(bucket)
    for number in range(OBJECTS):
        folder.blob(f"d/{number:03d}").upload_from_string(os.urandom(SIZE))


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """Seconds that `work` takes."""

    def measure() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return measure


def bare(bucket: str, folder: Path) -> None:
    """What a user of the SDK would write: list, then transfer_manager.download_many with checksums."""
    from google.cloud.storage import transfer_manager

    target = folder / uuid.uuid4().hex
    target.mkdir()
    client: Any = connect()._client
    blobs = list(client.list_blobs(bucket, prefix="d/"))
    pairs = [(blob, str(target / Path(blob.name).name)) for blob in blobs]
    transfer_manager.download_many(
        pairs, worker_type=transfer_manager.THREAD, max_workers=16, raise_exception=True,
        download_kwargs={"checksum": "crc32c"},
    )  # fmt: skip


def upload_cost(bucket: str, folder: Path) -> tuple[float, float]:
    """CPU seconds of the uploading thread and seconds in all for a file of 100 MB, the size of a checkpoint."""
    file = folder / "checkpoint"
    file.write_bytes(os.urandom(100_000_000))
    cpu, began = time.thread_time(), time.perf_counter()
    connect().upload(file, Address(bucket, f"up/{uuid.uuid4().hex}"))
    return time.thread_time() - cpu, time.perf_counter() - began


def trainer_of(config: TrainConfig, steps: int) -> Callable[[], object]:
    """What loads the data of `config` and trains `steps` steps at each call; the model is made once."""
    assembly = build_setup(config, make_replicas(config))
    run_steps = assembly.step_runner()
    run_steps(assembly.rows_from(0), 0, steps)  # traces
    return lambda: run_steps(assembly.rows_from(0), 0, steps)


def beside_uploads(work: Callable[[], object], bucket: str, file: Path) -> Callable[[], None]:
    """`work`, while a thread uploads `file` UPLOADS times, one after the other."""

    address, generation = Address(bucket, "up/checkpoint"), 0  # each replaces the one before: all lies in memory

    def upload() -> None:
        nonlocal generation
        for _ in range(UPLOADS):
            generation = connect().upload(file, address, generation)

    def both() -> None:
        thread = threading.Thread(target=upload)
        thread.start()
        work()
        thread.join()  # the work is made to be the longer one

    return both


def loop_contenders(bucket: str, folder: Path) -> dict[str, Callable[[], float]]:
    """A loop of some 4 seconds with and without uploads of 100 MB beside it."""
    checkpoint = folder / "checkpoint.data"
    checkpoint.write_bytes(os.urandom(100_000_000))
    work = trainer_of(resolve(["--recipe=wgan_gp_digits", "--replicas=1"]).config, STEPS)
    return {
        f"training, {UPLOADS} uploads of 100 MB beside it": timed(beside_uploads(work, bucket, checkpoint)),
        "training alone": timed(work),
    }


def warm_contenders(bucket: str, folder: Path) -> dict[str, Callable[[], float]]:
    """Data loaded and trained on: from the local disk, and from a bucket with a warm cache."""
    images = np.random.default_rng(0).integers(0, 255, (60_000, 28, 28), np.uint8)
    np.savez(folder / "images.npz", images=images, labels=np.arange(60_000) % 10)
    connect().upload(folder / "images.npz", Address(bucket, "npz/images.npz"))
    flags = ["--model=mlp", "--image_size=28", "--global_batch_size=256", "--replicas=1", f"--cache_dir={folder}"]
    sources = {"a warm cache": f"gs://{bucket}/npz/images.npz", "local files": str(folder / "images.npz")}

    def start(data: str) -> Callable[[], float]:
        config = resolve([*flags, f"--data={data}"]).config
        return timed(lambda: trainer_of(config, 500)())

    return {f"load and train 1,000 steps from {name}": start(data) for name, data in sources.items()}


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    return base_parser(__doc__, repeats=5)


def main() -> None:
    """Prints the tables and keeps the raw numbers."""
    repeats = make_parser().parse_args().repeats
    bucket = f"b-{uuid.uuid4().hex}"
    with fake_gcs() as url, tempfile.TemporaryDirectory() as name:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        fill(bucket)
        address, folder, warm = f"gs://{bucket}/d", Path(name), str(Path(name) / "warm")
        local = stage(address, "data", warm)
        contenders = {
            "staged, cold": timed(lambda: stage(address, "data", str(folder / uuid.uuid4().hex))),
            "bare transfer_manager, 16 threads, crc32c": timed(lambda: bare(bucket, folder)),
            "staged, warm": timed(lambda: stage(address, "data", warm)),
            "checksums of the local files alone": timed(lambda: [crc32c_of(file) for file in local.iterdir()]),
        }
        raw = alternate(contenders, repeats)
        uploads = [upload_cost(bucket, folder) for _ in range(repeats)]
        loop = alternate(loop_contenders(bucket, folder), PAIRS * repeats)
        warmed = alternate(warm_contenders(bucket, folder), repeats)
    title = f"{OBJECTS} objects of {SIZE // 2**20} MiB"
    print("\n".join([f"\nStaging {title}", "", *table(raw, "staged, cold", "seconds")]))
    cpu, seconds = sorted(uploads)[repeats // 2]
    print(f"\nA background upload of 100 MB: {cpu:.2f} s of CPU, {seconds:.2f} s in all (medians of {repeats})")
    print("\n".join(["", *table(loop, next(iter(loop)), "seconds")]))
    low, median, high = quartiles([(one - other) / UPLOADS for one, other in zip(*loop.values(), strict=True)])
    print(
        f"\nAn upload of 100 MB costs the loop {median:.2f} s (quartiles {low:.2f} to {high:.2f}): {median / 60:.1%} "
        f"({low / 60:.1%} to {high / 60:.1%}) at one checkpoint a minute"
    )
    print("\n".join(["", *table(warmed, next(iter(warmed)), "seconds")]))
    record = {
        "command": "python -m benchmarks.storage",
        "what": title,
        "seconds": raw,
        "upload_100_mb_cpu_and_seconds": uploads,
        "loop_seconds": loop,
        "warm_seconds": warmed,
    }
    keep("storage", record)


if __name__ == "__main__":
    run_main(main)
