"""Measures a process up to its first step against import and tracing alone: `python -m benchmarks.startup`."""

import sys
import tempfile
import uuid
from collections.abc import Callable

from benchmarks.emulated_bucket import emulated_bucket
from benchmarks.processes import DIGITS, seconds_until
from benchmarks.runner import compare, make_parser, program, save
from trainer.storage import Address
from trainer.storage.gcs import connect

RECIPE = "wgan_gp_digits"
PARSER = make_parser(__doc__, repeats=5)

# Nothing but TensorFlow, the model and one traced step: no settings, data files, job directory or reports.
ALONE = """
import numpy as np, tensorflow as tf
from trainer.config.overrides import resolve
from trainer.data.dataset import Arrays, Dataset
from trainer.distribution.strategy import make_replicas
from trainer.models import build_model
from trainer.training.steps import StepRunner
config = resolve(["--recipe=%s"]).config
size, rows = config.image_size, config.global_batch_size
model = build_model(config, Dataset("none", Arrays(np.zeros((1, size, size, 1), np.uint8))))
images = tf.zeros((1, config.critic_steps, rows, size, size, 1), tf.uint8)
StepRunner(model, make_replicas(config), 0)(iter(tf.data.Dataset.from_tensors((images,)).repeat()), 0, 1)
print("stepped", flush=True)
"""


def job(*data: str) -> float:
    """Measures `trainer.task` up to the report of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--recipe={RECIPE}", f"--job_dir={folder}", "--steps=1", *data]
        return seconds_until("step 1/1", [sys.executable, "-m", "trainer.task", *flags])


@program
def main() -> None:
    """Prints the table and saves the raw numbers."""
    repeats = PARSER.parse_args().repeats
    with emulated_bucket() as (bucket, _, folder):
        connect().upload(DIGITS, Address(bucket, "digits.npz"))
        data, warm = f"--data=gs://{bucket}/digits.npz", f"--cache_dir={folder / 'warm'}"
        candidates: dict[str, Callable[[], float]] = {
            "trainer.task": job,
            "import + trace alone": lambda: seconds_until("stepped", [sys.executable, "-c", ALONE % RECIPE]),
            "data on gs://, fetched": lambda: job(data, f"--cache_dir={folder / uuid.uuid4().hex}"),
            "data on gs://, in the cache": lambda: job(data, warm),
        }
        job(data, warm)  # fills the cache
        save("startup", seconds=compare(f"Start to first step, {RECIPE}", candidates, repeats))
