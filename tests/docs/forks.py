"""Runs commands as `python -m` does, in forks of one process that has imported TensorFlow and has not started it.

Importing it takes longer than a short run.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tensorflow", "keras"])


def run_module(words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float) -> tuple[int, str]:
    """Runs a module, the first word, with the others as arguments; returns its exit code and all that it printed."""
    log = folder / ".printed"
    process = _FORKS.Process(target=_run, args=(list(words), folder, dict(environment), log))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode or 0, log.read_text(encoding="utf-8", errors="replace")


def _run(words: list[str], folder: Path, environment: Mapping[str, str], log: Path) -> None:
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(folder)
    os.environ.update(environment)
    sys.path.insert(0, str(folder))
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
