"""Reads and writes golden files, and compares a run with one: equal bits, rounding, or changed and where.

A golden file holds the numbers of a run's first steps, and what they depend on: settings, data, sources, packages.
Of a tensor it holds two projections onto random signs. The root mean square of their differences estimates the L2 norm
of the difference of two tensors (Achlioptas 2003, doi:10.1016/S0022-0000(03)00025-4). Imports no TensorFlow.
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
from trainer.base.run_files.job_files import finite, read_json
from trainer.base.storage import write_whole

GOLDEN_FORMAT = 1
PROJECTIONS = 2
RECORDED_STEPS = (1, 2, 4, 8, 16, 30)


def recorded_steps(last: int) -> list[int]:
    """Returns the steps after which the numbers of a run of `last` steps are recorded."""
    return sorted({*(step for step in RECORDED_STEPS if step < last), last})


@dataclass
class Golden:
    """Holds a golden file's content. The keys of `moments`, `control` and each item of `digests` are step numbers."""

    flags: Sequence[str]  # of the run, in the form of `trainer.task`
    settings: Mapping[str, Any]
    steps: Sequence[int]
    names: Sequence[str]  # of the variables in order: weights, then optimizers' slots and averages
    sizes: Sequence[int]
    learning_rate: float
    moments: Mapping[str, Any]  # the results of `moment`
    control: Mapping[str, Any]  # largest differences of the same run with its rows in another order
    data: Mapping[str, Any]
    sources: Mapping[str, str]
    packages: Mapping[str, str]  # versions by name
    digests: dict[str, Mapping[str, str]]  # of all bits, by the processor's instruction set and the step


def read_golden(path: Path) -> Golden:
    """Reads a golden file. Raises UserError if it is missing, damaged or of another version."""
    content, problem = read_json(path)
    if not problem and content.pop("format", None) != GOLDEN_FORMAT:
        problem = f"{path} is no golden file of this version"
    try:
        if not problem:
            golden = Golden(**content)
            if golden.steps and golden.moments.keys() == golden.control.keys() == {str(step) for step in golden.steps}:
                return golden
            problem = f"{path} is damaged (a step lacks numbers)"
    except (TypeError, AttributeError) as error:
        problem = f"{path} is damaged ({error!r})"
    raise UserError(f"{problem}: record it again (python -m trainer.golden record …)")


def write_golden(path: Path, golden: Golden) -> None:
    """Writes a golden file atomically, with a line for each step and each entry, so that a diff of two is readable."""
    lines = []
    for name, value in {"format": GOLDEN_FORMAT, **asdict(golden)}.items():
        parts = value if value and name in ("moments", "control", "settings", "sources", "packages") else {}
        inner = ",\n".join(f"  {json.dumps(key)}: {json.dumps(finite(part))}" for key, part in parts.items())
        lines.append(f' "{name}": ' + (f"{{\n{inner}\n }}" if inner else json.dumps(finite(value))))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")


def moment(tensors: Mapping[str, npt.NDArray[Any]], losses: Mapping[str, float]) -> dict[str, Any]:
    """Returns the record of a step for JSON: losses, a SHA-256 of all bits, each tensor's projections to 12 digits.

    A tensor's signs depend on its place alone, so tensors may be renamed but not reordered.
    """
    digest, projections = hashlib.sha256(), []
    for place, tensor in enumerate(tensors.values()):
        digest.update(np.ascontiguousarray(tensor).tobytes())
        values = np.asarray(tensor, np.float64).ravel()
        draw = np.random.Generator(np.random.Philox(key=place))
        signs = draw.integers(0, 2, (PROJECTIONS, values.size), np.int8, endpoint=False) * 2 - 1
        projections.append([float(f"{projection:.12g}") for projection in signs.astype(np.float64) @ values])
    return {"losses": dict(losses), "digest": digest.hexdigest(), "projections": projections}


