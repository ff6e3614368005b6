"""Start of the process to its first step, against import and tracing alone: `python -m benchmarks.startup`.

Also with the data on gs://, by fake-gcs-server on loopback: what the client costs, not the network.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import alternate, base_parser, keep, run_main, table
from benchmarks.turns import Failed, last_line
from tests.trainer.storage.emulator import fake_gcs
from trainer.data import digits
from trainer.storage import Address
from trainer.storage.gcs import connect

RECIPE = "wgan_gp_digits"

# Nothing but TensorFlow, the model and one traced step: no settings, data files, job directory or reports.
ALONE = """
import tensorflow as tf
from trainer.config.recipe import resolve
from trainer.data.dataset import Arrays, Dataset
from trainer.distribution.strategy import make_replicas
from trainer.models import build_model
from trainer.training.steps import StepRunner
import numpy as np
config = resolve(["--recipe=%s"]).config
size, rows = config.image_size, config.global_batch_size
model = build_model(config, Dataset("none", Arrays(np.zeros((1, size, size, 1), np.uint8))))
images = tf.zeros((1, config.critic_steps, rows, size, size, 1), tf.uint8)
StepRunner(model, make_replicas(config), 0)(iter(tf.data.Dataset.from_tensors((images,)).repeat()), 0, 1)
print("stepped", flush=True)
"""


def seconds_until(line_begins: str, command: list[str]) -> float:
    """From the start of the process to the first line of its output that begins so; Failed where the process does."""
    with tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            found = [time.perf_counter() - began for line in process.stdout if line.startswith(line_begins)]
        if process.returncode or not found:
            raise Failed(last_line(errors))
    return found[0]


def alone() -> float:
    """A process that imports, traces and takes one step."""
    return seconds_until("stepped", [sys.executable, "-c", ALONE % RECIPE])


def job(*data: str) -> float:
    """`trainer.task`, to the report of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--recipe={RECIPE}", f"--job_dir={folder}", "--steps=1", *data]
        return seconds_until("step 1/1", [sys.executable, "-m", "trainer.task", *flags])


def put_digits(bucket: str) -> str:
    """Uploads the digits of the package; the flag that takes them from there."""
    client: Any = connect()._client
    client.create_bucket(bucket)
    connect().upload(Path(digits.__file__).with_name("digits.npz"), Address(bucket, "digits.npz"))
    return f"--data=gs://{bucket}/digits.npz"


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    return base_parser(__doc__, repeats=5)


def main() -> None:
    """Prints the table and keeps the raw numbers."""
    repeats = make_parser().parse_args().repeats
    with fake_gcs() as url, tempfile.TemporaryDirectory() as name:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        data, folder = put_digits(f"b-{uuid.uuid4().hex}"), Path(name)
        contenders: dict[str, Callable[[], float]] = {
            "trainer.task": job,
            "import + trace alone": alone,
            "data on gs://, fetched": lambda: job(data, f"--cache_dir={folder / uuid.uuid4().hex}"),
            "data on gs://, in the cache": lambda: job(data, f"--cache_dir={folder / 'warm'}"),
        }
        job(data, f"--cache_dir={folder / 'warm'}")  # fills the cache
        raw = alternate(contenders, repeats)
    print("\n".join([f"\nStart to first step, {RECIPE}", "", *table(raw, "trainer.task", "seconds")]))
    keep("startup", {"command": "python -m benchmarks.startup", "seconds": raw})


if __name__ == "__main__":
    run_main(main)
