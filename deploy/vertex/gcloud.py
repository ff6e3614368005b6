"""Jobs by the user's own `gcloud`: each call is one command, an argument list that a user could paste."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deploy.spec.job_spec import to_yaml
from deploy.vertex.api import (
    LABEL,
    ApiError,
    Broken,
    CustomJob,
    JobStatus,
    LogEntry,
    log_filter,
    read_entry,
    read_status,
)
from trainer.errors import UserError

TIMEOUT_S = 300.0  # of one command; gcloud itself asks again for half a minute
_CODES = {
    "INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 400, "UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404, "RESOURCE_EXHAUSTED": 429, "INTERNAL": 500, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504,
}  # fmt: skip
# Of connections that fail in a way it does not know it says that it crashed too, as (ConnectTimeout): those may mend.
_BROKEN = re.compile(r"gcloud failed to load|gcloud crashed \((Attribute|Import|Key|ModuleNotFound|Name|Type)Error\)")


class Gcloud:
    """The protocol `deploy.vertex.api.Backend`."""

    def __init__(self, project: str, region: str) -> None:
        self._project = [f"--project={project}"]
        self._region = [*self._project, f"--region={region}"]

    def create_command(self, request: CustomJob) -> list[str]:
        """The command that makes the job; it reads the spec from stdin."""
        labels = ",".join(f"{key}={value}" for key, value in request.labels.items())
        about = [f"--display-name={request.display_name}", f"--labels={labels}", "--config=-"]
        return ["gcloud", "ai", "custom-jobs", "create", *self._region, *about]

    def paste(self, request: CustomJob) -> str:
        """The command as a shell takes it, the spec and all."""
        return f"{shlex.join(self.create_command(request))} <<'END'\n{to_yaml(request.spec)}END"

    def submit(self, request: CustomJob) -> str:
        """Runs gcloud until it has an answer, or would ask a second time.

        gcloud sends its POST again after 5xx and cut connections, which can make a second job: it is stopped when it
        logs that it is about to.
        """
        command = [*self.create_command(request), "--format=value(name)", "--verbosity=debug"]
        with _started(command) as process, _deadline(process):
            assert process.stdin
            assert process.stdout
            assert process.stderr
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(to_yaml(request.spec))
            said = []
            for line in process.stderr:
                if "Retrying request to url" in line:
                    _end(process)
                    status = re.search(r"'status': (\d{3})", line)
                    reason = line.rsplit("after exception ", 1)[-1][-200:]
                    raise ApiError(int(status[1]) if status else 0, f"no clear answer: {reason}")
                said.append(line)
            name = process.stdout.read().strip()
        if process.returncode or not name:
            raise _error(process.returncode, "".join(said))
        return name

    def state(self, name: str) -> JobStatus:
        """`gcloud ai custom-jobs describe`."""
        return read_status(self._json("ai", "custom-jobs", "describe", name, *self._region))

    def logs(self, name: str, since: str) -> Sequence[LogEntry]:
        """`gcloud logging read`."""
        found = self._json("logging", "read", log_filter(name, since), *self._project, "--order=asc")
        return [read_entry(entry) for entry in found]

    def jobs(self, label: str = "") -> Sequence[JobStatus]:
        """`gcloud ai custom-jobs list`."""
        wanted = f"labels.{LABEL}={label}" if label else f"labels.{LABEL}:*"
        found = self._json("ai", "custom-jobs", "list", *self._region, f"--filter={wanted}")
        return [read_status(job) for job in found]

    def cancel(self, name: str) -> None:
        """`gcloud ai custom-jobs cancel`."""
        _run(["gcloud", "ai", "custom-jobs", "cancel", name, *self._region])

    def upload(self, file: Path, uri: str) -> None:
        """`gcloud storage cp`, unless something is there: the address says which sources that holds.

        gcloud compares checksums and deletes what arrived damaged, https://cloud.google.com/storage/docs/data-validation
        """
        try:
            self._json("storage", "objects", "describe", uri, *self._project)
        except ApiError as error:
            if error.code != 404:
                raise
            _run(["gcloud", "storage", "cp", str(file), uri, *self._project])

    def holds(self, address: str) -> bool:
        """`gcloud storage objects list`, of one object."""
        try:
            return any(
                self._json("storage", "objects", "list", at, "--limit=1", *self._project)
                for at in (f"{address.rstrip('/')}/**", address)
            )
        except ApiError as error:
            if error.code == 403:  # the job's account may
                return True
            if "matched no objects" in str(error) or error.code == 404:
                return False
            raise

    def location(self, bucket: str) -> str:
        """`gcloud storage buckets describe`."""
        try:
            return str(self._json("storage", "buckets", "describe", bucket, *self._project).get("location", ""))
        except ApiError as error:
            if error.code == 403:  # its objects may be used without this permission
                return ""
            raise

    def _json(self, *arguments: str) -> Any:
        return json.loads(_run(["gcloud", *arguments, "--format=json"]) or "{}")


def _run(command: Sequence[str]) -> str:
    with _started(command) as process, _deadline(process):
        output, said = process.communicate()
    if process.returncode:
        raise _error(process.returncode, said)
    return output


def _started(command: Sequence[str]) -> subprocess.Popen[str]:
    """In a session of its own: gcloud may be a shell script, and what it started has to end with it."""
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    except FileNotFoundError:
        raise not_installed(", or say --backend=sdk") from None


@contextlib.contextmanager
def _deadline(process: subprocess.Popen[str]) -> Iterator[None]:
    timer = threading.Timer(TIMEOUT_S, _end, [process])
    timer.start()
    try:
        yield
    except BaseException:
        _end(process)
        raise
    finally:
        timer.cancel()


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def not_installed(otherwise: str = "") -> UserError:
    """The error for a gcloud that is not there. `otherwise`: what a user may do instead."""
    return UserError(f"gcloud is not installed: https://cloud.google.com/sdk/docs/install{otherwise}")


def _error(code: int, stderr: str) -> ApiError:
    """What gcloud's last words mean."""
    if code < 0:  # what it said may be cut off anywhere
        return ApiError(0, f"gcloud was ended by signal {-code}; it has {TIMEOUT_S:.0f} s to answer")
    said = stderr[stderr.rfind("ERROR:") :] if "ERROR:" in stderr else stderr[-500:]
    text = re.sub(r"^ERROR: (\(gcloud[\w.-]*\) )?", "", said.strip())
    if _BROKEN.match(text):
        cure = "reinstall it (https://cloud.google.com/sdk/docs/install), or say --backend=sdk"
        return Broken(0, f"{text.splitlines()[0]}: {cure}")
    name = re.match(r"([A-Z_]+):", text)
    if name and name[1] in _CODES:
        return ApiError(_CODES[name[1]], text)
    number = re.search(r"\b(?:HTTPError|Error|status:?) (\d{3})\b", text)
    if number:
        return ApiError(int(number[1]), text)
    if "auth login" in text or "active account" in text:
        return ApiError(401, text)
    if "not have permission" in text:
        return ApiError(403, text)
    if "not found" in text:
        return ApiError(404, text)
    if code == 2:  # gcloud's own refusal of an argument
        return ApiError(400, text)
    return ApiError(0, text or f"gcloud ended with {code} and said nothing")
