"""Counts the progress of a run: the results of calls to the device, their means over steps, and the
speed."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.base.log import duration
from trainer.base.run_files.job_files import Scalars, Speeds, StatsEntry

_LEAST_SECONDS = 30.0  # how long steps must have run before a worker is called slow
_SLOW_SHARE = 0.1  # a slow worker makes the others wait for this share of the time of the steps
# Values of the variables of Keras metrics since the epoch began, summed over replicas. They can be
# subtracted and added for other ranges of steps, while the metrics' results cannot: the mean of two
# AUCs is not an AUC.
MetricCounts = tuple[npt.NDArray[np.float64], ...]
State = dict[str, Any]  # what a part of a run stores in a checkpoint, valid in JSON


@dataclass(frozen=True)
class StepLogs:
    """Holds what a call to the device returned: summed scalars of each step, Keras metrics.

    Those are of the epoch so far, as in `fit`.
    """

    names: tuple[str, ...]
    values: npt.NDArray[np.float64]  # (count, len(names))
    metrics: Mapping[str, float] = field(default_factory=dict)
    counts: MetricCounts = ()
    # whether each of `counts` adds up over steps; a maximum does not
    adds_up: tuple[bool, ...] = ()
    # the function that computes `metrics` from counts
    results: Callable[[MetricCounts], Mapping[str, float]] = lambda counts: {}
    waits: tuple[float, ...] = ()  # seconds of the call in which each worker waited for a batch

    @property
    def count(self) -> int:
        """Returns the number of steps."""
        return len(self.values)

    @property
    def input_wait_seconds(self) -> float:
        """Returns the longest wait of a worker for its batches; all others wait for it."""
        return max(self.waits, default=0.0)

    def joined(self, after: "StepLogs") -> "StepLogs":
        """Returns the logs of these steps and of those `after` them."""
        waits = tuple(first + second for first, second in zip(self.waits, after.waits, strict=True))
        return replace(after, values=np.concatenate([self.values, after.values]), waits=waits)

    def means(self) -> Scalars:
        """Returns the mean of every scalar over the steps.

        A Keras metric replaces a scalar of the same name.
        """
        means = dict(zip(self.names, self.values.mean(axis=0).tolist(), strict=True))
        return {**means, **self.metrics}

    def first_not_finite(self) -> tuple[int, list[str]] | None:
        """Returns the first step (from 0) with NaN or infinite losses, and their names.

        Metrics may be NaN, such as that of a class missing from a batch. They count only if no
        scalar is a loss.
        """
        watched = np.array([is_loss(name) for name in self.names], bool)
        wrong = ~np.isfinite(self.values) & (watched | ~watched.any())
        if not wrong.any():
            return None
        index = int(wrong.any(axis=1).argmax())
        return index, [self.names[number] for number in np.flatnonzero(wrong[index])]


@dataclass
class WorkerWaits:
    """Adds up how long each worker waited for its batches, to name one that holds up all others."""

    waits: Sequence[float] = ()
    seconds: float = 0.0

    def count(self, waits: Sequence[float], seconds: float) -> tuple[int, float] | None:
        """Counts a call to the devices.

        Returns the slow worker's index and the share of time that it costs, or None. A worker is
        slow if its share of time spent waiting is well above the median of the others.
        """
        totals = self.waits or [0.0] * len(waits)
        self.waits = [total + wait for total, wait in zip(totals, waits, strict=True)]
        self.seconds += seconds
        most = max(self.waits)
        rest = sorted(self.waits)[:-1]
        share = (most - statistics.median(rest)) / self.seconds if rest and self.seconds else 0.0
        slow = self.seconds >= _LEAST_SECONDS and share >= _SLOW_SHARE
        return (self.waits.index(most), share) if slow else None


@dataclass
class RunningMeans:
    """Accumulates means and speed over the steps since its creation.

    counts: what the variables of metrics have counted in these steps; of those that do not add up,
        in the epoch so far. Of a whole epoch, `metrics` are those of the calls.
    """

    examples_per_step: int
    steps: int = 0
    timed_steps: int = 0
    timed_seconds: float = 0.0
    waited_seconds: float = 0.0  # of timed_seconds, for batches
    sums: Scalars = field(default_factory=dict)
    counts: MetricCounts = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def restored(cls, state: State) -> "RunningMeans":
        """Restores the result of asdict().

        Raises KeyError, TypeError or ValueError for anything else.
        """
        values = {
            "sums": numbers(state["sums"]),
            "counts": tuple(np.asarray(count, np.float64) for count in state["counts"]),
            "metrics": numbers(state["metrics"]),
        }
        return cls(**{**state, **values})

    def add(self, logs: StepLogs, seconds: float, timed: bool) -> None:
        """Adds one call: its steps, scalars and metrics, which are of the epoch so far.

        `timed` is as in `count`.
        """
        # One step at a time: the sums do not depend on how many steps a call has.
        start = np.array([[self.sums.get(name, 0.0) for name in logs.names]])
        totals = np.add.accumulate(np.concatenate([start, logs.values]))[-1].tolist()
        self.sums = dict(zip(logs.names, totals, strict=True))
        self.metrics = logs.metrics
        self.count(logs, seconds, timed)

    def add_counts(self, logs: StepLogs, before: MetricCounts) -> None:
        """Makes the metrics those of the calls since its creation.

        `before`: the counts at the newest call's begin.
        """
        zeros = tuple(map(np.zeros_like, logs.counts))
        shapes = [*map(np.shape, zeros)]
        # A resumed run may have other metrics than before.
        earlier, begin = (
            counts if [*map(np.shape, counts)] == shapes else zeros
            for counts in (self.counts, before)
        )
        of_calls = zip(logs.adds_up, earlier, logs.counts, begin, strict=True)
        sums = [total + now - first if adds else now for adds, total, now, first in of_calls]
        self.counts = tuple(sums)
        if any(np.any(first) for first in begin) or any(np.any(total) for total in earlier):
            self.metrics = logs.results(self.counts)

    def count(self, logs: StepLogs, seconds: float, timed: bool) -> None:
        """Counts the steps of one call, and its seconds if `timed`.

        The call that traced the graph is not timed.
        """
        self.steps += logs.count
        if timed:
            self.timed_steps += logs.count
            self.timed_seconds += seconds
            self.waited_seconds += min(logs.input_wait_seconds, seconds)

    def means(self) -> Scalars:
        """Returns the mean of every scalar; a Keras metric replaces a scalar of the same name."""
        return {**{name: value / self.steps for name, value in self.sums.items()}, **self.metrics}

    @property
    def step_seconds(self) -> float | None:
        """Returns the mean seconds per step; None if no call was timed."""
        return self.timed_seconds / self.timed_steps if self.timed_steps else None

    @property
    def input_wait_seconds(self) -> float | None:
        """Returns the mean seconds per step spent waiting for a batch.

        It is None if no call was timed.
        """
        return self.waited_seconds / self.timed_steps if self.timed_steps else None

    @property
    def images_per_second(self) -> float | None:
        """Returns the real images read per second; None if no call was timed."""
        return self.examples_per_step / self.step_seconds if self.step_seconds else None


@dataclass
class SavedProgress:
    """Holds what a checkpoint keeps of the progress, besides the step."""

    seconds: float
    training_seconds: float
    whole: State  # RunningMeans as asdict() gives them
    asked_steps: int
    total_steps: int


@dataclass
class Progress:
    """Holds how far a run is, over all its restarts. A repeated step counts once."""

    step: int
    total_steps: int
    steps_per_epoch: int
    examples_per_step: int
    began: float = field(default_factory=time.monotonic)
    first_call_ended: float | None = None  # time.monotonic() after the call that traced the graph
    seconds_before: float = 0.0  # seconds of earlier processes
    training_seconds: float = 0.0  # seconds in calls to the device, without saving and sampling
    call_seconds: float = 0.0  # seconds of the newest call
    call_timed: bool = False  # False if the newest call traced the graph
    # whether --max_minutes is used up: this process ends, another one may resume
    budget_spent: bool = False
    unit: str = "images"  # what an example is called
    # the steps of earlier calls of `fit` in a script, each of which counts its own
    steps_before: int = 0
    flops: int = 0  # FLOPs of a step over all replicas; 0 while unknown
    peak_tflops: float = 0.0  # TFLOP/s of all replicas by the data sheet; 0 if unknown
    whole: RunningMeans = field(init=False)
    asked_steps: int = field(init=False)  # total_steps before early stopping

    def __post_init__(self) -> None:
        self.whole = RunningMeans(self.examples_per_step)
        self.asked_steps = self.total_steps

    def state(self) -> SavedProgress:
        """Returns what a checkpoint stores of this."""
        whole = asdict(self.whole)
        return SavedProgress(
            self.seconds, self.training_seconds, whole, self.asked_steps, self.total_steps
        )

    def resume(self, saved: SavedProgress) -> None:
        """Restores what `state` returned.

        Raises KeyError, TypeError or ValueError for values of other types.
        """
        self.seconds_before = float(saved.seconds)
        self.training_seconds = float(saved.training_seconds)
        self.whole = RunningMeans.restored(saved.whole)
        if saved.asked_steps == self.asked_steps:  # a run that early stopping ended stays ended
            self.total_steps = int(saved.total_steps)

    def advance(self, logs: StepLogs, seconds: float) -> None:
        """Counts one call to the device.

        The first call of a process traces the graph and is not timed.
        """
        self.call_timed = self.first_call_ended is not None
        self.first_call_ended = self.first_call_ended or time.monotonic()
        self.call_seconds = seconds
        self.step += logs.count
        self.training_seconds += seconds
        self.whole.count(logs, seconds, self.call_timed)

    @property
    def run_step(self) -> int:
        """Returns the number of steps of the run, those of earlier calls of `fit` included."""
        return self.steps_before + self.step

    @property
    def epoch(self) -> float:
        """Returns the number of epochs done, with the fraction of the current one."""
        return self.step / self.steps_per_epoch

    @property
    def finished(self) -> bool:
        """Returns whether the last step is done."""
        return self.step >= self.total_steps

    @property
    def ends(self) -> bool:
        """Returns whether the newest call was the last one, of the run or of its budget."""
        return self.finished or self.budget_spent

    @property
    def seconds(self) -> float:
        """Returns the seconds since training began, over all processes."""
        return self.seconds_before + time.monotonic() - self.began

    def speeds(self, running: RunningMeans) -> Speeds:
        """Returns the speeds of the steps in `running`, as stats.jsonl and result.json have them.

        One that is unknown is None. TFLOP/s are those of all replicas together. MFU, the model
        FLOPs utilization, is the share of the data sheet's TFLOP/s that is used.
        """
        seconds = running.step_seconds
        rate = rounded(self.flops / seconds / 1e12) if self.flops and seconds else None
        return {
            "images_per_second": rounded(running.images_per_second),
            "step_seconds": rounded(seconds),
            "input_wait_seconds": rounded(running.input_wait_seconds),
            "tflop_per_second": rate,
            "mfu": rounded(rate / self.peak_tflops) if rate and self.peak_tflops else None,
        }

    def speed_text(self, images_per_second: float | None) -> str:
        """Returns text on a speed, as "1,280 images/s"; "" if it is unknown."""
        return f"{images_per_second:,.0f} {self.unit}/s" if images_per_second else ""

    @property
    def remaining_text(self) -> str:
        """Returns text on the time left at the mean speed so far.

        It is "" while that is unknown, and at the end.
        """
        seconds = (self.total_steps - self.step) * (self.whole.step_seconds or 0.0)
        return f"{duration(seconds)} left" if seconds else ""


def by_kind(means: Scalars) -> StatsEntry:
    """Groups scalars as {"losses": …, "metrics": …}."""
    losses = {name: value for name, value in means.items() if is_loss(name)}
    return {
        "losses": losses,
        "metrics": {name: value for name, value in means.items() if name not in losses},
    }


def is_loss(name: str) -> bool:
    """Returns whether `name` is that of a loss: it contains "loss" or "penalty"."""
    return "loss" in name or "penalty" in name


def numbers(values: Mapping[Any, Any]) -> Scalars:
    """Returns numbers that were read from JSON, with null as NaN.

    Raises TypeError, ValueError or AttributeError for other values.
    """
    return {name: math.nan if value is None else float(value) for name, value in values.items()}


def rounded(value: Any) -> Any:
    """Rounds a number to six significant digits; None stays None."""
    return None if value is None else float(f"{value:.6g}")
