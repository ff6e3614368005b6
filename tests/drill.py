"""Runs the interruption drill: one run, killed repeatedly at random moments and restarted with the same command."""

import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deploy.platform.local import free_addresses
from tests import workers
from trainer.training.checkpoint import checkpoint_folders, read_checkpoint

RUN = [
    "--recipe=wgan_gp_digits", "--width=4", "--latent_dim=8", "--global_batch_size=8", "--critic_steps=2",
    "--checkpoint_every_steps=5", "--report_every_steps=3", "--sample_every_steps=50", "--tensorboard=false",
    "--jit_compile=false",  # auto could choose differently for the undisturbed run, which measures again
]  # fmt: skip
MOMENTS = ("starting, SIGKILL", "starting, SIGTERM", "training, SIGKILL", "training, SIGTERM", "saving, SIGKILL")
_LONGEST_SECONDS = 600.0  # of any wait


def start(flags: Sequence[str], count: int, log: Path) -> list[subprocess.Popen[bytes]]:
    """Starts the processes of one run, the chief first; all write to `log`."""
    addresses = free_addresses(count) if count > 1 else []
    return [workers.start(addresses, index, flags, log) for index in range(count)]


def finish(flags: Sequence[str], log: Path, count: int = 1) -> None:
    """Runs to the end, without a kill, in `count` processes."""
    assert workers.end(start(flags, count, log), _LONGEST_SECONDS) == [0] * count, log.read_text()


@dataclass
class Drill:
    """Holds one run in `folder` and its kills. `workers` and `replicas` of each: one number a start, in turn."""

    folder: Path
    steps: int
    seed: int
    workers: Sequence[int] = (1,)
    replicas: Sequence[int] = (1,)
    flags: Sequence[str] = ()
    kills: Counter[str] = field(default_factory=Counter)
    left_half_written: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def run(self, kills: Sequence[str]) -> None:
        """Kills the run at each of these moments (see MOMENTS), then lets it finish."""
        for number, moment in enumerate(kills):
            gap = 2 * (self.steps - self.reached) // (len(kills) - number + 1)
            self._run_until_killed(moment, self.reached + self._random.randint(0, gap))
        finish(self._flags(len(kills)), self.log, self._count(len(kills)))

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    @property
    def reached(self) -> int:
        """Returns the last reported step."""
        return max((line["step"] for line in stats(self.folder)), default=0)

    def _count(self, life: int) -> int:
        return self.workers[life % len(self.workers)]

    def _flags(self, life: int) -> list[str]:
        replicas = self.replicas[life % len(self.replicas)]
        job = [f"--job_dir={self.folder}", f"--steps={self.steps}", f"--replicas={replicas}"]
        return [*RUN, *job, *self.flags]

    def _run_until_killed(self, moment: str, step: int) -> None:
        log_before = self.log.stat().st_size if self.log.exists() else 0
        life = sum(self.kills.values())
        processes = start(self._flags(life), self._count(life), self.log)
        try:
            self._await_moment(moment, step, processes)
            victim, number = self._random.choice(processes), signal.Signals[moment.split()[-1]]
            assert victim.poll() is None, f"it ended before the kill: {self.log.read_text()[log_before:]}"
            victim.send_signal(number)
            ended = [process.wait(_LONGEST_SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        self.kills[moment] += 1
        self.left_half_written += any(self.folder.glob("checkpoints/.step-*"))
        # Before the first line of task.py runs, SIGTERM kills too.
        codes = {-number} if number == signal.SIGKILL else {75, -number} if moment.startswith("starting") else {75}
        for process, code in zip(processes, ended, strict=True):
            assert code in (codes if process is victim else {75}), self.log.read_text()[log_before:]

    def _await_moment(self, moment: str, step: int, processes: list[subprocess.Popen[bytes]]) -> None:
        """Waits for a random moment of this kind."""
        if moment.startswith("starting"):
            time.sleep(self._random.uniform(0.0, 5.0))
            return

        def running() -> bool:
            return all(process.poll() is None for process in processes)

        restored = self.reached  # later reports come from this start: before them, SIGTERM finds it starting
        workers.until(lambda: self.reached >= max(step, restored + 1) or not running(), _LONGEST_SECONDS)
        if moment.startswith("saving"):
            workers.until(lambda: any(self.folder.glob("checkpoints/.step-*.part")) or not running(), _LONGEST_SECONDS)
            time.sleep(self._random.uniform(0.0, 0.004))
        else:
            time.sleep(self._random.uniform(0.0, 0.06))


def stats(folder: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of stats.jsonl."""
    path = folder / "stats.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in stats(folder) if line["kind"] == kind]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    """Returns what must be equal in stats.jsonl: kind, step and epoch of each line."""
    return [(line["kind"], line["step"], line["epoch"]) for line in stats(folder)]


def losses(folder: Path) -> list[float]:
    """Returns every loss and metric of stats.jsonl, in order."""
    return [value for line in stats(folder) for kind in ("losses", "metrics") for value in line[kind].values()]


def last_state(folder: Path) -> dict[str, Any]:
    """Returns every variable of the newest checkpoint: networks, averages, optimizers, random state."""
    _, values = read_checkpoint(checkpoint_folders(folder / "checkpoints")[-1])
    return {name: np.asarray(value) for name, value in values.items()}
