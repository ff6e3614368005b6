"""Limits the whole time of a request, and ends transfers at once when one of them fails or a signal comes.

A timeout of the socket limits the wait for the next byte only, so that a byte every few seconds would hold a request
without end. Here a request runs in a thread of its own, which is abandoned when its time is over: a daemon, which ends
with its socket or with the process, and whose result nobody takes.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from typing import TypeVar

from trainer.base.log import log
from trainer.base.terminal import ProgressBar

Item = TypeVar("Item")
T = TypeVar("T")

NEVER = threading.Event()  # is never set
_TURN_SECONDS, _LOG_SECONDS = 0.1, 30.0


class Cancelled(Exception):
    """Ends a transfer because another one failed, or a signal came."""


class TooSlow(ConnectionError):
    """Ends a request whose time is over; the client's retries repeat it like a connection that was cut."""


def in_time(work: Callable[[], T], seconds: float, cancelled: threading.Event = NEVER) -> T:
    """Calls `work` and returns its result. Raises TooSlow after `seconds`, Cancelled soon after the event."""
    if cancelled.is_set():
        raise Cancelled
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="request", daemon=True).start()
    deadline = time.monotonic() + seconds
    while not wait([outcome], timeout=_TURN_SECONDS).done:
        if cancelled.is_set():
            raise Cancelled
        if time.monotonic() > deadline:
            raise TooSlow(f"no complete answer within {seconds:.3g} s")
    return outcome.result()


def in_parallel(work: Callable[[Item, threading.Event], None], items: Collection[Item], workers: int) -> None:
    """Calls `work` with each item and an event, which is set at the first failure or Ctrl-C and ends the others."""
    cancelled, errors = threading.Event(), list[BaseException]()

    def run(item: Item) -> None:
        try:
            if not cancelled.is_set():
                work(item, cancelled)
        except BaseException as error:
            errors.append(error)  # the first is the cause, the others are Cancelled
            cancelled.set()

    with ThreadPoolExecutor(workers) as pool:
        try:
            for transfer in [pool.submit(run, item) for item in items]:
                while not transfer.done():  # in turns: Python notices a Ctrl-C just before a wait only after it
                    wait([transfer], timeout=1)
        finally:
            cancelled.set()
    if errors:
        raise errors[0]


@contextmanager
def transfer_bar(label: str, size: int, files: int, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a thread-safe function that adds transferred bytes, or subtracts those that must be fetched again.

    Shows a bar on a terminal, a log line every 30 seconds elsewhere, and logs bytes and speed at the end.
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
