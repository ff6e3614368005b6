"""Job directories, read: run.json, stats.jsonl and result.json of each run, as one frozen, typed Run.

Made for directories of any origin: a file that is missing or damaged costs the values it held, never the report.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from deploy.tier import TierFacts
from trainer.errors import UserError
from trainer.storage import expanded, parse

COMPARISON = "comparison.json"
ESTIMATE = "estimate.json"
_RUN_FILES = ("run.json", "stats.jsonl", "result.json")
_REPEAT = "repeat-"
_MOST = 1e15  # no count, time or loss of a run is larger: what is, is damaged


@dataclass(frozen=True)
class Window:
    """One line of stats.jsonl: means over the steps since the line of its kind before."""

    step: int
    warm_up: bool  # the first of its kind, or the first after a restart
    step_seconds: float | None
    images_per_second: float | None
    scalars: Mapping[str, float]
    gpu_memory_gib: float | None  # of the fullest GPU


@dataclass(frozen=True)
class Run:
    """One job directory. None where the directory does not say; `problems` tells what was damaged."""

    folder: Path
    state: str  # done, interrupted, failed, running; missing or unknown where result.json is not there or is damaged
    error: str | None
    config: Mapping[str, Any]
    devices: tuple[str, ...]  # of each worker
    gpus: tuple[str, ...]  # what the chief's call themselves, as "NVIDIA L4"; none where TensorFlow does not say
    simulated: bool  # logical CPU devices stand for accelerators
    workers: int
    replicas: int | None
    global_batch_size: int | None
    rows_per_replica: int | None
    examples_per_step: int | None
    steps_per_epoch: int | None
    steps: int | None
    startup_seconds: float | None  # start of the process to the end of its first step
    wall_seconds: float | None  # of all processes
    restarts: int
    peak_memory_gib: float | None
    final: Mapping[str, float]  # losses and metrics, the newest of each
    started: str  # UTC; "" where run.json does not say
    command: str
    tensorflow: str  # its version
    reports: tuple[Window, ...]
    epochs: tuple[Window, ...]
    untold: str  # why stats.jsonl tells nothing; "" where it does
    problems: tuple[str, ...]

    @property
    def ending(self) -> str:
        """How the run ended, in words that follow a colon."""
        if self.state == "running":
            last = max((window.step for window in (*self.reports, *self.epochs)), default=None)
            return f"it has not ended, or was killed ({'no report' if last is None else f'last report: step {last:,}'})"
        told = {"missing": "there is no result.json", "unknown": "result.json is damaged"}
        because = f": {self.error}" if self.error else ""
        return told.get(self.state, f"the run ended as '{self.state}'{because}")

    @property
    def sample(self) -> Path | None:
        """The newest grid of generated images."""
        return max((self.folder / "samples").glob("step-*.png"), default=None)


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
        parallel = _whole(asked.get("parallel")) or 1
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
    """What was estimated of each tier, where its seconds are an interval."""
    tiers = _mapping(read_json(path)[0], "tiers")
    ends = {name: [_positive(_mapping(tiers[name], "seconds").get(end)) for end in ("low", "middle", "high")]
            for name in tiers if isinstance(tiers[name], Mapping)}  # fmt: skip
    return {name: tiers[name] for name, found in ends.items() if None not in found}


def _tier(name: str, machine_type: str, **others: Any) -> TierFacts:
    """As a comparison keeps it; TypeError for what is none, or is no folder's name."""
    tier = TierFacts(name, machine_type, **others)
    texts = (name, machine_type, tier.accelerator_type)
    plain = all(isinstance(text, str) and text.isprintable() and len(text.encode()) < 250 for text in texts)
    counted = _whole(tier.accelerators) is not None and _whole(tier.workers)
    priced = tier.price_per_hour is None or _number(tier.price_per_hour) is not None
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


