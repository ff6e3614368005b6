"""Defines, reads and writes golden files: the numbers of a run's first steps, and what they were made of."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.base.run_files.records import finite, read_json
from trainer.base.storage import write_whole

GOLDEN_FORMAT = 1
RECORDED_STEPS = (1, 2, 4, 8, 16, 30)
PACKAGES = ("tensorflow", "keras", "numpy")  # whose versions may change numbers


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
    moments: Mapping[str, Any]  # as of `trainer.proofs.sketches.moment`
    control: Mapping[str, Any]  # how far other orders of the rows are from it
    data: Mapping[str, Any]
    sources: Mapping[str, str]
    packages: Mapping[str, str]  # versions of PACKAGES
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
        parts = value if value and name in ("moments", "control", "settings", "sources") else {}
        inner = ",\n".join(f"  {json.dumps(key)}: {json.dumps(finite(part))}" for key, part in parts.items())
        lines.append(f' "{name}": ' + (f"{{\n{inner}\n }}" if inner else json.dumps(finite(value))))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")
