"""Tests two worker processes with a planted nvidia-smi each: one idle is named, two idle end themselves with 0.

Run as a program, this is `trainer.task` with a GPU that the guard believes in, and with short waits.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import keras
import pytest

from deploy.localrun.workers import free_addresses
from tests import workers
from tests.drill import read, stats
from tests.fixtures import Patch
from tests.nvidia_smi import PlantedGpu
from trainer.base.errors import DONE
from trainer.base.run_files.stop_limits import LIMITS, StopLimits
from trainer.cluster.cluster_spec import read_cluster

LONG = ["--steps=100000", "--model=mlp", "--data=digits", "--width=8", "--global_batch_size=16", "--steps_per_loop=1",
        "--report_every_steps=5", "--checkpoint_every_steps=20", f"--callbacks={__name__}:callbacks"]  # fmt: skip
IDLE = StopLimits(idle_s=2.0)
HANGS = "TRAINER_TEST_HANGS"  # a file: as soon as it is there, a worker that is not the chief hangs


class Hanging(keras.callbacks.Callback):
    """Hangs once the file is there."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        while os.path.exists(os.environ[HANGS]):
            time.sleep(0.1)


def callbacks() -> list[keras.callbacks.Callback]:
    return [] if read_cluster().is_chief else [Hanging()]


def until(true: Callable[[], object], logs: list[Path]) -> None:
    deadline = time.monotonic() + workers.LIMIT_SECONDS
    while not true():
        assert time.monotonic() < deadline, [log.read_text() for log in logs]
        time.sleep(0.05)


def said(log: Path, words: str) -> bool:
    return words in log.read_text()


def reached(job_dir: Path, step: int) -> bool:
    return stats(job_dir)[-1]["step"] >= step


@pytest.mark.slow
def test_one_idle_worker_is_named_and_two_end_the_job(tmp_path: Path, monkeypatch: Patch) -> None:
    """At first they end in their loop with a checkpoint; then, with the same command, one of them hangs."""
    monkeypatch.setenv(LIMITS, IDLE.text)
    monkeypatch.setenv(HANGS, str(tmp_path / "hangs"))
    path, job_dir, steps = os.environ["PATH"], tmp_path / "job", 0
    for hangs in (False, True):
        addresses, logs, gpus, processes = free_addresses(2), list[Path](), list[PlantedGpu](), []
        for index in range(2):
            monkeypatch.setenv("PATH", path)
            gpus.append(PlantedGpu(tmp_path / f"bin{index}", monkeypatch, 95 * index))
            logs.append(tmp_path / f"{index}.{hangs}.log")
            processes.append(workers.start(addresses, index, [*LONG, f"--job_dir={job_dir}"], logs[index], __name__))
        try:
            begun = (
                partial(reached, job_dir, steps + 20) if hangs else partial(said, logs[0], " is slow: its GPUs alone")
            )
            until(begun, logs)
            time.sleep(IDLE.idle_s)
            assert [process.poll() for process in processes] == [None, None]
            if hangs:
                (tmp_path / "hangs").touch()
            gpus[1].use(4)
            codes = workers.end(processes, 60)
        finally:
            workers.end(processes, 0.1)
        assert codes == [DONE, DONE], [log.read_text() for log in logs]
        for log in logs:
            assert (said(log, "the running step hangs"), said(log, "state saved at step")) == (hangs, not hangs)
        result = read(job_dir / "result.json")
        assert (result["state"], result["error"]) == ("stopped", IDLE.idle)
        assert result["slow_worker"]["name"].startswith("chief (")
        assert result["steps"] > steps
        steps = result["steps"]


if __name__ == "__main__":
    import trainer.task
    from trainer.reporting import resources
    from trainer.run import job
    from trainer.training import limit_watch

    job.local_devices = lambda config, cluster: ("GPU:0",)  # type: ignore[attr-defined]
    limit_watch.POLL_SECONDS, limit_watch.GRACE_SECONDS, resources._QUERY_EVERY_SECONDS = 0.1, 5.0, 0.1
    sys.exit(trainer.task.main())
