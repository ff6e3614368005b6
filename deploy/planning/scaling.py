"""Predicts the step time on more GPUs of one machine from two measured numbers of them.

A step on N GPUs takes a / N + b (docs/scaling.md), where b is counted by a part of what two measured times with the
same rows a pass show: it is a small difference of large numbers. `python -m benchmarks.backtest` predicts 600 published
times of seven sources, each source by what the others show, and makes the constants here.

- Rows a GPU takes in one pass stay (weak scaling, or passes: --micro_batches): the interval holds 96 % of the times of
  sources that were left out, and 90 % of two tables that calibrated nothing.
- They shrink: published times were up to 2.4 times what the rule says, as kernels with few rows end sooner than the
  host starts them. No rule held there; the interval reaches to no gain at all, and a short run tells more.
"""

from dataclasses import dataclass

from deploy.planning.interval import Interval

COUNTED = 0.25  # of b, if the rows of both measured times are the same
SLOWER_BY_ROWS = 0.08  # a step takes ratio ** this as long where rows shrink by `ratio`, which the times did not show
ROWS_STAY = Interval(0.877, 1.0, 1.34)  # published over predicted
ROWS_SHRINK, NO_GAIN = 0.9, 1.05  # the least of published over predicted; the most of published over `many`


@dataclass(frozen=True)
class Measurement:
    """Holds a step on `devices` GPUs of one machine, each with `rows` rows in one pass, as seconds of a fixed batch."""

    devices: int
    rows: float
    seconds: float


def step_seconds(few: Measurement, many: Measurement, devices: int, rows: float) -> float:
    """Returns the seconds on `devices` GPUs with `rows` rows each in one pass, from `few` and more GPUs."""
    stays = (many.devices * many.seconds - few.devices * few.seconds) / (many.devices - few.devices)
    stays = min(max(stays, 0.0), many.seconds)
    if few.rows == many.rows:
        stays *= COUNTED
    shrunk = 1.0 if few.rows > many.rows else max(1.0, many.rows / rows) ** SLOWER_BY_ROWS
    return ((many.seconds - stays) * many.devices / devices + stays) * shrunk


def interval(few: Measurement, many: Measurement, devices: int, rows: float) -> Interval:
    """Returns the prediction with its interval."""
    seconds = step_seconds(few, many, devices, rows)
    if few.rows == many.rows == rows:
        return ROWS_STAY.times(seconds)
    return Interval(ROWS_SHRINK * seconds, seconds, max(NO_GAIN * many.seconds, seconds))
