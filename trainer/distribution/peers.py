"""Watches the connections between workers, so that each of them notices when another one is lost.

TensorFlow aborts the survivors of a lost worker in C++, often without a useful message. So the connections of the
meeting stay open: a killed process closes its connection at once, a frozen machine stops sending. One number of
seconds, --worker_timeout_seconds, limits how long a worker may be late, silent or behind the others.
"""

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.distribution.cluster import Cluster
from trainer.distribution.messages import LineBuffer, Overflow, parse, safe, text, whole_number
from trainer.errors import FAULT, INTERRUPTED, USER_MUST_CHANGE
from trainer.log import log

BEAT_SECONDS = 5.0  # between two heartbeats
SUSPECT_SECONDS = 20.0  # without a heartbeat, after which a peer is the likely cause of an error of TensorFlow
GOODBYE_SECONDS = 30.0  # for workers to close their connections at the end, and at least for their last words
LEAVE_SECONDS = 5.0  # for our main thread to end by itself after another worker has failed


@dataclass
class _Peer:
    """Holds one connection and the last known state of the worker at its other end."""

    index: int
    link: socket.socket
    last_message: float = field(default_factory=time.monotonic)
    buffer: LineBuffer = field(default_factory=LineBuffer)
    calls: int = 0  # to the devices, according to its newest heartbeat
    in_step: float = field(default_factory=time.monotonic)  # when its count last rose, or was as high as ours
    done: bool = False  # it has no more work; of the chief: it has finished last
    closed: bool = False

    def behind_for(self, calls: int, now: float) -> float:
        """Returns for how many seconds it has made no progress while behind our `calls`."""
        if self.calls >= calls:
            self.in_step = now
        return now - self.in_step


