"""Runs every candidate in processes of its own that compute only in their turn, so that none
disturbs another.

`python -m benchmarks.processes MODULE[:OPTION] FLAGS` is one such process. It prints its work per
step as a line of JSON, then reads a number of steps per line and prints the seconds that they took.
FLAGS are those of trainer.task; `--data` is an .npz file of images in their final size, which every
framework reads.
"""

import contextlib
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image

from benchmarks.runner import OPTIONAL, elapsed
from deploy.platform.local import free_addresses
from trainer.base.settings.request import Overrides
from trainer.base.settings.train_config import TrainConfig

Run = Callable[[int], float]  # steps -> seconds
# the work of a step: trainable numbers of the networks, settings of the optimizers
Work = Mapping[str, Any]
# Work compares learning rates as numbers
CONSTANT_RATE = ("--learning_rate_schedule=constant", "--warmup_steps=0")

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "trainer" / "data" / "digits.npz"
# PyTorch's threads wait asleep: spinning, they were 20 times slower beside other processes on the
# same cores.
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_WAIT_POLICY": "PASSIVE"}
_MIN_SECONDS = 0.3  # a shorter turn does not determine how many steps the next ones take


def timed(run: Callable[[int], object]) -> Run:
    """Returns a function that calls `run(steps)` and returns the seconds it took."""
    return lambda steps: elapsed(lambda: run(steps))


class ProcessError(RuntimeError):
    """Reports the last line in `errors`, the stderr of a process that ended too early."""

    def __init__(self, errors: IO[str]) -> None:
        errors.seek(0)
        super().__init__(next(reversed(errors.read().strip().splitlines()), "no reason was given"))


def seconds_until(prefix: str, command: Sequence[str]) -> float:
    """Runs a command; returns the seconds from its start to the first line with `prefix`, or raises
    ProcessError."""
    with tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            found = [
                time.perf_counter() - began for line in process.stdout if line.startswith(prefix)
            ]
        if process.returncode or not found:
            raise ProcessError(errors)
    return found[0]


class Candidate:
    """Runs one process on all cores or, with `workers`, as many with one core each; a call measures
    images/s.

    `name` is MODULE[:OPTION], `images_per_step` counts over all processes. With `joined`, the
    processes are the workers of one job; otherwise they are independent. The steps of a turn are a
    multiple of `multiple`.
    """

    def __init__(
        self,
        name: str,
        flags: Sequence[str],
        images_per_step: int,
        workers: int = 0,
        *,
        joined: bool = False,
        multiple: int = 1,
    ) -> None:
        self._images_per_step = images_per_step
        self._multiple = multiple
        self._steps = multiple
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the processes run
        cores = sorted(os.sched_getaffinity(0))
        addresses = free_addresses(workers) if joined else []
        self._processes = []
        for index in range(workers or 1):
            own_cores = {cores[index % len(cores)]} if workers else set(cores)
            self._processes.append(self._start([name, *flags], own_cores, addresses, index))
        works: list[Work] = [json.loads(line) for line in self._lines()]
        assert works[0] == works[-1]
        self.work = works[0]

    def _start(
        self, arguments: list[str], cores: set[int], addresses: list[str], index: int
    ) -> Any:
        environment = {**_ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": str(len(cores))}
        if addresses:
            task = {"type": "worker", "index": index}
            environment["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
        command = [sys.executable, "-m", "benchmarks.processes", *arguments]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=pipe,
            stdout=pipe,
            stderr=self._errors,
            text=True,
        )
        os.sched_setaffinity(process.pid, cores)  # threads that the process starts later inherit it
        return process

    def calibrate(self, seconds: float) -> None:
        """Warms up, and chooses the steps of a turn so that it takes about `seconds`."""
        self._turn(self._steps)
        while (took := self._turn(self._steps)) < min(_MIN_SECONDS, seconds):
            self._steps *= 4
        self._steps = self._multiple * math.ceil(self._steps * seconds / took / self._multiple)

    def __call__(self) -> float:
        """Runs one turn; returns the real images per second of all processes together."""
        return self._steps * self._images_per_step / self._turn(self._steps)

    def close(self) -> None:
        """Ends the processes."""
        while self._processes:
            process = self._processes.pop()
            process.kill()
            process.communicate()
        self._errors.close()

    def _turn(self, steps: int) -> float:
        for process in self._processes:
            print(steps, file=process.stdin, flush=True)
        return max(float(line) for line in self._lines())

    def _lines(self) -> Iterator[str]:
        """Yields one line of each process; if one has ended, ends the others and raises
        ProcessError."""
        for process in self._processes:
            if not (line := process.stdout.readline()):
                error = ProcessError(self._errors)
                self.close()
                raise error
            yield line


@contextlib.contextmanager
def started(
    makers: Mapping[str, Callable[[], Candidate]], seconds: float
) -> Iterator[dict[str, Candidate]]:
    """Starts and calibrates candidates for turns of about `seconds`; one of PyTorch that fails is
    left out."""
    found: dict[str, Candidate] = {}
    with contextlib.ExitStack() as stack:
        for name, make in makers.items():
            try:
                candidate = stack.enter_context(contextlib.closing(make()))
                candidate.calibrate(seconds)
                same = not found or candidate.work in ({}, next(iter(found.values())).work)
                assert same, f"{name} does other work per step"
                found[name] = candidate
            except ProcessError as error:
                if OPTIONAL not in name:
                    raise
                print(f"{name}: left out: {error}", flush=True)
        yield found


@contextlib.contextmanager
def digits_file(flags: Sequence[str]) -> Iterator[tuple[TrainConfig, list[str]]]:
    """Yields the settings and flags with --data=FILE, a file of digits that is deleted at the end
    of the block.

    Flags that name data of their own stay as they are.
    """
    if any(flag.startswith("--data=") for flag in flags):
        yield Overrides.parse(flags).config, [*flags]
        return
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags, f"--data={Path(folder) / 'digits.npz'}"]
        config = Overrides.parse(flags).config
        write_digits(config)
        yield config, flags


def write_digits(config: TrainConfig) -> None:
    """Writes the .npz file `config.data`: `images` (1797, size, size, channels) uint8, `labels`
    (1797,)."""
    with np.load(DIGITS) as content:
        small = (content["images"] * 15).astype(np.uint8)
        labels = content["labels"].astype(np.int32)
    size = (config.image_size, config.image_size)
    grey = np.stack([np.asarray(Image.fromarray(image).resize(size)) for image in small])
    np.savez(
        config.data,
        images=np.repeat(grey[..., np.newaxis], config.channels, axis=-1),
        labels=labels,
    )


def images_per_step(config: Any) -> int:
    """Returns the number of real images that a step reads."""
    return config.global_batch_size * (config.critic_steps if config.model == "wgan_gp" else 1)


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # everything else that the process prints goes to stderr
    module, _, option = sys.argv[1].partition(":")
    run, work = importlib.import_module(f"benchmarks.{module}").make_candidate(
        Overrides.parse(sys.argv[2:]).config, option
    )
    print(json.dumps(work), file=replies, flush=True)
    for line in sys.stdin:
        print(run(int(line)), file=replies, flush=True)
