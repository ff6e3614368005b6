"""A job's workers as processes of this machine, restarted and ended as Vertex AI would."""

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

from deploy.localrun.workers import Worker
from trainer.errors import DONE, FAULT, INTERRUPTED, USER_MUST_CHANGE
from trainer.reporting.run_files import last_reported_step
from trainer.storage.run_layout import CHECKPOINTS, step_of

LEAVE_SECONDS = 20.0  # that the others have when one is lost, or all when the job is to end
_POLL_SECONDS = 0.05

Say = Callable[[str, str], None]  # (worker's name, line)


@dataclass(frozen=True)
class WorkerKill:
    """A worker to kill without warning once the run has reported this step."""

    worker: int  # 0 is the chief
    step: int


@dataclass(frozen=True)
class Outcome:
    """How a job ended: an exit code of the trainer's contract, the state as Vertex AI would report it, and why."""

    code: int
    state: str
    error: str = ""
    restarts: int = 0


@dataclass
class _Process:
    """A worker and its process of the moment."""

    worker: Worker
    process: "subprocess.Popen[str]"
    reader: threading.Thread
    restarts: int = 0
    code: int | None = None


@dataclass
class LocalJob:
    """One job on this machine. `run` may be called once; `stop` from any thread or signal handler."""

    workers: Sequence[Worker]
    job_dir: Path
    say: Say
    restarts: int = 0  # of each worker, as Vertex AI restarts what exits non-zero
    loss: WorkerKill | None = None
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> Outcome:
        """Waits for the job's end; no process is left."""
        running: list[_Process] = []
        try:
            for worker in self.workers:
                running.append(self._start(worker))
            return self._watch(running)
        finally:
            self._end(running)

    def stop(self) -> None:
        """Asks every worker to save its state and end."""
        self._stopping.set()

    def _start(self, worker: Worker) -> _Process:
        process = subprocess.Popen(
            [sys.executable, "-m", worker.module, *worker.arguments],
            env={**os.environ, **worker.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for us, who pass it on once
        )
        with contextlib.suppress(AttributeError, OSError):  # no affinity on this system, or not of these; gone already
            os.sched_setaffinity(process.pid, worker.cores)
        assert process.stdout is not None
        reader = threading.Thread(target=self._read, args=(worker.name, process.stdout), daemon=True)
        reader.start()
        return _Process(worker, process, reader)

    def _read(self, name: str, output: IO[str]) -> None:
        with output:
            for line in output:
                self._say(name, plain(line))

    def _say(self, name: str, line: str) -> None:
        """Says it where that can be done: a full disk or a closed terminal must not cost the worker its pipe."""
        with contextlib.suppress(OSError, ValueError):
            self.say(name, line)

    def _watch(self, running: list[_Process]) -> Outcome:
        while True:
            time.sleep(_POLL_SECONDS)
            if self._stopping.is_set():
                return self._stopped(running)
            self._lose(running)
            for one in running:
                one.code = one.process.poll()
            if running[0].code == DONE:  # the chief's end is the job's
                return Outcome(DONE, "SUCCEEDED", restarts=sum(one.restarts for one in running))
            for one in running:
                if one.code and not self._restart(one, running):
                    return self._failed(one, running)

    def _restart(self, one: _Process, running: list[_Process]) -> bool:
        """Starts a worker that failed anew, in place; False where it has used up its restarts."""
        if one.restarts >= self.restarts:
            return False
        one.reader.join(LEAVE_SECONDS)
        self._say(
            one.worker.name, f"exited with status {_status(one.code)}: restart {one.restarts + 1} of {self.restarts}"
        )
        fresh = self._start(one.worker)
        fresh.restarts = one.restarts + 1
        running[running.index(one)] = fresh
        return True

    def _failed(self, one: _Process, running: Sequence[_Process]) -> Outcome:
        """The job fails with its first worker: the others have a while to say what they know."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline and any(other.process.poll() is None for other in running):
            time.sleep(_POLL_SECONDS)
        one.reader.join(LEAVE_SECONDS)
        error = f"The replica {one.worker.name} exited with a non-zero status of {_status(one.code)}."
        code = one.code if one.code in (USER_MUST_CHANGE, INTERRUPTED) else FAULT
        return Outcome(code or FAULT, "FAILED", error, sum(o.restarts for o in running))

    def _stopped(self, running: Sequence[_Process]) -> Outcome:
        self._say("all", f"asked to save the state and end, within {LEAVE_SECONDS:.0f} s")
        self._end(running)
        codes = {one.process.returncode for one in running}
        killed = f"killed after {LEAVE_SECONDS:.0f} s" if -signal.SIGKILL in codes else ""
        return Outcome(INTERRUPTED if codes != {DONE} else DONE, "CANCELLED", killed)

    def _lose(self, running: Sequence[_Process]) -> None:
        """Kills the worker that is to be lost, once."""
        if self.loss and last_reported_step(self.job_dir) >= self.loss.step:
            one = running[self.loss.worker]
            self._say(one.worker.name, f"killed at step {last_reported_step(self.job_dir)}, as --kill asks")
            one.process.kill()
            self.loss = None

    def _end(self, running: Sequence[_Process]) -> None:
        """SIGTERM, on which the trainer saves its state; SIGKILL for what is left then."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + LEAVE_SECONDS
            for one in running:
                if one.process.poll() is None:
                    one.process.send_signal(number)
            for one in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.process.wait(max(0.0, deadline - time.monotonic()))
        for one in running:
            one.reader.join(LEAVE_SECONDS)


@contextlib.contextmanager
def on_signals(handler: Callable[[int, FrameType | None], Any], *numbers: int) -> Iterator[None]:
    """Within the block `handler` hears of `numbers`, and once of a closed terminal, unless nohup keeps that away."""
    hangup = getattr(signal, "SIGHUP", None)

    def hear(number: int, frame: FrameType | None) -> None:
        if number == hangup:  # the shell sends it and, when the shell ends, the kernel
            signal.signal(number, lambda number, frame: None)
        handler(number, frame)

    heard = [*numbers, hangup] if hangup and signal.getsignal(hangup) != signal.SIG_IGN else numbers
    before = {number: signal.signal(number, hear) for number in heard}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def plain(line: str) -> str:
    """A line of a worker's output, as Cloud Logging would show it: the message of what is JSON."""
    with contextlib.suppress(ValueError):
        entry = json.loads(line)
        if isinstance(entry, dict) and "message" in entry:
            severity = entry.get("severity", "INFO")
            mark = "" if severity == "INFO" else f"{severity.lower()}: "
            return f"{mark}{entry['message']}"
    return line.rstrip("\n")


def kept_step(job_dir: Path) -> int | None:
    """The step of the newest checkpoint, each a folder that appears whole; None for none."""
    steps = [step_of(path.name) for path in (job_dir / CHECKPOINTS).glob("*")]
    return max((step for step in steps if step >= 0), default=None)


def _status(code: int | None) -> int:
    """As a container reports it: 128 and the number of the signal that ended the process."""
    return 0 if code is None else code if code >= 0 else 128 - code