class Peers:
    """Holds the chief's connections to all workers, or a worker's to its chief, and watches them in a thread."""

    def __init__(
        self,
        cluster: Cluster,
        links: Mapping[int, socket.socket],
        timeout_seconds: float,
        on_loss: Callable[[str, int], None],
    ) -> None:
        self._cluster, self._timeout_seconds, self._on_loss = cluster, timeout_seconds, on_loss
        self._silence_seconds, self._beat_seconds = timeout_seconds, min(BEAT_SECONDS, timeout_seconds / 4)
        self._peers = {index: _Peer(index, link) for index, link in links.items()}
        self._calls, self._stage, self._trains = 0, "", False
        self._connects_since: float | None = None  # while TensorFlow's servers wait for each other
        self._lock, self._over = threading.Lock(), threading.Event()
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            peer.link.settimeout(timeout_seconds)
            self._selector.register(peer.link, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def begin(self, stage: str) -> None:
        """Counts a step of the start that all workers take together; `stage` completes "it did not …"."""
        self._stage, self._calls = stage, self._calls + 1

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Limits the time within the block, in which TensorFlow's servers wait for each other."""
        self.begin("start TensorFlow")
        self._connects_since = time.monotonic()
        yield
        self._connects_since = None
        self.begin("load its data and build the model")

    def begin_call(self) -> None:
        """Counts a call to the devices, which all workers make together."""
        self._calls, self._trains = self._calls + 1, True

    def finish(self) -> None:
        """Waits as the last barrier: a worker until the chief has written everything, so that the chief ends last.

        The chief, when all its work is done, waits for the workers as long as they may be late.
        """
        if not self._cluster.is_chief:
            self._send({"done": True})
            # A lost chief ends this process instead.
            while self._thread.is_alive() and not all(peer.done for peer in self._peers.values()):
                time.sleep(0.02)
        else:
            self._await(lambda peer: peer.done, max(self._timeout_seconds, GOODBYE_SECONDS))
            self._send({"done": True})
            self._await(lambda peer: peer.closed, GOODBYE_SECONDS)  # closing first could lose our message
        self._close()

    def fail(self, code: int, error: str) -> None:
        """Sends the others the reason why this worker ends, so that they end for the same reason."""
        self._send({"failed": code, "error": error[:2000], "index": self._cluster.index})
        self._close()

    def await_verdict(self) -> None:
        """Waits after an error of TensorFlow, to give the watching thread time to find a lost worker as its cause."""
        self._silence_seconds = min(self._silence_seconds, SUSPECT_SECONDS)
        self._over.wait(self._silence_seconds + BEAT_SECONDS)

    def _await(self, reached: Callable[[_Peer], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(map(reached, self._peers.values())):
            time.sleep(0.02)

    def _close(self) -> None:
        self._over.set()
        self._thread.join(2 * BEAT_SECONDS)

    def _send(self, message: Mapping[str, Any], *, skip: int | None = None) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            for peer in self._peers.values():
                if peer.index != skip and not peer.closed:
                    with contextlib.suppress(OSError):  # the watching thread notices and reports it
                        peer.link.sendall(line)

    def _watch(self) -> None:
        next_beat = time.monotonic()
        while not self._over.is_set():
            if time.monotonic() >= next_beat:
                self._send({"beat": self._calls})
                next_beat = time.monotonic() + self._beat_seconds
            for key, _ in self._selector.select(timeout=0.1):
                self._receive(key.data)
            self._check(time.monotonic())
        for peer in self._peers.values():
            peer.link.close()

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.link.recv(65536)
            lines = peer.buffer.feed(data)
        except (OSError, Overflow):
            data, lines = b"", []
        if not data:
            self._selector.unregister(peer.link)
            peer.closed = True
            if not peer.done:
                self._lost(peer, "its process has ended")
            return
        peer.last_message = time.monotonic()
        for line in lines:
            self._handle(peer, parse(line))

    def _handle(self, peer: _Peer, message: Mapping[str, Any]) -> None:
        """Handles a message; ignores what none of our workers would send."""
        beat = whole_number(message, "beat")
        if beat is not None and beat != peer.calls:
            peer.calls, peer.in_step = beat, time.monotonic()
        if message.get("done") is True:
            peer.done = True
        code, index = whole_number(message, "failed", 255), whole_number(message, "index", self._cluster.workers - 1)
        if code is not None and index is not None:
            self._send(message, skip=peer.index)
            self._leave(f"{self._cluster.name(index)} stopped: {text(message, 'error')}", code, LEAVE_SECONDS)

    def _check(self, now: float) -> None:
        """Gives up a peer that is silent, or that makes no progress while behind, and a start that takes too long."""
        # Our count of a peer's calls is as old as its newest heartbeat.
        allowed, limit = self._timeout_seconds + 2 * self._beat_seconds, f"{self._timeout_seconds:.0f} seconds"
        for peer in self._peers.values():
            if peer.done or peer.closed:
                continue
            behind = peer.behind_for(self._calls, now) > allowed
            if now - peer.last_message > self._silence_seconds:
                self._lost(peer, f"it sent nothing for {self._silence_seconds:.0f} seconds")
            elif behind and not self._trains:
                self._lost(peer, f"it did not {self._stage} within {limit}")
            elif behind and self._cluster.is_chief:  # a worker does not know what the chief alone has to do
                self._lost(peer, f"it made no progress for {limit} while the others did")
        if self._connects_since is not None and now - self._connects_since > allowed:
            line = f"TensorFlow's servers did not connect within {limit}: let the workers reach each other's ports"
            self._leave(line, INTERRUPTED, 0.0)

    def _lost(self, peer: _Peer, reason: str) -> None:
        error = f"{self._cluster.name(peer.index)} was lost: {reason}"
        self._send({"failed": INTERRUPTED, "error": error, "index": self._cluster.index}, skip=peer.index)
        advice = "run the same command again to resume from the last checkpoint"
        self._leave(f"{error}; {advice}", INTERRUPTED, 0.0)

    def _leave(self, line: str, code: int, grace_seconds: float) -> None:
        """Ends this process: its main thread may wait in C++ for a worker that never responds."""
        if self._over.wait(grace_seconds):
            return
        code = code if code in (USER_MUST_CHANGE, INTERRUPTED) else FAULT
        log.error("%s", safe(line))
        try:
            self._on_loss(line, code)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
