"""Watches the connections between workers, so that each of them notices when another one is lost.

TensorFlow aborts the survivors of a lost worker in C++, often without a useful message. So the connections of the
meeting stay open: a killed process closes its connection at once, a frozen machine stops sending.
"""

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.distribution.cluster import Cluster
from trainer.errors import FAULT, INTERRUPTED, USER_MUST_CHANGE
from trainer.log import log

BEAT_SECONDS = 5.0  # between two heartbeats
SILENCE_SECONDS = 30.0  # without a heartbeat, after which the peer's machine is lost or frozen
LEAVE_SECONDS = 5.0  # for our main thread to end by itself after another worker has failed


@dataclass
class _Peer:
    """Holds one connection and the last known state of the worker at its other end."""

    index: int
    link: socket.socket
    last_message: float = field(default_factory=time.monotonic)
    received: bytes = b""
    calls: int = 0  # to the devices, according to its newest heartbeat
    in_step: float = field(default_factory=time.monotonic)  # when its count last rose, or was as high as ours
    done: bool = False

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
        stall_seconds: float,
        on_loss: Callable[[str, int], None],
    ) -> None:
        self._cluster, self._stall_seconds, self._on_loss = cluster, stall_seconds, on_loss
        self._peers = {index: _Peer(index, link) for index, link in links.items()}
        self._calls = 0
        self._lock, self._over = threading.Lock(), threading.Event()
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            peer.link.settimeout(SILENCE_SECONDS)
            self._selector.register(peer.link, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def begin_call(self) -> None:
        """Counts a call to the devices, which all workers make together."""
        self._calls += 1

    def finish(self, timeout_seconds: float) -> None:
        """Waits as the last barrier: the chief returns when every worker is done, so that it ends last.

        It waits for SILENCE_SECONDS or longer: on a busy machine TensorFlow needs seconds to release a dataset.
        """
        if not self._cluster.is_chief:
            self._send({"done": True})  # the chief confirms it: closing the link too early could lose our message
        deadline = time.monotonic() + max(timeout_seconds, SILENCE_SECONDS)
        while time.monotonic() < deadline and not all(peer.done for peer in self._peers.values()):
            time.sleep(0.02)
        self._close()

    def fail(self, code: int, error: str) -> None:
        """Sends the others the reason why this worker ends, so that they end for the same reason."""
        self._send({"failed": code, "error": error[:2000], "index": self._cluster.index})
        self._close()

    def await_verdict(self) -> None:
        """Waits after an error of TensorFlow, to give the watching thread time to find a lost worker as its cause."""
        self._over.wait(SILENCE_SECONDS + BEAT_SECONDS)

    def _close(self) -> None:
        self._over.set()
        self._thread.join(2 * BEAT_SECONDS)

    def _send(self, message: Mapping[str, Any], *, skip: int | None = None, only: int | None = None) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            for peer in self._peers.values():
                if peer.index != skip and only in (None, peer.index) and not peer.done:
                    with contextlib.suppress(OSError):  # the watching thread notices and reports it
                        peer.link.sendall(line)

    def _watch(self) -> None:
        next_beat = time.monotonic()
        while not self._over.is_set():
            if time.monotonic() >= next_beat:
                self._send({"beat": self._calls})
                next_beat = time.monotonic() + BEAT_SECONDS
            for key, _ in self._selector.select(timeout=0.1):
                self._receive(key.data)
            self._check(time.monotonic())
        for peer in self._peers.values():
            peer.link.close()

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.link.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(peer.link)
            if not peer.done:
                self._lost(peer, "its process has ended")
            return
        peer.last_message = time.monotonic()
        *lines, peer.received = (peer.received + data).split(b"\n")
        for line in lines:
            self._handle(peer, parse(line))

    def _handle(self, peer: _Peer, message: Mapping[str, Any]) -> None:
        if message.get("beat", peer.calls) != peer.calls:
            peer.calls, peer.in_step = message["beat"], time.monotonic()
        if "done" in message and not peer.done:
            if self._cluster.is_chief:
                self._send({"done": True}, only=peer.index)
            peer.done = True
        if "failed" in message:
            who, code = self._cluster.name(message["index"]), message["failed"]
            self._send(message, skip=peer.index)
            self._leave(f"{who} stopped: {message['error']}", code, LEAVE_SECONDS)

    def _check(self, now: float) -> None:
        """Gives up a peer that is silent; the chief also gives up one that makes no progress while behind."""
        # Our count of a peer's calls is as old as its newest heartbeat.
        allowed = self._stall_seconds + 2 * BEAT_SECONDS
        for peer in self._peers.values():
            if peer.done:
                continue
            if now - peer.last_message > SILENCE_SECONDS:
                self._lost(peer, f"it sent nothing for {SILENCE_SECONDS:.0f} seconds")
            elif self._cluster.is_chief and peer.behind_for(self._calls, now) > allowed:
                self._lost(peer, f"it made no progress for {self._stall_seconds:.0f} seconds while the others did")

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
        log.error("%s", line)
        try:
            self._on_loss(line, code)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def parse(line: bytes) -> dict[str, Any]:
    """Returns the JSON object of a line; {} for anything else."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
