"""Runs a command of the user's when a job or a comparison is over, with the outcome in its environment."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deploy.vertex.api import JobStatus
from deploy.vertex.costs import spent
from deploy.vertex.errors import STATE_UNKNOWN, StateUnknownError, describe_failure, exit_code
from deploy.vertex.live import LiveReader
from deploy.vertex.retry import Clock
from trainer.errors import DONE, INTERRUPTED, UserError, reason, shortened

_TIMEOUT_S = 60.0


def read_notify(text: str) -> list[str]:
    """Returns the command as a list of arguments, [] for none. Raises UserError if there is no such program."""
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise UserError(f"notify={text}: {reason(error)}: write a command as in a shell, quotes in pairs") from None
    if command and shutil.which(command[0]) is None:
        raise UserError(f"notify={text}: there is no program {command[0]}: give its path, as it is run without a shell")
    return command


class Notification:
    """Runs `command` once, at the end of `deferred`, for the last outcome that was given."""

    def __init__(self, command: Sequence[str], clock: Clock) -> None:
        self._command, self._clock = command, clock
        self._outcome: dict[str, str] = {}

    def stopped(self) -> None:
        """Forgets the outcome of earlier jobs: nobody saw the end of the last."""
        self._outcome = {}

    def ended(self, status: JobStatus) -> None:
        """Keeps the outcome of a job that is over."""
        usd = LiveReader(status).try_read()[1] + spent(status, self._clock.now()) if self._command else 0.0
        self._outcome = {
            "JOB": status.name, "NAME": status.display_name, "STATE": status.state, "OUTPUT": status.output,
            "EXIT_CODE": str(exit_code(status)), "USD": f"{usd:.2f}", "ERROR": describe_failure(status),
        }  # fmt: skip

    def compared(self, code: int, out: Path, error: str = "") -> None:
        """Keeps the outcome of the comparison in the folder `out`, which ended with this exit code."""
        state = {DONE: "SUCCEEDED", INTERRUPTED: "CANCELLED"}.get(code, "FAILED")
        self._outcome = {"STATE": state, "EXIT_CODE": str(code), "NAME": out.name, "OUTPUT": str(out), "ERROR": error}

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Runs the command after the block, unless no job ended in it. The state is UNKNOWN if it cannot be read."""
        try:
            yield
        except KeyboardInterrupt:
            self.stopped()
            raise
        except StateUnknownError as error:
            self._outcome = {"STATE": "UNKNOWN", "EXIT_CODE": str(STATE_UNKNOWN), "ERROR": str(error)}
            raise
        finally:
            if self._command and self._outcome:
                self._run()

    def _run(self) -> None:
        """Prints one line if the command fails: that changes nothing of the job."""
        environment = {**os.environ, **{f"DEPLOY_{name}": value for name, value in self._outcome.items()}}
        try:
            done = subprocess.run(
                self._command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                timeout=_TIMEOUT_S,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            problem = reason(error)
        else:
            problem = f"exit code {done.returncode}: {shortened(done.stderr)}" if done.returncode else ""
        if problem:
            print(f"warning: --notify={shlex.join(self._command)} failed: {problem}", file=sys.stderr, flush=True)
