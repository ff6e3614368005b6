"""How far a transfer is: a bar with MB/s on a terminal, a line now and then elsewhere."""

import sys
import threading
import time
from types import TracebackType

from trainer.log import log, on_vertex

_EVERY = 30  # seconds between two lines


class TransferBar:
    """Counts bytes from several threads; says at the end what came and how fast."""

    def __init__(self, what: str, size: int, files: int, quiet: bool = False) -> None:
        self._what, self._size, self._files, self._quiet = what, size, files, quiet
        self._done, self._lock = 0, threading.Lock()
        self._began = self._said = time.monotonic()
        self._shown = not quiet and sys.stdout.isatty() and not on_vertex()
        if self._shown:
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            self._bar = Progress(BarColumn(20), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._task = self._bar.add_task("", total=size)

    def advance(self, size: int) -> None:
        """`size` bytes more; a negative number takes back what has to come again."""
        with self._lock:
            self._done += size
            say = not self._shown and not self._quiet and time.monotonic() - self._said > _EVERY
            self._said = time.monotonic() if say else self._said
        if say:
            log.info(f"{self._what}: {self._done / 1e6:,.0f} of {self._size / 1e6:,.0f} MB, {self._speed:,.0f} MB/s")
        if self._shown:
            self._bar.update(self._task, advance=size)

    @property
    def _speed(self) -> float:
        return self._done / 1e6 / max(time.monotonic() - self._began, 1e-9)

    def __enter__(self) -> "TransferBar":
        if self._shown:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._bar.stop()
        if kind is None and not self._quiet:
            seconds = time.monotonic() - self._began
            log.info(
                f"{self._what}: fetched {self._files:,} files, {self._size / 1e6:,.1f} MB, in {seconds:.1f} s "
                f"({self._speed:,.0f} MB/s)"
            )
