"""Combines the values of several runs or reports into one. Unknown values, which are None, do not count."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Holds a median with its quartiles, and the number of values."""

    median: float
    low: float
    high: float
    count: int


def _numbers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def spread(values: Iterable[float | None]) -> Spread | None:
    """Returns median and quartiles; None of no values."""
    numbers = _numbers(values)
    if len(numbers) < 2:
        return Spread(numbers[0], numbers[0], numbers[0], 1) if numbers else None
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return Spread(middle, low, high, len(numbers))


def median(values: Iterable[float | None]) -> float | None:
    """Returns the median; None of no values."""
    numbers = _numbers(values)
    return statistics.median(numbers) if numbers else None


def largest(values: Iterable[Any]) -> Any:
    """Returns the largest value; None of no values."""
    return max(_numbers(values), default=None)


def common(values: Iterable[Any]) -> Any:
    """Returns the value if all are equal; else None."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None
