"""Lists the stretches of a run between kept checkpoints, and says how surely some of them find a forged one.

Imports no TensorFlow.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.base.run_files.records import read_json
from trainer.base.run_files.run_layout import CHECKPOINTS, MANIFEST, STEP_PREFIX, step_name, step_of


@dataclass(frozen=True)
class Stretch:
    """Describes the steps between two kept checkpoints; `first` is 0 where the run begins."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"steps {self.first + 1:,} to {self.last:,}"


def manifests(job_dir: Path) -> dict[int, Mapping[str, Any]]:
    """Returns the manifests of the kept checkpoints by step. Raises UserError for one that cannot be read."""
    result = {}
    for folder in (job_dir / CHECKPOINTS).glob(f"{STEP_PREFIX}*"):
        step = step_of(folder.name)
        content, problem = read_json(folder / MANIFEST)
        if step >= 0 and problem:
            raise UserError(f"{problem}: a run with damaged checkpoints cannot be audited")
        if step >= 0:
            result[step] = content
    return dict(sorted(result.items()))


def stretches(kept: Mapping[int, Mapping[str, Any]]) -> list[Stretch]:
    """Returns the stretches between checkpoints that follow each other, by the digest that each names.

    The first one of a run follows None. One without the name is of an older version.
    """
    by_digest = {manifest.get("sha256"): step for step, manifest in kept.items()}
    result = []
    for step, manifest in kept.items():
        before = manifest.get("previous", {})
        if before is None:
            result.append(Stretch(0, step))
        elif before.get("sha256") in by_digest:
            result.append(Stretch(by_digest[before["sha256"]], step))
    return result


def broken_links(kept: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Returns the checkpoints whose forerunner is kept under its step, and is another one than they name."""
    links = ((step, manifest.get("previous") or {}) for step, manifest in kept.items())
    return [
        f"{step_name(step)} follows another {step_name(before['step'])} than the one that is kept"
        for step, before in links
        if before.get("step") in kept and kept[before["step"]].get("sha256") != before["sha256"]
    ]


def chosen(every: Sequence[Stretch], count: int, seed: int) -> list[Stretch]:
    """Returns `count` of the stretches, or all if there are fewer, by the auditor's seed."""
    picked = random.Random(seed).sample(every, min(count, len(every)))  # noqa: S311 - the auditor names the seed
    return sorted(picked, key=lambda stretch: stretch.last)


def probability(stretch_count: int, checked: int, forged: int = 1) -> float:
    """Returns the probability that checking so many of all stretches meets at least one of the forged ones."""
    if checked >= stretch_count:
        return 1.0
    return 1.0 - math.comb(stretch_count - forged, checked) / math.comb(stretch_count, checked)
