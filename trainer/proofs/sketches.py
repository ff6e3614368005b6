"""Describes tensors by a few numbers, so that a file of some kB can tell how far another run's tensors are from them.

Two projections on random signs: the root mean square of their differences estimates the L2 norm of the difference of
the tensors (Achlioptas 2003, doi:10.1016/S0022-0000(03)00025-4). Imports no TensorFlow.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PROJECTIONS = 2


@dataclass(frozen=True)
class Moment:
    """Holds what a run had after a step: losses, a digest of all bits, and each tensor's projections in order."""

    losses: Mapping[str, float]
    digest: str  # SHA-256 of the bytes of all tensors
    projections: Sequence[Sequence[float]]  # (tensors, PROJECTIONS)

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> "Moment":
        """Restores what `as_json` returned. Raises KeyError or TypeError for anything else."""
        return cls(content["losses"], content["digest"], content["projections"])

    def as_json(self) -> dict[str, Any]:
        """Returns the moment for a file, its numbers to 12 digits."""
        numbers = [[float(f"{value:.12g}") for value in values] for values in self.projections]
        return {"losses": dict(self.losses), "digest": self.digest, "projections": numbers}


def moment(tensors: Mapping[str, npt.NDArray[Any]], losses: Mapping[str, float]) -> Moment:
    """Returns what is kept of tensors. Their order counts, their names do not."""
    digest = hashlib.sha256()
    for tensor in tensors.values():
        digest.update(np.ascontiguousarray(tensor).tobytes())
    return Moment(losses, digest.hexdigest(), [projected(tensor, at) for at, tensor in enumerate(tensors.values())])


def projected(tensor: npt.NDArray[Any], place: int) -> list[float]:
    """Returns the projections of a tensor; the signs depend on its place among all tensors alone."""
    values = np.asarray(tensor, np.float64).ravel()
    draw = np.random.Generator(np.random.Philox(key=place))
    signs = draw.integers(0, 2, (PROJECTIONS, values.size), np.int8, endpoint=False) * 2 - 1
    return [float(projection) for projection in signs.astype(np.float64) @ values]


def distances(measured: Moment, golden: Moment) -> list[float]:
    """Returns the estimated L2 norm of the difference of each tensor; infinite where a number is not finite."""
    return [
        root_mean_square([a - b for a, b in zip(projections, others, strict=True)])
        for projections, others in zip(measured.projections, golden.projections, strict=True)
    ]


def losses_apart(losses: Mapping[str, float], others: Mapping[str, float]) -> float:
    """Returns the largest difference of a loss or metric, relative to the largest of `others`.

    Infinite if a name is missing, or a number is not finite in one of them alone.
    """
    if losses.keys() != others.keys():
        return math.inf
    pairs = [(losses[name], value) for name, value in others.items() if not (_lost(value) and _lost(losses[name]))]
    if any(_lost(value) for pair in pairs for value in pair):
        return math.inf
    scale = max((abs(value) for _, value in pairs), default=0.0)
    return max((abs(a - b) for a, b in pairs), default=0.0) / max(scale, 1e-300)


def _lost(value: float | None) -> bool:
    """Returns whether a number is not finite; JSON has null for it."""
    return value is None or not math.isfinite(value)


def root_mean_square(values: Sequence[float]) -> float:
    """Returns the root of the mean of squares, infinite if a value is not finite."""
    mean = sum(value * value for value in values) / len(values)
    return math.sqrt(mean) if math.isfinite(mean) else math.inf
