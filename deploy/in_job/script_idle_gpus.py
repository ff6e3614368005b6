"""Finds GPUs that a script leaves idle, for --stop_if_idle, by nvidia-smi and by the steps that it reports."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping

from .starter import say

LOOK_S, IDLE_PERCENT = 10.0, 10.0
SAVING_S = 30.0  # for a script that is told to end (SIGTERM) to save its state
_QUERY = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]


def gpu_use() -> list[float]:
    """Returns how much each GPU of this machine is used, in percent; [] if that is not known of all."""
    try:
        query = subprocess.run(_QUERY, capture_output=True, text=True, timeout=LOOK_S, check=True)
        return [float(line) for line in query.stdout.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


class IdleGpus:
    """Counts for how long a script has neither used a GPU nor reported; its start, before the first of both, is free.

    `environment` holds the variable TRAINER_LIMITS of the job.
    """

    def __init__(
        self, environment: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic,
        use: Callable[[], list[float]] = gpu_use,
    ) -> None:  # fmt: skip
        self._limit = float(json.loads(environment.get("TRAINER_LIMITS") or "{}").get("idle_s") or 0.0)
        self._clock, self._use = clock, use
        self._looked, self._active = clock(), float("inf")  # when the script last was active
        self._reports, self._warned, self._blind = 0, False, False

    def reason(self, reports: int = 0) -> str:
        """Returns why the script is to end; "" if it may go on. Looks every LOOK_S. `reports`: their number so far."""
        now = self._clock()
        if not self._limit or now - self._looked < LOOK_S:
            return ""
        self._looked, used = now, self._use()
        if not used and not self._blind:
            self._blind = True
            say("nvidia-smi does not say how much the GPUs are used: so long --stop_if_idle ends nothing", "WARNING")
        unknown = not used and self._active < now  # then nobody knows that it is idle
        if unknown or max(used, default=0.0) >= IDLE_PERCENT or reports > self._reports:
            self._active, self._warned = now, False
        self._reports = reports
        if not self._warned and now - self._active >= self._limit / 2:
            self._warned = True
            say(f"half of the time is over until this job ends itself: {_idle_for(self._limit / 2)}", "WARNING")
        return _idle_for(self._limit) if now - self._active >= self._limit else ""


def _idle_for(seconds: float) -> str:
    return f"all GPUs were below {IDLE_PERCENT:.0f} % for {seconds / 60:.3g} minutes (--stop_if_idle)"
