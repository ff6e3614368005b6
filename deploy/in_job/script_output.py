"""Passes on the output of a script in bounded memory, and finds its reports in the order in which it wrote them."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, cast

PIECE = 2**16  # the most bytes that are read at once; of a longer line only this much of its end is looked at
LAST_OUTPUT_S = 5.0  # how long to read on after the script's end, if a process that it started still has its output

Take = Callable[[bytes], None]


class Output:
    """Reads the stdout, the stderr and the pipe of reports of a script in a thread, and passes on stdout and stderr.

    `reports`: the file descriptor of the pipe, which does not block; `take`: gets each line of stdout and of the pipe,
    since both may have reports.
    """

    def __init__(self, process: subprocess.Popen[bytes], reports: int, take: Take) -> None:
        self._process, self._reports, self._take = process, reports, take
        self._unfinished = {"stdout": b"", "stderr": b"", "reports": b""}  # the end of each, after its last line break
        self.last_error = b""  # the newest line of stderr that is not blank
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Reads what is left once the script has ended."""
        self._thread.join(LAST_OUTPUT_S)
        self._take_reports()
        self._take(self._unfinished["stdout"])
        self._keep_error(self._unfinished["stderr"])

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(cast(IO[bytes], self._process.stdout), selectors.EVENT_READ, "stdout")
            selector.register(cast(IO[bytes], self._process.stderr), selectors.EVENT_READ, "stderr")
            selector.register(self._reports, selectors.EVENT_READ, "reports")
            while len(selector.get_map()) > 1:
                for key, _ in selector.select():
                    if key.data == "reports":
                        self._take_reports()
                    elif piece := os.read(key.fd, PIECE):
                        target = sys.stdout.buffer if key.data == "stdout" else sys.stderr.buffer
                        # Nobody may read this process's output any more; the script must not wait for it.
                        with contextlib.suppress(OSError, ValueError):
                            target.write(piece)
                            target.flush()
                        if key.data == "stdout":
                            self._take_reports()  # first those that the script wrote before this piece of stdout
                        self._split(key.data, piece, self._take if key.data == "stdout" else self._keep_error)
                    else:
                        selector.unregister(key.fileobj)

    def _take_reports(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._reports, PIECE):
                self._split("reports", piece, self._take)

    def _split(self, stream: str, piece: bytes, use: Take) -> None:
        """Passes each line that the new piece of a stream completes to `use`."""
        *lines, unfinished = (self._unfinished[stream] + piece).split(b"\n")
        self._unfinished[stream] = unfinished[-PIECE:]
        for line in lines:
            use(line)

    def _keep_error(self, line: bytes) -> None:
        self.last_error = line if line.strip() else self.last_error
