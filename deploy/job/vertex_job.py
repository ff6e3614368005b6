"""Represents a job of Vertex AI for programs and verbs: its status, its end, its cancellation, its
result and model."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TextIO

from deploy.base.console import printed_on
from deploy.job.ledger import Attempt, Submission
from deploy.job.sending import cancel_duplicate, originals
from deploy.job.watching import PrintLine, cancel_and_wait, show, watch_job, with_stop_reason
from deploy.platform import buckets
from deploy.platform.errors import JobUnknown, api_errors, exit_code
from deploy.platform.rest import Platform
from deploy.platform.retries import retried
from deploy.platform.vertex_api import JobStatus, WatchLine
from deploy.report.plots import axes
from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.tier import LABEL
from trainer.base.errors import INTERRUPTED, UserError, reason
from trainer.base.run_files.job_files import MODEL, RESULT, losses_and_metrics, mapping, number
from trainer.base.storage import expanded, parse

KERAS_FILE = "model.keras"


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Holds result.json: how a run ended, its steps, seconds, last losses and metrics.

    `content`: the whole file; `place`: the job directory.
    """

    state: str
    steps: int
    wall_seconds: float | None
    metrics: Mapping[str, float]
    content: Mapping[str, Any] = dataclasses.field(repr=False)
    place: str

    @property
    def history(self) -> dict[str, list[float | None]]:
        """Returns Keras's History.history: by name, the value of each epoch."""
        return {**mapping(self.content, "history")}

    def model(self) -> Any:
        """Returns the trained keras.Model, which Keras loads without the code of this package."""
        return load_model(self.place)

    def plot(self) -> Any:
        """Draws the losses of training and evaluation by epoch, and returns matplotlib's axes."""
        chart = axes(self.place, "epoch")
        for name, values in self.history.items():
            if "loss" in name:
                points = [math.nan if value is None else value for value in values]
                chart.plot(range(1, len(values) + 1), points, label=name)
        chart.legend()
        return chart

    @classmethod
    def read(cls, text: str, place: str) -> RunResult:
        """Returns the result in the text of a file at `place`.

        Raises UserError if there is none.
        """
        try:
            content = dict(json.loads(text))
        except (ValueError, TypeError):
            raise UserError(
                f"{place}: there is no result yet: wait for the end of the run"
            ) from None
        return cls(
            str(content.get("state")),
            int(content.get("steps") or 0),
            number(content.get("wall_seconds")),
            losses_and_metrics(mapping(content, "final")),
            content,
            place,
        )


