"""Measures the cost of checkpoints and the time to resume after a restart: `python -m benchmarks.checkpoint`.

It compares training with a checkpoint every 50 steps and without, in turn in one process, and the time from the start
of the process to the first step from scratch and from a checkpoint. WGAN-GP, 64x64.
"""

import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.processes import seconds_until
from benchmarks.runner import compare, elapsed, make_parser, program, save
from benchmarks.trainer_loop import TrainingLoop, setup_of
from trainer.training.checkpoint import Checkpoints

SETTINGS = ["--model=wgan_gp", "--data=digits", "--image_size=64", "--global_batch_size=16"]  # short steps, large state
EVERY = 50
PARSER = make_parser(__doc__, repeats=7)


class Training:
    """Trains and saves through all measurements."""

    def __init__(self, folder: Path) -> None:
        setup = setup_of(*SETTINGS)
        self._loop, self._checkpoints = TrainingLoop(setup), Checkpoints(setup.model, setup.replicas, folder, keep=3)

    def run(self, steps: int, *, save: bool = False) -> None:
        """Runs steps in calls of 10, with a checkpoint in the background if `save`, until both have ended."""
        if save:
            self._checkpoints.save(self._loop.step, {})
        for _ in range(0, steps, 10):
            self._loop(10)
        self._checkpoints.wait()

    def save_alone(self) -> tuple[float, float]:
        """Returns the seconds that training waits for a checkpoint, and until it is stored, with no steps beside it."""
        self.run(10)
        waited = elapsed(lambda: self._checkpoints.save(self._loop.step, {}))
        return waited, waited + elapsed(self._checkpoints.wait)


def first_step(begin: Path | None = None) -> float:
    """Measures the start of a process to its first step, from a copy of the job directory `begin` if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        job_dir = Path(folder) / "job"
        if begin:
            shutil.copytree(begin, job_dir)
        step = 2 if begin else 1
        flags = [*SETTINGS, f"--job_dir={job_dir}", f"--steps={step}"]
        return seconds_until(f"step {step}/{step}", [sys.executable, "-m", "trainer.task", *flags])


@program
def main() -> None:
    """Prints both tables and saves the raw numbers."""
    repeats = PARSER.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder) / "checkpoints")
        training.run(20)  # traces and warms up
        candidates = {
            "no checkpoint": lambda: elapsed(lambda: training.run(EVERY)),
            f"a checkpoint every {EVERY} steps": lambda: elapsed(lambda: training.run(EVERY, save=True)),
        }
        cost = compare(f"{EVERY} steps of WGAN-GP 64x64", candidates, repeats)
        saves = [training.save_alone() for _ in range(repeats)]
        waited, whole = (statistics.median(part) for part in zip(*saves, strict=True))
        print(f"\nOne save alone: {whole:.3f} s, of which training waits {waited:.4f} s ({waited / whole:.1%}).")
        begin = Path(folder) / "job"
        seconds_until("done", [sys.executable, "-m", "trainer.task", *SETTINGS, "--steps=1", f"--job_dir={begin}"])
        starts = {"fresh start": first_step, "resume": lambda: first_step(begin)}
        start = compare("Start of the process to the first step", starts, repeats)
    save("checkpoint", seconds={**cost, **start}, save_waited_and_whole=saves)
