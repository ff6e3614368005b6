"""Sends runs that have ended to trackers; a comparison becomes a parent run, and each of its runs a
child run."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deploy.base.console import say
from deploy.report.collection import COMPARISON, fetched
from deploy.report.measures import figures_of
from deploy.report.run_reader import billed
from trainer.base.errors import PlatformFault, UserError, reason
from trainer.base.run_files.job_files import RUN_FILES, RUN_INFO, items, read_json
from trainer.base.run_files.tracking.sender import RunFiles, Sender, digest, open_tracker
from trainer.base.storage import is_locked
from trainer.base.tracker import Point, TrackedRun, read_addresses, text_of


@dataclass(frozen=True)
class _Comparison(RunFiles):
    """Represents a comparison, the parent of its runs; at its end it has one point with the FIGURES
    of each tier."""

    about: TrackedRun = dataclasses.field(kw_only=True)

    def run(self, *, ended: bool) -> TrackedRun:
        return self.about if ended else replace(self.about, state="running", files=())

    def points(self, *, ended: bool) -> list[Point]:
        tiers = items(read_json(self.folder / "table.json")[0], "tiers") if ended else []
        values = dict[str, float]()
        for tier in tiers:
            values |= {f"{tier['tier']}/{key}": value for key, value in figures_of(tier).items()}
        if not values:
            return []
        repeats = sum(tier["repeats"] for tier in tiers)
        return [Point(repeats, (self.folder / COMPARISON).stat().st_mtime, values)]


def trackers_in(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the setting `track`, the trackers' addresses.

    Raises UserError for one that the trainer would refuse.
    """
    trackers: tuple[str, ...] = settings.get("track", ())
    for address in read_addresses(trackers):
        open_tracker(address)
    return trackers


def track_runs(paths: Sequence[str], addresses: Sequence[str]) -> None:
    """Sends each run or comparison to each tracker, and prints a line for each run.

    Raises UserError if a tracker refuses a run, if a run goes on, or if a path has no run;
    PlatformFault if a tracker does not answer.
    """
    sources = list[RunFiles]()
    for path in paths:
        sources += _sources(path)
    for source in sources:
        for address in read_addresses(addresses):
            sender = Sender(address, source)
            run = source.run(ended=True)
            try:
                sender.send(ended=True)
            except UserError:
                raise
            except Exception as error:
                raise PlatformFault(
                    f"{sender.text}: {run.name} is not sent: {reason(error)}"
                ) from error
            link = sender.opened.link if sender.opened else ""
            say(f"{run.name}: {run.state}, {sender.sent:,} steps sent: {link}")


def _sources(path: str) -> Iterator[RunFiles]:
    """Yields the run in a folder or, for a folder of runs, a parent that stands for the folder and
    then its runs."""
    folder = fetched(path, "track")
    place = path.rstrip("/")
    if (folder / RUN_INFO).is_file():
        if is_locked(folder):
            raise UserError(f"{path}: the run is not done: give it --track, or wait for its end")
        yield RunFiles(folder, place)
        return
    below = sorted({file.parent for name in RUN_FILES for file in folder.glob(f"**/{name}")})
    if not below and not (folder / COMPARISON).is_file():  # a comparison may have no run yet
        raise UserError(f"{path}: no run in it: use the folder that --job_dir or --out named")
    # The parent: the settings and the report of a comparison, if the folder has them.
    table = read_json(folder / "table.json")[0]
    request = read_json(folder / COMPARISON)[0]
    settings = {name: text_of(value) for name, value in request.items() if name != "command"}
    verdict = [*map(str, items(table, "verdict"))]
    tags = {"verdict": text_of(" ".join(verdict[:1])), "command": text_of(request.get("command"))}
    files = [file for name in ("table.md", "report.html") if (file := folder / name).is_file()]
    table_text = ""
    if (file := folder / "table.md") in files:
        table_text = file.read_text(encoding="utf-8").partition("\n\n")[0]
    # a tag in MLflow, whose length is limited
    description = "\n".join([*(f"- {sentence}" for sentence in verdict), "", table_text])[:5000]
    key = digest([place, settings])
    name = place.rsplit("/", 1)[-1]
    parent = TrackedRun(key, name, folder, "", settings, tags, "finished", files, description)
    yield _Comparison(folder, place, about=parent)
    for run in below:
        name = run.relative_to(folder).as_posix()
        (_, usd) = billed(run)
        cost = {} if usd is None else {"result/usd": usd}
        yield RunFiles(run, f"{place}/{name}", name=name, parent=parent.id, more=cost)
