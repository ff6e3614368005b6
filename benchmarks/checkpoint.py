"""What checkpoints cost, and how soon a run goes on after a restart: `python -m benchmarks.checkpoint`.

Training with a checkpoint every 50 steps against none, in turn in one process; start of the process to the first step,
from scratch against from a checkpoint. WGAN-GP, 64x64.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import alternate, base_parser, keep, run_main, table
from benchmarks.startup import seconds_until
from trainer.build import TrainingSetup, build_setup
from trainer.config.recipe import resolve
from trainer.distribution.strategy import make_replicas
from trainer.training.checkpoint import Checkpoints

SETTINGS = ["--model=wgan_gp", "--data=digits", "--image_size=64", "--global_batch_size=16"]  # short steps: dear saves
EVERY = 50


class Training:
    """A run that goes on through all measurements."""

    def __init__(self, assembly: TrainingSetup, folder: Path) -> None:
        self._rows, self._run, self._step = assembly.rows_from(0), assembly.step_runner(), 0
        self.checkpoints = Checkpoints(assembly.model, assembly.replicas, folder, keep=3)

    def steps(self, count: int) -> None:
        """`count` steps in calls of 10."""
        for _ in range(0, count, 10):
            self._run(self._rows, self._step, 10)
            self._step += 10

    def seconds(self, *, save: bool) -> float:
        """Of 50 steps, with a checkpoint in their background, to the end of both."""
        began = time.perf_counter()
        if save:
            self.checkpoints.save(self._step, {})
        self.steps(EVERY)
        self.checkpoints.wait()
        return time.perf_counter() - began

    def save_alone(self) -> tuple[float, float]:
        """Seconds that training waits for a checkpoint, and seconds until it is kept, with nothing beside it."""
        self.steps(10)
        began = time.perf_counter()
        self.checkpoints.save(self._step, {})
        waited = time.perf_counter() - began
        self.checkpoints.wait()
        return waited, time.perf_counter() - began


def first_step(begin: Path | None) -> Callable[[], float]:
    """Seconds from the start of a process to its first step; it goes on from a copy of the job directory `begin`."""

    def measure() -> float:
        with tempfile.TemporaryDirectory() as folder:
            job_dir = Path(folder) / "job"
            if begin:
                shutil.copytree(begin, job_dir)
            step = 2 if begin else 1
            flags = [*SETTINGS, f"--job_dir={job_dir}", f"--steps={step}"]
            return seconds_until(f"step {step}/{step}", [sys.executable, "-m", "trainer.task", *flags])

    return measure


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    return base_parser(__doc__, repeats=7)


def main() -> None:
    """Prints both tables and keeps the raw numbers."""
    repeats = make_parser().parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        config = resolve(SETTINGS).config
        training = Training(build_setup(config, make_replicas(config)), Path(folder) / "checkpoints")
        training.steps(20)  # traces and warms up
        contenders = {
            "no checkpoint": lambda: training.seconds(save=False),
            f"a checkpoint every {EVERY} steps": lambda: training.seconds(save=True),
        }
        cost = alternate(contenders, repeats)
        print("\n".join([f"\n{EVERY} steps of WGAN-GP 64x64", "", *table(cost, "no checkpoint", "seconds")]))
        saves = [training.save_alone() for _ in range(repeats)]
        waited, whole = (statistics.median(part) for part in zip(*saves, strict=True))
        print(f"\nOne save alone: {whole:.3f} s, of which training waits {waited:.4f} s ({waited / whole:.1%}).")
        share = whole / statistics.median(cost["no checkpoint"])
        print(f"Were nothing of it in the background, it would be {share:.1%} of {EVERY} steps.")
        begun = Path(folder) / "job"
        seconds_until("done", [sys.executable, "-m", "trainer.task", *SETTINGS, "--steps=1", f"--job_dir={begun}"])
        start = alternate({"fresh start": first_step(None), "resume": first_step(begun)}, repeats)
    print("\n".join(["\nStart of the process to the first step", "", *table(start, "fresh start", "seconds")]))
    raw = {"command": "python -m benchmarks.checkpoint", "seconds": {**cost, **start}, "save_waited_and_whole": saves}
    keep("checkpoint", raw)


if __name__ == "__main__":
    run_main(main)
