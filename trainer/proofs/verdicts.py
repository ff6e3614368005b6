"""Judges a measured run against a golden file: equal bits, rounding, or changed and where. Imports no TensorFlow."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.proofs.golden_file import Golden, distances, losses_apart, root_mean_square

EQUAL, ROUNDING, CHANGED = "equal bits", "rounding", "CHANGED"
TIMES_CONTROL = 3.0  # of what another order of the rows does, as in `trainer.check --on_gpus`
_ONE_TENSOR = 10.0  # times its own control: two projections estimate a norm within that, but for one case in 1e40
# Differences that rounding alone may make: relative to a tensor's norm, or to what a hundred updates move. A weight
# without effect (a bias before batch norm) moves by rounding alone, and its control is chance.
_FLOOR_OF_FLOAT64, _FLOOR = 1e-10, 1e-6
_UPDATES = 100
_FIRST_NAMED = ("tensorflow", "keras", "numpy")  # of packages that differ
_MOST_NAMED = 5


@dataclass(frozen=True)
class GoldenVerdict:
    """Holds how a run stands to its golden file. `times`: the largest multiple of the control, of 3 allowed."""

    kind: str
    times: float = 0.0
    step: int = 0  # the first that changed
    tensor: str = ""  # the first that changed in it, by the order of the graph
    reason: str = ""  # why nothing could be compared, of a changed one


def judge(golden: Golden, measured: Mapping[str, Any]) -> GoldenVerdict:
    """Returns the verdict on what `trainer.proofs.golden_run.measure` wrote."""
    names, moments = measured["names"], measured["moments"]
    if list(measured["sizes"]) != list(golden.sizes):
        return GoldenVerdict(CHANGED, math.inf, golden.steps[0], reason=_other_variables(golden, measured))
    digests = golden.digests.get(measured["instructions"], {})
    same = (
        digests.get(step) == moments[step]["digest"]
        # Replicas add their parts of a loss that is only shown in an order of their own.
        and losses_apart(moments[step]["losses"], golden.moments[step]["losses"]) <= _floor(golden)
        for step in map(str, golden.steps)
    )
    if all(same):
        return GoldenVerdict(EQUAL)
    largest = 0.0
    for step in golden.steps:
        times, ratios = _times_control(golden, step, moments[str(step)])
        changed = next((place for place, ratio in enumerate(ratios) if ratio > _ONE_TENSOR), None)
        largest = max(largest, times)
        if times > TIMES_CONTROL or changed is not None:
            place = ratios.index(max(ratios)) if changed is None else changed
            return GoldenVerdict(CHANGED, max(times, ratios[place]), step, names[place])
    return GoldenVerdict(ROUNDING, largest)


def _other_variables(golden: Golden, measured: Mapping[str, Any]) -> str:
    count, recorded = len(measured["sizes"]), len(golden.sizes)
    if count != recorded:
        return f"the model has {count} variables, {recorded} were recorded"
    place = next(at for at, size in enumerate(golden.sizes) if size != measured["sizes"][at])
    return f"{measured['names'][place]} has {measured['sizes'][place]} numbers, {golden.sizes[place]} were recorded"


def _times_control(golden: Golden, step: int, measured: Mapping[str, Any]) -> tuple[float, list[float]]:
    """Returns how many times the control all tensors or the losses are away after `step`, and each tensor by itself."""
    recorded, control = golden.moments[str(step)], golden.control[str(step)]
    floor = _floor(golden)
    moved = _UPDATES * golden.learning_rate * step
    allowed = [
        max(norm, floor * max(root_mean_square(numbers), moved * math.sqrt(size)), 1e-300)
        for norm, numbers, size in zip(control["tensors"], recorded["projections"], golden.sizes, strict=True)
    ]
    norms = distances(measured, recorded)
    losses = losses_apart(measured["losses"], recorded["losses"]) / max(control["losses"], floor)
    times = max(math.hypot(*norms) / math.hypot(*allowed), losses)
    return times, [norm / most for norm, most in zip(norms, allowed, strict=True)]


def _floor(golden: Golden) -> float:
    return _FLOOR_OF_FLOAT64 if golden.settings.get("precision") == "float64" else _FLOOR


def causes(golden: Golden, settings: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[str]:
    """Yields how the measured run differs from the recorded one: settings, data, sources, packages, instruction set.

    Packages that were installed since then are left out.
    """
    pairs = {
        "settings": (golden.settings, settings),
        "data": (golden.data, measured["data"]),
        "sources": (golden.sources, measured["sources"]),
    }
    for part, (recorded, now) in pairs.items():
        names = [name for name in {**recorded, **now} if recorded.get(name) != now.get(name)]
        yield _difference(part, names)
    before, after = golden.packages, measured["packages"]
    names = [name for name in before if before[name] != after.get(name)]
    names.sort(key=lambda name: (name not in _FIRST_NAMED, name))
    yield _difference("packages", [f"{name} {before[name]} -> {after.get(name, 'none')}" for name in names])
    instructions = measured["instructions"]
    known = instructions in golden.digests
    yield _difference("instruction sets", [] if known else [f"{' and '.join(golden.digests)} -> {instructions}"])


def _difference(part: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{part} differ: {', '.join(names[:_MOST_NAMED])}{more}" if names else f"{part} equal"
