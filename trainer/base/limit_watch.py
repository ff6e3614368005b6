"""Watches a paid job from inside, and ends it at the limits that `submit` was given:
--stop_if_idle, --stop_if_over.

Jobs of the trainer and jobs of the user's own script run the same watch. It uses the standard
library alone, because `deploy` copies this file into the jobs of scripts, whose images may have
nothing else of this package.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from threading import Event, Thread

LIMITS = "TRAINER_LIMITS"  # environment variable of a job that holds the limits as JSON
CHECK_S = 5.0  # between two checks
GRACE_S = 30.0  # within which a job has to end after the request to do so
IDLE_PERCENT = 10.0  # utilization below which a GPU is idle
_LONGEST_QUERY_S = 30.0  # a driver that has to start first needs seconds


@dataclass(frozen=True)
class StopLimits:
    """Holds how many seconds all GPUs may be idle, and a job may run; 0: no limit."""

    idle_s: float = 0.0
    over_s: float = 0.0
    factor: float = 0.0  # over_s as a multiple of the upper end of the job's plan

    @property
    def text(self) -> str:
        """Returns the limits as JSON, for `read_limits`; "" without a limit."""
        return json.dumps(asdict(self)) if self.idle_s or self.over_s else ""


def read_limits(environment: Mapping[str, str] = os.environ) -> StopLimits:
    """Returns the limits of this job, zeros without any."""
    return StopLimits(**json.loads(environment.get(LIMITS, "{}")))


def read_gpus() -> list[dict[str, float | None]]:
    """Returns memory_gib and utilization_percent of each visible NVIDIA GPU, as `ask_gpus`."""
    gpus = []
    for mib, percent in ask_gpus("memory.used", "utilization.gpu"):
        gib = None if mib is None else mib / 1024
        gpus.append({"memory_gib": gib, "utilization_percent": percent})
    return gpus


def ask_gpus(*names: str) -> list[list[float | None]]:
    """Returns these values of each visible NVIDIA GPU; [] if nvidia-smi does not answer.

    A value that nvidia-smi does not know, as under MIG, is None.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):  # nvidia-smi itself ignores it
        command.append(f"--id={visible}")
    try:
        query = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return []
    try:
        text, _ = query.communicate(timeout=_LONGEST_QUERY_S)
    except subprocess.TimeoutExpired:
        query.kill()
        # with a broken GPU it never ends, and subprocess.run would wait
        with suppress(subprocess.TimeoutExpired):
            query.communicate(timeout=1.0)
        return []
    lines = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    lines = [fields for fields in lines if len(fields) == len(names)]
    return [[*map(_number, fields)] for fields in lines]


def _number(text: str) -> float | None:
    return float(text) if text.replace(".", "").isdigit() else None


@dataclass
class LimitWatch:
    """Measures how long GPUs have been idle and the job has run, and ends it at a limit.

    warn prints a line in the job's log; end asks the job to save its state and to end; leave ends
    it by force if it does not. ran_s: the seconds for which the job has run already.
    """

    limits: StopLimits
    warn: Callable[[str], object]
    end: Callable[[], object]
    leave: Callable[[], object]
    ran_s: float = 0.0
    reason: str = ""  # why the job ends
    idle_s: float = 0.0
    active: bool = False  # the GPUs were used in a way that nvidia-smi does not show

    def __post_init__(self) -> None:
        self._at = time.monotonic()
        self._began = self._at - self.ran_s
        self._warnings: set[str] = set()
        self._grace_ends = 0.0

    def works(self) -> bool:
        """Returns whether the job now does work for GPUs; no time is idle while it does not."""
        return True

    def saves(self) -> bool:
        """Returns whether the job is saving, which may take longer than GRACE_S."""
        return False

    def due(self) -> str:
        """Returns why the job is to end; "" if it may go on."""
        return self.reached(self.idle_s)

    def check(self) -> None:
        """Adds the time since the last check; warns at half of a limit, and ends the job at one."""
        now = time.monotonic()
        elapsed = now - self._at
        self._at = now
        # A job that was asked to end gets some time for that, and for its saving.
        if self.reason:
            if self.saves():
                self._grace_ends = now + GRACE_S
            elif now >= self._grace_ends:
                self.leave()
            return
        # How long its GPUs have been idle.
        if self.active:
            self.active = False
            self.idle_s = 0.0
        if self.limits.idle_s and self.works():
            use = [gpu["utilization_percent"] for gpu in read_gpus()]
            if not use or None in use:
                self._warn_once(
                    "nvidia-smi does not report the use of the GPUs: that time does not count as"
                    " idle"
                )
            else:
                busy = max(percent or 0.0 for percent in use) >= IDLE_PERCENT
                self.idle_s = 0.0 if busy else self.idle_s + elapsed
        self.reason = self.due()
        if self.reason:
            self._grace_ends = now + GRACE_S
            self.warn(f"stops: {self.reason}")
            self.end()

    def reached(self, idle_s: float) -> str:
        """Returns why the job is to end, after `idle_s` without use, else ""; warns at half."""
        planned = f"{self.limits.factor:g} times the upper end of its plan"
        over = (
            f"the job has run for {self.limits.over_s / 3600:.3g} hours, {planned} (--stop_if_over)"
        )
        idle = (
            f"all GPUs were below {IDLE_PERCENT:.0f} % for {self.limits.idle_s / 60:.3g} minutes"
            " (--stop_if_idle)"
        )
        reason = ""
        for seconds, limit, text in (
            (self._at - self._began, self.limits.over_s, over),
            (idle_s, self.limits.idle_s, idle),
        ):
            if limit and seconds >= limit / 2:
                self._warn_once(f"halfway to a limit at which this job ends itself: {text}")
                reason = text if seconds >= limit else reason
        return reason

    def _warn_once(self, line: str) -> None:
        if line not in self._warnings:
            self._warnings.add(line)
            self.warn(line)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Calls `check` every CHECK_S seconds in a thread within the block, if there is a limit."""
        over = Event()

        def watch() -> None:
            while not over.wait(CHECK_S):
                self.check()

        if self.limits.text:
            Thread(target=watch, name="limits", daemon=True).start()
        try:
            yield
        finally:
            over.set()
