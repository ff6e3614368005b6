"""How far a run is: what calls to the device returned, their means over a stretch of steps, their speed."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

# What the variables of Keras metrics hold after a stretch of steps, summed over replicas. Counts of two stretches add
# up, results do not: the mean of two AUCs is none.
Counts = tuple[npt.NDArray[np.float64], ...]


@dataclass(frozen=True)
class StepLogs:
    """What one call to the device returned: a row a step, summed over replicas; and Keras metrics over the call."""

    names: tuple[str, ...]
    values: npt.NDArray[np.float64]  # (count, len(names))
    metrics: Mapping[str, float] = field(default_factory=dict)
    counts: Counts = ()
    results: Callable[[Counts], Mapping[str, float]] = lambda counts: {}  # as `metrics`, of any counts

    @property
    def count(self) -> int:
        return len(self.values)

    def means(self) -> dict[str, float]:
        """Mean over the steps of every scalar; a metric that Keras keeps wins over the scalar of its name."""
        means = dict(zip(self.names, self.values.mean(axis=0).tolist(), strict=True))
        return {**means, **self.metrics}

    def sums(self, before: dict[str, float]) -> dict[str, float]:
        """`before` with the scalars of every step added one by one: the same sum however steps are cut into calls."""
        start = np.array([[before.get(name, 0.0) for name in self.names]])
        totals = np.add.accumulate(np.concatenate([start, self.values]))[-1].tolist()
        return dict(zip(self.names, totals, strict=True))

    def first_not_finite(self) -> tuple[int, list[str]] | None:
        """The first step (counted from 0) with a NaN or an infinite scalar, and the names of those scalars."""
        for index, row in enumerate(self.values.tolist()):
            names = [name for name, value in zip(self.names, row, strict=True) if not math.isfinite(value)]
            if names:
                return index, names
        return None


@dataclass
class RunningMeans:
    """Means and speed over the steps since it was made."""

    examples_per_step: int
    steps: int = 0
    timed_steps: int = 0
    timed_seconds: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    counts: Counts = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "RunningMeans":
        """Of what asdict() made; KeyError, TypeError or ValueError for anything else."""
        examples, steps, timed = (int(state[name]) for name in ("examples_per_step", "steps", "timed_steps"))
        counts = tuple(np.asarray(count, np.float64) for count in state.get("counts", ()))
        metrics = numbers(state.get("metrics", {}))
        return cls(examples, steps, timed, float(state["timed_seconds"]), numbers(state["sums"]), counts, metrics)

    def add(self, logs: StepLogs, seconds: float, timed: bool) -> None:
        """Counts one call, with its scalars and metrics; `timed` as in `count`."""
        self.sums = logs.sums(self.sums)
        goes_on = [count.shape for count in self.counts] == [count.shape for count in logs.counts]
        self.counts = tuple(map(np.add, self.counts, logs.counts)) if goes_on else logs.counts
        self.metrics = logs.results(self.counts) if self.steps else logs.metrics
        self.count(logs.count, seconds, timed)

    def count(self, steps: int, seconds: float, timed: bool) -> None:
        """Counts the steps of one call; one that traced the graph says nothing of speed (timed=False)."""
        self.steps += steps
        if timed:
            self.timed_steps += steps
            self.timed_seconds += seconds

    def means(self) -> dict[str, float]:
        """Mean of every scalar over the steps of the window; a metric that Keras keeps wins, as in StepLogs."""
        return {**{name: value / self.steps for name, value in self.sums.items()}, **self.metrics}

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds a step; None where no call was timed."""
        return self.timed_seconds / self.timed_steps if self.timed_steps else None

    @property
    def images_per_second(self) -> float | None:
        """Real images read a second; None where no call was timed."""
        return self.examples_per_step / self.step_seconds if self.step_seconds else None


@dataclass
class Progress:
    """How far a run is. Steps and seconds count from scratch, over all restarts; repeated steps once."""

    step: int
    total_steps: int
    steps_per_epoch: int
    examples_per_step: int
    began: float = field(default_factory=time.monotonic)
    first_call_ended: float | None = None  # time.monotonic() after the call that traced the graph
    seconds_before: float = 0.0  # of the processes that this one goes on from
    training_seconds: float = 0.0  # in calls to the device: saving and sampling left out
    call_seconds: float = 0.0  # of the newest call
    call_timed: bool = False  # whether the newest call says something of speed
    budget_spent: bool = False  # this process ends here; another one may go on
    whole: RunningMeans = field(init=False)
    asked_steps: int = field(init=False)  # total_steps as given: early stopping lowers that

    def __post_init__(self) -> None:
        self.whole, self.asked_steps = RunningMeans(self.examples_per_step), self.total_steps

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the step."""
        return {
            "seconds": self.seconds,
            "training_seconds": self.training_seconds,
            "whole": asdict(self.whole),
            "asked_steps": self.asked_steps,
            "total_steps": self.total_steps,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state()` gave."""
        self.seconds_before, self.training_seconds = float(state["seconds"]), float(state["training_seconds"])
        self.whole = RunningMeans.restored(state["whole"])
        if state["asked_steps"] == self.asked_steps:  # early stopping, if it has ended this run, has ended it for good
            self.total_steps = int(state["total_steps"])

    def advance(self, logs: StepLogs, seconds: float) -> None:
        """Counts one call. The first of a process traces the graph and is not timed."""
        self.call_timed = self.first_call_ended is not None
        self.first_call_ended = self.first_call_ended or time.monotonic()
        self.call_seconds = seconds
        self.step += logs.count
        self.training_seconds += seconds
        self.whole.count(logs.count, seconds, self.call_timed)

    @property
    def epoch(self) -> float:
        """Epochs done, with the part of the one in work."""
        return self.step / self.steps_per_epoch

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.step >= self.total_steps

    @property
    def ends(self) -> bool:
        """Whether the newest call was the last, of the run or of its budget."""
        return self.finished or self.budget_spent

    @property
    def seconds(self) -> float:
        """Since the run began to train."""
        return self.seconds_before + time.monotonic() - self.began

    @property
    def seconds_left(self) -> float | None:
        """At the mean speed so far; None while that is unknown."""
        per_step = self.whole.step_seconds
        return per_step * (self.total_steps - self.step) if per_step is not None else None


def by_kind(means: dict[str, float]) -> dict[str, dict[str, float]]:
    """Scalars as {"losses": …, "metrics": …}."""
    losses = {name: value for name, value in means.items() if is_loss(name)}
    return {"losses": losses, "metrics": {name: value for name, value in means.items() if name not in losses}}


def is_loss(name: str) -> bool:
    """Whether a value of that name is a loss: it has `loss` or `penalty` in it."""
    return "loss" in name or "penalty" in name


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers by name as JSON gave them, null for NaN; TypeError, ValueError or AttributeError for anything else."""
    return {name: math.nan if value is None else float(value) for name, value in values.items()}


def rounded(value: Any, digits: int = 6) -> Any:
    """A number with `digits` significant digits; None stays None."""
    return None if value is None else float(f"{value:.{digits}g}")
