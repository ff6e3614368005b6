"""Creates a job exactly once, however often the service fails, or the user interrupts it."""

from collections.abc import Callable

from deploy.tiers.output import tell
from deploy.tiers.spec_changes import LABEL
from deploy.vertex.api import ApiError, CustomJob
from deploy.vertex.cancellation import newest_original
from deploy.vertex.errors import StateUnknownError
from deploy.vertex.reservation import LISTED_S
from deploy.vertex.rest import Backend
from deploy.vertex.retry import TELL_S, Clock, backoff

FIRST_WAIT_S = 5.0  # before a refused request is repeated
CREATE_S = 300.0  # how long requests are repeated
LISTINGS, LOOK_S = 10, 3.0  # a request is repeated only after so many lists without its job; seconds between them


class Creation:
    """Creates the job of one request. `before_request` is called immediately before each request is sent."""

    def __init__(
        self, backend: Backend, request: CustomJob, clock: Clock, before_request: Callable[[], None] = lambda: None
    ) -> None:
        self._backend, self._request, self._clock, self._before_request = backend, request, clock, before_request
        self._unclear = False
        self.name = ""  # of the job, as soon as it is known

    @property
    def may_exist(self) -> bool:
        """Returns whether a request whose response is not known may have created the job."""
        return self._unclear or self._backend.sent

    def run(self) -> str:
        """Creates the job and returns its name; after a lost response it looks for the job before it sends another.

        Raises StateUnknownError if a job may have been created and none is listed.
        """
        began = self._clock.now()
        for wait in backoff(FIRST_WAIT_S):
            failure = self._send()
            if failure is None:
                if self._unclear:
                    tell("warning: a response was lost: a second job is cancelled as soon as `watch` or `jobs` sees it")
                return self.name
            last = not failure.transient or self._clock.now() + wait - began > CREATE_S
            if last and not self._unclear:
                raise failure
            then = "looks for the job" if self._unclear else f"tries again after {wait:.0f} s"
            tell(f"the submission failed ({failure}): {then}")
            if not self._unclear:
                self._clock.sleep(wait)
            elif self.look(0.0 if last else LISTED_S, 1 if last else LISTINGS):
                return self.name
            if last:
                raise StateUnknownError(0, f"the submission failed ({failure}), and its job is not listed yet")
        raise AssertionError("backoff never ends")

    def _send(self) -> ApiError | None:
        self._before_request()
        try:
            self.name = self._backend.submit(self._request)
        except ApiError as error:
            self._unclear = self._unclear or error.may_have_succeeded
            self._backend.sent = False
            return error
        return None

    def look(self, seconds: float = LISTED_S, listings: int = LISTINGS) -> str:
        """Returns the name of the job with the request's label; see `look_for`."""
        label, since = self._request.labels[LABEL], self._clock.now() + seconds - LISTED_S
        self.name = look_for(label, self._backend, self._clock, since, listings)
        return self.name


def look_for(label: str, backend: Backend, clock: Clock, since: float, listings: int = 1) -> str:
    """Returns the name of the job with this label, and cancels its duplicates; "" if none is listed.

    Looks until LISTED_S after `since`, the time of the last request, and so often, at least. Raises StateUnknownError
    if jobs cannot be listed.
    """
    until, tell_at = since + LISTED_S, clock.now() + TELL_S
    give_up = max(until, clock.now() + LISTED_S)  # if they cannot be listed
    while True:
        failure: ApiError | None = None
        try:
            if job := newest_original(backend.jobs(label), backend, clock):
                return job.name
            listings -= 1
        except ApiError as error:
            failure = error
        now = clock.now()
        if failure and (not failure.transient or now >= give_up):
            reason = f"cannot check whether a lost response created a job ({failure})"
            raise StateUnknownError(failure.code, reason)
        if not failure and now >= until and listings <= 0:
            return ""
        if now >= tell_at:
            tell_at = now + TELL_S
            tell(f"looks for the job by its label {label}: for {max(until - now, 0.0):.0f} s more")
        clock.sleep(LOOK_S)
