"""Says which failed calls of Google's services are retried, such as after HTTP 429 or 503, and
retries them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from deploy.base.console import tell
from deploy.platform.api_error import ApiError

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
