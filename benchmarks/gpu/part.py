"""Gives a part of the measurement what it shares with the others: how it keeps a number, its turn,
and nvidia-smi."""

import fcntl
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOCK = Path(__file__)  # any file that all parts can open


def keep(**measured: Any) -> None:
    """Prints numbers by name on a line of the part's log, which is there even if the part is ended
    later."""
    print(json.dumps(measured), flush=True)


def kept(log: Path) -> dict[str, Any]:
    """Returns what a part kept in its log."""
    lines = [
        line
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.startswith('{"')
    ]
    return {name: value for line in lines for name, value in json.loads(line).items()}


@contextmanager
def turn(*, alone: bool) -> Iterator[None]:
    """Waits, where parts run together, until no other one measures; with `alone` until no other one
    builds either."""
    with LOCK.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def nvidia(fields: str) -> list[str]:
    """Returns what nvidia-smi says of each GPU, as `81559, 580.1`; [] without an NVIDIA driver, as
    in a rehearsal."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=False
    ).stdout.splitlines()
