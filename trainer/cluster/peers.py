"""Watches the other workers while a run trains, names one that is lost, and ends all of them in order."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from trainer.base.errors import FAULT, INTERRUPTED, USER_MUST_CHANGE, printable
from trainer.base.log import log
from trainer.cluster.cluster_spec import Cluster

BEAT_SECONDS = 5.0  # between two heartbeats
SUSPECT_SECONDS = 20.0  # without a heartbeat, after which a peer is the likely cause of an error of TensorFlow
GOODBYE_SECONDS = 30.0  # for workers to close their connections at the end, and at least for their last words
LEAVE_SECONDS = 5.0  # for our main thread to end by itself after another worker has failed
TURN_SECONDS = 0.02  # between two looks at what has happened
_LONGEST_LINE = 256 * 1024  # bytes; the settings of a run are a few kilobytes


class Link:
    """Holds one connection, whose messages a thread adds to `events`, and the last known state of its other end."""

    def __init__(self, connection: socket.socket, events: "SimpleQueue[Event]") -> None:
        self.connection = connection
        connection.setblocking(True)
        self.index = 0  # of the worker at the other end
        self.last_message = self.in_step = time.monotonic()  # in_step: when its count last rose, or was as high as ours
        self.calls = 0  # to the devices, according to its newest heartbeat
        self.idle_s = 0.0  # of its GPUs
        self.done = False  # it has no more work; of the chief: it has finished last
        self.closed = False
        threading.Thread(target=self._receive, args=(events,), name="link", daemon=True).start()

    def _receive(self, events: "SimpleQueue[Event]") -> None:
        """Adds what arrives, "" for what is no JSON; None once the connection has ended or a line is too long."""
        with contextlib.suppress(OSError), self.connection.makefile("rb") as lines:
            while (line := lines.readline(_LONGEST_LINE)).endswith(b"\n"):
                self.last_message = time.monotonic()
                try:
                    events.put((self, json.loads(line)))
                except (ValueError, RecursionError):
                    events.put((self, ""))
        events.put((self, None))

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message; whoever receives from a lost connection notices it."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Closes the connection."""
        self.closed = True
        with contextlib.suppress(OSError):  # the other end may have closed it
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


Event = tuple[Link, Any]  # a connection, and a message that came by it


