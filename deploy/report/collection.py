"""Collects job directories by tier: those of a comparison, single ones, and folders of them."""

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from deploy.report.run_reader import RunRecord
from deploy.tiers.tier import TierFacts
from trainer.base.errors import UserError
from trainer.base.run_files.job_files import (
    BILLED,
    RUN_FILES,
    SAMPLE_FILES,
    items,
    mapping,
    number,
    read_json,
    whole,
)
from trainer.base.storage import expanded, parse

COMPARISON = "comparison.json"
_REPEAT = "repeat-"
_OF_A_RUN = (*RUN_FILES, BILLED)  # a folder with one of these files is a run


class TierRuns(NamedTuple):
    """Holds the runs of one tier, its repeats. `tier` is None if the machine is not known."""

    name: str
    runs: tuple[RunRecord, ...]
    tier: TierFacts | None = None
    command: str = ""  # the command of the comparison, if known
    local: bool = False  # the comparison ran on this machine
    spot: bool = False  # on machines that may be taken away


class Collection(NamedTuple):
    """Holds the tiers of a report, and what is known of the comparison that ran them."""

    tiers: tuple[TierRuns, ...]
    scaling: str | None = None  # strong, weak, or None if not known
    parallel: int = 1  # how many runs there were at a time

    @property
    def runs(self) -> tuple[RunRecord, ...]:
        """Returns every run of every tier."""
        return tuple(run for tier in self.tiers for run in tier.runs)


def collect(paths: Sequence[str]) -> Collection:
    """Reads the runs at each path: a comparison, a tier of one, a job directory, or a folder of job
    directories.

    Raises UserError for a path without a run, and if two tiers have one name.
    """
    parts = [_collect(fetched(path, "report")) for path in paths]
    tiers = tuple(tier for part in parts for tier in part.tiers)
    names = [tier.name for tier in tiers]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{twice[0]} names two tiers: use folders with different names")
    scalings = {part.scaling for part in parts}
    scaling = scalings.pop() if len(scalings) == 1 else None
    return Collection(tiers, scaling, max(part.parallel for part in parts))


def fetched(path: str, name: str) -> Path:
    """Returns the local folder of `path`; from a gs:// address the files that a report needs are
    downloaded first.

    Raises UserError, which names the setting `name`, if a gs:// address has no run or may not be
    read.
    """
    address = parse(path, name)
    if address is None:
        return expanded(path)
    from trainer.base.storage.staging import Staged

    staged = Staged(address, name)
    below = [*map(PurePosixPath, staged.objects)]
    files = {str(path) for path in below if path.name in (*_OF_A_RUN, COMPARISON)}
    # the newest ones
    grids = {path.parent: str(path) for path in sorted(below) if path.match(SAMPLE_FILES)}
    if not files:
        raise UserError(
            f"{name}={path}: no {', '.join(RUN_FILES)} at or below it: use the folder that"
            " --job_dir named"
        )
    return staged.fetch({*files, *grids.values()}.__contains__, quiet=True)


def _collect(folder: Path) -> Collection:
    """Reads the runs in one local folder; see `collect`."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder: use job directories, or the folder of a comparison"
        )
    if (compared := _comparison(folder)).tiers:
        return compared
    if runs := _runs(folder):
        # One run, or the repeats of a tier; what the comparison above them says of the tier is
        # read, too.
        tier_folder = folder.resolve()
        tier_folder = tier_folder.parent if tier_folder.name.startswith(_REPEAT) else tier_folder
        compared = _comparison(tier_folder.parent)
        same = [tier for tier in compared.tiers if tier.name == tier_folder.name]
        tiers = tuple(tier._replace(runs=runs) for tier in same)
        return compared._replace(tiers=tiers or (TierRuns(tier_folder.name, runs),))
    groups = []
    for child in sorted(folder.iterdir()):
        if runs := _runs(child):
            groups.append(TierRuns(child.name, runs))
    if not groups:
        raise UserError(
            f"{folder}: no {', '.join(RUN_FILES)} in it: use the folder that --job_dir or --out"
            " named"
        )
    return Collection(tuple(groups))


def _comparison(folder: Path) -> Collection:
    """Returns the tiers of the comparison in a folder, and their runs; no tiers if it is none.

    Raises UserError for damaged values, and for a tier whose name cannot be that of a folder.
    """
    content, _ = read_json(folder / COMPARISON)
    groups = []
    for fields in items(content, "tiers"):
        # A tier counts if all that names a file or is calculated with is of its type.
        try:
            tier = TierFacts(**fields)
            texts = (tier.name, tier.machine_type, tier.accelerator_type)
            printable = all(text.isprintable() and len(text.encode()) < 250 for text in texts)
            counted = whole(tier.accelerators) is not None and whole(tier.workers)
            priced = tier.price_per_hour is None or number(tier.price_per_hour) is not None
            valid = (
                printable
                and counted
                and priced
                and "/" not in tier.name
                and tier.name not in ("", ".", "..")
            )
        except (TypeError, AttributeError):
            valid = False
        if not valid:
            raise UserError(f"{folder / COMPARISON} is damaged: use its job directories one by one")
        command = str(content.get("command") or "")
        spot = mapping(content, "strategies").get(tier.name) == "SPOT"
        local = content.get("on") == "local"
        groups.append(TierRuns(tier.name, _runs(folder / tier.name), tier, command, local, spot))
    scaling = content["scaling"] if content.get("scaling") in ("strong", "weak") else None
    return Collection(tuple(groups), scaling, whole(content.get("parallel")) or 1)


def report_folder(paths: Sequence[str]) -> str:
    """Returns where the report on local folders goes: a comparison's into it, others beside all of
    their runs."""
    folders = [expanded(path).resolve() for path in paths]
    if len(folders) == 1 and (folders[0] / COMPARISON).is_file():
        return paths[0]
    parents = [folder.parent if _runs(folder) else folder for folder in folders]
    common = Path(os.path.commonpath(parents))
    while _runs(common):
        common = common.parent
    return os.path.relpath(common / "report")


def repeat_folder(out: Path, tier: str, repeat: int) -> Path:
    """Returns the job directory of a tier's repeat in the folder `out` of a comparison; repeats
    count from 1."""
    return out / tier / f"{_REPEAT}{repeat}"


def _runs(folder: Path) -> tuple[RunRecord, ...]:
    """Returns the run whose files are in a folder, or else the repeats that are folders in it."""
    if any((folder / name).is_file() for name in _OF_A_RUN):
        return (RunRecord(folder),)
    folders = sorted(folder.glob(f"{_REPEAT}*"), key=lambda path: (len(path.name), path.name))
    return tuple(RunRecord(child) for child in folders if child.is_dir())
