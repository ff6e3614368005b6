"""Runs the interruption drill, one run that is killed at random moments and goes on, and reads the
files of runs."""

import json
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deploy.platform.local import free_addresses
from tests import workers
from trainer.training.checkpoint import METRICS, checkpoint_folders, read_checkpoint

RUN = [
    "--recipe=wgan_gp_digits",
    "--width=4",
    "--latent_dim=8",
    "--global_batch_size=8",
    "--critic_steps=2",
    "--checkpoint_every_steps=5",
    "--report_every_steps=3",
    "--sample_every_steps=50",
    "--tensorboard=false",
    # auto could choose differently for the undisturbed run, which measures again
    "--jit_compile=false",
]
MOMENTS = (
    "starting, SIGKILL",
    "starting, SIGTERM",
    "training, SIGKILL",
    "training, SIGTERM",
    "saving, SIGKILL",
)
_LONGEST_SECONDS = 600.0  # of any wait


def run(flags: Sequence[str], log: Path, count: int) -> list[subprocess.Popen[bytes]]:
    """Starts the processes of one run, the chief first; all write to `log`."""
    addresses = free_addresses(count) if count > 1 else []
    return [workers.start(addresses, index, flags, log) for index in range(count)]


def drill(
    folder: Path,
    steps: int,
    kills: Sequence[str],
    seed: int,
    *,
    count: Sequence[int] = (1,),
    flags: Sequence[str] = (),
) -> None:
    """Kills the run in `folder` at each of these moments (see MOMENTS), then lets it finish.

    count: the numbers of workers, of one start after the other, in turn.
    """
    draw = random.Random(seed)
    log = folder.with_suffix(".log")
    flags = [*RUN, f"--job_dir={folder}", f"--steps={steps}", *flags]
    for number, moment in enumerate(kills):
        # later reports come from this start: before them, SIGTERM finds it starting
        restored = _reached(folder)
        step = restored + draw.randint(0, 2 * (steps - restored) // (len(kills) - number + 1))
        log_before = log.stat().st_size if log.exists() else 0
        processes = run(flags, log, count[number % len(count)])
        try:
            if moment.startswith("starting"):
                time.sleep(draw.uniform(0.0, 5.0))
            else:
                _await(folder, max(step, restored + 1), moment.startswith("saving"), processes)
            time.sleep(draw.uniform(0.0, 0.004 if moment.startswith("saving") else 0.06))
            victim = draw.choice(processes)
            signal_sent = signal.Signals[moment.split()[-1]]
            assert victim.poll() is None, (
                f"it ended before the kill: {log.read_text()[log_before:]}"
            )
            victim.send_signal(signal_sent)
            ended = [process.wait(_LONGEST_SECONDS) for process in processes]
        finally:
            workers.end(processes, 0)
        # Before the first line of task.py runs, SIGTERM kills too.
        codes = {75, -signal_sent} if moment.startswith("starting") else {75}
        if signal_sent == signal.SIGKILL:
            codes = {-signal_sent}
        for process, code in zip(processes, ended, strict=True):
            assert code in (codes if process is victim else {75}), log.read_text()[log_before:]
    processes = run(flags, log, count[len(kills) % len(count)])
    assert not any(workers.end(processes, _LONGEST_SECONDS)), log.read_text()


def _await(
    folder: Path, step: int, saving: bool, processes: Sequence[subprocess.Popen[bytes]]
) -> None:
    """Waits until the step is reported and, if asked, a checkpoint is written, or until one of the
    processes ends."""

    def ended() -> bool:
        return any(process.poll() is not None for process in processes)

    workers.until(lambda: _reached(folder) >= step or ended(), _LONGEST_SECONDS)
    workers.until(
        lambda: not saving or any(folder.glob("checkpoints/.step-*.part")) or ended(),
        _LONGEST_SECONDS,
    )


def _reached(folder: Path) -> int:
    """Returns the last reported step."""
    return max((line["step"] for line in stats(folder)), default=0)


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
    return [
        value
        for line in stats(folder)
        for kind in ("losses", "metrics")
        for value in line[kind].values()
    ]


def last_state(folder: Path) -> dict[str, Any]:
    """Returns every variable of the newest checkpoint: networks, averages, optimizers, random
    state.

    What metrics have counted is left out, as it is kept for each replica.
    """
    _, values = read_checkpoint(checkpoint_folders(folder / "checkpoints")[-1])
    return {
        name: np.asarray(value) for name, value in values.items() if not name.startswith(METRICS)
    }
