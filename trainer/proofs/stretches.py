"""Lists the stretches of a run between kept checkpoints. Imports no TensorFlow."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.base.errors import UserError
from trainer.base.run_files.records import read_json
from trainer.base.run_files.run_layout import CHECKPOINTS, MANIFEST, STEP_PREFIX, step_name, step_of


class Stretch(NamedTuple):
    """Describes the steps between two kept checkpoints; `first` is 0 where the run begins."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"steps {self.first + 1:,} to {self.last:,}"


def manifests(job_dir: Path) -> dict[int, Mapping[str, Any]]:
    """Returns the manifests of the kept checkpoints by step. Raises UserError for one that cannot be read."""
    folders = {step_of(folder.name): folder for folder in (job_dir / CHECKPOINTS).glob(f"{STEP_PREFIX}*")}
    result: dict[int, Mapping[str, Any]] = {}
    for step in sorted(step for step in folders if step >= 0):
        result[step], problem = read_json(folders[step] / MANIFEST)
        if problem:
            raise UserError(f"{problem}: a run with damaged checkpoints cannot be audited")
    return result


def stretches(checkpoints: Mapping[int, Mapping[str, Any]]) -> list[Stretch]:
    """Returns the stretches between checkpoints that follow each other, by the digest that each names.

    The first one of a run follows None. One without the name is of an older version.
    """
    by_digest = {manifest.get("sha256"): step for step, manifest in checkpoints.items()}
    links = ((step, manifest.get("previous", {})) for step, manifest in checkpoints.items())
    firsts = ((0 if link is None else by_digest.get(link.get("sha256"), -1), step) for step, link in links)
    return [Stretch(first, last) for first, last in firsts if first >= 0]


def broken_links(checkpoints: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Returns the checkpoints whose forerunner is kept under its step, and is another one than they name."""
    links = ((step, manifest.get("previous") or {}) for step, manifest in checkpoints.items())
    return [
        f"{step_name(step)} follows another {step_name(before['step'])} than the one that is kept"
        for step, before in links
        if before.get("step") in checkpoints and checkpoints[before["step"]].get("sha256") != before["sha256"]
    ]


def chosen(every: Sequence[Stretch], count: int, seed: int) -> list[Stretch]:
    """Returns `count` of the stretches, or all if there are fewer, by the auditor's seed."""
    picked = random.Random(seed).sample(every, min(count, len(every)))  # noqa: S311 - the auditor names the seed
    return sorted(picked, key=lambda stretch: stretch.last)
