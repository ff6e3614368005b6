"""Starts the workers of a job as processes of this machine, each with its TF_CONFIG, and waits for
what they do."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from deploy.platform.local import free_addresses

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 240


def python(
    *words: str, code: int = 0, cwd: Path = ROOT, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Runs Python to its end, which has to be this exit code; returns what it printed."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_SECONDS,
    )
    assert done.returncode == code, done.stderr
    return done


def start(
    addresses: Sequence[str],
    index: int,
    flags: Sequence[str],
    log: Path,
    module: str = "trainer.task",
    cwd: Path = ROOT,
) -> "subprocess.Popen[bytes]":
    """Starts worker `index` of the cluster, or the process of a job without a cluster; its output
    goes to `log`."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    if addresses:
        task = (
            {"type": "chief", "index": 0} if index == 0 else {"type": "worker", "index": index - 1}
        )
        config = {"cluster": {"chief": addresses[:1], "worker": addresses[1:]}, "task": task}
        environment["TF_CONFIG"] = json.dumps(config)
    with open(log, "ab") as output:
        command = [sys.executable, "-m", module, *flags]
        return subprocess.Popen(
            command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT
        )


def end(
    processes: Sequence["subprocess.Popen[bytes]"], seconds: float = LIMIT_SECONDS
) -> list[int]:
    """Waits `seconds` for each and returns the exit codes; a hanging one is killed and fails the
    test by its code."""
    with suppress(subprocess.TimeoutExpired):
        for process in processes:
            process.wait(seconds)
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
    return [process.returncode for process in processes]


def run(
    workers: int,
    flags: Sequence[str],
    log: Path,
    module: str = "trainer.task",
    seconds: float = LIMIT_SECONDS,
) -> list[int]:
    """Runs a job on `workers` workers, or in one process; their outputs are `log`.0, `log`.1 …"""
    addresses = free_addresses(workers) if workers > 1 else []
    logs = [log.with_name(f"{log.name}.{index}") for index in range(workers)]
    return end(
        [start(addresses, index, flags, logs[index], module) for index in range(workers)], seconds
    )


def until(happened: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits until `happened` is true; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.0005)
