"""Reports the progress of a transfer: a bar with the speed on a terminal, a log line every 30 seconds elsewhere."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from trainer.base.log import log
from trainer.base.terminal import ProgressBar

_LOG_SECONDS = 30


@contextmanager
def transfer_bar(label: str, size: int, files: int, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a thread-safe function that adds transferred bytes; logs their number and the speed at the end.

    A negative number subtracts bytes that must be fetched again.
    """
    began = logged = time.monotonic()
    transferred, lock = 0, threading.Lock()

    def advance(more: int) -> None:
        nonlocal transferred, logged
        with lock:
            transferred += more
            now = time.monotonic()
            log_now = not (bar.shown or quiet) and now - logged > _LOG_SECONDS
            logged = now if log_now else logged
        if log_now:
            speed = transferred / 1e6 / (now - began)
            log.info(f"{label}: {transferred / 1e6:,.0f} of {size / 1e6:,.0f} MB, {speed:,.0f} MB/s")
        bar.update(advance=more)

    with closing(ProgressBar("bar", "bytes", "speed", "left", total=size, hidden=quiet)) as bar:
        yield advance
    if not quiet:
        seconds = max(time.monotonic() - began, 1e-9)
        speed = transferred / 1e6 / seconds
        log.info(f"{label}: fetched {files:,} files, {size / 1e6:,.1f} MB, in {seconds:.1f} s ({speed:,.0f} MB/s)")
