"""Objects of which only a few are on the disk at a time."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from trainer.storage.gcs import Remote, connect
from trainer.storage.local_files import is_running

Opened = TypeVar("Opened")


class Rolling(Generic[Opened]):
    """Opens objects by their number, the `keep` newest of which stay open; those named ahead are fetched meanwhile.

    `opener(number, path)` makes of a whole, verified file what `get` returns. It must keep the file open or mapped as
    long as it needs it: afterwards the file has no name any more, and its space is free when the last user lets go.
    """

    def __init__(
        self, objects: Sequence[Remote], folder: Path, keep: int, opener: Callable[[int, Path], Opened]
    ) -> None:
        self._objects, self._folder, self._keep, self._opener = objects, folder, keep, opener
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._opened: OrderedDict[int, Future[Opened]] = OrderedDict()
        self._pool = ThreadPoolExecutor(min(keep, connect().limits.workers), thread_name_prefix="rolling")
        folder.mkdir(parents=True, exist_ok=True)
        for left_behind in folder.iterdir():  # by a process that was killed
            if not is_running(left_behind.name.partition("-")[0]):
                left_behind.unlink(missing_ok=True)

    def get(self, number: int) -> Opened:
        """Waits for the object where it is not there yet. PlatformFault or UserError where it cannot be had."""
        return self._future(number).result()

    def ahead(self, numbers: Iterable[int]) -> None:
        """Begins to fetch these."""
        for number in numbers:
            self._future(number)

    def close(self) -> None:
        """Fetches nothing more: what waits is dropped, what is under way ends after the piece that it reads."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _future(self, number: int) -> "Future[Opened]":
        with self._lock:
            future = self._opened.pop(number, None)
            if future is None or (future.done() and future.exception()):  # a failure is tried again when asked for
                future = self._pool.submit(self._fetch, number)
            self._opened[number] = future
            while len(self._opened) > self._keep:
                self._opened.popitem(last=False)
            return future

    def _fetch(self, number: int) -> Opened:
        file = self._folder / f"{os.getpid()}-{threading.get_ident()}-{number}"
        connect().download(self._objects[number], file, cancelled=self._closed)
        try:
            return self._opener(number, file)
        finally:
            file.unlink()
