"""Job directories, collected: those of a comparison, single ones, and folders of them, each as the runs of a tier."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from deploy.report.json_values import mapping, number, positive, read_json, whole
from deploy.report.run_reader import Run, read_run
from deploy.spec.tier import TierFacts
from trainer.errors import UserError
from trainer.storage import expanded, parse

COMPARISON = "comparison.json"
ESTIMATE = "estimate.json"
_RUN_FILES = ("run.json", "stats.jsonl", "result.json")
_REPEAT = "repeat-"


@dataclass(frozen=True)
class TierRuns:
    """The repeats of one tier. `tier` is None where nothing says what machine they ran on."""

    name: str
    runs: tuple[Run, ...]
    tier: TierFacts | None = None
    command: str = ""  # of the comparison that it is of, where one says


@dataclass(frozen=True)
class Collection:
    """What a report is made of."""

    tiers: tuple[TierRuns, ...]
    scaling: str | None = None  # strong, weak, or None where no comparison says
    at_desk: bool = False  # whether the machines of the tiers were simulated on one
    parallel: int = 1  # runs at a time
    estimates: Mapping[str, Any] = field(default_factory=dict)  # by tier
    left_out: tuple[str, ...] = ()  # names of comparisons that lie beside the job directories

    @property
    def runs(self) -> tuple[Run, ...]:
        """Every run of every tier."""
        return tuple(run for tier in self.tiers for run in tier.runs)


def collect(paths: Sequence[str]) -> Collection:
    """Reads comparison folders, job directories, and folders of job directories; UserError where one holds no run."""
    parts = [_collect(fetched(path, "report")) for path in paths]
    tiers = [tier for part in parts for tier in part.tiers]
    names = [tier.name for tier in tiers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{twice[0]} stands for two tiers: give folders whose names differ")
    scalings = {part.scaling for part in parts}
    return Collection(
        tuple(tiers),
        scalings.pop() if len(scalings) == 1 else None,
        any(part.at_desk for part in parts),
        max(part.parallel for part in parts),
        {name: estimate for part in parts for name, estimate in part.estimates.items()},
        tuple(name for part in parts for name in part.left_out),
    )


def fetched(path: str, name: str) -> Path:
    """A local folder with what is read here of the job directories at and below `path`; a local path as it is.

    UserError, naming the setting `name`, where nothing lies at a gs:// address or it may not be read.
    """
    address = parse(path, name)
    if address is None:
        return expanded(path)
    from trainer.storage.staging import Staged

    staged = Staged(address, name)
    grids = [below for below in staged.objects if PurePosixPath(below).match("samples/step-*.png")]
    newest = {PurePosixPath(below).parent: below for below in sorted(grids)}.values()
    wanted = (*_RUN_FILES, COMPARISON, ESTIMATE)
    return staged.fetch(lambda below: PurePosixPath(below).name in wanted or below in newest, quiet=True)


def _collect(folder: Path) -> Collection:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder: name job directories, or the folder of a comparison")
    asked, _ = read_json(folder / COMPARISON)
    if isinstance(asked.get("tiers"), list) and asked["tiers"]:
        try:
            tiers = [_tier(**tier) for tier in asked["tiers"]]
        except TypeError:
            raise UserError(f"{folder / COMPARISON} is damaged: name the job directories in it one by one") from None
        command = str(asked.get("command") or "")
        groups = tuple(TierRuns(tier.name, _repeats(folder / tier.name), tier, command) for tier in tiers)
        scaling = asked.get("scaling")
        known = scaling if scaling in ("strong", "weak") else None
        parallel = whole(asked.get("parallel")) or 1
        return Collection(groups, known, asked.get("on") == "local", parallel, _estimates(folder / ESTIMATE))
    if _is_run(folder):
        return Collection((TierRuns(folder.resolve().name, (read_run(folder),)),))
    below = [child for child in sorted(folder.iterdir()) if child.is_dir()]
    comparisons = tuple(child.name for child in below if (child / COMPARISON).is_file())
    found = {child.name: (read_run(child),) if _is_run(child) else _repeats(child) for child in below}
    groups = tuple(TierRuns(name, runs) for name, runs in found.items() if runs)
    if not groups and comparisons:
        raise UserError(f"{folder}: comparisons lie in it: name one of them: {', '.join(comparisons)}")
    if not groups:
        raise UserError(f"{folder}: no run.json, stats.jsonl or result.json in it: name what --job_dir named")
    return Collection(groups, left_out=comparisons)


def _estimates(path: Path) -> dict[str, Any]:
    """What was estimated of each tier, where its seconds are an interval, with the settings of the job it is of."""
    content, _ = read_json(path)
    tiers, config = mapping(content, "tiers"), mapping(content, "config")
    ends = {name: [positive(mapping(tiers[name], "seconds").get(end)) for end in ("low", "middle", "high")]
            for name in tiers if isinstance(tiers[name], Mapping)}  # fmt: skip
    return {name: {**tiers[name], "config": config} for name, found in ends.items() if None not in found}


def _tier(name: str, machine_type: str, **others: Any) -> TierFacts:
    """As a comparison keeps it; TypeError for what is none, or is no folder's name."""
    tier = TierFacts(name, machine_type, **others)
    texts = (name, machine_type, tier.accelerator_type)
    plain = all(isinstance(text, str) and text.isprintable() and len(text.encode()) < 250 for text in texts)
    counted = whole(tier.accelerators) is not None and whole(tier.workers)
    priced = tier.price_per_hour is None or number(tier.price_per_hour) is not None
    if not (plain and counted and priced) or "/" in name or name in ("", ".", ".."):
        raise TypeError
    return tier


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _RUN_FILES)


def repeat_folder(out: Path, tier: str, repeat: int) -> Path:
    """Where a comparison in `out` keeps the job directory of a tier's repeat, counted from 1."""
    return out / tier / f"{_REPEAT}{repeat}"


def _repeats(folder: Path) -> tuple[Run, ...]:
    found = sorted(folder.glob(f"{_REPEAT}*"), key=lambda path: (len(path.name), path.name))
    return tuple(read_run(child) for child in found if child.is_dir())