def read_run(folder: Path) -> Run:
    """The job directory `folder`; whatever is missing or damaged in it is None."""
    about, about_problem = read_json(folder / "run.json")
    result, result_problem = read_json(folder / "result.json")
    entries, damaged = _entries(folder / "stats.jsonl")
    stats = "" if (folder / "stats.jsonl").is_file() else f"{folder / 'stats.jsonl'} is missing"
    if damaged:
        lines = "1 damaged line of stats.jsonl was" if damaged == 1 else f"{damaged} damaged lines of stats.jsonl were"
        stats = f"{folder}: {lines} left out"
    reports, epochs = _windows(entries, "report"), _windows(entries, "epoch")
    cluster, data, final = (_mapping(about, "cluster"), _mapping(about, "data"), _mapping(result, "final"))
    config, steps = _mapping(about, "config"), _whole(result.get("steps"))
    return Run(
        folder=folder,
        state=str(result.get("state") or ("unknown" if (folder / "result.json").is_file() else "missing")),
        error=str(result["error"]) if result.get("error") else None,
        config=config,
        devices=tuple(map(str, _list(about, "devices"))),
        gpus=tuple(map(str, filter(None, _list(about, "gpus")))),
        simulated=about.get("simulated") is True,
        replicas=_whole(cluster.get("replicas")),
        workers=_whole(cluster.get("workers")) or 1,
        global_batch_size=_whole(config.get("global_batch_size")),
        rows_per_replica=_whole(cluster.get("rows_per_replica")),
        examples_per_step=_whole(data.get("examples_per_step")),
        steps_per_epoch=_whole(data.get("steps_per_epoch")),
        steps=max((window.step for window in (*reports, *epochs)), default=None) if steps is None else steps,
        startup_seconds=_number(result.get("startup_seconds")),
        restarts=_whole(result.get("restarts")) or 0,
        wall_seconds=_number(result.get("wall_seconds")),
        peak_memory_gib=_number(result.get("peak_memory_gib")),
        final=_scalars(final) if final else _newest(entries),
        started=str(about.get("started", "")),
        command=str(about.get("command", "")),
        tensorflow=str(_mapping(about, "versions").get("tensorflow", "")),
        reports=reports,
        epochs=epochs,
        untold="" if reports or epochs else _untold(bool(stats), damaged),
        problems=tuple(problem for problem in (about_problem, result_problem, stats) if problem),
    )


def _untold(wrong: bool, damaged: int) -> str:
    if not wrong:
        return "stats.jsonl holds no report"
    return "stats.jsonl is damaged" if damaged else "stats.jsonl is missing"


def read_json(path: Path) -> tuple[dict[str, Any], str]:
    """The object in a JSON file and "", or {} and what is wrong with the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"{path} is missing"
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path} cannot be read ({error})"
    return (content, "") if isinstance(content, dict) else ({}, f"{path} holds no JSON object")


def _entries(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines that hold an object with a step, a kind and times, if any, that are numbers; how many do not."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [], 0
    found = [entry for line in lines if (entry := _entry(line)) is not None]
    return found, len(lines) - len(found)


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    sound = isinstance(entry, dict) and _whole(entry.get("step")) is not None and isinstance(entry.get("kind"), str)
    times = ("step_seconds", "images_per_second")
    sound = sound and all(entry.get(name) is None or _number(entry[name]) is not None for name in times)
    return entry if sound else None


def _windows(entries: Iterable[Mapping[str, Any]], kind: str) -> tuple[Window, ...]:
    found = [entry for entry in entries if entry["kind"] == kind]
    return tuple(_window(entry, place == 0) for place, entry in enumerate(found))


def _window(entry: Mapping[str, Any], first: bool) -> Window:
    gpus = [gpu for gpu in _list(entry, "gpus") if isinstance(gpu, Mapping)]
    memory = [value for gpu in gpus if (value := _number(gpu.get("memory_gib"))) is not None]
    return Window(
        step=entry["step"],
        warm_up=first or bool(_whole(entry.get("untimed_steps"))),
        step_seconds=_positive(entry.get("step_seconds")),
        images_per_second=_positive(entry.get("images_per_second")),
        scalars=_scalars(entry),
        gpu_memory_gib=max(memory, default=None),
    )


def _newest(entries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The last value of every loss and metric, but for the means over an epoch."""
    return {name: value for entry in entries if entry["kind"] != "epoch" for name, value in _scalars(entry).items()}


def _scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    both = {**_mapping(entry, "losses"), **_mapping(entry, "metrics")}
    return {name: number for name, value in both.items() if (number := _number(value)) is not None}


def _mapping(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = content.get(key)
    return value if isinstance(value, Mapping) else {}


def _list(content: Mapping[str, Any], key: str) -> list[Any]:
    value = content.get(key)
    return value if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    """A number of a size that arithmetic can take, or None."""
    sound = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MOST
    return float(value) if sound else None


def _positive(value: Any) -> float | None:
    number = _number(value)
    return number if number is not None and number > 0 else None


def _whole(value: Any) -> int | None:
    """A count, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST else None
