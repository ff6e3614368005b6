"""Predicts the step time on more GPUs from two measured numbers of them, with an interval that published times prove.

A step on N GPUs takes a / N + b (docs/scaling.md). Two things make that wrong, and published.yaml shows by how much:

- From two times with the same rows a GPU, b is a small difference of large numbers: half of it is taken.
- Kernels lose efficiency with fewer rows. Where the two measured times show that already, b has it in it; else a step
  takes `ratio ** SLOWER_BY_ROWS` times as long if the rows a GPU shrink by `ratio`.

The interval is the range of what is left of the published times, twice as wide, as other networks differ by more, and
at least 10 % to each side, as the published times vary within a run.
`python -m benchmarks.backtest` predicts each published configuration from all others, and counts.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from deploy.planning.interval import Interval
from trainer.base.settings.yaml_file import read_yaml

PUBLISHED = Path(__file__).with_name("published.yaml")
SLOWER_BY_ROWS = 0.08  # fitted to published.yaml: rows a GPU that were not seen to shrink
_WIDER, _LEAST = 2.0, 0.1
_MOST = {True: 0.12, False: 0.25}  # half-widths, by whether the rows a GPU stay


@dataclass(frozen=True)
class Measurement:
    """Holds a measured step on `devices` GPUs of one machine, each with `rows` rows in one pass."""

    devices: int
    rows: float
    seconds: float


@dataclass(frozen=True)
class Case:
    """Describes a published prediction: from two points to a third, of a configuration and a GPU."""

    configuration: str
    gpu: str
    few: Measurement
    many: Measurement
    target: Measurement

    @property
    def rows_stay(self) -> bool:
        """Returns whether the rows a GPU are the same in all three."""
        return self.few.rows == self.many.rows == self.target.rows


@dataclass(frozen=True)
class Error:
    """Holds the natural logarithms of measured over predicted between which a kind of prediction lies."""

    low: float
    high: float


def step_seconds(few: Measurement, many: Measurement, devices: int, rows: float) -> float:
    """Returns the middle of the prediction for `devices` GPUs with `rows` rows each, from `few` and more GPUs."""
    stays = (many.devices * many.seconds - few.devices * few.seconds) / (many.devices - few.devices)
    stays = min(max(stays, 0.0), many.seconds)
    if few.rows == many.rows:
        stays /= 2
    shrunk = 1.0 if few.rows > many.rows else max(1.0, many.rows / rows) ** SLOWER_BY_ROWS
    return ((many.seconds - stays) * many.devices / devices + stays) * shrunk


def interval(
    few: Measurement, many: Measurement, devices: int, rows: float, errors: Mapping[bool, Error] | None = None
) -> Interval:
    """Returns the prediction with its interval. `errors`: those of `calibrated`, by default of all published times."""
    error = (errors or calibrated(cases()))[few.rows == many.rows == rows]
    middle = step_seconds(few, many, devices, rows) * math.exp((error.low + error.high) / 2)
    half = (error.high - error.low) / 2
    return Interval(middle * math.exp(-half), middle, middle * math.exp(half))


def calibrated(known: Iterable[Case]) -> dict[bool, Error]:
    """Returns the errors of predictions by whether the rows a GPU stay, from known times of other configurations."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for case in known:
        predicted = step_seconds(case.few, case.many, case.target.devices, case.target.rows)
        errors[case.rows_stay].append(math.log(case.target.seconds / predicted))
    return {stay: _error(values, math.atanh(_MOST[stay])) for stay, values in errors.items()}


def _error(values: Sequence[float], most: float) -> Error:
    middle = (min(values) + max(values)) / 2
    half = min(max(_WIDER * (max(values) - min(values)) / 2, _LEAST), most)
    return Error(middle - half, middle + half)


@cache
def cases() -> tuple[Case, ...]:
    """Returns every prediction that published.yaml allows: from 1 and 2 GPUs to 4 and 8, from 2 and 4 to 8."""
    return tuple(_cases(read_yaml(PUBLISHED, PUBLISHED.name)["stylegan3"]))


def _cases(rows: Sequence[Mapping[str, Any]]) -> Iterator[Case]:
    for row in rows:
        for gpu in ("V100", "A100"):
            at = {count: Measurement(count, row["batch"][count], seconds) for count, seconds in row[gpu].items()}
            for few, many, target in ((1, 2, 4), (1, 2, 8), (2, 4, 8)):
                yield Case(f"{row['resolution']}, {row['config']}", gpu, at[few], at[many], at[target])
