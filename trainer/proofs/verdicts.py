"""Judges a measured run against a golden file: equal bits, rounding, or changed and where. Imports no TensorFlow."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.proofs.golden_file import Golden
from trainer.proofs.sketches import Moment, distances, losses_apart, root_mean_square

EQUAL, ROUNDING, CHANGED = "equal bits", "rounding", "CHANGED"
TIMES_CONTROL = 3.0  # of what another order of the rows does, as in `trainer.check --on_gpus`
_ONE_TENSOR = 10.0  # times its own control: two projections estimate a norm within that, but for one case in 1e40
# Differences that rounding alone may make: relative to a tensor's norm, or to what a hundred updates move. A weight
# without effect (a bias before batch norm) moves by rounding alone, and its control is chance.
_FLOORS = {"float64": 1e-10}
_FLOOR = 1e-6  # of other precisions
_UPDATES = 100


@dataclass(frozen=True)
class Verdict:
    """Holds how a run stands to its golden file. `times`: the largest multiple of the control, of 3 allowed."""

    kind: str
    times: float = 0.0
    step: int = 0  # the first that changed
    tensor: str = ""  # the first that changed in it, by the order of the graph
    reason: str = ""  # why nothing could be compared, of a changed one


def judge(golden: Golden, measured: Mapping[str, Any]) -> Verdict:
    """Returns the verdict on what `trainer.proofs.golden_run.measure` wrote."""
    if list(measured["sizes"]) != list(golden.sizes):
        return Verdict(CHANGED, math.inf, golden.steps[0], reason=_other_variables(golden, measured))
    digests = golden.digests.get(measured["instructions"], {})
    moments = {step: Moment.of_json(measured["moments"][str(step)]) for step in golden.steps}
    same = (digests.get(str(step)) == moments[step].digest for step in golden.steps)
    if all(same) and all(moments[step].losses == golden.moments[str(step)]["losses"] for step in golden.steps):
        return Verdict(EQUAL)
    largest = 0.0
    for step in golden.steps:
        comparison = _Comparison(golden, step, moments[step])
        times, tensor = comparison.times, comparison.changed_tensor
        largest = max(largest, times)
        if times > TIMES_CONTROL or tensor is not None:
            place = comparison.worst_tensor if tensor is None else tensor
            return Verdict(CHANGED, max(times, comparison.ratios[place]), step, measured["names"][place])
    return Verdict(ROUNDING, largest)


def _other_variables(golden: Golden, measured: Mapping[str, Any]) -> str:
    count, recorded = len(measured["sizes"]), len(golden.sizes)
    if count != recorded:
        return f"the model has {count} variables, {recorded} were recorded"
    place = next(at for at, size in enumerate(golden.sizes) if size != measured["sizes"][at])
    return f"{measured['names'][place]} has {measured['sizes'][place]} numbers, {golden.sizes[place]} were recorded"


class _Comparison:
    """Compares the moments after one step."""

    def __init__(self, golden: Golden, step: int, measured: Moment) -> None:
        recorded, control = Moment.of_json(golden.moments[str(step)]), golden.control[str(step)]
        floor = _FLOORS.get(golden.settings.get("precision", ""), _FLOOR)
        moved = _UPDATES * golden.learning_rate * step
        allowed = [
            max(norm, floor * max(root_mean_square(numbers), moved * math.sqrt(size)))
            for norm, numbers, size in zip(control["tensors"], recorded.projections, golden.sizes, strict=True)
        ]
        found = distances(measured, recorded)
        self.ratios = [distance / max(norm, 1e-300) for distance, norm in zip(found, allowed, strict=True)]
        losses = losses_apart(measured.losses, recorded.losses) / max(control["losses"], floor)
        self.times = max(_together(found) / max(_together(allowed), 1e-300), losses)

    @property
    def changed_tensor(self) -> int | None:
        """Returns the first tensor that is too far by itself."""
        return next((place for place, ratio in enumerate(self.ratios) if ratio > _ONE_TENSOR), None)

    @property
    def worst_tensor(self) -> int:
        """Returns the tensor that is farthest."""
        return max(range(len(self.ratios)), key=lambda place: self.ratios[place])


def _together(norms: Sequence[float]) -> float:
    return math.sqrt(sum(norm * norm for norm in norms))


def causes(golden: Golden, settings: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[str]:
    """Yields what differs between the recorded run and the measured one: settings, data, sources, packages."""
    yield _differing("settings", golden.settings, settings)
    yield _differing("data", golden.data, measured["data"])
    yield _differing("sources", golden.sources, measured["sources"])
    versions = [
        f"{name} {golden.packages.get(name, 'none')} -> {measured['packages'].get(name, 'none')}"
        for name in ("tensorflow", "keras", "numpy")
        if golden.packages.get(name) != measured["packages"].get(name)
    ]
    yield f"versions differ: {', '.join(versions)}" if versions else "versions equal"


def _differing(name: str, recorded: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [key for key in {**recorded, **now} if recorded.get(key) != now.get(key)]
    return f"{name} differ: {', '.join(names[:5])}" if names else f"{name} equal"
