"""Provides the backends that create jobs by gcloud or by Google's Python package."""

import importlib
import json
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from threading import Thread, Timer
from typing import IO, Any

import yaml

from deploy.platform.errors import converted_errors, gcloud_error, lost_response
from deploy.platform.local import kill_group
from deploy.platform.rest import REQUEST_TIMEOUT_S, Platform
from deploy.platform.vertex_api import CustomJob, created_name
from trainer.base.errors import UserError
from trainer.base.storage.login import credentials, gcloud_environment

# The time that one gcloud command may take. SILENT_S in deploy/job/sending.py must be longer: after
# that time without a sign a submission is taken for dead.
COMMAND_TIMEOUT_S = 120.0
# Text in gcloud's log when it connects to a server, and when it is about to repeat a request.
_CONNECTS = "Starting new HTTP"
_RETRIES = "Retrying request to url"


def to_yaml(spec: Mapping[str, Any]) -> str:
    """Returns the spec as YAML, as `gcloud ai custom-jobs create --config` reads it."""
    return yaml.dump(dict(spec), Dumper=_Dumper, sort_keys=False, width=1_000_000)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, so that people can read the program in a job's
    command."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar(
            "tag:yaml.org,2002:str", data, style="|" if "\n" in data else None
        )


_Dumper.add_representer(str, _Dumper.represent_str)


class Gcloud(Platform):
    """Creates jobs by gcloud; for everything else it calls REST, as Platform does."""

    def create_command(self, request: CustomJob, config: str = "-") -> list[str]:
        """Returns the command that creates the job; it reads the spec from the file `config`, or
        from stdin."""
        labels = ",".join(f"{key}={value}" for key, value in request.labels.items())
        flags = [
            f"--display-name={request.display_name}",
            f"--labels={labels}",
            f"--config={config}",
        ]
        flags += [f"--kms-key={request.kms_key}"] if request.kms_key else []
        place = [f"--project={self.gcp.project}", f"--region={self.gcp.region}"]
        return ["gcloud", "ai", "custom-jobs", "create", *place, *flags]

    def create(self, request: CustomJob) -> str:
        """Runs `gcloud ai custom-jobs create` and returns the job's name.

        gcloud repeats its POST after 5xx and dropped connections, which could create a second job:
        it is killed when it is about to do so, and after COMMAND_TIMEOUT_S. `sent` becomes False if
        its log shows that it has not connected to a server. Raises UserError if gcloud is not
        installed.
        """
        command = [*self.create_command(request), "--format=value(name)", "--verbosity=debug"]
        log: list[str] = []
        with ExitStack() as stack:
            with converted_errors():
                environment = stack.enter_context(gcloud_environment())
            self.sent = True  # unless the log says otherwise below
            pipe = subprocess.PIPE
            try:
                # In a session of its own: gcloud may be a shell script, whose child processes must
                # be killed too.
                process: Any = subprocess.Popen(
                    command,
                    stdin=pipe,
                    stdout=pipe,
                    stderr=pipe,
                    text=True,
                    start_new_session=True,
                    env=environment,
                )
            except FileNotFoundError:
                raise not_installed(", or use --backend=sdk") from None
            stack.enter_context(process)

            def read_log(lines: IO[str] = process.stderr) -> None:
                # stderr is closed if Ctrl-C came just as this thread began
                with suppress(ValueError):
                    for line in lines:
                        log.append(line)
                        if _RETRIES in line:
                            kill_group(process)

            reader = Thread(target=read_log, daemon=True)
            timer = Timer(COMMAND_TIMEOUT_S, kill_group, [process])
            timer.daemon = True  # a second Ctrl-C leaves it running
            try:
                timer.start()
                reader.start()
                with suppress(BrokenPipeError), process.stdin as stdin:
                    stdin.write(to_yaml(request.spec))
                name = process.stdout.read().strip()
                process.wait()
            except BaseException:
                kill_group(process)
                raise
            finally:
                if reader.ident is not None:
                    # ended by the timer, too, if a child of gcloud's still holds stderr
                    reader.join()
                    self.sent = any(_CONNECTS in line for line in log)
                timer.cancel()
        # How it ended: killed at its first retry, failed, or with the name of the job.
        retry = next((place for place, line in enumerate(log) if _RETRIES in line), None)
        if retry is not None:
            raise lost_response("".join(log[retry:]))
        if process.returncode:
            raise gcloud_error(process.returncode, "".join(log))
        return created_name(name)


def not_installed(alternative: str = "") -> UserError:
    """Returns the error for a missing gcloud.

    `alternative`: ends the line with what the user may do instead.
    """
    return UserError(
        f"gcloud is not installed: https://cloud.google.com/sdk/docs/install{alternative}"
    )


class Sdk(Platform):
    """Creates jobs with Google's Python package; for everything else it calls REST, as Platform
    does."""

    def create(self, request: CustomJob) -> str:
        """Creates the job by one POST, which the client never repeats, and returns its name."""
        try:
            aiplatform = importlib.import_module("google.cloud.aiplatform_v1")
        except ImportError:
            raise UserError(
                "google-cloud-aiplatform is not installed: pip install google-cloud-aiplatform, or"
                " use gcloud"
            ) from None
        content = {
            "displayName": request.display_name,
            "labels": request.labels,
            "jobSpec": request.spec,
        }
        content |= {"encryptionSpec": {"kmsKeyName": request.kms_key}} if request.kms_key else {}
        with converted_errors():
            endpoint = {"api_endpoint": self.service.removesuffix("/v1")}
            client = aiplatform.JobServiceClient(
                credentials=credentials(), transport="rest", client_options=endpoint
            )
            job = aiplatform.CustomJob.from_json(json.dumps(content))
            self.sent = True
            created = client.create_custom_job(
                parent=self.parent, custom_job=job, retry=None, timeout=REQUEST_TIMEOUT_S
            )
            return created_name(created.name)


BACKENDS: Mapping[str, type[Platform]] = {"gcloud": Gcloud, "sdk": Sdk}
