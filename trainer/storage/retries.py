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
_TEMPORARY = frozenset({408, 429, 500, 502, 503, 504})  # status codes


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

        if is_refused_token(error):
            if seconds > self._refused_seconds:
                raise error
        elif not may_pass(error):
            raise error
        elif seconds > self._seconds:
            raise RetryError(f"no success within {self._seconds:g} s", cause=error) from error


def may_pass(error: Exception) -> bool:
    """Returns whether the same request may succeed later: https://cloud.google.com/storage/docs/retry-strategy"""
    import http.client

    import requests
    import urllib3
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import TransportError
    from google.cloud.storage.exceptions import InvalidResponse

    if isinstance(error, TransportError) and error.args and isinstance(error.args[0], Exception):
        return may_pass(error.args[0])
    if isinstance(error, InvalidResponse):
        return error.response.status_code in _TEMPORARY
    if isinstance(error, GoogleAPICallError):
        return error.code in _TEMPORARY
    network: tuple[type[Exception], ...] = (
        ConnectionError, requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError,
        http.client.HTTPException, urllib3.exceptions.PoolError, urllib3.exceptions.ProtocolError,
        urllib3.exceptions.SSLError, urllib3.exceptions.TimeoutError,
    )  # fmt: skip
    return isinstance(error, network)
