"""Records the numbers that a script reports, in the files of a job directory that reports and `watch` read.

The directory is on this disk or in a bucket. These are the files and fields of trainer/base/run_files/job_files.py,
which is not imported.
"""

from __future__ import annotations

import datetime
import json
import os
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from .starter import STORAGE, object_url, request, say, token

RUN_INFO, STATS, RESULT = "run.json", "stats.jsonl", "result.json"
EVERY_S = {False: 1.0, True: 30.0}  # between writes, on a disk and in a bucket
LARGEST = 1e15  # a larger number is left out, as a reader would
LINES = 5_000  # so many reports have a line each; then lines are a second apart, and twice as far after as many again


class Record:
    """Counts the reports of one start of a script. Its methods may be called by several threads.

    `job_dir`: a path or a gs:// address; `about`: the content of run.json that is known before the first report. That
    the files cannot be written is said once, and ends no script.
    """

    def __init__(self, job_dir: str, about: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._job_dir, self._clock, self._lock = job_dir, clock, threading.RLock()
        started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self._info = {**about, "data": {"unit": "examples"}, "started": started,
                      "on_vertex": os.environ.get("CLOUD_ML_JOB_ID", "").isdigit()}  # fmt: skip
        self._began, self._result = clock(), {"state": "running", "steps": 0, "wall_seconds": 0.0, "restarts": 0}
        self._final: dict[str, dict[str, float | None]] = {"losses": {}, "metrics": {}}
        self._lines: list[tuple[int, str]] = []  # of stats.jsonl, by step
        self._last: dict[str, Any] | None = None  # the report of the newest line
        self._written: dict[str, str] = {}
        self._startup: float | None = None
        self._before, self._due, self._refused = 0.0, 0.0, False
        self.reports = 0  # that have arrived

    def begin(self) -> None:
        """Continues the record of an earlier start that did not end as planned, and writes what is known."""
        try:
            earlier, stats = _object(_read(self._job_dir, RESULT)), _read(self._job_dir, STATS)
        except OSError as error:
            self._refuse(error)
            return
        self._written[STATS] = stats  # of a run that was done: it is replaced
        if earlier and earlier.get("state") != "done":
            self._before = _number(earlier.get("wall_seconds")) or 0.0
            self._result["restarts"] = 1 + (_count(earlier.get("restarts")) or 0)
            self._startup = _number(earlier.get("startup_seconds"))
            steps = [(_object(line).get("step"), line) for line in stats.splitlines()]
            self._lines = [(step, line) for step, line in steps if isinstance(step, int)]
        self.write()

    def take(self, line: bytes) -> None:
        """Counts a line of a script's output if it is a report: a JSON object with a whole number `step`.

        A report has a line of its own unless the last one is too recent.
        """
        text = line.rstrip(b"\r\n").rpartition(b"\r")[2].strip()
        if not (text.startswith(b"{") and b'"step"' in text):
            return
        values = _object(text.decode(errors="replace"))
        step, examples = _count(values.get("step")), _count(values.get("examples"))
        if step is None:
            return
        with self._lock:
            now = self._clock()
            self.reports += 1
            self._startup = round(now - self._began, 6) if self._startup is None else self._startup
            if total := _count(values.get("total_steps")):
                self._info["total_steps"] = total
            numbers: dict[str, dict[str, float | None]] = {"losses": {}, "metrics": {}}
            for name, value in values.items():
                if name not in ("step", "examples", "total_steps") and isinstance(value, (int, float)):
                    kind = "losses" if "loss" in name or "penalty" in name else "metrics"
                    numbers[kind][name] = self._final[kind][name] = _number(value)
            self._result["steps"] = step
            last = self._last
            spaced = 2.0 ** (len(self._lines) // LINES - 1) if len(self._lines) >= LINES else 0.0
            if last and step > last["step"] and now - last["time"] < spaced:
                return
            if self._lines and step <= self._lines[-1][0]:  # the script trains these steps another time
                self._lines = [earlier for earlier in self._lines if earlier[0] < step]
            pace = rows = None
            if last and step > last["step"]:
                steps = step - last["step"]
                pace = (now - last["time"]) / steps
                # Without a count of examples the steps themselves are counted.
                before: Any = examples if last["examples"] is None else last["examples"]
                read = steps if examples is None else examples - before
                rows = read / steps if read > 0 else None
                unit = {"unit": "steps" if examples is None else "examples"}
                self._info["data"] = {**unit, "examples_per_step": round(rows)} if rows else unit
            entry = {
                "kind": "report", "step": step, "step_seconds": pace, "untimed_steps": 0 if last else max(1, step),
                "seconds": round(max(0.0, self._before + now - self._began - (self._startup or 0.0)), 6),
                "images_per_second": rows / pace if rows and pace else None, **numbers,
            }  # fmt: skip
            self._lines.append((step, json.dumps(entry)))
            self._last = {"step": step, "examples": examples, "time": now}

    def write_if_due(self) -> None:
        """Writes the files now and then, and as soon as there is a first report."""
        if self._clock() >= self._due or (self.reports and not self._written.get(STATS)):
            self.write()
            self._due = self._clock() + EVERY_S[self._job_dir.startswith("gs://")]

    def write(self, state: str = "running", **more: Any) -> None:
        """Writes the files that have changed; what cannot be written is written by the next call."""
        with self._lock:
            wall = round(self._before + self._clock() - self._began, 3)
            result = {**self._result, "state": state, "wall_seconds": wall, "startup_seconds": self._startup,
                      "final": self._final, **more}  # fmt: skip
            files = {RUN_INFO: _text(self._info), STATS: "".join(f"{line}\n" for _, line in self._lines)}
            files[RESULT] = _text(result)  # last: it tells how complete the others are
        try:
            for name, content in files.items():
                if self._written.get(name, "") != content:
                    _write(self._job_dir, name, content)
                    self._written[name] = content
        except OSError as error:
            self._refuse(error)

    def _refuse(self, error: OSError) -> None:
        if not self._refused:
            line = f"the numbers of this script cannot be written to its job directory: {error}; the script goes on"
            say(f"{line}; its account needs roles/storage.objectUser there (docs/permissions.md)", "WARNING")
        self._refused = True


def _read(folder: str, name: str) -> str:
    """Returns the content of a file, empty if there is none. Raises OSError if it cannot be read."""
    if folder.startswith("gs://"):
        return request(object_url(f"{folder}/{name}"), {"Authorization": f"Bearer {token()}"}, missing=b"").decode(
            errors="replace"
        )
    try:
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _write(folder: str, name: str, content: str) -> None:
    """Replaces a file as a whole: https://cloud.google.com/storage/docs/uploading-objects

    Raises OSError if that fails.
    """
    if folder.startswith("gs://"):
        bucket, _, path = f"{folder}/{name}".removeprefix("gs://").partition("/")
        target = urllib.parse.urlencode({"uploadType": "media", "name": path})
        headers = {"Authorization": f"Bearer {token()}", "Content-Type": "application/json"}
        request(f"{STORAGE}/upload/storage/v1/b/{bucket}/o?{target}", headers, content.encode())
        return
    os.makedirs(folder, exist_ok=True)
    partial = os.path.join(folder, f".{name}.part")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(content)
    os.replace(partial, os.path.join(folder, name))


def _number(value: Any) -> float | None:
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if valid else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST else None


def _object(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
