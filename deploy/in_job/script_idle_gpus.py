"""Finds GPUs that a script leaves idle, for --stop_if_idle, by what nvidia-smi says of all GPUs of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping

LOOK_S, IDLE_PERCENT = 10.0, 10.0
SAVING_S = 30.0  # for a script that is told to end (SIGTERM) to save its state
_QUERY = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]


def gpu_use() -> list[float]:
    """Returns how much each GPU is used, in percent; [] if that is not known of all."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=LOOK_S, check=True)
        return [float(line) for line in done.stdout.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


class IdleGpus:
    """Counts for how long all GPUs have been idle. `limits`: the variable TRAINER_LIMITS of the job."""

    def __init__(
        self, environment: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic,
        use: Callable[[], list[float]] = gpu_use,
    ) -> None:  # fmt: skip
        self._limit = float(json.loads(environment.get("TRAINER_LIMITS") or "{}").get("idle_s") or 0.0)
        self._clock, self._use = clock, use
        self._since = self._looked = clock()

    def reason(self) -> str:
        """Returns why the script is to end; "" if it may go on. Looks every LOOK_S."""
        now = self._clock()
        if not self._limit or now - self._looked < LOOK_S:
            return ""
        self._looked, used = now, self._use()
        if not used or max(used) >= IDLE_PERCENT:
            self._since = now
        idle = f"all GPUs were below {IDLE_PERCENT:.0f} % for {self._limit / 60:.3g} minutes (--stop_if_idle)"
        return idle if now - self._since >= self._limit else ""
