"""Measures a process up to its first step against import and tracing alone: `python -m
benchmarks.startup`."""

import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.processes import DIGITS, seconds_until
from benchmarks.runner import compare, make_parser, program, save
from tests.trainer.base.storage.emulator import fake_gcs
from trainer.base.storage import Address
from trainer.base.storage.gcs import connect

RECIPE = "wgan_gp_digits"
PARSER = make_parser(__doc__, repeats=5)

# Nothing but TensorFlow, the model and one traced step: no settings, data files, job directory or
# reports.
ALONE = """
import numpy as np, tensorflow as tf
from trainer.run.training_setup import set_precision_and_seed, setup_with
from trainer.base.settings.request import Overrides
from trainer.data.dataset import Arrays, Dataset
from trainer.cluster.strategy import make_replicas
config = Overrides.parse(["--recipe=%s"]).config
set_precision_and_seed(config)
size = config.image_size
rows = (1, config.critic_steps, config.global_batch_size)
arrays = Arrays(np.zeros((10, size, size, 1), np.uint8), np.arange(10))
data = Dataset("none", arrays, class_names=tuple("0123456789"))
setup = setup_with(config, make_replicas(config), data)
batch = tf.zeros((*rows, size, size, 1), tf.uint8), tf.zeros(rows, tf.int32)
setup.step_runner()(iter(tf.data.Dataset.from_tensors(batch).repeat()), 0, 1)
print("stepped", flush=True)
"""


def job(*data: str, begin: Path | None = None) -> float:
    """Measures `trainer.task` up to the report of its first step, from a copy of the job directory
    `begin` if given."""
    with tempfile.TemporaryDirectory() as folder:
        if begin:
            shutil.copytree(begin, folder, dirs_exist_ok=True)
        return task(Path(folder), 2 if begin else 1, *data)


def task(job_dir: Path, step: int, *data: str) -> float:
    """Measures `trainer.task` up to the report of its step `step`, which is the last."""
    flags = [f"--recipe={RECIPE}", f"--job_dir={job_dir}", f"--steps={step}", *data]
    return seconds_until(f"step {step}/{step}", [sys.executable, "-m", "trainer.task", *flags])


def alone() -> float:
    """Measures TensorFlow's import and the recipe's first step, without a job."""
    return seconds_until("stepped", [sys.executable, "-c", ALONE % RECIPE])


@program
def main() -> None:
    """Prints the table and saves the raw numbers."""
    repeats = PARSER.parse_args().repeats
    # on the same cores: the cost of the client alone
    with fake_gcs() as url, tempfile.TemporaryDirectory() as name:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        folder = Path(name)
        bucket = f"b-{uuid.uuid4().hex}"
        client: Any = connect().client
        client.create_bucket(bucket)
        connect().upload(DIGITS, Address(bucket, "digits.npz"))
        data = f"--data=gs://{bucket}/digits.npz"
        warm = f"--cache_dir={folder / 'warm'}"
        candidates: dict[str, Callable[[], float]] = {
            "trainer.task": job,
            "resuming": lambda: job(begin=folder / "job"),
            "import + trace alone": alone,
            "data on gs://, fetched": lambda: job(data, f"--cache_dir={folder / uuid.uuid4().hex}"),
            "data on gs://, in the cache": lambda: job(data, warm),
        }
        task(folder / "job", 1, data, warm)  # fills the cache
        save("startup", seconds=compare(f"Start to first step, {RECIPE}", candidates, repeats))
