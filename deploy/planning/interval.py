"""Holds numbers that are known only within an interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """Holds a number between two others; the middle is the best guess."""

    low: float
    middle: float
    high: float

    def times(self, factor: float) -> Interval:
        """Returns all three numbers multiplied by a factor."""
        return Interval(self.low * factor, self.middle * factor, self.high * factor)

    def plus(self, other: Interval) -> Interval:
        """Returns the sum, whose ends are the sums of the ends: both may err the same way at once."""
        return Interval(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def product(self, other: Interval) -> Interval:
        """Returns the product of two intervals of positive numbers, whose ends are the products of the ends."""
        return Interval(self.low * other.low, self.middle * other.middle, self.high * other.high)

    @property
    def half_width(self) -> float:
        """Returns half of the width, relative to the middle of the two ends."""
        return (self.high - self.low) / (self.high + self.low)