def distances(measured: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[float]:
    """Returns each tensor's estimated L2 norm of the difference of two moments; infinity if one is not finite."""
    pairs = zip(measured["projections"], recorded["projections"], strict=True)
    return [root_mean_square([_number(a) - _number(b) for a, b in zip(*pair, strict=True)]) for pair in pairs]


def losses_apart(losses: Mapping[str, float], others: Mapping[str, float]) -> float:
    """Returns the largest difference of the losses and metrics that both have, relative to the largest of `others`.

    It is infinite if a number is finite in only one of them.
    """
    pairs = [(_number(losses[name]), _number(value)) for name, value in others.items() if name in losses]
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


EQUAL, ROUNDING, CHANGED = "equal bits", "rounding", "CHANGED"
METRICS = "losses or metrics of one alone"
TIMES_CONTROL = 3.0  # allowed multiple of the control, the effect of another order of rows, as in `--on_gpus`
_TIMES_CONTROL_OF_TENSOR = 10.0  # for one tensor, as its norm is an estimate: off by more in 1 case of 1e40
# Differences up to this floor count as rounding whatever the control, relative to a tensor's norm or to a hundred
# updates: a weight without effect (a bias before batch norm) moves by rounding alone, and its control is chance.
_FLOOR_OF_FLOAT64, _FLOOR = 1e-10, 1e-6
_UPDATES = 100
_FIRST_NAMED = ("tensorflow", "keras", "numpy")  # named before other packages that differ
_MOST_NAMED = 5  # differences that a line names


@dataclass(frozen=True)
class GoldenVerdict:
    """Holds how a run compares with its golden file: `kind` is EQUAL, ROUNDING or CHANGED."""

    kind: str
    times: float = 0.0  # the largest difference as a multiple of the control
    step: int = 0  # the first step that changed
    tensor: str = ""  # the first tensor that changed in this step, in the order of the graph, or "a loss or metric"
    reason: str = ""  # why a run counts as changed that could not be compared


def compare_with_golden(golden: Golden, measured: Mapping[str, Any]) -> GoldenVerdict:
    """Compares what `trainer.checks.golden_run.measure` wrote with a golden file; returns the verdict."""
    names, moments, sizes = measured["names"], measured["moments"], list(measured["sizes"])
    if sizes != list(golden.sizes):
        reason = f"the model has {len(sizes)} variables, {len(golden.sizes)} were recorded"
        if len(sizes) == len(golden.sizes):
            place = next(at for at, size in enumerate(golden.sizes) if size != sizes[at])
            reason = f"{names[place]} has {sizes[place]} numbers, {golden.sizes[place]} were recorded"
        return GoldenVerdict(CHANGED, math.inf, golden.steps[0], reason=reason)
    floor = _FLOOR_OF_FLOAT64 if golden.settings.get("precision") == "float64" else _FLOOR
    digests = golden.digests.get(measured["instructions"], {})
    same = (
        digests.get(step) == moments[step]["digest"]
        # Reported losses have no equal bits: replicas sum them in another order than gradients.
        and losses_apart(moments[step]["losses"], golden.moments[step]["losses"]) <= floor
        for step in map(str, golden.steps)
    )
    if all(same):
        return GoldenVerdict(EQUAL)
    largest = 0.0
    for step in golden.steps:
        recorded, control, now = (part[str(step)] for part in (golden.moments, golden.control, moments))
        moved = _UPDATES * golden.learning_rate * step
        allowed = [
            max(norm, floor * max(root_mean_square(numbers), moved * math.sqrt(size)), 1e-300)
            for norm, numbers, size in zip(control["tensors"], recorded["projections"], golden.sizes, strict=True)
        ]
        norms = distances(now, recorded)
        ratios = [norm / most for norm, most in zip(norms, allowed, strict=True)]
        times = math.hypot(*norms) / math.hypot(*allowed)
        losses = losses_apart(now["losses"], recorded["losses"]) / max(control["losses"], floor)
        changed = next((place for place, ratio in enumerate(ratios) if ratio > _TIMES_CONTROL_OF_TENSOR), None)
        largest = max(largest, times, losses)
        if times > TIMES_CONTROL or changed is not None:
            place = ratios.index(max(ratios)) if changed is None else changed
            return GoldenVerdict(CHANGED, max(times, losses, ratios[place]), step, names[place])
        if losses > TIMES_CONTROL:
            return GoldenVerdict(CHANGED, losses, step, "a loss or metric")
    return GoldenVerdict(ROUNDING, largest)


def causes(golden: Golden, settings: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[str]:
    """Yields one line each on settings, data, sources, packages and instruction set: equal, or how they differ now.

    If only one of the runs has some losses or metrics, a line before these names them. Packages that were not installed
    at the recording are left out.
    """
    last = str(golden.steps[-1])
    if only_in_one := golden.moments[last]["losses"].keys() ^ measured["moments"][last]["losses"].keys():
        yield _difference(METRICS, sorted(only_in_one))
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
    """Returns the line on `part`, with the names of what differs, if anything does."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{part} differ: {', '.join(names[:_MOST_NAMED])}{more}" if names else f"{part} equal"
