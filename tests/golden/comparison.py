"""Compares the numbers of a run's first steps with those of a golden file: whether they changed by
more than rounding, and where.

Of a tensor the file holds two projections onto random signs. The root mean square of their
differences estimates the L2 norm of the difference of two tensors (Achlioptas 2003,
doi:10.1016/S0022-0000(03)00025-4).
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from trainer.base.run_files.job_files import finite
from trainer.checks.on_gpus import TIMES_CONTROL

PROJECTIONS = 2
# for one tensor, as its norm is an estimate: off by more in 1 case of 1e40
_TIMES_CONTROL_OF_TENSOR = 10.0
# Differences up to this floor count as rounding whatever the control, relative to a tensor's norm
# or to a hundred updates: a weight without effect (a bias before batch norm) moves by rounding
# alone, and its control is chance.
_FLOOR = 1e-10  # in float64, which all golden runs use
_UPDATES = 100


def compare(golden: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    """Returns the first step and tensor in which what `measure` returned is not that of a golden
    file; "" if it differs by rounding alone."""
    names = measured["names"]
    if measured["sizes"] != golden["sizes"]:
        return f"sizes of {names}, of which others were recorded"
    for step in golden["steps"]:
        recorded, control, now = (
            part[str(step)] for part in (golden["moments"], golden["control"], measured["moments"])
        )
        moved = _UPDATES * golden["learning_rate"] * step
        allowed = [
            max(norm, _FLOOR * max(root_mean_square(numbers), moved * math.sqrt(size)), 1e-300)
            for norm, numbers, size in zip(
                control["tensors"], recorded["projections"], golden["sizes"], strict=True
            )
        ]
        norms = distances(now, recorded)
        ratios = [norm / most for norm, most in zip(norms, allowed, strict=True)]
        times = math.hypot(*norms) / math.hypot(*allowed)
        worst = max(ratios)
        if times > TIMES_CONTROL or worst > _TIMES_CONTROL_OF_TENSOR:
            return f"step {step}: {names[ratios.index(worst)]}, by {worst:.3g} times the control"
        losses = losses_apart(now["losses"], recorded["losses"]) / max(control["losses"], _FLOOR)
        if losses > TIMES_CONTROL:
            return f"step {step}: a loss or metric, by {losses:.3g} times the control"
    return ""


def moment(tensors: Mapping[str, npt.NDArray[Any]], losses: Mapping[str, float]) -> dict[str, Any]:
    """Returns the record of a step for JSON: losses, and each tensor's projections to 12 digits.

    A tensor's signs depend on its place alone, so tensors may be renamed but not reordered.
    """
    projections = []
    for place, tensor in enumerate(tensors.values()):
        values = np.asarray(tensor, np.float64).ravel()
        draw = Generator(np.random.Philox(key=place))
        signs = draw.integers(0, 2, (PROJECTIONS, values.size), np.int8, endpoint=False) * 2 - 1
        projections.append(
            [float(f"{projection:.12g}") for projection in signs.astype(np.float64) @ values]
        )
    return {"losses": dict(losses), "projections": projections}


def distances(measured: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[float]:
    """Returns each tensor's estimated L2 norm of the difference of two moments; infinity if one is
    not finite."""
    pairs = zip(measured["projections"], recorded["projections"], strict=True)
    return [
        root_mean_square([_number(a) - _number(b) for a, b in zip(*pair, strict=True)])
        for pair in pairs
    ]


def losses_apart(losses: Mapping[str, float], others: Mapping[str, float]) -> float:
    """Returns the largest difference of the losses and metrics that both have, relative to the
    largest of `others`.

    It is infinite if a number is finite in only one of them.
    """
    pairs = [
        (_number(losses[name]), _number(value)) for name, value in others.items() if name in losses
    ]
    pairs = [pair for pair in pairs if any(map(math.isfinite, pair))]
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        return math.inf
    scale = max((abs(value) for _, value in pairs), default=0.0)
    return max((abs(a - b) for a, b in pairs), default=0.0) / max(scale, 1e-300)


def root_mean_square(values: Sequence[float]) -> float:
    """Returns the root mean square; infinity if a value is not finite."""
    mean = sum(value * value for value in values) / len(values)
    return math.sqrt(mean) if math.isfinite(mean) else math.inf


def _number(value: float | None) -> float:
    """Returns a number read from JSON; null, which stands for NaN and infinity, becomes NaN."""
    return math.nan if value is None else value


def write_golden(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a golden file, with a line for each entry."""
    lines = [f' "{name}": {json.dumps(finite(value))}' for name, value in content.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
