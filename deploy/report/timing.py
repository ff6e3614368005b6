"""Computes how long steps and epochs take: medians and quartiles, without the warm-up.

Only calls to the device are timed, not saving, sampling and evaluation. The warm-up is the first report (for epochs:
the first epoch) after each start of a run, in which call sizes grow and caches fill; the trainer itself does not time
the call that traces the graph.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from deploy.report.run_reader import Run, StatsLine


@dataclass(frozen=True)
class Spread:
    """Holds a median with its quartiles, and the number of values."""

    median: float
    low: float
    high: float
    count: int

    @property
    def width(self) -> float:
        """Returns the interquartile range."""
        return self.high - self.low


def spread(values: Iterable[float | None]) -> Spread | None:
    """Returns median and quartiles of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return Spread(known[0], known[0], known[0], 1) if known else None
    low, middle, high = statistics.quantiles(known, n=4, method="inclusive")
    return Spread(middle, low, high, len(known))


def after_warm_up(lines: Sequence[StatsLine]) -> list[StatsLine]:
    """Returns the timed lines, without the first of each start."""
    return [line for line in lines if not line.warm_up and line.step_seconds is not None]


def timed(run: Run) -> list[StatsLine]:
    """Returns the lines that time the steps of a run, without the warm-up."""
    return after_warm_up(_timing_lines(run))


def warm_up_steps(run: Run) -> int:
    """Returns the number of steps that are left out."""
    lines = _timing_lines(run)
    starts = [0, *(line.step for line in lines)]
    return sum(line.step - start for line, start in zip(lines, starts, strict=False) if line.warm_up)


def epoch_seconds(run: Run) -> Iterator[float]:
    """Yields the seconds of training in each epoch after the warm-up."""
    for line in after_warm_up(run.epochs):
        if line.step_seconds is not None and run.steps_per_epoch:
            yield line.step_seconds * run.steps_per_epoch


def _timing_lines(run: Run) -> Sequence[StatsLine]:
    """Returns the reports or, if none is left after the warm-up, the epochs."""
    return run.reports if after_warm_up(run.reports) else run.epochs
