"""Records the numbers that a script reports, in the files of a job directory that reports and `watch` read.

The same files and fields as trainer/base/run_files/records.py defines, without importing it.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from .job_files import BucketFiles, LocalFiles

RUN_INFO, STATS, RESULT = "run.json", "stats.jsonl", "result.json"
LARGEST = 1e15  # a larger number is left out, as a reader would
MOST_NAMES = 100  # losses and metrics of one report
LINES = 5_000  # so many reports have a line each; then lines are a second apart, and twice as far after as many again


class Record:
    """Counts the reports of one start of a script. Its methods may be called by several threads.

    `about`: the content of run.json that is known before the first report.
    """

    def __init__(
        self, files: LocalFiles | BucketFiles, about: Mapping[str, Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._files, self._clock, self._lock = files, clock, threading.RLock()
        started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self._info = {**about, "data": {"unit": "examples"}, "started": started}
        self._began, self._before, self._restarts = clock(), 0.0, 0
        self._lines: list[tuple[int, str]] = []
        self._last: tuple[float, int, int | None] | None = None  # time, step and examples of the newest line
        self._pending: dict[str, Any] | None = None  # a report that came too soon after that line for one of its own
        self._startup: float | None = None
        self._step = 0
        self._final: dict[str, dict[str, float | None]] = {"losses": {}, "metrics": {}}
        self._written: dict[str, str] = {}

    def begin(self) -> None:
        """Continues the record of an earlier start that did not end as planned, and writes what is known."""
        earlier, stats = _object(self._files.read(RESULT)), self._files.read(STATS)
        self._written[STATS] = stats  # of a run that was done: it is replaced
        if earlier and earlier.get("state") != "done":
            self._before, self._restarts = (
                _number(earlier.get("wall_seconds")) or 0.0,
                1 + (_count(earlier.get("restarts")) or 0),
            )
            self._startup = _number(earlier.get("startup_seconds"))
            found = [(_object(line).get("step"), line) for line in stats.splitlines()]
            self._lines = [(step, line) for step, line in found if isinstance(step, int)]
        self.write()

    @property
    def has_numbers(self) -> bool:
        """Returns whether a report has arrived."""
        return self._last is not None

    def take(self, line: bytes) -> None:
        """Counts a line of a script's output if it is a report: a JSON object with a whole number `step`."""
        text = line.rstrip(b"\r\n").rpartition(b"\r")[2].strip()
        if text.startswith(b"{") and b'"step"' in text:
            values = _object(text.decode(errors="replace"))
            step = _count(values.get("step"))
            if step is not None:
                with self._lock:
                    self._count(step, values)

    def write(self, state: str = "running", **more: Any) -> None:
        """Writes the files that have changed. Raises OSError if that fails; the next call writes them then."""
        with self._lock:
            if state != "running" and self._pending:
                self._add_line(self._pending)
            wall = round(self._before + self._clock() - self._began, 3)
            result = {"state": state, "steps": self._step, "wall_seconds": wall, "restarts": self._restarts,
                      "startup_seconds": self._startup, "final": self._final, **more}  # fmt: skip
            files = {RUN_INFO: _text(self._info), STATS: "".join(f"{line}\n" for _, line in self._lines)}
            files[RESULT] = _text(result)  # last: it tells how complete the others are
        for name, content in files.items():
            if self._written.get(name, "") != content:
                self._files.write(name, content)
                self._written[name] = content

    def _count(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds a report, by a line of its own unless the last one is too recent."""
        now = self._clock()
        if self._startup is None:
            self._startup = round(now - self._began, 6)
        if total := _count(values.get("total_steps")):
            self._info["total_steps"] = total
        named = [(name, value) for name, value in values.items() if name not in ("step", "examples", "total_steps")]
        scalars = {name: _number(value) for name, value in named[:MOST_NAMES] if isinstance(value, (int, float))}
        for name, value in scalars.items():
            self._final["losses" if _is_loss(name) else "metrics"][name] = value
        report = {"step": step, "examples": _count(values.get("examples")), "time": now, "scalars": scalars}
        again = self._last is not None and step <= self._last[1]  # the script trains another time
        spaced = 2.0 ** (len(self._lines) // LINES - 1) if len(self._lines) >= LINES else 0.0
        self._step = step
        if self._last and now - self._last[0] < spaced and not again:
            self._pending = report
            return
        self._add_line(report)

    def _add_line(self, report: Mapping[str, Any]) -> None:
        step, now, last = report["step"], report["time"], self._last
        examples: int | None = report["examples"]
        self._lines = [line for line in self._lines if line[0] < step] if self._goes_back(step) else self._lines
        steps = step - last[1] if last else 0
        pace = (now - last[0]) / steps if last and steps > 0 else None
        rows = None
        if last and steps > 0:
            # Without a count of examples the steps themselves are counted.
            read = None if examples is None or last[2] is None else examples - last[2]
            rows = 1.0 if examples is None else read / steps if read and read > 0 else None
            unit = "steps" if examples is None else "examples"
            self._info["data"] = {"unit": unit, **({"examples_per_step": round(rows)} if rows else {})}
        seconds = self._before + now - self._began - (self._startup or 0.0)
        scalars = report["scalars"]
        entry = {
            "kind": "report", "step": step, "seconds": round(max(0.0, seconds), 6), "step_seconds": pace,
            "images_per_second": rows / pace if rows and pace else None, "untimed_steps": 0 if last else max(1, step),
            "losses": {name: value for name, value in scalars.items() if _is_loss(name)},
            "metrics": {name: value for name, value in scalars.items() if not _is_loss(name)},
        }  # fmt: skip
        self._lines.append((step, json.dumps(entry)))
        self._last, self._pending = (now, step, examples), None

    def _goes_back(self, step: int) -> bool:
        return bool(self._lines) and step <= self._lines[-1][0]


def _is_loss(name: str) -> bool:
    return "loss" in name or "penalty" in name


def _number(value: Any) -> float | None:
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if valid else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST else None


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
