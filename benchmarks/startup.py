"""Start of the process to its first step, against import and tracing alone: `python -m benchmarks.startup`."""

import argparse
import subprocess
import sys
import tempfile
import time

from benchmarks.measure import alternate, keep, table

RECIPE = "wgan_gp_digits"

# Nothing but TensorFlow, the model and one traced step: no settings, data files, job directory or reports.
ALONE = """
import tensorflow as tf
from trainer.config import resolve
from trainer.data.dataset import Arrays, Dataset
from trainer.distribution.strategy import make_replicas
from trainer.models import build_model
from trainer.training.steps import StepRunner
import numpy as np
config = resolve(["--recipe=%s"]).config
size, rows = config.image_size, config.global_batch_size
model = build_model(config, Dataset("none", Arrays(np.zeros((1, size, size, 1), np.uint8))))
images = tf.zeros((1, config.critic_steps, rows, size, size, 1), tf.uint8)
StepRunner(model, make_replicas(config), 0)(iter(tf.data.Dataset.from_tensors(images).repeat()), 0, 1)
print("stepped", flush=True)
"""


def seconds_until(line_begins: str, command: list[str]) -> float:
    """From the start of the process to the first line of its output that begins so."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        found = [time.perf_counter() - began for line in process.stdout if line.startswith(line_begins)]
    return found[0]


def alone() -> float:
    """A process that imports, traces and takes one step."""
    return seconds_until("stepped", [sys.executable, "-c", ALONE % RECIPE])


def job() -> float:
    """`trainer.task`, to the report of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--recipe={RECIPE}", f"--job_dir={folder}", "--steps=1"]
        return seconds_until("step 1/1", [sys.executable, "-m", "trainer.task", *flags])


def main() -> None:
    """Prints the table and keeps the raw numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    raw = alternate({"trainer.task": job, "import + trace alone": alone}, parser.parse_args().repeats)
    print("\n".join([f"\nStart to first step, {RECIPE}", "", *table(raw, "trainer.task", "seconds")]))
    keep("startup", {"command": "python -m benchmarks.startup", "seconds": raw})


if __name__ == "__main__":
    main()
