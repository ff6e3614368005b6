"""Watches every response of Cloud Storage: cuts one that is too slow, and ends those of a cancelled transfer at once.

A timeout of the socket limits the wait for the next byte only, so that a byte every few seconds would hold a request
without end. Here each response must bring a least number of bytes in every period; otherwise it ends like a connection
that was cut, and is retried.
"""

import http.client
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Cancelled(Exception):
    """Ends a transfer because another one failed, or a signal came."""


class TooSlow(TimeoutError):
    """Ends a response that brings too few bytes; requests and urllib3 report it as a timeout."""


class Progress:
    """Raises TooSlow when fewer than `least` bytes were added in a period of `seconds`."""

    def __init__(self, least: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._least, self._seconds, self._clock = least, seconds, clock
        self._began, self._received = clock(), 0

    def add(self, count: int) -> None:
        """Counts bytes that were received."""
        self._received += count
        now = self._clock()
        if now - self._began < self._seconds:
            return
        if self._received < self._least:
            raise TooSlow(f"fewer than {self._least:,} bytes in {self._seconds:g} s")
        self._began, self._received = now, 0


class Transport:
    """Counts what responses bring, by the thread that reads them.

    least: bytes that a response must bring in every period of `seconds`, unless it ends before.
    """

    def __init__(self, least: int, seconds: float) -> None:
        self._least, self._seconds = least, seconds
        self._lock, self._local = threading.Lock(), threading.local()
        self._reading: dict[int, tuple[threading.Event, socket.socket]] = {}

    @property
    def cancelled(self) -> threading.Event:
        """Returns the event that cancels this thread's transfer; one that is never set outside of `of`."""
        return getattr(self._local, "cancelled", None) or threading.Event()

    @contextmanager
    def of(self, cancelled: threading.Event) -> Iterator[None]:
        """Makes the requests of this thread within the block those of a transfer that `cut` ends."""
        self._local.cancelled = cancelled
        try:
            yield
        finally:
            self._local.cancelled = None
            with self._lock:
                self._reading.pop(threading.get_ident(), None)

    def cut(self, cancelled: threading.Event) -> None:
        """Sets the event, and ends the responses that threads of its transfers wait for."""
        cancelled.set()
        with self._lock:
            reading = [link for event, link in self._reading.values() if event is cancelled]
        for link in reading:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def watched(self, link: socket.socket, stream: Any) -> Any:
        """Returns the buffered stream of a new response, with its bytes counted."""
        if cancelled := getattr(self._local, "cancelled", None):
            with self._lock:
                self._reading[threading.get_ident()] = (cancelled, link)
            if cancelled.is_set():  # `cut` came before this response could be ended
                raise Cancelled
        counted = _Counted(stream.detach(), Progress(self._least, self._seconds))
        return io.BufferedReader(counted, 64 * 1024)

    def adapter(self, connections: int) -> Any:
        """Returns an adapter for a session of requests, with a pool of so many connections."""
        from requests.adapters import HTTPAdapter

        pools = _pools(self)

        class Adapter(HTTPAdapter):
            """Makes connections whose responses are watched."""

            def init_poolmanager(self, *given: Any, **named: Any) -> None:
                super().init_poolmanager(*given, **named)
                self.poolmanager.pool_classes_by_scheme = pools

            def proxy_manager_for(self, *given: Any, **named: Any) -> Any:
                manager = super().proxy_manager_for(*given, **named)
                manager.pool_classes_by_scheme = pools
                return manager

        return Adapter(pool_maxsize=connections)


class _Counted(io.RawIOBase):
    """Reads from a socket's stream and counts the bytes."""

    def __init__(self, raw: Any, progress: Progress) -> None:
        self._raw, self._progress = raw, progress

    def readable(self) -> bool:
        """Returns True: the io module requires it."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        count: int | None = self._raw.readinto(buffer)
        if count:
            self._progress.add(count)
        return count

    def close(self) -> None:
        """Closes the socket's stream too."""
        if not self.closed:
            self._raw.close()
        super().close()


def _pools(transport: Transport) -> dict[str, Any]:
    """Returns the connection pools of urllib3 whose responses `transport` watches, by scheme."""
    from urllib3.connection import HTTPConnection, HTTPSConnection
    from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

    class Response(http.client.HTTPResponse):
        """Reads from a counted stream."""

        def __init__(self, sock: Any, *given: Any, **named: Any) -> None:
            super().__init__(sock, *given, **named)
            self.fp = transport.watched(sock, self.fp)

    def pool(kind: type, connection: type) -> type:
        watched = type(connection.__name__, (connection,), {"response_class": Response})
        return type(kind.__name__, (kind,), {"ConnectionCls": watched})

    return {"http": pool(HTTPConnectionPool, HTTPConnection), "https": pool(HTTPSConnectionPool, HTTPSConnection)}
