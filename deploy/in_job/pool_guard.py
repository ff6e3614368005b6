"""Guards a persistent resource from a job of its own: deletes it when no job uses it, or when its time is over.

The API knows no deadline for such machines, and whoever created them may be gone. This program starts as a script does;
the variable TRAINER_SCRIPT is JSON: the full name of the "resource", a filter of the "jobs" in it, "deadline" in
seconds since 1970, "idle_s" without such a job, "poll_s", and "output", the job directory, with the name of the file
there, "record", which says that the guard may do its work.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from .job_files import files_at
from .starter import FAULT, MUST_CHANGE, Refused, end, request, say, token

APPEAR_S = 3600.0  # the longest time until the resource is created
SURE = 3  # looks in a row that do not find it
_OVER = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED")


class Guard:
    """Watches one persistent resource. `now` and `sleep`: in seconds; tests replace them."""

    def __init__(
        self, plan: dict[str, Any], now: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._plan, self._now, self._sleep = plan, now, sleep
        parent = plan["resource"].rpartition("/persistentResources/")[0]
        region = parent.rsplit("/", 1)[-1]
        default = f"https://{region}-aiplatform.googleapis.com"
        host = os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM", default).rstrip("/")
        self._url, self._jobs = f"{host}/v1/{plan['resource']}", f"{host}/v1/{parent}/customJobs"
        self._seen, self._missing = False, 0
        self._began = self._idle_since = now()

    def check(self) -> None:
        """Raises Refused unless the job's account may do all that a guard does; asks about a name that nothing has."""
        self._ask("delete", "DELETE", f"{self._url}-none")
        self._ask("get", "GET", f"{self._url}-none")
        self._busy()

    def watch(self) -> None:
        """Looks at the resource until it is gone, or never came."""
        while True:
            try:
                if self._gone():
                    return
            except OSError as error:
                say(f"tries again: {error}", "WARNING")
            self._sleep(self._plan["poll_s"])

    def delete(self) -> None:
        """Requests deletion, which cancels the jobs in it. Raises OSError if that fails."""
        self._ask("delete", "DELETE", self._url)

    def _gone(self) -> bool:
        """Looks once, and deletes the resource if that is due; returns whether it is gone for good."""
        state, now = self._ask("get", "GET", self._url).get("state", ""), self._now()
        if not state:
            self._missing += 1
            return self._missing >= SURE and (self._seen or now >= self._began + APPEAR_S)
        self._seen, self._missing = True, 0
        if state == "PROVISIONING" or self._busy():
            self._idle_since = now
        why = "" if state == "STOPPING" else self._why_due(state, now)
        if why:
            say(f"deletes {self._plan['resource']}: {why}")
            self.delete()
        return False

    def _why_due(self, state: str, now: float) -> str:
        """Returns why the resource must be deleted; empty if it need not."""
        if now >= self._plan["deadline"]:
            return "its time is over"
        if state == "ERROR":
            return "its state is ERROR"
        idle = now - self._idle_since
        return f"no job has used it for {idle:.0f} s" if idle >= self._plan["idle_s"] else ""

    def _busy(self) -> bool:
        """Returns whether a job in the resource is not over."""
        page = ""
        while True:
            query = {"filter": self._plan["jobs"], "pageSize": 100, **({"pageToken": page} if page else {})}
            found = self._ask("customJobs.list", "GET", f"{self._jobs}?{urllib.parse.urlencode(query)}")
            if not all(job.get("state", "").endswith(_OVER) for job in found.get("customJobs", [])):
                return True
            page = found.get("nextPageToken", "")
            if not page:
                return False

    def _ask(self, permission: str, method: str, url: str) -> dict[str, Any]:
        """Returns the answer's JSON, empty for 404. Raises OSError, Refused with the name of the permission."""
        try:
            answer = request(url, {"Authorization": f"Bearer {token()}"}, None, b"{}", method)
        except Refused as error:
            named = permission if "." in permission else f"persistentResources.{permission}"
            raise Refused(
                f"{error}: the job's account needs the permission aiplatform.{named} (docs/permissions.md)"
            ) from None
        try:
            found: dict[str, Any] = json.loads(answer or b"{}")
        except ValueError:
            raise OSError(f"no JSON from {url}") from None
        return found


def main() -> int:
    """Guards as TRAINER_SCRIPT says, and deletes the resource if this job is stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    plan = json.loads(os.environ["TRAINER_SCRIPT"])
    guard = Guard(plan)
    try:
        run(guard, plan)
    except KeyboardInterrupt:
        say("stopped: nothing would end the persistent resource after this, so it is deleted now", "WARNING")
        try:
            guard.delete()
        except OSError as error:
            end(f"{plan['resource']} is not deleted: {error}", FAULT)
    return 0


def run(guard: Guard, plan: dict[str, Any]) -> None:
    """Checks the permissions, says so in the record, and guards to the end."""
    files = files_at(plan["output"])
    try:
        guard.check()
        files.write(plan["record"], json.dumps({"ready": time.time()}) + "\n")
    except OSError as error:
        with contextlib.suppress(OSError):
            files.write(plan["record"], json.dumps({"error": str(error)}) + "\n")
        end(str(error), MUST_CHANGE if isinstance(error, Refused) else FAULT)
    guard.watch()


if __name__ == "__main__":
    sys.exit(main())
