"""Creates jobs with the user's own `gcloud`, by a command that a user could paste; the rest goes by REST."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence

from deploy.tiers.job_spec import to_yaml
from deploy.vertex import api
from deploy.vertex.api import CustomJob
from deploy.vertex.error_messages import converted_errors, gcloud_error, lost_response
from deploy.vertex.rest import Backend
from trainer.base.errors import UserError
from trainer.base.storage.login import gcloud_environment

COMMAND_TIMEOUT_S = 120.0  # of one command; a submission that is silent for longer is taken for dead (reservation.py)
_CONNECTS, _RETRIES = "Starting new HTTP", "Retrying request to url"  # in gcloud's log


class Gcloud(Backend):
    """Creates jobs by gcloud."""

    def create_command(self, request: CustomJob, config: str = "-") -> list[str]:
        """Returns the command that creates the job; it reads the spec from the file `config`, or from stdin."""
        labels = ",".join(f"{key}={value}" for key, value in request.labels.items())
        flags = [f"--display-name={request.display_name}", f"--labels={labels}", f"--config={config}"]
        flags += [f"--kms-key={request.kms_key}"] if request.kms_key else []
        place = [f"--project={self._project}", f"--region={self._region}"]
        return ["gcloud", "ai", "custom-jobs", "create", *place, *flags]

    def submit(self, request: CustomJob) -> str:
        """Runs `gcloud ai custom-jobs create`, and kills it when it is about to retry.

        gcloud repeats its POST after 5xx and dropped connections, which can create a second job. Its log tells whether
        it has connected to a server.
        """
        command = [*self.create_command(request), "--format=value(name)", "--verbosity=debug"]
        with contextlib.ExitStack() as stack:
            with converted_errors():
                environment = stack.enter_context(gcloud_environment())
            self.sent = True  # unless its log says otherwise
            process = stack.enter_context(_running(command, environment))
            log: list[str] = []
            reader = threading.Thread(target=_read_log, args=(process, log), daemon=True)
            try:
                reader.start()
                assert process.stdin
                assert process.stdout
                with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                    stdin.write(to_yaml(request.spec))
                name = process.stdout.read().strip()
                process.wait()
            except KeyboardInterrupt:
                _kill(process)
                raise
            finally:
                if reader.ident is not None:
                    reader.join()
                    self.sent = any(_CONNECTS in line for line in log)
        retry = next((place for place, line in enumerate(log) if _RETRIES in line), None)
        if retry is not None:
            raise lost_response("".join(log[retry:]))
        if process.returncode:
            raise gcloud_error(process.returncode, "".join(log))
        return api.created_name(name)


def _read_log(process: subprocess.Popen[str], log: list[str]) -> None:
    assert process.stderr
    with contextlib.suppress(ValueError):  # it is closed, as Ctrl-C came just when this began
        for line in process.stderr:
            log.append(line)
            if _RETRIES in line:
                _kill(process)


@contextlib.contextmanager
def _running(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Starts the command, and kills it after COMMAND_TIMEOUT_S or on an exception.

    It runs in a new session: gcloud may be a shell script whose child processes must be killed too.
    """
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=environment
        )
    except FileNotFoundError:
        raise not_installed(", or use --backend=sdk") from None
    timer = threading.Timer(COMMAND_TIMEOUT_S, _kill, [process])
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
