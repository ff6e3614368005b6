"""Measures runs in processes of their own: on some replicas of this machine's CPU, or on several workers."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer.base.errors import PlatformFault, UserError
from trainer.base.run_files.records import read_json

OF_A_JOB = ("TF_CONFIG", "CLUSTER_SPEC", "AIP_MODEL_DIR", "AIP_CHECKPOINT_DIR", "AIP_TENSORBOARD_LOG_DIR")
LONGEST_SECONDS = 1_800.0


def measured(
    flags: Sequence[str], steps: Sequence[int], replicas: int = 1, workers: int = 1, *, control: bool = False
) -> dict[str, Any]:
    """Returns what `trainer.proofs.golden_run.measure` writes of a run with these flags of trainer.task.

    Raises UserError with the line of a process that ended with it, and PlatformFault for other ends.
    """
    with TemporaryDirectory(prefix="trainer-golden-") as folder:
        out = Path(folder) / "measured.json"
        words = [sys.executable, "-m", "trainer.golden", "measure", f"--out={out}", f"--replicas={replicas}",
                 f"--after={','.join(map(str, steps))}", *(["--control"] if control else []), *flags]  # fmt: skip
        _run(words, Path(folder), workers)
        content, problem = read_json(out)
    if problem:
        raise PlatformFault(f"a measuring process left no result ({problem})")
    return content


def _run(words: Sequence[str], folder: Path, workers: int) -> None:
    """Runs the command as each worker of a cluster on loopback, and ends all if one fails or takes too long."""
    clean = {name: value for name, value in os.environ.items() if name not in OF_A_JOB}
    environment = {**clean, "CUDA_VISIBLE_DEVICES": "-1"}
    addresses = _free_addresses(workers)
    processes = []
    try:
        for index in range(workers):
            own = {} if workers == 1 else {"TF_CONFIG": _cluster(addresses, index)}
            with (folder / f"log-{index}").open("wb") as log:
                processes.append(subprocess.Popen(
                    words, env={**environment, **own}, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                ))  # fmt: skip
        for index, process in enumerate(processes):
            if process.wait(LONGEST_SECONDS):
                _refuse(process.returncode, folder / f"log-{index}")
    except subprocess.TimeoutExpired:
        raise PlatformFault(f"a measuring process took longer than {LONGEST_SECONDS:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _cluster(addresses: Sequence[str], index: int) -> str:
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}})


def _refuse(code: int, log: Path) -> None:
    if code == UserError.exit_code:
        raise UserError(line_of(log))
    raise PlatformFault(f"a measuring process ended with exit code {code}: {line_of(log)}")


def line_of(log: Path) -> str:
    """Returns the last error in the log of one of our commands, or else its last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.partition("error: ")[2] for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it printed nothing"])[-1]


def _free_addresses(count: int) -> list[str]:
    """Returns addresses on loopback that nobody listens at."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{listener.getsockname()[1]}" for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()
