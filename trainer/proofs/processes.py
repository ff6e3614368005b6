"""Measures runs in processes of their own: on some replicas of this machine's CPU, or on several workers."""

import json
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer.base.errors import PlatformFault, UserError
from trainer.base.run_files.records import read_json
from trainer.run.child import last_error, start

LONGEST_SECONDS = 1_800.0


def measured(
    flags: Sequence[str], steps: Sequence[int], replicas: int = 1, workers: int = 1, *, control: bool = False
) -> dict[str, Any]:
    """Returns what `trainer.proofs.golden_run.measure` writes of a run with these flags of trainer.task.

    Raises UserError with the line of a process that ended with it, and PlatformFault for other ends.
    """
    with TemporaryDirectory(prefix="trainer-golden-") as folder:
        out = Path(folder) / "measured.json"
        words = ["trainer.golden", "measure", f"--out={out}", f"--on={replicas}",
                 f"--after={','.join(map(str, steps))}", *(["--control"] if control else []), *flags]  # fmt: skip
        _run(words, Path(folder), workers)
        content, problem = read_json(out)
    if problem:
        raise PlatformFault(f"a measuring process left no result ({problem})")
    return content


def _run(words: Sequence[str], folder: Path, workers: int) -> None:
    """Runs the command as each worker of a cluster on loopback, and ends all if one fails or takes too long."""
    logs, processes = [folder / f"log-{index}" for index in range(workers)], []
    try:
        for log, cluster in zip(logs, _clusters(workers), strict=True):
            processes.append(start(words, log, cluster))
        for log, process in zip(logs, processes, strict=True):
            if code := process.wait(LONGEST_SECONDS):
                line = last_error(log)
                if code == UserError.exit_code:
                    raise UserError(line)
                raise PlatformFault(f"a measuring process ended with exit code {code}: {line}")
    except subprocess.TimeoutExpired:
        raise PlatformFault(f"a measuring process took longer than {LONGEST_SECONDS:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _clusters(workers: int) -> list[dict[str, str]]:
    """Returns the environment of each worker, at ports that nobody listens at."""
    if workers == 1:
        return [{}]
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
    cluster = {"worker": [f"127.0.0.1:{listener.getsockname()[1]}" for listener in sockets]}
    for listener in sockets:
        listener.close()
    tasks = ({"cluster": cluster, "task": {"type": "worker", "index": index}} for index in range(workers))
    return [{"TF_CONFIG": json.dumps(task)} for task in tasks]
