"""stats.jsonl, for programs: one JSON object a report, an epoch, an evaluation and a measurement of quality."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.reporting.job_directory import finite
from trainer.storage import write_whole, writing


class Stats:
    """Appends to a stats.jsonl. Lines past `step` are of a run that went on from an older checkpoint: dropped."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        drop_past(path, step)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Writes one line; a number that JSON cannot hold becomes null."""
        with writing(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(finite(entry), allow_nan=False) + "\n")


def drop_past(path: Path, step: int) -> None:
    """Leaves the whole lines of a stats.jsonl up to `step`."""
    kept = [entry for entry in _entries(path) if entry["step"] <= step]
    write_whole(path, "".join(json.dumps(entry) + "\n" for entry in kept))


def last_reported_step(path: Path) -> int:
    """The furthest step that a stats.jsonl tells of; 0 for none."""
    return max((entry["step"] for entry in _entries(path)), default=0)


def _entries(path: Path) -> list[dict[str, Any]]:
    """What the lines hold; one cut short by a kill, or damaged, is left out."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int) and isinstance(entry.get("kind"), str):
            found.append(entry)
    return found
