"""Finds the worker of several that slows the others down: they wait for its batches in every sum over workers."""

import statistics
from collections.abc import Sequence

LEAST_SECONDS = 30.0  # of steps, before a worker is called slow
MUCH = 0.1  # of the time of the steps


class WorkerWaits:
    """Adds up for how long each worker waited for its batches, and with it the others."""

    def __init__(self) -> None:
        self._waits: list[float] = []
        self._seconds = 0.0

    def count(self, waits: Sequence[float], seconds: float) -> tuple[int, float] | None:
        """Counts a call to the devices; returns the index of the slow worker, and by which share the steps took longer.

        Returns None while no worker waits for MUCH more of the time than is usual among them.
        """
        before = self._waits or [0.0] * len(waits)
        self._waits = [total + wait for total, wait in zip(before, waits, strict=True)]
        self._seconds += seconds
        most = max(self._waits)
        rest = sorted(self._waits)[:-1]
        share = (most - statistics.median(rest)) / self._seconds if rest and self._seconds else 0.0
        slow = self._seconds >= LEAST_SECONDS and share >= MUCH
        return (self._waits.index(most), share) if slow else None
