"""Defines, reads and writes golden files, and judges a run by one: equal bits, rounding, or changed and where.

A golden file has the numbers of a run's first steps, and what they were made of.

A tensor is described by two projections on random signs: the root mean square of their differences estimates the L2
norm of the difference of two tensors (Achlioptas 2003, doi:10.1016/S0022-0000(03)00025-4). Imports no TensorFlow.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.base.errors import UserError
from trainer.base.run_files.records import finite, read_json
from trainer.base.storage import write_whole

GOLDEN_FORMAT = 1
PROJECTIONS = 2
RECORDED_STEPS = (1, 2, 4, 8, 16, 30)


def recorded_steps(last: int) -> list[int]:
    """Returns the steps after which a run of `last` steps is looked at."""
    return sorted({*(step for step in RECORDED_STEPS if step < last), last})


@dataclass
class Golden:
    """Holds a golden file; the keys of `moments`, `control` and each of `digests` are the steps."""

    flags: Sequence[str]  # of the run, as `trainer.task` takes them
    settings: Mapping[str, Any]
    steps: Sequence[int]
    names: Sequence[str]  # of the variables in order: weights, then optimizers' slots and averages
    sizes: Sequence[int]
    learning_rate: float
    moments: Mapping[str, Any]  # as of `moment`
    control: Mapping[str, Any]  # how far other orders of the rows are from it
    data: Mapping[str, Any]
    sources: Mapping[str, str]
    packages: Mapping[str, str]  # versions by name
    digests: dict[str, Mapping[str, str]]  # of all bits, by the instruction set of the processor


def read_golden(path: Path) -> Golden:
    """Reads a golden file. Raises UserError if it is missing, damaged or of another version."""
    content, problem = read_json(path)
    if not problem and content.pop("format", None) != GOLDEN_FORMAT:
        problem = f"{path} is no golden file of this version"
    try:
        if not problem:
            golden = Golden(**content)
            steps = [str(step) for step in golden.steps]
            whole = all({"losses", "digest", "projections"} <= golden.moments[step].keys() for step in steps)
            if steps and whole and all({"tensors", "losses"} <= golden.control[step].keys() for step in steps):
                return golden
            problem = f"{path} is damaged (a step lacks numbers)"
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"{path} is damaged ({error!r})"
    raise UserError(f"{problem}: record it again (python -m trainer.golden record …)")


def write_golden(path: Path, golden: Golden) -> None:
    """Writes a golden file whole, a line for each step and each part, so that a difference of two files reads well."""
    lines = []
    for name, value in {"format": GOLDEN_FORMAT, **asdict(golden)}.items():
        parts = value if value and name in ("moments", "control", "settings", "sources", "packages") else {}
        inner = ",\n".join(f"  {json.dumps(key)}: {json.dumps(finite(part))}" for key, part in parts.items())
        lines.append(f' "{name}": ' + (f"{{\n{inner}\n }}" if inner else json.dumps(finite(value))))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")


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
    """Returns the largest difference of a loss or metric that both have, relative to the largest of `others`.

    Infinite if a number is not finite in one of them alone.
    """
    pairs = [(_number(losses[name]), _number(value)) for name, value in others.items() if name in losses]
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


EQUAL, ROUNDING, CHANGED = "equal bits", "rounding", "CHANGED"
METRICS = "losses or metrics of one alone"
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
    tensor: str = ""  # the first that changed in it, by the order of the graph; else the losses
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
        times, losses, ratios = _times_control(golden, step, moments[str(step)])
        changed = next((place for place, ratio in enumerate(ratios) if ratio > _ONE_TENSOR), None)
        largest = max(largest, times, losses)
        if times > TIMES_CONTROL or changed is not None:
            place = ratios.index(max(ratios)) if changed is None else changed
            return GoldenVerdict(CHANGED, max(times, losses, ratios[place]), step, names[place])
        if losses > TIMES_CONTROL:
            return GoldenVerdict(CHANGED, losses, step, "a loss or metric")
    return GoldenVerdict(ROUNDING, largest)


def _other_variables(golden: Golden, measured: Mapping[str, Any]) -> str:
    count, recorded = len(measured["sizes"]), len(golden.sizes)
    if count != recorded:
        return f"the model has {count} variables, {recorded} were recorded"
    place = next(at for at, size in enumerate(golden.sizes) if size != measured["sizes"][at])
    return f"{measured['names'][place]} has {measured['sizes'][place]} numbers, {golden.sizes[place]} were recorded"


def _times_control(golden: Golden, step: int, measured: Mapping[str, Any]) -> tuple[float, float, list[float]]:
    """Returns how many times the control all tensors are away after `step`, the losses, and each tensor by itself."""
    recorded, control = golden.moments[str(step)], golden.control[str(step)]
    floor = _floor(golden)
    moved = _UPDATES * golden.learning_rate * step
    allowed = [
        max(norm, floor * max(root_mean_square(numbers), moved * math.sqrt(size)), 1e-300)
        for norm, numbers, size in zip(control["tensors"], recorded["projections"], golden.sizes, strict=True)
    ]
    norms = distances(measured, recorded)
    losses = losses_apart(measured["losses"], recorded["losses"]) / max(control["losses"], floor)
    times = math.hypot(*norms) / math.hypot(*allowed)
    return times, losses, [norm / most for norm, most in zip(norms, allowed, strict=True)]


def _floor(golden: Golden) -> float:
    return _FLOOR_OF_FLOAT64 if golden.settings.get("precision") == "float64" else _FLOOR


def causes(golden: Golden, settings: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[str]:
    """Yields how the measured run differs from the recorded one: settings, data, sources, packages, instruction set.

    Packages that were installed since then are left out. First come losses and metrics that only one of them has, if
    there are any: the others are compared.
    """
    last = str(golden.steps[-1])
    if of_one := golden.moments[last]["losses"].keys() ^ measured["moments"][last]["losses"].keys():
        yield _difference(METRICS, sorted(of_one))
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
