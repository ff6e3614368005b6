"""What has been done so far, and the means over a stretch of it."""

import time
from dataclasses import dataclass, field
from typing import Any

from trainer.training.steps import StepLogs


@dataclass
class Window:
    """Means and speed over the steps since it was last taken."""

    steps: int = 0
    timed_steps: int = 0
    seconds: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, logs: StepLogs, seconds: float, timed: bool) -> None:
        """Counts one call of `logs.count` steps; a call that traced the graph says nothing of speed (timed=False)."""
        for name, mean in logs.means().items():
            self.sums[name] = self.sums.get(name, 0.0) + mean * logs.count
        self.steps += logs.count
        if timed:
            self.timed_steps += logs.count
            self.seconds += seconds

    def take(self, examples_per_step: int) -> dict[str, Any]:
        """losses, step_seconds and images_per_second since the last take; None where nothing was timed."""
        losses = {name: value / self.steps for name, value in self.sums.items()} if self.steps else {}
        step_seconds = self.seconds / self.timed_steps if self.timed_steps else None
        speed = examples_per_step / step_seconds if step_seconds else None
        self.__init__()  # type: ignore[misc]
        return {"losses": losses, "step_seconds": step_seconds, "images_per_second": speed}


@dataclass
class Progress:
    """How far a run is. `step` counts steps done since scratch, over all restarts."""

    step: int
    total_steps: int
    steps_per_epoch: int
    examples_per_step: int
    started: float = field(default_factory=time.monotonic)
    training_seconds: float = 0.0  # in the loop, saving and sampling left out
    timed_steps: int = 0
    timed_seconds: float = 0.0  # without the call that traced the graph
    epoch_seconds: list[float] = field(default_factory=list)
    latest: dict[str, float] = field(default_factory=dict)  # means of the newest call

    @property
    def epoch(self) -> float:
        """Epochs done, with the part of the one in work."""
        return self.step / self.steps_per_epoch

    @property
    def finished(self) -> bool:
        return self.step >= self.total_steps

    @property
    def seconds(self) -> float:
        """Since the loop began."""
        return time.monotonic() - self.started

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds a step so far; None until a call was timed."""
        return self.timed_seconds / self.timed_steps if self.timed_steps else None

    @property
    def images_per_second(self) -> float | None:
        """Real images read a second so far."""
        return self.examples_per_step / self.step_seconds if self.step_seconds else None