class Peers:
    """Holds the chief's connections to all workers, or a worker's to its chief, and watches them in a thread."""

    def __init__(
        self,
        cluster: Cluster,
        links: Sequence[Link],
        events: "SimpleQueue[Event]",
        timeout_seconds: float,
        on_loss: Callable[[str, int], None],
    ) -> None:
        self._cluster, self._peers, self._events, self._on_loss = cluster, links, events, on_loss
        self._timeout_seconds = self._silence_seconds = timeout_seconds
        self._beat_seconds = min(BEAT_SECONDS, timeout_seconds / 4)
        self._calls = 0
        self._lock, self._over = threading.Lock(), threading.Event()
        self.stop_reason = ""  # of the chief's watch
        for peer in links:  # the first to come may have waited for long
            peer.last_message = peer.in_step = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Limits the time within the block, in which TensorFlow's servers wait for each other."""
        limit = f"{self._timeout_seconds:.0f} seconds"
        line = f"TensorFlow's servers did not connect within {limit}: let the workers reach each other's ports"
        # Later than a worker that did not start TensorFlow is named.
        seconds = self._timeout_seconds + 3 * self._beat_seconds
        timer = threading.Timer(seconds, self._leave, (line, INTERRUPTED, 0.0))
        timer.start()
        self.begin_call()
        try:
            yield
        finally:
            timer.cancel()
        self.begin_call()

    def begin_call(self) -> None:
        """Counts a call to the devices, or another step of a job, which all workers make together."""
        self._calls += 1

    @property
    def is_chief(self) -> bool:
        """Returns whether this worker is the chief."""
        return self._cluster.is_chief

    def share_idle(self, seconds: float) -> list[float]:
        """Sends for how long our GPUs have been idle; returns, on the chief, that of each worker by index."""
        self._send({"idle": seconds})
        return [seconds, *(peer.idle_s for peer in sorted(self._peers, key=lambda peer: peer.index))]

    def stop(self, reason: str) -> None:
        """Makes all workers end by themselves, for `reason`."""
        self.stop_reason = reason
        self._send({"stop": reason})

    def abandon(self) -> None:
        """Tells the others that this process is about to end and is not lost."""
        self._send({"done": True})

    def finish(self) -> None:
        """Waits as the last barrier: a worker until the chief has written everything, so that the chief ends last."""
        chief = self._cluster.is_chief
        self._send({"done": True})  # a lost chief ends a worker that waits for this
        self._await(lambda peer: peer.done, max(self._timeout_seconds, GOODBYE_SECONDS) if chief else float("inf"))
        if chief:
            self._await(lambda peer: peer.closed, GOODBYE_SECONDS)  # closing first could lose our message
        self._close()

    def fail(self, code: int, error: str) -> None:
        """Sends the others the reason why this worker ends, so that they end for the same reason."""
        line = f"{self._cluster.name(self._cluster.index)} stopped: {error[:2000]}"
        self._send({"failed": code, "error": line})
        self._close()

    def await_verdict(self) -> None:
        """Waits after an error of TensorFlow, to give the watching thread time to find a lost worker as its cause."""
        self._silence_seconds = min(self._silence_seconds, SUSPECT_SECONDS)
        self._over.wait(self._silence_seconds + BEAT_SECONDS)

    def _await(self, reached: Callable[[Link], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < deadline and not all(map(reached, self._peers)):
            time.sleep(TURN_SECONDS)

    def _close(self) -> None:
        self._over.set()
        self._thread.join(2 * BEAT_SECONDS)

    def _send(self, message: Mapping[str, Any], *, skip: Link | None = None) -> None:
        with self._lock:
            for peer in self._peers:
                if peer is not skip and not peer.closed:
                    peer.send(message)

    def _watch(self) -> None:
        next_beat = time.monotonic()
        while not self._over.is_set():
            if time.monotonic() >= next_beat:
                self._send({"beat": self._calls})
                next_beat = time.monotonic() + self._beat_seconds
            with contextlib.suppress(Empty):
                peer, message = self._events.get(timeout=TURN_SECONDS)
                if peer in self._peers:  # not a stranger who came before the start
                    self._handle(peer, message)
            self._check(time.monotonic())
        for peer in self._peers:
            peer.close()

    def _handle(self, peer: Link, message: Any) -> None:
        """Handles a message; ignores what none of our workers would send."""
        match message:
            case None:
                peer.close()
            case {"beat": int(calls)} if calls != peer.calls:
                peer.calls, peer.in_step = calls, time.monotonic()
            case {"done": True}:
                peer.done = True
            case {"idle": int() | float() as seconds}:
                peer.idle_s = seconds
            case {"stop": str(reason)}:
                self.stop_reason = reason
            case {"failed": int(code), "error": str(line)}:
                self._send(message, skip=peer)
                self._leave(line, code, LEAVE_SECONDS)

    def _check(self, now: float) -> None:
        """Gives up a peer that has ended, that is silent or, on the chief, one that makes no progress while behind."""
        # Our count of a peer's calls is as old as its newest heartbeat.
        allowed = self._timeout_seconds + 2 * self._beat_seconds
        for peer in self._peers:
            if peer.done:
                continue
            if peer.calls >= self._calls:
                peer.in_step = now
            if peer.closed:
                self._lost(peer, "its process has ended")
            elif now - peer.last_message > self._silence_seconds:
                self._lost(peer, f"it sent nothing for {self._silence_seconds:.0f} seconds")
            elif self._cluster.is_chief and now - peer.in_step > allowed:  # only the chief has work of its own
                self._lost(peer, f"it made no progress for {self._timeout_seconds:.0f} seconds while the others did")

    def _lost(self, peer: Link, reason: str) -> None:
        line = f"{self._cluster.name(peer.index)} was lost: {reason}"
        line += "; run the same command again to resume from the last checkpoint"
        self._send({"failed": INTERRUPTED, "error": line}, skip=peer)
        self._leave(line, INTERRUPTED, 0.0)

    def _leave(self, line: str, code: int, grace_seconds: float) -> None:
        """Ends this process: its main thread may wait in C++ for a worker that never responds."""
        if self._over.wait(grace_seconds):
            return
        line, code = printable(line), code if code in (USER_MUST_CHANGE, INTERRUPTED) else FAULT
        log.error("%s", line)
        try:
            self._on_loss(line, code)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
