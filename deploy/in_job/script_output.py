"""Passes on the output of a script in bounded memory, and finds its reports in the order in which it made them."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, cast

PIECE = 2**16  # bytes that are read at once; a longer line is passed on, but is no report
LAST_OUTPUT_S = 5.0  # after the script's end, for a process that it left and that holds its output open

Take = Callable[[bytes], None]


class Lines:
    """Puts pieces of output together to lines."""

    def __init__(self) -> None:
        self._tail, self._too_long = b"", False

    def of(self, piece: bytes) -> Iterator[bytes]:
        """Yields the lines that the piece completes, but for those that are too long."""
        *whole, tail = (self._tail + piece).split(b"\n")
        for line in whole:
            if not self._too_long:
                yield line
            self._too_long = False
        self._too_long = self._too_long or len(tail) > PIECE
        self._tail = b"" if self._too_long else tail

    @property
    def rest(self) -> bytes:
        """Returns the last line, if nothing ended it."""
        return self._tail


class Output:
    """Reads stdout, stderr and the pipe of reports of a script in a thread. `take` gets lines that may be reports."""

    def __init__(self, process: subprocess.Popen[bytes], reports: int, take: Take) -> None:
        self._process, self._reports, self._take = process, reports, take
        self._stdout, self._stderr, self._reported = Lines(), Lines(), Lines()
        self.last_error = b""  # the newest line of stderr with a word in it
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Reads what is left once the script has ended."""
        self._ended.set()
        self._thread.join(LAST_OUTPUT_S)
        self._take_reports()
        self._take(self._stdout.rest)
        self._note(self._stderr.rest)

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for source, target in (
                (self._process.stdout, sys.stdout.buffer),
                (self._process.stderr, sys.stderr.buffer),
            ):
                selector.register(cast(IO[bytes], source), selectors.EVENT_READ, target)
            selector.register(self._reports, selectors.EVENT_READ)
            while len(selector.get_map()) > 1:
                for key, _ in selector.select():
                    if key.data is None:
                        self._take_reports()
                    elif piece := os.read(key.fd, PIECE):
                        self._pass_on(piece, key.data)
                    else:
                        selector.unregister(key.fileobj)

    def _pass_on(self, piece: bytes, target: IO[bytes]) -> None:
        """Passes a piece on and looks for reports in it, or for the script's last error."""
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more: the script is not to wait
            target.write(piece)
            target.flush()
        if target is sys.stderr.buffer:
            for line in self._stderr.of(piece):
                self._note(line)
            return
        self._take_reports()  # those before this piece, which is read already
        for line in self._stdout.of(piece):
            self._take(line)

    def _take_reports(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._reports, PIECE):
                for line in self._reported.of(piece):
                    self._take(line)

    def _note(self, line: bytes) -> None:
        self.last_error = line if line.strip() else self.last_error
