"""Proves that --stop_if_idle ends no training of a recipe that works, and each that stalls within a minute.

`python -m benchmarks.proofs.limits [RECIPE …]`: each recipe trains some steps on the digits of the package, with its
evaluation, samples and checkpoints. The watch is the real one; its clock and its GPU are planted: at each change of
its phase the run stays there for as long as LASTS says, and a GPU is used in steps alone. The first start stalls in a
step, the second in what runs between two, the third does not. Prints a line a stall; exits with 1 if one was not
found within a minute of the limit, or if the watch stopped anything else.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras

from benchmarks.proofs.served_recipes import commands
from trainer.base import limit_watch
from trainer.base.errors import DONE
from trainer.base.limit_watch import LIMITS, StopLimits
from trainer.base.run_files.goodput import CLASSES, OTHER, SAVE, STEP, Goodput
from trainer.base.run_files.records import read_result
from trainer.base.settings.resolution import resolve
from trainer.run import job

HOUR, LATEST_S = 3600.0, 60.0
LIMIT = StopLimits(idle_s=HOUR / 2)
LASTS = {**dict.fromkeys(CLASSES, 2 * HOUR), STEP: 20.0, OTHER: 5.0}  # the watch waits 30 s for a loop to end
SMALL = ["--steps=12", "--steps_per_loop=1", "--global_batch_size=16", "--report_every_steps=4", "--tensorboard=false",
         "--checkpoint_every_steps=3"]  # fmt: skip
GAN = ["--sample_every_steps=4", "--fid_every_steps=0"]
PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("recipes", nargs="*", metavar="RECIPE", help="default: all")


class Planted:
    """Holds the clock and the GPU of one start, which stalls at the given visit of a phase; 0: never."""

    def __init__(self, phase: str, visit: int) -> None:
        self._stalls, self._visits, self.now, self._percent = (phase, visit), Counter[str](), 0.0, 0.0
        self.watch: Any = None
        self.found_after: float | None = None  # seconds of a stall

    def monotonic(self) -> float:
        """Returns the planted time."""
        return self.now

    def read(self) -> list[dict[str, float | None]]:
        """Returns the planted use of one GPU, as `read_gpus` does."""
        return [{"memory_gib": 1.0, "utilization_percent": self._percent}]

    def spend(self, phase: str) -> None:
        """Lets the run be in a phase, and the watch look, for as long as the phase lasts, or until a stall is found."""
        if not self.watch:
            return
        self._visits[phase] += 1
        stalls = (phase, self._visits[phase]) == self._stalls
        self._percent = 95.0 if phase == STEP and not stalls else 0.0
        began = self.now
        while self.now - began < (10 * HOUR if stalls else LASTS[phase]):
            self.now += limit_watch.LOOK_S
            self.watch.look()
            if stalls and self.watch.reason:
                self.found_after = self.now - began
                return


class Watch(job.JobWatch):
    """Watches as the real one does, but when `planted` says so, and may not end this process."""

    planted: Planted

    @contextmanager
    def looking(self) -> Iterator[None]:
        self.planted.watch = self
        yield
        self.planted.watch = None

    def _leave_step(self) -> None:
        raise AssertionError("the watch takes what saves its state for a hanging loop")


def trained(flags: list[str], planted: Planted) -> int:
    """Runs a start of a training with this clock; returns its exit code."""
    enter = Goodput.enter

    def entered(self: Goodput, phase: str) -> None:
        changes = phase != self.phase
        enter(self, phase)
        if changes:
            planted.spend(phase)

    replaced: list[tuple[Any, str, Any]] = [
        (Goodput, "enter", entered), (job, "JobWatch", Watch), (Watch, "planted", planted),
        (limit_watch, "time", planted), (limit_watch, "read_gpus", planted.read),
    ]  # fmt: skip
    before = [(owner, name, getattr(owner, name, None)) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        keras.backend.clear_session()
        return job.run(resolve(flags).config, ["python"], time.monotonic())
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def wrong(name: str, flags: list[str], folder: Path) -> Iterator[str]:
    """Trains a recipe in three starts; yields what differs from what is claimed."""
    for phase, visit in ((STEP, 3), (OTHER, 5), (SAVE, 0)):
        planted = Planted(phase, visit)
        code, result = trained([*flags, f"--job_dir={folder}"], planted), read_result(folder)[0]
        if code != DONE or result["state"] != ("stopped" if visit else "done"):
            yield f"{name}: exit code {code}, {result['state']}: {result.get('error')}"
        late = (planted.found_after or 0.0) - LIMIT.idle_s
        if visit:
            print(f"{name}: a stall in {CLASSES[phase]} is found {late:+.0f} s from the limit, at step "
                  f"{result['steps']}, {planted.now / HOUR:.1f} planted hours", flush=True)  # fmt: skip
            if abs(late) > LATEST_S:  # the GPU was idle already in what ran before the step
                yield f"{name}: {late:.0f} s after the limit"
        else:
            print(f"{name}: done at step {result['steps']}, {planted.now / HOUR:.1f} planted hours", flush=True)


def main() -> int:
    """Trains the recipes; returns 1 if anything differs."""
    args = PARSER.parse_args().recipes
    os.environ[LIMITS] = LIMIT.text
    failures = list[str]()
    for name, flags in commands():
        if flags[0] == f"--recipe={name}" and (name in args or not args):
            more = GAN if "gan" in name else ["--evaluation_fraction=0.2"]
            with tempfile.TemporaryDirectory() as folder:
                failures += wrong(name, [*flags, *SMALL, *more], Path(folder) / "run")
    print(*failures or ["no false stop; every stall was found"], sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
