"""How long steps and epochs take: medians and quartiles, with the warm-up left out.

Timed are the calls to the device: saving, sampling and evaluating are not in. The warm-up is the first report (for
epochs: the first epoch) of a run and after each restart of it, in which call sizes grow and caches fill; the trainer
itself times no call that traces.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from deploy.report.run_reader import Run, StatsLine


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles, and how many values it was taken from."""

    median: float
    low: float
    high: float
    count: int

    @property
    def width(self) -> float:
        """The interquartile range."""
        return self.high - self.low


def spread(values: Iterable[float | None]) -> Spread | None:
    """Median and quartiles of what is not None; None of nothing."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    if len(found) == 1:
        return Spread(found[0], found[0], found[0], 1)
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return Spread(middle, low, high, len(found))


def after_warm_up(windows: Sequence[StatsLine]) -> list[StatsLine]:
    """Those that were timed, without the first of each start."""
    return [window for window in windows if not window.warm_up and window.step_seconds is not None]


def timed(run: Run) -> list[StatsLine]:
    """What the steps of a run are timed by, after the warm-up."""
    return after_warm_up(_windows(run))


def warm_up_steps(run: Run) -> int:
    """The steps that are left out."""
    windows = _windows(run)
    before = [0, *(window.step for window in windows)]
    return sum(window.step - begun for window, begun in zip(windows, before, strict=False) if window.warm_up)


def epoch_seconds(run: Run) -> Iterator[float]:
    """Seconds of training in each epoch after the warm-up."""
    for window in after_warm_up(run.epochs):
        if window.step_seconds is not None and run.steps_per_epoch:
            yield window.step_seconds * run.steps_per_epoch


def _windows(run: Run) -> Sequence[StatsLine]:
    """Reports or, where none is left of them after the warm-up, epochs."""
    return run.reports if after_warm_up(run.reports) else run.epochs
