"""Describes tensors by a few numbers, so that a file of some kB can tell how far another run's tensors are from them.

Two projections on random signs: the root mean square of their differences estimates the L2 norm of the difference of
the tensors (Achlioptas 2003, doi:10.1016/S0022-0000(03)00025-4). Imports no TensorFlow.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

PROJECTIONS = 2


def moment(tensors: Mapping[str, npt.NDArray[Any]], losses: Mapping[str, float]) -> dict[str, Any]:
    """Returns what is kept of a step as JSON: losses, a SHA-256 of all bits, each tensor's projections to 12 digits.

    The order of the tensors counts, their names do not.
    """
    digest = hashlib.sha256()
    for tensor in tensors.values():
        digest.update(np.ascontiguousarray(tensor).tobytes())
    projections = [_projections(tensor, place) for place, tensor in enumerate(tensors.values())]
    return {"losses": dict(losses), "digest": digest.hexdigest(), "projections": projections}


def _projections(tensor: npt.NDArray[Any], place: int) -> list[float]:
    """Returns the projections of a tensor; the signs depend on its place among all tensors alone."""
    values = np.asarray(tensor, np.float64).ravel()
    draw = np.random.Generator(np.random.Philox(key=place))
    signs = draw.integers(0, 2, (PROJECTIONS, values.size), np.int8, endpoint=False) * 2 - 1
    return [float(f"{projection:.12g}") for projection in signs.astype(np.float64) @ values]


def distances(measured: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[float]:
    """Returns the estimated L2 norm of the difference of each tensor of two moments; infinite for NaN and null."""
    pairs = zip(measured["projections"], recorded["projections"], strict=True)
    return [root_mean_square([_number(a) - _number(b) for a, b in zip(*pair, strict=True)]) for pair in pairs]


def losses_apart(losses: Mapping[str, float], others: Mapping[str, float]) -> float:
    """Returns the largest difference of a loss or metric, relative to the largest of `others`.

    Infinite if a name is missing, or a number is not finite in one of them alone.
    """
    if losses.keys() != others.keys():
        return math.inf
    pairs = [(_number(losses[name]), _number(value)) for name, value in others.items()]
    pairs = [pair for pair in pairs if any(map(math.isfinite, pair))]
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        return math.inf
    scale = max((abs(value) for _, value in pairs), default=0.0)
    return max((abs(a - b) for a, b in pairs), default=0.0) / max(scale, 1e-300)


def root_mean_square(values: Sequence[float]) -> float:
    """Returns the root of the mean of squares, infinite if a value is not finite."""
    mean = sum(value * value for value in values) / len(values)
    return math.sqrt(mean) if math.isfinite(mean) else math.inf


def _number(value: float | None) -> float:
    """Returns a number of JSON, which has null for what is not finite."""
    return math.nan if value is None else value
