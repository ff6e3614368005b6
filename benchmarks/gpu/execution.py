"""Runs parts, each as a process of its own within a limit; a part that fails ends no other."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part
from trainer.base.storage import write_whole

DONE, FAILED, LATE, LEFT_OUT = "done", "failed", "out of time", "left out"
# Variables of a part's process.
RESULT, REHEARSE, TURNS = "BENCHMARK_GPU_RESULT", "BENCHMARK_GPU_REHEARSE", "BENCHMARK_GPU_TURNS"
_LEAST_SECONDS = 20.0  # a part is not begun with less
_SLOWER_REHEARSAL = 5  # two cores, and other work on them


@dataclass
class Outcome:
    """Holds how a part ended, and what it had measured until then."""

    question: str
    state: str
    seconds: float = 0.0
    reason: str = ""
    result: dict[str, Any] = field(default_factory=dict)


def run_parts(
    parts: Sequence[Part], out: Path, minutes: float, gpus: int, *, rehearse: bool, together: bool = False
) -> dict[str, Outcome]:
    """Runs the parts that the time and the GPUs allow; writes parts.json anew after each.

    together: as many at once as there are cores: they build beside each other, which takes most of the time, and
    measure in turn.
    """
    until, turns, lock = time.monotonic() + 60 * minutes, out / "turns" if together else None, threading.Lock()
    outcomes: dict[str, Outcome] = {}

    def run(part: Part) -> None:
        left = until - time.monotonic()
        if gpus < part.gpus and not rehearse:
            outcome = Outcome(part.question, LEFT_OUT, reason=f"it needs {part.gpus} GPUs, this machine has {gpus}")
        elif left < _LEAST_SECONDS:
            outcome = Outcome(part.question, LEFT_OUT, reason=f"the {minutes:g} minutes are over")
        else:
            print(f"{part.name}: {part.question} …", flush=True)
            limit = part.seconds * (_SLOWER_REHEARSAL if rehearse and not part.name.startswith("fault") else 1)
            waits = together and part.measures
            outcome = run_part(part, out, left if waits else min(limit, left), rehearse=rehearse, turns=turns)
        reason = f": {outcome.reason}" if outcome.reason else ""
        with lock:
            outcomes[part.name] = outcome
            print(f"{part.name}: {outcome.state} after {outcome.seconds:.0f} s{reason}", flush=True)
            _write(outcomes, out)

    with ThreadPoolExecutor(max(2, os.cpu_count() or 2) if together else 1) as threads:
        for _ in threads.map(run, parts):
            pass
    return {part.name: outcomes[part.name] for part in parts}


def _write(outcomes: dict[str, Outcome], out: Path) -> None:
    content = {name: asdict(outcome) for name, outcome in outcomes.items()}
    write_whole(out / "parts.json", json.dumps(content, indent=1) + "\n")


def run_part(part: Part, out: Path, limit: float, *, rehearse: bool, turns: Path | None = None) -> Outcome:
    """Runs one part for at most `limit` seconds; all of its processes are ended afterwards.

    turns: a file by which parts that run beside it measure in turn.
    """
    result, log = out / f"{part.name}.json", out / f"{part.name}.log"
    result.unlink(missing_ok=True)
    environment = {"TF_CPP_MIN_LOG_LEVEL": "1", **os.environ, RESULT: str(result), REHEARSE: "1" if rehearse else "",
                   TURNS: str(turns or "")}  # fmt: skip
    began = time.monotonic()
    with log.open("wb") as output, _group(part.command, environment, output) as process:
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
    seconds = time.monotonic() - began
    measured = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    if code is None:
        return Outcome(part.question, LATE, seconds, f"ended after its limit of {limit:.0f} s", measured)
    if code:
        return Outcome(part.question, FAILED, seconds, _reason(code, log), measured)
    return Outcome(part.question, DONE, seconds, result=measured)


@contextlib.contextmanager
def _group(command: Sequence[str], environment: dict[str, str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process that leads a group, and kills the group at the end: a hung NCCL call ignores other signals."""
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                               stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(code: int, log: Path) -> str:
    """Returns why a part failed: the signal that ended it, or the last line that it printed."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"exit {code}: {lines[-1][:300] if lines else 'it printed nothing'}"


class Results:
    """Keeps what a part measures; each `keep` writes all of it, so that a part that is ended loses nothing."""

    def __init__(self) -> None:
        self._content: dict[str, Any] = {}
        self._path = os.environ.get(RESULT, "")

    def keep(self, **measured: Any) -> None:
        """Adds numbers by name, prints them and writes the file of the part."""
        self._content |= measured
        print(json.dumps(measured), flush=True)
        if self._path:
            write_whole(Path(self._path), json.dumps(self._content, indent=1) + "\n")


@contextlib.contextmanager  # a decorator of functions too
def turn(*, alone: bool) -> Iterator[None]:
    """Waits, where parts run together, until no other one measures; with `alone` until no other one builds either."""
    path = os.environ.get(TURNS)
    if not path:
        yield
        return
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def rehearsing() -> bool:
    """Returns whether this process rehearses on a CPU, with sizes that prove nothing."""
    return bool(os.environ.get(REHEARSE))
