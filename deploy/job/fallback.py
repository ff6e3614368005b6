"""Sends one of several jobs: finds it or creates it, follows it, and goes on to the next where it gets no machines."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

from deploy.base.console import say
from deploy.job.cost import CostConfirmation
from deploy.job.job import Job
from deploy.job.ledger import Submission, find_interrupted
from deploy.job.sending import Creation, check_resources, look_for, upload_packages
from deploy.job.vertex_job import VertexJob
from deploy.job.watching import PrintLine, show, watch_job
from deploy.platform.errors import api_errors, describe_failure, exit_code, stocked_out
from deploy.platform.gcloud_and_sdk import Session
from deploy.platform.model_registry import read_registration, register_run
from deploy.platform.retries import ApiError
from deploy.platform.vertex_api import JobStatus
from trainer.base.errors import DONE, USER_MUST_CHANGE, PlatformFault, UserError

FLEX_START_SLACK_S = 600.0  # for the service to end a wait by itself


class SubmittedJob(VertexJob):
    """Represents a submission that was checked and, once it is sent, its newest job.

    `jobs`: one for each tier in each region that is left to try, in this order; the first is the current one, and if
    there are no machines for it, `wait` goes on with the next. `about`: lines that describe the jobs; `register`: a
    name for the model in the registry, and the image that serves it; `confirmation`: returns the cost confirmation.
    """

    def __init__(
        self, jobs: Sequence[Job], record: Submission, session: Session, about: Sequence[str] = (),
        confirmation: Callable[..., CostConfirmation] = lambda **_: CostConfirmation("", ""),
        register: tuple[str, str] = ("", ""),
    ) -> None:  # fmt: skip
        super().__init__("", None)
        self.jobs = jobs
        self.record = record
        self.about = about
        self.confirmation = confirmation
        self._register = register
        self._open = partial(session.open, jobs[0].options.backend)

    def send(self) -> "SubmittedJob":
        """Creates the job, or finds the one that an interrupted call with the same arguments created.

        Raises UserError if the cost needs confirmation and nobody confirms it.
        """
        with api_errors(self.jobs[0].gcp):
            earlier = find_interrupted(self.record.command, self.record.sources)
            if earlier and self.resume(earlier):
                say(f"goes on with {self.name}, which the same command submitted before")
                if earlier.detached:  # found now, so that the next call creates another job
                    earlier.attempts[-1].state = "SUBMITTED"
                    earlier.write()
            else:
                self.confirmation(transfer_usd=check_resources(self.jobs)).confirm()
                upload_packages(self.jobs)
                self.create()
        return self

    def resume(self, earlier: Submission) -> bool:
        """Goes on with the newest job of an earlier submission; returns False if it has none.

        The tiers and regions that come after that job's own are left to try.
        """
        attempt = earlier.attempts[-1]
        backend = self._open(attempt.project, attempt.region)
        attempt.job = attempt.job or look_for(earlier.label, backend, attempt.sent_at)
        if not attempt.job:
            return False
        place = (attempt.tier, attempt.region)
        left = itertools.dropwhile(lambda job: (job.tier.name, job.gcp.region) != place, self.jobs)
        self.jobs = [job.named(earlier.submission) for job in [*left] or self.jobs[:1]]
        self.record = earlier
        self._set_job()
        return True

    def create(self) -> None:
        """Creates the job, or the next one for which there are machines. Raises as `Creation.create` does."""
        while True:
            try:
                Creation(self.jobs[0], self.record, self._open).create()
                self._set_job()
                return
            except KeyboardInterrupt:
                attempts = self.record.attempts  # none yet, if it came before the first was recorded
                if attempts and attempts[-1].state == "INTERRUPTED":  # the job was created and goes on
                    self._set_job()
                raise
            except ApiError as error:
                if not (error.unavailable and self.jobs[1:]):
                    raise
            self._try_next()

    def _set_job(self) -> None:
        """Makes the job of the record's last attempt the current one."""
        attempt = self.record.attempts[-1]
        self.name = attempt.job
        self.attempt = self.record, attempt
        self._backend = self._open(attempt.project, attempt.region)

    def follow(self, print_line: PrintLine = show) -> JobStatus | None:
        """Follows the job as `wait` does, and prints its log by `print_line`; returns None after Ctrl-C."""
        with api_errors(self.gcp):
            while True:
                backend = self.backend
                attempt = self.record.attempts[-1]
                max_wait_s = self.jobs[0].options.max_wait or math.inf
                if self.jobs[0].tier.strategy == "FLEX_START":  # the service ends the wait itself
                    max_wait_s += FLEX_START_SLACK_S
                status = watch_job(backend, attempt.job, print_line, created=True,
                                   max_wait_s=max_wait_s)  # fmt: skip
                if status is None:
                    attempt.state = "INTERRUPTED"
                    self.record.write()
                    return None
                self.name = attempt.job = status.name
                self.record.record_status(attempt, status, backend.clock.now())
                if not (self.jobs[1:] and stocked_out(status)):
                    break
                self._try_next()
                try:
                    self.create()
                except KeyboardInterrupt:
                    if self.record.attempts[-1].state != "INTERRUPTED":
                        raise
                    return None
            name, image = self._register
            if name and exit_code(status) == DONE:
                register_run(read_registration(self.output, name, image, self.gcp, self.name), "", backend)
        return status

    def finish(self, print_line: PrintLine = show) -> None:
        """Sends the job, follows it, and returns once it has succeeded.

        Raises KeyboardInterrupt after Ctrl-C, while the job goes on, and UserError or PlatformFault with the job's exit
        code if it failed.
        """
        say(*self.about)
        status = self.send().follow(print_line)
        if status is None:
            raise KeyboardInterrupt(f"{self.name} goes on: the same call follows it")
        if code := exit_code(status):
            error = (UserError if code == USER_MUST_CHANGE else PlatformFault)(describe_failure(status) or status.state)
            error.exit_code = code
            raise error

    def _try_next(self) -> None:
        say(f"{self.jobs[0].name}: {self.record.attempts[-1].error}", "tries the next")
        self.jobs = self.jobs[1:]
