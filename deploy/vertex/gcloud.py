"""Implements the backend with the user's own `gcloud`: each call is one command that a user could paste."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy.spec.job_spec import to_yaml
from deploy.vertex import api
from deploy.vertex.api import CustomJob, JobStatus, LogEntry, PersistentResource
from deploy.vertex.buckets import Buckets
from deploy.vertex.client_errors import converted_errors
from deploy.vertex.gcloud_errors import error_of, lost_response
from trainer.errors import UserError
from trainer.storage.login import gcloud_environment

TIMEOUT_S = 300.0  # of one command; gcloud itself retries for half a minute


class Gcloud(Buckets):
    """Implements `deploy.vertex.api.Backend`."""

    def __init__(self, project: str, region: str) -> None:
        self._project = [f"--project={project}"]
        self._region = [*self._project, f"--region={region}"]

    def create_command(self, request: CustomJob) -> list[str]:
        """Returns the command that creates the job; it reads the spec from stdin, for which a study needs a path."""
        config = "-" if request.kind is api.CUSTOM else "/dev/stdin"
        flags = [f"--display-name={request.display_name}", _labels(request.labels), f"--config={config}"]
        flags += [f"--kms-key={request.kms_key}"] if request.kms_key else []
        return ["gcloud", "ai", request.kind.command, "create", *self._region, *flags]

    def shell_command(self, request: CustomJob) -> str:
        """Returns the command with its spec, ready to paste into a shell."""
        return f"{shlex.join(self.create_command(request))} <<'END'\n{to_yaml(request.spec)}END"

    def submit(self, request: CustomJob) -> str:
        """Runs `gcloud ai custom-jobs create`, of a study hp-tuning-jobs, and kills it when it is about to retry.

        gcloud repeats its POST after 5xx and dropped connections, which can create a second job.
        """
        command = [*self.create_command(request), "--format=value(name)", "--verbosity=debug"]
        with _running(command) as process:
            assert process.stdin
            assert process.stdout
            assert process.stderr
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(to_yaml(request.spec))
            log = []
            for line in process.stderr:
                if "Retrying request to url" in line:
                    _kill(process)
                    raise lost_response(line + process.stderr.read())
                log.append(line)
            name = process.stdout.read().strip()
        if process.returncode:
            raise error_of(process.returncode, "".join(log))
        return api.created_name(name)

    def state(self, name: str) -> JobStatus:
        """Runs `gcloud ai custom-jobs describe`."""
        return api.parse_job(self._describe(name))

    def trials(self, name: str) -> Sequence[Mapping[str, Any]]:
        """Runs `gcloud ai hp-tuning-jobs describe`."""
        with api.unreadable_as_lost():
            return list(self._describe(name).get("trials", []))

    def _describe(self, name: str) -> Any:
        return self._json("ai", api.kind_of(name).command, "describe", name, *self._region)

    def logs(self, name: str, since: str) -> Sequence[LogEntry]:
        """Runs `gcloud logging read`."""
        entries = self._json("logging", "read", api.log_filter(name, since), *self._project, "--order=asc")
        with api.unreadable_as_lost():
            return [api.parse_log_entry(entry) for entry in entries]

    def jobs(self, label: str = "") -> Sequence[JobStatus]:
        """Runs `gcloud ai custom-jobs list`, without a label `gcloud ai hp-tuning-jobs list` too."""
        only = f"--filter={api.label_filter(label)}"
        listed = [self._json("ai", kind.command, "list", *self._region, only) for kind in api.kinds_of(label)]
        return [api.parse_job(job) for jobs in listed for job in jobs]

    def cancel(self, name: str) -> None:
        """Runs `gcloud ai custom-jobs cancel`."""
        _run(["gcloud", "ai", api.kind_of(name).command, "cancel", name, *self._region])

    def create_resource(self, request: PersistentResource) -> None:
        """Runs `gcloud ai persistent-resources create`, which reads the pools from stdin.

        That gcloud repeats its POST does no harm: the id is chosen here.
        """
        flags = [f"--persistent-resource-id={request.id}", f"--display-name={request.id}", _labels(request.labels)]
        flags += [f"--network={request.network}"] if request.network else []
        flags += [f"--kms-key={request.kms_key}"] if request.kms_key else []
        flags += ["--enable-custom-service-account"] if request.own_account else []
        command = ["gcloud", "ai", "persistent-resources", "create", *self._region, *flags, "--config=-"]
        _run(command, to_yaml({"resourcePools": list(request.pools)}))

    def resource(self, id: str) -> JobStatus:
        """Runs `gcloud ai persistent-resources describe`."""
        return api.parse_resource(self._json("ai", "persistent-resources", "describe", id, *self._region))

    def resources(self) -> Sequence[JobStatus]:
        """Runs `gcloud ai persistent-resources list`."""
        only = f"--filter={api.label_filter('')}"
        found = self._json("ai", "persistent-resources", "list", *self._region, only)
        return [api.parse_resource(each) for each in found]

    def delete_resource(self, id: str) -> None:
        """Runs `gcloud ai persistent-resources delete`."""
        _run(["gcloud", "ai", "persistent-resources", "delete", id, *self._region])

    def _json(self, *arguments: str) -> Any:
        with api.unreadable_as_lost():
            return json.loads(_run(["gcloud", *arguments, "--format=json"]) or "{}")


def _labels(labels: Mapping[str, str]) -> str:
    return f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}"


def _run(command: Sequence[str], given: str | None = None) -> str:
    with _running(command) as process:
        output, errors = process.communicate(given)
    if process.returncode:
        raise error_of(process.returncode, errors)
    return output


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Starts the command with a login and kills it after TIMEOUT_S or on an exception."""
    with contextlib.ExitStack() as stack:
        with converted_errors():
            environment = stack.enter_context(gcloud_environment())
        yield stack.enter_context(_started(command, environment))


@contextlib.contextmanager
def _started(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Runs the command in a new session: gcloud may be a shell script whose child processes must be killed too."""
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=environment
        )
    except FileNotFoundError:
        raise not_installed(", or use --backend=sdk") from None
    timer = threading.Timer(TIMEOUT_S, _kill, [process])
    timer.start()
    with process:
        try:
            yield process
        except BaseException:
            _kill(process)
            raise
        finally:
            timer.cancel()


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def not_installed(alternative: str = "") -> UserError:
    """Returns the error for a missing gcloud. `alternative`: what the user may do instead."""
    return UserError(f"gcloud is not installed: https://cloud.google.com/sdk/docs/install{alternative}")
