"""Says which failed calls of Google's services are retried, such as after HTTP 429 or 503, and
retries them."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from deploy.base.console import tell
from trainer.base.errors import reason


class ApiError(Exception):
    """Reports a failed call.

    `code`: its HTTP status, 0 without a response; `login`: the command that fixes a 401.

    `sent`: False if the request certainly did not reach the service.
    """

    final = False  # True if another tier or region does not help; the message then says what to do

    def __init__(
        self, code: int, message: str, login: str = "gcloud auth login", *, sent: bool = True
    ) -> None:
        super().__init__(" ".join(message.split()))
        self.code = code
        self.login = login
        self.sent = sent
        self._service_fault = code >= 500 and code != 501  # 501: the service lacks this method

    @property
    def quota(self) -> bool:
        """Returns whether a machine quota is exhausted, which a retry does not fix; rate limits do
        not count."""
        text = str(self).lower()
        rate_limit = re.search(r"per (\d+ )?(minute|second)|rate_?limit_?exceeded", text)
        return not self.final and self.code == 429 and "quota" in text and not rate_limit

    @property
    def unavailable(self) -> bool:
        """Returns whether this region lacks quota or machines for the job, which another region or
        tier may have."""
        missing = re.search(
            r"(machine|accelerator|gpu).* (not|un)\W?(supported|available|offered|exist|found)\b"
            r"|not (supported|available|offered) in (the )?(region|location|zone)",
            str(self),
            re.IGNORECASE,
        )
        return self.quota or (self.code in (400, 404) and missing is not None and not self.final)

    @property
    def transient(self) -> bool:
        """Returns whether a retry may help."""
        return self._service_fault or (self.code in (0, 408, 429) and not self.quota)

    @property
    def may_have_succeeded(self) -> bool:
        """Returns whether the service may have carried out the request although the call failed."""
        return self.sent and (self.code == 0 or self._service_fault)


class BrokenClientError(ApiError):
    """Reports a fault of this machine's client program or network that every call would meet;
    states the fix."""

    final = True
    transient = False


@contextmanager
def unreadable_as_lost(of_parser: type[Exception] = ValueError) -> Iterator[None]:
    """Raises ApiError, as if the response were lost, if the block cannot parse it.

    `of_parser`: an exception of the parser in use, which is converted like ValueError, KeyError and
        the like.
    """
    try:
        yield
    except (of_parser, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ApiError(0, f"the response is not one of this service: {reason(error)}") from None


T = TypeVar("T")

RETRY_S = 1800.0  # how long a failing call is retried
LONGEST_WAIT_S = 60.0  # between two attempts
ANNOUNCED_WAIT_S = 30.0  # the first wait of at least this length is announced
TELL_S = 10.0  # between two lines on what a submission waits for


@dataclass(frozen=True)
class Clock:
    """Provides the time in seconds since 1970, and a sleep in seconds; tests replace both."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


CLOCK = Clock()


def backoff(first: float = 1.0) -> Iterator[float]:
    """Yields the seconds to wait between attempts, without end, as exponential backoff.

    https://cloud.google.com/storage/docs/retry-strategy
    """
    wait = first
    while True:
        yield wait
        wait = min(2 * wait, LONGEST_WAIT_S)


def retried(call: Callable[[], T], clock: Clock = CLOCK, retry_s: float = RETRY_S) -> T:
    """Returns the result of `call`, which is repeated after transient errors for `retry_s` seconds.

    The first long wait is announced in a line on stderr. Raises an ApiError that is not transient
    at once, and the last transient one when the time is over.
    """
    deadline = clock.now() + retry_s
    for wait in backoff():
        try:
            return call()
        except ApiError as error:
            if not error.transient or clock.now() + wait > deadline:
                raise
            if ANNOUNCED_WAIT_S <= wait < LONGEST_WAIT_S:  # 32 s is the only wait between the two
                end = time.strftime("%H:%M UTC", time.gmtime(deadline))
                tell(f"{error} ({error.code or 'no response'}): retrying until {end}; Ctrl-C stops")
        clock.sleep(wait)
    raise AssertionError("backoff never ends")
