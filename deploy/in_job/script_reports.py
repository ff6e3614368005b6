"""Records the numbers that a script reports in a job directory, for `deploy report` and `deploy
watch`.

The directory is on this disk or in a bucket. Its files and their fields are those of
trainer/base/run_files/job_files.py, which cannot be imported here.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .bootstrap import STORAGE, log_line, object_url, request, token

RUN_INFO = "run.json"
STATS = "stats.jsonl"
RESULT = "result.json"
# the time between two writes, on a disk (False) and in a bucket (True)
EVERY_S = {False: 1.0, True: 30.0}
LARGEST = 1e15  # larger numbers are left out; the readers of these files ignore them, too
# this many reports get a line each; then lines are at least 1 s apart, after as many again 3 s,
# then 7 s
LINES = 5_000


class Record:
    """Records the reports of one start of a script.

    `job_dir`: a path or a gs:// address; `about`: the content of run.json that is known before the
        first report; `clock`: returns the time in seconds, as `vertex_report` does. If the files
        cannot be written, one warning is printed; the script goes on.
    """

    def __init__(
        self, job_dir: str, about: Mapping[str, Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._job_dir = job_dir
        self._clock = clock
        started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self._info = {
            **about,
            "data": {"unit": "steps", "examples_per_step": 1},
            "started": started,
            "on_vertex": os.environ.get("CLOUD_ML_JOB_ID", "").isdigit(),
        }
        self._began = clock()
        self._result = {"state": "running", "steps": 0, "restarts": 0, "startup_seconds": None}
        self._final: dict[str, dict[str, float | None]] = {"losses": {}, "metrics": {}}
        self._lines: list[tuple[int, str]] = []  # the lines of stats.jsonl, each after its step
        # step and time of the report that the newest line was made of
        self._last: tuple[int, float] | None = None
        self._written: dict[str, str] = {}  # the content of each file as it was last written
        self._earlier_seconds = 0.0  # the wall time of earlier starts
        self._due = 0.0
        self._warned = False

    def begin(self) -> None:
        """Continues an earlier start's record, unless done or damaged, and writes the files."""
        try:
            # if that is not continued, the next write replaces it
            self._written[STATS] = _read(self._job_dir, STATS)
            text = _read(self._job_dir, RESULT)
        except OSError as error:
            self._warn_once(error)
            return
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            earlier = json.loads(text or "{}")
            if earlier.get("state", "done") != "done":
                lines = [
                    (json.loads(line)["step"], line) for line in self._written[STATS].splitlines()
                ]
                self._result |= {
                    "restarts": 1 + earlier["restarts"],
                    "startup_seconds": earlier["startup_seconds"],
                }
                self._earlier_seconds = earlier["wall_seconds"]
                self._lines = lines
        self.write()

    def take(self, report: bytes) -> None:
        """Records a report: a line of JSON, [time in seconds, {"step": …, …}], as `vertex_report`
        writes it.

        It gets a line in stats.jsonl unless there are many and the last one is too recent.
        """
        try:
            now, values = json.loads(report)
        except ValueError:  # a process was killed, or the disk was full, while it wrote
            return
        step = values.pop("step")
        last = self._last
        if not 0 <= step < LARGEST:
            return
        if self._result["startup_seconds"] is None:
            self._result["startup_seconds"] = round(now - self._began, 6)
        numbers: dict[str, dict[str, float | None]] = {"losses": {}, "metrics": {}}
        for name, value in values.items():
            kind = "losses" if "loss" in name or "penalty" in name else "metrics"
            numbers[kind][name] = self._final[kind][name] = value if abs(value) < LARGEST else None
        self._result["steps"] = step
        if last and step > last[0] and now - last[1] < 2.0 ** (len(self._lines) // LINES) - 1.0:
            return
        # the script repeats these steps, as after a restart
        if self._lines and step <= self._lines[-1][0]:
            self._lines = [earlier for earlier in self._lines if earlier[0] < step]
        seconds = (now - last[1]) / (step - last[0]) if last and step > last[0] else None
        trained = self._earlier_seconds + now - self._began - self._result["startup_seconds"]
        entry = {
            "kind": "report",
            "step": step,
            "step_seconds": seconds,
            "untimed_steps": 0 if last else max(1, step),
            "seconds": round(max(0.0, trained), 6),
            "images_per_second": 1 / seconds if seconds else None,
            **numbers,
        }
        self._lines.append((step, json.dumps(entry)))
        self._last = step, now

    def write_if_due(self) -> None:
        """Writes the files if EVERY_S has passed, or if they lack the first report."""
        if self._clock() >= self._due or (self._lines and not self._written.get(STATS)):
            self.write()
            self._due = self._clock() + EVERY_S[self._job_dir.startswith("gs://")]

    def write(self, state: str = "running", **more: Any) -> None:
        """Writes the files that have changed; the next call tries again what cannot be written.

        `state`, `more`: what result.json says beside the numbers.
        """
        wall = round(self._earlier_seconds + self._clock() - self._began, 3)
        result = {
            **self._result,
            "state": state,
            "wall_seconds": wall,
            "final": self._final,
            **more,
        }
        # The result is last, so that the other files are at least as new as it says.
        files = {
            RUN_INFO: json.dumps(self._info, indent=2) + "\n",
            STATS: "".join(f"{line}\n" for _, line in self._lines),
            RESULT: json.dumps(result, indent=2) + "\n",
        }
        try:
            for name, content in files.items():
                if self._written.get(name, "") != content:
                    _write(self._job_dir, name, content)
                    self._written[name] = content
        except OSError as error:
            self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
        if not self._warned:
            role = "roles/storage.objectUser"
            log_line(
                f"the numbers of this script cannot be kept in its job directory: {error}; the"
                f" script continues; its account needs {role} there (docs/permissions.md)",
                "WARNING",
            )
        self._warned = True


def _read(folder: str, name: str) -> str:
    """Returns the content of a file; "" if there is none. Raises OSError if it cannot be read."""
    if folder.startswith("gs://"):
        return request(
            object_url(f"{folder}/{name}"), {"Authorization": f"Bearer {token()}"}, missing=b""
        ).decode(errors="replace")
    path = Path(folder, name)
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


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
    partial = Path(folder, f".{name}.part")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(content, encoding="utf-8")
    partial.replace(partial.with_name(name))
