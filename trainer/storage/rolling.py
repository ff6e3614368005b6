"""Downloads objects on demand and keeps only a few of them on the disk."""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from trainer.storage.gcs import Remote, connect
from trainer.storage.local_files import is_running

Opened = TypeVar("Opened")

_waiting: dict[int, float] = {}  # since when threads wait for a download, by thread


def longest_wait_seconds() -> float:
    """Returns for how long a step of this process has been waiting for a download; 0 if none does."""
    return max((time.monotonic() - since for since in list(_waiting.values())), default=0.0)


class Rolling(Generic[Opened]):
    """Opens objects by their number and keeps the `keep` most recent ones open.

    `opener(number, path)` turns a complete, verified file into what `get` returns. It must keep the file open or mapped
    as long as needed: the file is then unlinked, and its space is freed when its last user closes it.
    """

    def __init__(
        self, objects: Sequence[Remote], folder: Path, keep: int, opener: Callable[[int, Path], Opened]
    ) -> None:
        self._objects, self._folder, self._keep, self._opener = objects, folder, keep, opener
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._opened: OrderedDict[int, Future[Opened]] = OrderedDict()
        self._pool = ThreadPoolExecutor(min(keep, connect().limits.workers), thread_name_prefix="rolling")
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.iterdir():  # left by killed processes
            if not is_running(stale.name.partition("-")[0]):
                stale.unlink(missing_ok=True)

    def get(self, number: int) -> Opened:
        """Returns the opened object, after its download. Raises PlatformFault or UserError if that fails."""
        thread = threading.get_ident()
        _waiting[thread] = time.monotonic()
        try:
            return self._future(number).result()
        finally:
            del _waiting[thread]

    def ahead(self, numbers: Iterable[int]) -> None:
        """Starts to download these objects."""
        for number in numbers:
            self._future(number)

    def close(self) -> None:
        """Cancels queued downloads, and ends running ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        connect().cut(self._closed)

    def _future(self, number: int) -> "Future[Opened]":
        with self._lock:
            future = self._opened.pop(number, None)
            if future is None or (future.done() and future.exception()):  # retries after a failure
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
