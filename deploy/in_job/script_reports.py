"""Records the numbers that a script reports in a job directory, for `deploy report` and `deploy watch`.

The directory is on this disk or in a bucket. Its files and their fields are those of
trainer/base/run_files/job_files.py, which cannot be imported here.
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
EVERY_S = {False: 1.0, True: 30.0}  # the time between two writes, on a disk (False) and in a bucket (True)
LARGEST = 1e15  # larger numbers are left out; the readers of these files ignore them, too
LINES = 5_000  # this many reports get a line each; then lines are a second apart, and twice as far after as many again


class Record:
    """Records the reports of one start of a script. Its methods may be called by several threads.

    `job_dir`: a path or a gs:// address; `about`: the content of run.json that is known before the first report;
    `clock`: returns the time in seconds. If the files cannot be written, one warning is printed; the script goes on.
    """

    def __init__(self, job_dir: str, about: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._job_dir, self._clock, self._lock = job_dir, clock, threading.RLock()
        started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self._info = {**about, "data": {"unit": "examples"}, "started": started,
                      "on_vertex": os.environ.get("CLOUD_ML_JOB_ID", "").isdigit()}  # fmt: skip
        self._began, self._result = clock(), {"state": "running", "steps": 0, "wall_seconds": 0.0, "restarts": 0}
        self._final: dict[str, dict[str, float | None]] = {"losses": {}, "metrics": {}}
        self._lines: list[tuple[int, str]] = []  # the lines of stats.jsonl, each after its step
        self._last: dict[str, Any] | None = None  # the report that the newest line was made of
        self._written: dict[str, str] = {}  # the content of each file as it was last written
        self._startup: float | None = None  # seconds until the first report
        self._earlier_seconds = 0.0  # the wall time of earlier starts
        self._due, self._warned = 0.0, False
        self.reports = 0  # how many have arrived

    def begin(self) -> None:
        """Continues the record of an earlier start, unless that was done, and writes the files."""
        try:
            earlier, stats = _object(_read(self._job_dir, RESULT)), _read(self._job_dir, STATS)
        except OSError as error:
            self._warn_once(error)
            return
        self._written[STATS] = stats  # if the earlier start was done, the next write replaces it
        if earlier and earlier.get("state") != "done":
            self._earlier_seconds = _number(earlier.get("wall_seconds")) or 0.0
            self._result["restarts"] = 1 + (_count(earlier.get("restarts")) or 0)
            self._startup = _number(earlier.get("startup_seconds"))
            steps = [(_object(line).get("step"), line) for line in stats.splitlines()]
            self._lines = [(step, line) for step, line in steps if isinstance(step, int)]
        self.write()

    def take(self, line: bytes) -> None:
        """Records a line of a script's output if it is a report: a JSON object with a whole number `step`.

        A report gets a line in stats.jsonl unless there are many and the last one is too recent.
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
            spacing_s = 2.0 ** (len(self._lines) // LINES - 1) if len(self._lines) >= LINES else 0.0
            if last and step > last["step"] and now - last["time"] < spacing_s:
                return
            if self._lines and step <= self._lines[-1][0]:  # the script repeats these steps, as after a restart
                self._lines = [earlier for earlier in self._lines if earlier[0] < step]
            step_seconds = examples_per_step = None
            if last and step > last["step"]:
                steps = step - last["step"]
                step_seconds = (now - last["time"]) / steps
                # If the script does not count examples, each step counts as one.
                before: Any = examples if last["examples"] is None else last["examples"]
                read = steps if examples is None else examples - before
                examples_per_step = read / steps if read > 0 else None
                unit = {"unit": "steps" if examples is None else "examples"}
                if examples_per_step:
                    self._info["data"] = {**unit, "examples_per_step": round(examples_per_step)}
                else:
                    self._info["data"] = unit
            speed = examples_per_step / step_seconds if examples_per_step and step_seconds else None
            entry = {
                "kind": "report", "step": step, "step_seconds": step_seconds,
                "untimed_steps": 0 if last else max(1, step),
                "seconds": round(max(0.0, self._earlier_seconds + now - self._began - (self._startup or 0.0)), 6),
                "images_per_second": speed, **numbers,
            }  # fmt: skip
            self._lines.append((step, json.dumps(entry)))
            self._last = {"step": step, "examples": examples, "time": now}

    def write_if_due(self) -> None:
        """Writes the files if EVERY_S has passed since the last time, or if they do not have the first report yet."""
        if self._clock() >= self._due or (self.reports and not self._written.get(STATS)):
            self.write()
            self._due = self._clock() + EVERY_S[self._job_dir.startswith("gs://")]

    def write(self, state: str = "running", **more: Any) -> None:
        """Writes the files that have changed. A file that cannot be written is tried again by the next call.

        `state`, `more`: what result.json says beside the numbers.
        """
        with self._lock:
            wall = round(self._earlier_seconds + self._clock() - self._began, 3)
            result = {**self._result, "state": state, "wall_seconds": wall, "startup_seconds": self._startup,
                      "final": self._final, **more}  # fmt: skip
            files = {RUN_INFO: _text(self._info), STATS: "".join(f"{line}\n" for _, line in self._lines)}
            files[RESULT] = _text(result)  # last, so that the other files are at least as new as it says
        try:
            for name, content in files.items():
                if self._written.get(name, "") != content:
                    _write(self._job_dir, name, content)
                    self._written[name] = content
        except OSError as error:
            self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
        if not self._warned:
            line = f"the numbers of this script cannot be written to its job directory: {error}; the script goes on"
            say(f"{line}; its account needs roles/storage.objectUser there (docs/permissions.md)", "WARNING")
        self._warned = True


def _read(folder: str, name: str) -> str:
    """Returns the content of a file; "" if there is none. Raises OSError if it cannot be read."""
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
    """Replaces a file as a whole: a reader never sees a part of it. Raises OSError if that fails.

    https://cloud.google.com/storage/docs/uploading-objects
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
