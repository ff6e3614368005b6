"""Ends a run on SIGTERM or Ctrl-C: the first signal asks it to save, a second one ends the process
at once."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from trainer.base.errors import INTERRUPTED
from trainer.base.log import log

_COMPILING_SECONDS = 6.0  # after a signal, for which a compilation may go on
_POLL_SECONDS = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class StopRequest:
    """Records the first signal.

    The loop checks it between calls to the device, when weights and step agree.
    """

    signal: str | None = None
    reason: str = ""  # why the job ends itself, if it does
    # no variable has changed yet: the running call compiles, perhaps for minutes
    nothing_to_save: bool = False

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Makes SIGINT and SIGTERM set the request within the block.

    A second one ends the process with exit code 75.
    """
    request = StopRequest()
    over = threading.Event()

    # A compilation may take minutes, and nobody loses anything by its end.
    def leave_while_compiling() -> None:
        over.wait(_COMPILING_SECONDS)
        while not over.wait(_POLL_SECONDS):
            if request.nothing_to_save:
                log.warning("the step is still being compiled: nothing is lost")
                end_process()

    def receive(name: str) -> None:
        if request:
            end_process()
        request.signal = name
        log.warning(
            f"{name}: saves after the running steps; a second signal stops at once, unsaved"
        )
        threading.Thread(target=leave_while_compiling, name="compiling", daemon=True).start()

    with _received(receive):
        try:
            yield request
        finally:
            over.set()


@contextmanager
def stop_on_interrupt() -> Iterator[StopRequest]:
    """Makes a first Ctrl-C within the block set the request.

    A second one raises KeyboardInterrupt, as ever.
    """
    request = StopRequest()
    before = signal.getsignal(signal.SIGINT)

    def receive(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        request.signal = signal.Signals(number).name
        log.warning(
            f"{request.signal}: saves after the running steps; a second one stops at once, unsaved"
        )

    signal.signal(signal.SIGINT, receive)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, before)


def leave_on_signals() -> AbstractContextManager[None]:
    """Makes SIGINT and SIGTERM end the process with exit code 75, within the block.

    They do so also while it waits in C++.
    """
    return _received(lambda name: end_process())


@contextmanager
def _received(receive: Callable[[str], None]) -> Iterator[None]:
    """Calls `receive` with the name of each SIGINT and SIGTERM within the block, in a thread.

    Python's own handlers wait for seconds until a call to the device returns, and then see two
    signals as one. https://docs.python.org/3/library/signal.html#signal.set_wakeup_fd
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def read() -> None:
        with reader:
            while number := reader.recv(1):
                if number[0] in _SIGNALS:
                    receive(signal.Signals(number[0]).name)

    threading.Thread(target=read, name="signals", daemon=True).start()
    before = {number: signal.signal(number, lambda number, frame: None) for number in _SIGNALS}
    wakeup = signal.set_wakeup_fd(writer.fileno())
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()


def keep_handlers() -> None:
    """Installs Python's handlers of SIGINT and SIGTERM again.

    TensorFlow takes SIGTERM when its servers connect.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.getsignal(number))


def end_process() -> None:
    """Ends this process with exit code 75, without Python's exit.

    Python's exit waits for TensorFlow's threads, or crashes.
    """
    if sys.stderr.isatty():
        print("\033[?25h", end="", file=sys.stderr)  # shows the cursor, which the bar hides
    log.warning("stopped at once: the same command resumes from the last checkpoint")
    sys.stderr.flush()
    os._exit(INTERRUPTED)
