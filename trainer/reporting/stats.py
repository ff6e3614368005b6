"""stats.jsonl: one JSON object a report and one an epoch, for programs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.jobdir import finite
from trainer.storage import write_whole


class Stats:
    """Appends to a stats.jsonl. Lines past `step` are of a run that went on from an older checkpoint: dropped."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= step]
        self.before = [json.loads(line) for line in kept]  # entries of the run so far
        write_whole(path, "".join(kept))

    def append(self, entry: Mapping[str, Any]) -> None:
        """Writes one line; a number that JSON cannot hold becomes null."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(finite(entry), allow_nan=False) + "\n")


def _lines(path: Path) -> list[str]:
    """Whole lines: one cut short by a kill is left out."""
    if not path.exists():
        return []
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("}\n")]