class VertexJob:
    """Represents a job of Vertex AI.

    Its methods raise UserError or PlatformFault, each in one line.

    `name`: its resource name; "" for a job that was not sent, of which they raise UserError.
    """

    about: Sequence[str] = ()  # lines that describe the job

    def __init__(
        self, name: str, backend: Platform | None, attempt: tuple[Submission, Attempt] | None = None
    ) -> None:
        self.name = name
        self.attempt = attempt
        self._backend = backend

    def __repr__(self) -> str:
        about = "\n".join(["<job that is not sent>", *self.about])
        return f"<job {self.name}>" if self.name else about

    @property
    def backend(self) -> Platform:
        """Returns the client for the job's project and region.

        Raises UserError for a job that was not sent.
        """
        if not self._backend:
            raise UserError(
                "this job was not sent: call its send(), or submit it without dry_run=True"
            )
        return self._backend

    @property
    def gcp(self) -> GcpConfig:
        """Returns the job's project and region. Raises UserError for a job that was not sent."""
        return self.backend.gcp

    @property
    def status(self) -> JobStatus:
        """Returns the job's state, times, error and labels as they are now."""
        with api_errors(self.gcp):
            return with_stop_reason(
                retried(partial(self.backend.get, self.name), self.backend.clock)
            )

    @property
    def exit_code(self) -> int:
        """Returns the exit code that `watch` has for the job's end; 75 while it runs."""
        status = self.status
        return exit_code(status) if status.over else INTERRUPTED

    def wait(self, stream: TextIO | None = None) -> JobStatus:
        """Waits until the job ends, and returns its status; prints its states and log on `stream`.

        Ctrl-C ends the wait but not the job; the status is then that of the job as it goes on.
        """
        with printed_on(stream):
            return self.follow() or self.status

    def follow(self, print_line: PrintLine = show) -> JobStatus | None:
        """Follows the job as `wait` does, and prints its log; returns None after Ctrl-C."""
        with api_errors(self.gcp):
            status = watch_job(self.backend, self.name, print_line)
        if status:
            self._record(status)
        return status

    def logs(self, tail: int = 0, worker: str = "", since_s: float = 0.0) -> list[WatchLine]:
        """Returns the log so far, in chronological order, without following the job.

        `tail`: only so many of the newest lines, 0 for all; `worker`: only this worker's, 0 for the
            chief, 1 for the next, or as Vertex AI calls it, such as workerpool1-0; `since_s`: only
            of the last so many seconds, 0 for all.
        """
        if not re.fullmatch(r"\d{0,5}|workerpool\d-\d+", worker):
            raise UserError(
                f"worker={worker}: 0 is the chief, 1 the next; or as Vertex AI calls it, as"
                " workerpool1-0"
            )
        # Vertex AI has the chief in pool 0, and all other workers in pool 1.
        place = worker
        if worker.isdecimal():
            place = f"workerpool{min(int(worker), 1)}-{max(int(worker) - 1, 0)}"
        since = self.backend.clock.now() - since_s if since_s else 0.0
        with api_errors(self.gcp):
            lines = retried(
                partial(self.backend.logs, self.name, since, place, tail), self.backend.clock
            )
        return [line for _, line in lines]

    def cancel(self, stream: TextIO | None = None) -> JobStatus:
        """Cancels the job and any duplicates of it, and waits until it is over."""
        with printed_on(stream):
            return self.stop()

    def stop(self, confirm: Callable[[JobStatus], object] = lambda status: None) -> JobStatus:
        """Cancels the job unless `confirm`, which gets its status, raises UserError."""
        backend = self.backend
        with api_errors(self.gcp):
            status = retried(partial(backend.get, self.name), backend.clock)
            if not status.over:
                confirm(status)
                status = cancel_and_wait(backend, self.name)
            label = status.labels.get(LABEL)
            jobs = retried(partial(backend.jobs, label), backend.clock) if label else []
            by_name = originals(jobs)
            for job in jobs:  # those that are older than this job, too
                if (
                    job.name != status.name
                    and by_name[job.name] is by_name.get(status.name)
                    and not job.over
                ):
                    cancel_duplicate(job, status.name, backend)
            self._record(status)
            if not status.over:
                raise JobUnknown(
                    f"{self.name}: still {status.state}: `python -m deploy watch` shows its end"
                )
        return status

    @property
    def output(self) -> str:
        """Returns the job directory, gs://… Raises UserError for a job without one."""
        folder = self.attempt[1].output if self.attempt else self.status.output
        if not folder:
            raise UserError(f"{self.name}: it has no job directory")
        return folder

    @property
    def result(self) -> RunResult:
        """Returns what the run left in result.json. Raises UserError if there is none yet."""
        return RunResult.read(buckets.read_text(f"{self.output}/{RESULT}")[0], self.output)

    def model(self) -> Any:
        """Returns the trained keras.Model, loaded from the bucket without this package's code."""
        return load_model(self.output)

    def _record(self, status: JobStatus) -> None:
        """Stores the final status in this folder's record of the job, if there is one."""
        if self.attempt:
            record, attempt = self.attempt
            record.record_status(attempt, status, self.backend.clock.now())


def load_model(job_dir: str) -> Any:
    """Returns the trained keras.Model of a job directory, local or gs://.

    Raises UserError if there is none.
    """
    import keras  # the one use of TensorFlow here, and only by a user's program

    from trainer.base.storage.staging import Staged

    address = parse(f"{job_dir}/{MODEL}", "model")
    folder = expanded(job_dir) / MODEL
    if address:
        folder = Staged(address, "model").fetch(lambda below: below == KERAS_FILE, quiet=True)
    if not (folder / KERAS_FILE).is_file():
        raise UserError(
            f"{job_dir}/{MODEL}/{KERAS_FILE}: there is no such file: a line of the run's log"
            " says why"
        )
    with warnings.catch_warnings():
        # about the optimizer's state, which is saved only with --save_optimizer
        warnings.simplefilter("ignore")
        try:
            return keras.saving.load_model(folder / KERAS_FILE, safe_mode=True)
        except (TypeError, ValueError) as error:  # such as a class that Keras does not know
            raise UserError(
                f"{job_dir}/{MODEL}/{KERAS_FILE}: Keras cannot load it: import the module that has"
                f" your own layers and losses first: {reason(error)}"
            ) from error
