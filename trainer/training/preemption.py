"""Ctrl-C and SIGTERM: the first asks the loop to stop after the call in work, the second stops at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Set by the first signal; the loop looks at it between calls to the device, where weights and step agree."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Within the block SIGINT and SIGTERM set the request; a second one raises KeyboardInterrupt."""
    request = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if request:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number).name

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
