"""Waiting for a service: a clock that tests can turn, and calls made again while the service does not answer."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from deploy.vertex.api import ApiError

T = TypeVar("T")

RETRY_S = 1800.0  # how long a service may fail before we give up asking
LONGEST_WAIT_S = 60.0
SILENT_S = 30.0  # a pause so long, or longer, is announced


@dataclasses.dataclass(frozen=True)
class Clock:
    """The time in seconds since 1970, and how to let it pass."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


SYSTEM_CLOCK = Clock()


def backoff(first: float = 1.0) -> Iterator[float]:
    """Seconds between attempts: exponential backoff, https://cloud.google.com/storage/docs/retry-strategy."""
    wait = first
    while True:
        yield wait
        wait = min(2 * wait, LONGEST_WAIT_S)


def retried(read: Callable[[], T], clock: Clock, retry_s: float = RETRY_S) -> T:
    """What `read` returns, asked again after 429, 5xx and lost answers; the last ApiError after `retry_s`.

    The first long pause is announced in a line on stderr.
    """
    until, told = clock.now() + retry_s, False
    for wait in backoff():
        try:
            return read()
        except ApiError as error:
            if not error.transient or clock.now() + wait > until:
                raise
            if wait >= SILENT_S and not told:
                told = True
                end = time.strftime("%H:%M UTC", time.gmtime(until))
                reason = f"{error} ({error.code or 'no answer'})"
                print(f"{reason}: asking again until {end}; Ctrl-C stops", file=sys.stderr, flush=True)
        clock.sleep(wait)
    raise AssertionError("backoff never ends")
