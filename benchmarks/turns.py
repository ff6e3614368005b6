"""Processes that wait for their turn, so that no contender computes while another is measured.

A contender is one process or several. Each first tells what it does a step, as a line of JSON, then reads a number of
steps a line and answers with the seconds that they took.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from deploy.localrun.workers import free_addresses

Run = Callable[[int], float]  # steps -> seconds
Work = Mapping[str, Any]  # what a step is: trainable numbers of the networks, settings of the optimizers
CONSTANT_RATE = ("--learning_rate_schedule=constant", "--warmup_steps=0")  # a schedule is no number, as Work wants it

# PyTorch's threads wait asleep: spinning, they were 20 times slower beside other processes on the same cores.
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_WAIT_POLICY": "PASSIVE"}
_LEAST = 0.3  # seconds that a turn must last before it says how many steps the next ones take


def timed(run: Callable[[int], object]) -> Run:
    """`run` with the seconds that it took."""

    def seconds(steps: int) -> float:
        began = time.perf_counter()
        run(steps)
        return time.perf_counter() - began

    return seconds


def wait_for_turns(start: Callable[[], tuple[Run, Work]]) -> None:
    """The side of the process. What it or its libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run, work = start()
    print(json.dumps(work), file=answers, flush=True)
    for line in sys.stdin:
        print(run(int(line)), file=answers, flush=True)


class Failed(RuntimeError):
    """A process of a contender has ended; the last line that it wrote."""


def last_line(file: IO[str]) -> str:
    """What a process wrote last to its `file`."""
    file.seek(0)
    return next(reversed(file.read().strip().splitlines()), "no reason was given")


class Contender:
    """One process on all cores or, with `workers`, as many with one core each. Calling it measures images/s.

    `name`: what benchmarks.contender runs, as pytorch:compile; `images_per_step`: over all processes. `joined`: the
    processes are the workers of one job; else none knows of the others. A turn is a multiple of `multiple` steps.
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
        self._images_per_step, self._multiple, self._steps = images_per_step, multiple, multiple
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the processes run
        cores = sorted(os.sched_getaffinity(0))
        addresses = free_addresses(workers) if joined else []
        self._processes = []
        for place in range(workers or 1):
            mine = {cores[place % len(cores)]} if workers else set(cores)
            self._processes.append(self._start([name, *flags], mine, addresses, place))
        try:
            works: list[Work] = [json.loads(line) for line in self._lines()]
        except Failed:
            self.close()
            raise
        assert works[0] == works[-1]
        self.work = works[0]

    def _start(
        self, arguments: list[str], cores: set[int], addresses: list[str], place: int
    ) -> "subprocess.Popen[str]":
        environment = {**_ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": str(len(cores))}
        if addresses:
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": place}}
            environment["TF_CONFIG"] = json.dumps(config)
        command = [sys.executable, "-m", "benchmarks.contender", *arguments]
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        os.sched_setaffinity(process.pid, cores)  # its threads, which start later, inherit it
        return process

    def fit(self, seconds: float) -> None:
        """Warms up, and chooses the steps of a turn that last about so long."""
        self._turn(self._steps)
        while (took := self._turn(self._steps)) < min(_LEAST, seconds):
            self._steps *= 4
        self._steps = self._multiple * math.ceil(self._steps * seconds / took / self._multiple)

    def __call__(self) -> float:
        """images/s of real images, over all processes, in one turn."""
        return self._steps * self._images_per_step / self._turn(self._steps)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.communicate()
        self._errors.close()

    def _turn(self, steps: int) -> float:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        return max(float(line) for line in self._lines())

    def _lines(self) -> Iterator[str]:
        """One line of each process."""
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise Failed(last_line(self._errors))
            yield line


@contextmanager
def started(makers: Mapping[str, Callable[[], Contender]], seconds: float) -> Iterator[dict[str, Contender]]:
    """Contenders that are warm, with turns of about `seconds`; a peer that fails is left out, with a line."""
    found: dict[str, Contender] = {}
    try:
        for name, make in makers.items():
            try:
                found[name] = make()
                found[name].fit(seconds)
            except Failed as error:
                if "PyTorch" not in name:
                    raise
                print(f"{name}: left out: {error}", flush=True)
                if name in found:
                    found.pop(name).close()
        yield found
    finally:
        for contender in found.values():
            contender.close()
