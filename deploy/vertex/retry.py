"""Retries calls while a service fails, with a clock that tests can replace."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from deploy.tiers.output import tell
from deploy.vertex.api import ApiError

T = TypeVar("T")

RETRY_S = 1800.0  # how long calls are retried
LONGEST_WAIT_S = 60.0
ANNOUNCED_WAIT_S = 30.0  # the first wait of this length or longer is announced
TELL_S = 10.0  # between lines on what a submission waits for


@dataclasses.dataclass(frozen=True)
class Clock:
    """Provides the time in seconds since 1970, and sleep."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


SYSTEM_CLOCK = Clock()


def backoff(first: float = 1.0) -> Iterator[float]:
    """Yields the seconds between attempts: exponential backoff, https://cloud.google.com/storage/docs/retry-strategy"""
    wait = first
    while True:
        yield wait
        wait = min(2 * wait, LONGEST_WAIT_S)


def retried(call: Callable[[], T], clock: Clock, retry_s: float = RETRY_S) -> T:
    """Returns the result of `call`, retried on transient errors; raises the last ApiError after `retry_s`.

    The first long wait is announced in one line on stderr.
    """
    deadline, announced = clock.now() + retry_s, False
    for wait in backoff():
        try:
            return call()
        except ApiError as error:
            if not error.transient or clock.now() + wait > deadline:
                raise
            if wait >= ANNOUNCED_WAIT_S and not announced:
                announced = True
                end = time.strftime("%H:%M UTC", time.gmtime(deadline))
                reason = f"{error} ({error.code or 'no response'})"
                tell(f"{reason}: retrying until {end}; Ctrl-C stops")
        clock.sleep(wait)
    raise AssertionError("backoff never ends")
