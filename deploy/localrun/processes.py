"""Runs a job's workers as local processes, and restarts and stops them as Vertex AI does."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from deploy.localrun.workers import LocalWorker
from trainer.base.errors import DONE, FAULT, INTERRUPTED, USER_MUST_CHANGE
from trainer.base.run_files.records import last_reported_step
from trainer.base.run_files.run_layout import CHECKPOINTS, step_of

EXIT_TIMEOUT_S = 20.0  # for the other workers after one has failed, or for all when the job is stopped
_POLL_S, ASK_S = 0.05, 0.5

PrintWorkerLine = Callable[[str, str], None]  # (worker's name, line)


@dataclass(frozen=True)
class WorkerKill:
    """Names a worker to kill without warning once the run has reported this step."""

    worker: int  # 0 is the chief
    step: int


@dataclass(frozen=True)
class JobEnd:
    """Holds a finished job's exit code (as the trainer defines them), its state in Vertex AI's terms, and its error."""

    code: int
    state: str
    error: str = ""
    restarts: int = 0
    status: int = 0  # of the worker that failed the job, as a container reports it


@dataclass
class _RunningWorker:
    """Holds a worker and its current process."""

    worker: LocalWorker
    process: "subprocess.Popen[str]"
    reader: threading.Thread
    restarts: int = 0
    code: int | None = None


@dataclass
class LocalJob:
    """Represents one local job. Call `run` once, and `stop` from any thread or signal handler."""

    workers: Sequence[LocalWorker]
    job_dir: Path
    print_line: PrintWorkerLine
    restarts: int = 0  # allowed per worker, after a non-zero exit status
    kill: WorkerKill | None = None
    to_stop: Callable[[], bool] = lambda: False  # asked every ASK_S
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> JobEnd:
        """Runs the job to its end; leaves no process behind."""
        running: list[_RunningWorker] = []
        try:
            for worker in self.workers:
                running.append(self._start(worker))
            return self._watch(running)
        finally:
            self._terminate(running)

    def stop(self) -> None:
        """Makes every worker save its state and exit."""
        self._stopping.set()

    def _start(self, worker: LocalWorker) -> _RunningWorker:
        with _on_cores(worker.cores):
            process = subprocess.Popen(
                [sys.executable, "-m", worker.module, *worker.arguments],
                env={**os.environ, **worker.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # so that Ctrl-C reaches only this process, which sends one signal
            )
        assert process.stdout is not None
        reader = threading.Thread(target=self._forward_output, args=(worker.name, process.stdout), daemon=True)
        reader.start()
        return _RunningWorker(worker, process, reader)

    def _forward_output(self, name: str, output: IO[str]) -> None:
        with output:
            for line in output:
                self._print(name, readable(line))

    def _print(self, name: str, line: str) -> None:
        """Prints a line; ignores a full disk or closed terminal, so that the worker's pipe is still read."""
        with contextlib.suppress(OSError, ValueError):
            self.print_line(name, line)

    def _watch(self, running: list[_RunningWorker]) -> JobEnd:
        ask_at = time.monotonic()
        while True:
            time.sleep(_POLL_S)
            if time.monotonic() >= ask_at:
                ask_at = time.monotonic() + ASK_S
                if self.to_stop():
                    self.stop()
            if self._stopping.is_set():
                return self._stopped(running)
            self._kill_if_due(running)
            for one in running:
                one.code = one.process.poll()
            if running[0].code == DONE:  # the job ends with its chief
                return JobEnd(DONE, "SUCCEEDED", restarts=sum(one.restarts for one in running))
            for one in running:
                if one.code and not self._restart(one, running):
                    return self._failed(one, running)

    def _restart(self, one: _RunningWorker, running: list[_RunningWorker]) -> bool:
        """Restarts a failed worker in place; returns False if it has no restarts left."""
        if one.restarts >= self.restarts:
            return False
        one.reader.join(EXIT_TIMEOUT_S)
        restarts = one.restarts + 1
        self._print(one.worker.name, f"exited with status {_status(one.code)}: restart {restarts} of {self.restarts}")
        fresh = self._start(one.worker)
        fresh.restarts = restarts
        running[running.index(one)] = fresh
        return True

    def _failed(self, one: _RunningWorker, running: Sequence[_RunningWorker]) -> JobEnd:
        """Returns the outcome of a job whose first worker failed, after the others had time to log and exit."""
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while time.monotonic() < deadline and any(other.process.poll() is None for other in running):
            time.sleep(_POLL_S)
        one.reader.join(EXIT_TIMEOUT_S)
        status = _status(one.code)
        error = f"The replica {one.worker.name} exited with a non-zero status of {status}."
        code = one.code if one.code in (USER_MUST_CHANGE, INTERRUPTED) else FAULT
        return JobEnd(code or FAULT, "FAILED", error, sum(o.restarts for o in running), status)

    def _stopped(self, running: Sequence[_RunningWorker]) -> JobEnd:
        self._print("all", f"stopping: the workers save their state and exit within {EXIT_TIMEOUT_S:.0f} s")
        self._terminate(running)
        codes = {one.process.returncode for one in running}
        killed = f"killed after {EXIT_TIMEOUT_S:.0f} s" if -signal.SIGKILL in codes else ""
        return JobEnd(INTERRUPTED if codes != {DONE} else DONE, "CANCELLED", killed)

    def _kill_if_due(self, running: Sequence[_RunningWorker]) -> None:
        """Kills the worker that `kill` names, once."""
        if self.kill and last_reported_step(self.job_dir) >= self.kill.step:
            one = running[self.kill.worker]
            self._print(one.worker.name, f"killed at step {last_reported_step(self.job_dir)}, as --kill requires")
            _send(one.process, signal.SIGKILL)
            self.kill = None

    def _terminate(self, running: Sequence[_RunningWorker]) -> None:
        """Sends SIGTERM, on which the trainer saves its state, then SIGKILL to what still runs."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + EXIT_TIMEOUT_S
            for one in running:
                if one.process.poll() is None:
                    _send(one.process, number)
            for one in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.process.wait(max(0.0, deadline - time.monotonic()))
        for one in running:
            one.reader.join(EXIT_TIMEOUT_S)


def _send(process: "subprocess.Popen[str]", number: int) -> None:
    """Sends a signal to a worker; SIGKILL, on which it cannot end its own processes, to these too."""
    if number == signal.SIGKILL:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.killpg(process.pid, number)
    else:
        process.send_signal(number)


@contextlib.contextmanager
def _on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Lets this thread, and a process that it starts, run on these cores only, if the system can do that.

    A process that is moved after its start may have looked at its cores before.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        with contextlib.suppress(OSError):  # no such core
            os.sched_setaffinity(0, cores)
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def on_signals(handler: Callable[[int, FrameType | None], Any], *numbers: int) -> Iterator[None]:
    """Calls `handler` for the signals `numbers`, and once for SIGHUP unless nohup ignores it, within the block."""
    hangup = getattr(signal, "SIGHUP", None)

    def handle(number: int, frame: FrameType | None) -> None:
        if number == hangup:  # the shell sends it, and the kernel again when the shell ends
            signal.signal(number, lambda number, frame: None)
        handler(number, frame)

    handled = [*numbers, hangup] if hangup and signal.getsignal(hangup) != signal.SIG_IGN else numbers
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def readable(line: str) -> str:
    """Returns a line of a worker's output as Cloud Logging shows it: the message if it is JSON."""
    with contextlib.suppress(ValueError):
        entry = json.loads(line)
        if isinstance(entry, dict) and "message" in entry:
            severity = entry.get("severity", "INFO")
            prefix = "" if severity == "INFO" else f"{severity.lower()}: "
            return f"{prefix}{entry['message']}"
    return line.rstrip("\n")


def checkpoint_step(job_dir: Path) -> int | None:
    """Returns the step of the newest checkpoint, each a folder that is created atomically; None if there is none."""
    steps = [step_of(path.name) for path in (job_dir / CHECKPOINTS).glob("*")]
    return max((step for step in steps if step >= 0), default=None)


def _status(code: int | None) -> int:
    """Returns the exit status as a container reports it: 128 + n for a process that signal n killed."""
    return 0 if code is None else code if code >= 0 else 128 - code
