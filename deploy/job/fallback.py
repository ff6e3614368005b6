"""Sends one of several jobs: finds it or creates it, follows it, and goes on to the next where it
gets no machines."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus

from deploy.base.console import consents, say
from deploy.job.cost import CostConfirmation
from deploy.job.job import Job
from deploy.job.ledger import UNFINISHED, Submission, sending_alone, submissions, watch_hint
from deploy.job.sending import Creation, check_resources, look_for, upload_packages
from deploy.job.vertex_job import VertexJob
from deploy.job.watching import PrintLine, show, watch_job, with_stop_reason
from deploy.platform.api_error import ApiError
from deploy.platform.errors import api_errors, describe_failure, exit_code, stocked_out
from deploy.platform.gcloud_and_sdk import BACKENDS
from deploy.platform.model_registry import read_registration, register_run
from deploy.platform.retries import CLOCK, Clock, retried
from deploy.platform.vertex_api import STOPPED, JobStatus
from trainer.base.errors import DONE, USER_MUST_CHANGE, PlatformFault, UserError

FLEX_START_SLACK_S = 600.0  # for the service to end a wait by itself


class SubmittedJob(VertexJob):
    """Represents a submission that was checked and, once it is sent, its newest job.

    `jobs`: one for each tier in each region that is left to try, in this order; the first is the
        current one, and if there are no machines for it, `wait` goes on with the next. `about`:
        lines that describe the jobs; `register`: a name for the model in the registry, and the
        image that serves it; `confirmation`: returns the cost confirmation.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        record: Submission,
        about: Sequence[str] = (),
        confirmation: Callable[..., CostConfirmation] = lambda **_: CostConfirmation("", ""),
        register: tuple[str, str] = ("", ""),
        clock: Clock = CLOCK,
    ) -> None:
        super().__init__("", None)
        self.jobs = jobs
        self.record = record
        self.about = about
        self.confirmation = confirmation
        self._register = register
        self._open = partial(BACKENDS[jobs[0].options.backend], clock=clock)
        self._clock = clock

    def send(self, *, takes_finished: bool = False) -> "SubmittedJob":
        """Creates the job, or goes on with the one that the same command created before.

        takes_finished: also with one that has succeeded, whose result is then read. Raises
        UserError if a job of the same command runs with other sources, or if the cost needs
        confirmation, and nobody confirms it.
        """
        with api_errors(self.jobs[0].gcp), sending_alone():
            earlier = None if self.jobs[0].options.again else self._earlier(takes_finished)
            if earlier:
                self.resume(earlier)
            if earlier and earlier.attempts[-1].state != STOPPED:
                earlier.attempts[-1].state = "SUBMITTED"
                earlier.write()
                origin = "which the same command submitted before (--again sends another)"
                say(f"continues with {self.name}, {origin}")
            else:
                if earlier:
                    say(f"continues where {self.name} stopped at a limit (--again starts anew)")
                self.confirmation(transfer_usd=check_resources(self.jobs)).confirm()
                self.create()
        return self

    def _earlier(self, takes_finished: bool) -> Submission | None:
        """Returns the submission that this call goes on with; None if it begins another.

        That is one of the same command and sources whose job runs or, of the newest, ended unseen,
        stopped at a limit or, with `takes_finished`, succeeded. Raises UserError if a job of the
        same command runs with other sources, and nobody wants another beside it.
        """
        states = (*UNFINISHED, "SUCCEEDED") if takes_finished else UNFINISHED
        command = self.record.command
        sent = (record for record in submissions() if record.command == command and record.attempts)
        for age, earlier in enumerate(sent):
            attempt = earlier.attempts[-1]
            same_sources = earlier.sources == self.record.sources
            # Nobody was to follow a job that was sent with --detach; of others, the newest alone
            # can have ended unseen.
            left_alone = earlier.detached and attempt.state == "SUBMITTED"
            unseen = age == 0 and not left_alone
            status = self.find(earlier) if attempt.state in states else None
            if status and status.over and not (same_sources and unseen):
                # The state may become STOPPED, with which the same command goes on.
                earlier.record_status(attempt, with_stop_reason(status), self._clock.now())
                status = None
            if same_sources and (status or (age == 0 and attempt.state == STOPPED)):
                return earlier
            if status:
                conflict = f"{status.name} ({status.state}) has the same command and other files"
                if not consents(f"{conflict}: send another job beside it?"):
                    hint = watch_hint(status.name)
                    raise UserError(f"{conflict}: {hint}; --again sends another beside it")
        return None

    def find(self, earlier: Submission) -> JobStatus | None:
        """Returns the status of the newest job of an earlier submission; None if there is none."""
        attempt = earlier.attempts[-1]
        backend = self._open(attempt.project, attempt.region)
        if not attempt.job and attempt.sent_at:
            attempt.job = look_for(earlier.label, backend, attempt.sent_at)
        try:
            return retried(partial(backend.get, attempt.job), self._clock) if attempt.job else None
        except ApiError as error:
            if error.code != HTTPStatus.NOT_FOUND:  # the job was deleted
                raise
        return None

    def resume(self, earlier: Submission) -> None:
        """Goes on with the newest job of an earlier submission.

        The tiers and regions that come after that job's own are left to try.
        """
        attempt = earlier.attempts[-1]
        place = (attempt.tier, attempt.region)
        remaining = [
            *itertools.dropwhile(lambda job: (job.tier.name, job.gcp.region) != place, self.jobs)
        ]
        self.jobs = [job.named(earlier.submission) for job in remaining or self.jobs[:1]]
        self.record = earlier
        self._set_job()

    def create(self) -> None:
        """Creates the job, or the next one for which there are machines.

        Raises as `Creation.create` does.
        """
        while True:
            try:
                job = self._within_cap(self.jobs[0])
                # `clean` may have come while the attempt before waited for machines.
                upload_packages([job])
                Creation(job, self.record, self._open).create()
                self._set_job()
                return
            except KeyboardInterrupt:
                # none yet, if it came before the first was recorded
                attempts = self.record.attempts
                # the job was created and goes on
                if attempts and attempts[-1].state == "INTERRUPTED":
                    self._set_job()
                raise
            except ApiError as error:
                if not (error.unavailable and self.jobs[1:]):
                    raise
            self._try_next()

    def _within_cap(self, job: Job) -> Job:
        """Returns the job with what the attempts before it left of --max_cost.

        Raises UserError if no job can start for that.
        """
        max_cost = job.options.max_cost
        spent = sum(attempt.spent_usd or 0.0 for attempt in self.record.attempts)
        if max_cost is None or not spent:
            return job
        options = dataclasses.replace(job.options, max_cost=max_cost - spent)
        try:
            return job.named(self.record.submission, options)
        except UserError:
            last_job = self.record.attempts[-1].job
            raise UserError(
                f"max_cost={max_cost:g}: {spent:.2f} USD of it are spent, the last by {last_job},"
                f" and the rest starts no job: to continue, raise it, with --job_dir={job.output}"
            ) from None

    def _set_job(self) -> None:
        """Makes the job of the record's last attempt the current one."""
        attempt = self.record.attempts[-1]
        self.name = attempt.job
        self.attempt = self.record, attempt
        self._backend = self._open(attempt.project, attempt.region)

    def follow(self, print_line: PrintLine = show) -> JobStatus | None:
        """Follows the job as `wait` does, and prints its log; returns None after Ctrl-C."""
        with api_errors(self.gcp):
            while True:
                backend = self.backend
                attempt = self.record.attempts[-1]
                # The current job, until it ends or has waited too long for machines.
                max_wait_s = self.jobs[0].options.max_wait or math.inf
                if self.jobs[0].tier.strategy == "FLEX_START":  # the service ends the wait itself
                    max_wait_s += FLEX_START_SLACK_S
                status = watch_job(
                    backend, attempt.job, print_line, created=True, max_wait_s=max_wait_s
                )
                if status is None:
                    attempt.state = "INTERRUPTED"
                    self.record.write()
                    return None
                self.name = attempt.job = status.name
                self.record.record_status(attempt, status, backend.clock.now())
                # Only a job that got no machines has a successor: the next tier or region.
                if not (self.jobs[1:] and stocked_out(status)):
                    break
                self._try_next()
                try:
                    self.create()
                except KeyboardInterrupt:
                    if self.record.attempts[-1].state != "INTERRUPTED":
                        raise
                    return None
            # A model that was trained to the end goes to the registry, if it has a name there.
            name, image = self._register
            if name and exit_code(status) == DONE:
                register_run(
                    read_registration(self.output, name, image, self.gcp, self.name), "", backend
                )
        return status

    def finish(self, print_line: PrintLine = show) -> None:
        """Sends the job unless it has succeeded before, and follows it until it has.

        Raises KeyboardInterrupt after Ctrl-C, while the job goes on, and UserError or PlatformFault
        with the job's exit code if it failed.
        """
        say(*self.about)
        status = self.send(takes_finished=True).follow(print_line)
        if status is None:
            raise KeyboardInterrupt(f"{self.name} is still running: the same call follows it")
        if code := exit_code(status):
            error = (UserError if code == USER_MUST_CHANGE else PlatformFault)(
                describe_failure(status) or status.state
            )
            error.exit_code = code
            raise error

    def _try_next(self) -> None:
        say(f"{self.jobs[0].name}: {self.record.attempts[-1].error}", "tries the next")
        self.jobs = self.jobs[1:]
