"""Defines when a paid job ends itself: what --stop_if_idle and --stop_if_over of `deploy` send to it."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

LIMITS = "TRAINER_LIMITS"  # the variable of a job that holds them
IDLE_PERCENT = 10.0  # a GPU that is used less is idle


@dataclass(frozen=True)
class StopLimits:
    """Holds the longest time, in seconds, for which all GPUs may be idle, and a job's longest time; 0: no limit."""

    idle_s: float = 0.0
    over_s: float = 0.0
    factor: float = 0.0  # over_s is so many times the upper end of the job's plan

    @property
    def text(self) -> str:
        """Returns the limits as JSON, for `read_limits`; "" without a limit."""
        return json.dumps(asdict(self)) if self.idle_s or self.over_s else ""

    @property
    def idle(self) -> str:
        """Returns the reason of a stop for idle GPUs."""
        return f"all GPUs were below {IDLE_PERCENT:.0f} % for {self.idle_s / 60:.3g} minutes (--stop_if_idle)"

    @property
    def over(self) -> str:
        """Returns the reason of a stop for a job that takes longer than its plan."""
        planned = f"{self.factor:g} times the upper end of its plan"
        return f"the job has run for {self.over_s / 3600:.3g} hours, {planned} (--stop_if_over)"


def read_limits(environment: Mapping[str, str] = os.environ) -> StopLimits:
    """Returns the limits of this job; none if it has none."""
    return StopLimits(**json.loads(environment.get(LIMITS, "{}")))
