"""Repeats requests after failures that may pass, with pauses that a signal or a cancelled transfer ends.

Takes the place of google.api_core's Retry in calls of the SDK: that one sleeps through a cancellation, does not try
again with a refused token, and draws its pauses from Python's global generator.
"""

import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from trainer.storage.gcs_errors import is_refused_token
from trainer.storage.transport import Cancelled

_FIRST_SECONDS = 1.0


def pauses(longest: float) -> Iterator[float]:
    """Yields random pauses in seconds whose limit doubles, from up to 1 second to up to `longest`."""
    draw, limit = random.Random(), _FIRST_SECONDS  # noqa: S311
    while True:
        yield draw.uniform(0.5, 1) * min(limit, longest)
        limit *= 2


class Retries:
    """Wraps a function as the SDK's `retry` parameter expects it.

    seconds: how long it is repeated; refused_seconds: the same after a refused token, which google-auth has refreshed
    twice by then; cancelled: returns the event that ends the pauses of the calling thread by Cancelled.
    """

    def __init__(
        self, seconds: float, longest_pause: float, refused_seconds: float, cancelled: Callable[[], threading.Event]
    ) -> None:
        self._seconds, self._longest_pause, self._refused_seconds = seconds, longest_pause, refused_seconds
        self._cancelled = cancelled

    def __call__(self, function: Callable[..., Any], on_error: Any = None) -> Callable[..., Any]:
        @functools.wraps(function)
        def repeated(*given: Any, **named: Any) -> Any:
            began = time.monotonic()
            for pause in pauses(self._longest_pause):
                try:
                    return function(*given, **named)
                except Exception as error:
                    if self._cancelled().is_set():
                        raise Cancelled from error
                    self._refuse_hopeless(error, time.monotonic() + pause - began)
                if self._cancelled().wait(pause):
                    raise Cancelled
            return None

        return repeated

    def _refuse_hopeless(self, error: Exception, seconds: float) -> None:
        """Raises the error, or RetryError after the time, unless another attempt at `seconds` may succeed."""
        from google.api_core.exceptions import RetryError
        from google.cloud.storage.retry import DEFAULT_RETRY

        if is_refused_token(error):
            if seconds > self._refused_seconds:
                raise error
        elif not DEFAULT_RETRY._predicate(error):
            raise error
        elif seconds > self._seconds:
            raise RetryError(f"no success within {self._seconds:g} s", cause=error) from error
