"""Lets the workers of a job meet before TensorFlow starts, watches them while it runs, and ends them in order.

TensorFlow waits silently until all workers have started, and aborts the survivors of a lost one in C++, often without a
useful message. So the chief first listens in Python on its own address of the cluster; each worker connects and sends
what it runs. If all run the same, TensorFlow takes over the port, and the connections stay: a killed process closes its
own at once, a frozen machine stops sending. --worker_timeout_seconds limits how long a worker may be late, silent or
behind the others. A message is a JSON object on a line:

    worker  {"hello": index, "runs": {…}}
    chief   {"start": true}, or {"refused": "…"}, when all are there
    both    {"beat": calls}, {"done": true}, {"failed": exit code, "error": "…", "index": worker}
            {"idle": seconds of its GPUs}, {"stop": "…"}, from --stop_if_idle and --stop_if_over

Anyone who reaches the port may connect (docs/security.md), so a connection that sends nothing, too much or nonsense
must hold up no worker: lines, waits and the number of connections have limits.
"""

import contextlib
import errno
import ipaddress
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.base.errors import FAULT, INTERRUPTED, USER_MUST_CHANGE, PlatformFault, UserError, printable, shortened
from trainer.base.log import log
from trainer.cluster.cluster_spec import Cluster

REFUSAL_SECONDS = 10.0  # how long other workers may still connect and be refused too, once one runs something else
BEAT_SECONDS = 5.0  # between two heartbeats
SUSPECT_SECONDS = 20.0  # without a heartbeat, after which a peer is the likely cause of an error of TensorFlow
GOODBYE_SECONDS = 30.0  # for workers to close their connections at the end, and at least for their last words
LEAVE_SECONDS = 5.0  # for our main thread to end by itself after another worker has failed
ADVISORY = "?"  # ends the names of values that may differ
_LOG_SECONDS = 10.0
_LONGEST_LINE = 256 * 1024  # bytes; the settings of a run are a few kilobytes
_MOST_STRANGERS = 64  # connections without a hello, or as many as there are workers; a new one closes the oldest
_MOST_NAMES = 8  # of workers on a line


@dataclass(eq=False)
class _Link:
    """Holds one connection, what arrived by it, and the last known state of the worker at its other end."""

    connection: socket.socket
    index: int = 0  # of that worker; on the chief 0 until its hello
    inbox: deque[Any] = field(default_factory=deque)  # of messages; None for a line that is no JSON
    rest: bytes = b""  # of a line that has not ended
    last_message: float = 0.0
    calls: int = 0  # to the devices, according to its newest heartbeat
    in_step: float = 0.0  # when its count last rose, or was as high as ours
    idle_s: float = 0.0  # of its GPUs
    done: bool = False  # it has no more work; of the chief: it has finished last
    closed: bool = False

    def receive(self) -> None:
        """Moves what has arrived to the inbox. Raises OSError if the connection has ended or a line is too long."""
        data = self.connection.recv(65536)
        *lines, self.rest = (self.rest + data).split(b"\n")
        if not data or len(self.rest) > _LONGEST_LINE:
            raise ConnectionError
        self.inbox += map(_parse, lines)

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message; whoever receives from a lost connection notices it."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Closes the connection."""
        self.closed = True
        self.connection.close()

    def fileno(self) -> int:
        """Returns the descriptor by which a selector waits."""
        return self.connection.fileno()


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _ready(waiting: Iterable[Any], seconds: float) -> list[Any]:
    """Returns the sockets and links by which something has arrived; waits up to `seconds` for the first."""
    with selectors.DefaultSelector() as selector:
        for item in waiting:
            selector.register(item, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def meet(
    cluster: Cluster,
    runs: Mapping[str, Any],
    timeout_seconds: float,
    on_loss: Callable[[str, int], None] = lambda line, code: None,
) -> "Peers":
    """Waits until all workers are connected; raises UserError on each of them if their `runs` differ.

    `runs`: values that must be equal on all workers, by name, all valid in JSON; those whose name ends in "?" are only
    compared, and a difference is logged. Raises PlatformFault if a worker does not connect within `timeout_seconds`, as
    its image is still pulled or its machine is missing.

    `on_loss` is called with the error line and the exit code just before this process ends because a worker is lost.
    """
    runs = {**runs, "TF_CONFIG": list(cluster.addresses)}
    _warn_of_open_ports(cluster)
    with _own_port(cluster) as server:  # TensorFlow's server takes the port afterwards
        if cluster.is_chief:
            with contextlib.closing(_Arrivals(cluster, server, runs)) as arrivals:
                links = arrivals.await_all(timeout_seconds)
        else:
            links = [_call_chief(cluster, runs, timeout_seconds)]
    return Peers(cluster, links, timeout_seconds, on_loss)


def differing(chief: Mapping[str, Any], worker: Mapping[str, Any], advisory: bool = False) -> str:
    """Returns the names and values that differ, of those that may or of those that must not; empty if all are equal."""
    chief = json.loads(json.dumps(chief))
    names = [name for name in {**chief, **worker} if name.endswith(ADVISORY) == advisory]
    names = [name for name in names if chief.get(name) != worker.get(name)]
    return "; ".join(
        f"{name.rstrip(ADVISORY)}: {shortened(repr(chief.get(name)))} on the chief, "
        f"{shortened(repr(worker.get(name)))} on the worker"
        for name in names[:3]
    )


def _endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _warn_of_open_ports(cluster: Cluster) -> None:
    """Logs a warning where others may reach the ports: on a public address, and where only loopback was named."""
    host, _ = _endpoint(cluster.addresses[cluster.index])
    with contextlib.suppress(OSError, ValueError):
        addresses = [ipaddress.ip_address(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
        if any(address.is_global or (address.is_loopback and cluster.is_chief) for address in addresses):
            log.warning(
                f"TensorFlow's servers listen on all addresses of their machines, not on {host} alone, and whoever "
                "reaches a port of TF_CONFIG reads and writes files as this job: close these ports to others "
                "(docs/security.md)"
            )


def _own_port(cluster: Cluster) -> socket.socket:
    """Opens a server on our own address, which proves that the port is free: TensorFlow would share it silently."""
    host, port = _endpoint(cluster.addresses[cluster.index])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=max(128, cluster.workers))
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        reason = "another process uses this port: end it, or use another port" if in_use else str(error)
        raise UserError(f"TF_CONFIG: this worker's address {host}:{port} cannot be opened: {reason}") from None


class _Arrivals:
    """Accepts connections to the chief and compares what their workers run."""

    def __init__(self, cluster: Cluster, server: socket.socket, runs: Mapping[str, Any]) -> None:
        self._cluster, self._server, self._runs = cluster, server, runs
        self._links: list[_Link] = []  # the oldest first
        self._refusal, self._refused_at = "", float("inf")
        server.setblocking(False)

    @property
    def _workers(self) -> dict[int, _Link]:
        """Returns the connections of workers, by index."""
        return {link.index: link for link in self._links if link.index}

    def await_all(self, timeout_seconds: float) -> list[_Link]:
        """Returns the connections of all workers, which were told to start. Raises UserError if one was refused."""
        began = logged = time.monotonic()
        while missing := sorted(set(range(1, self._cluster.workers)) - self._workers.keys()):
            names = ", ".join(map(self._cluster.name, missing[:_MOST_NAMES]))
            names += f" and {len(missing) - _MOST_NAMES} more" if len(missing) > _MOST_NAMES else ""
            now = time.monotonic()
            if now > self._refused_at + REFUSAL_SECONDS:
                break
            if now > began + timeout_seconds and not self._refusal:
                raise PlatformFault(f"{names} did not start within {timeout_seconds:.0f} seconds (see its log)")
            if now > logged + _LOG_SECONDS:
                log.info(f"waiting for {names}")
                logged = now
            self._serve()
        workers = list(self._workers.values())
        for link in workers:
            link.send({"refused": self._refusal} if self._refusal else {"start": True})
        if self._refusal:
            raise UserError(self._refusal)
        self._links = [link for link in self._links if not link.index]
        return workers

    def close(self) -> None:
        """Closes all connections but those that `await_all` has returned."""
        for link in self._links:
            link.close()

    def _serve(self) -> None:
        """Handles what arrives within a second."""
        for ready in _ready([self._server, *self._links], 1.0):
            if ready is self._server:
                self._accept()
            elif not self._is_worker(ready):
                ready.close()
        self._links = [link for link in self._links if not link.closed]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has hung up already
            self._links.append(_Link(self._server.accept()[0]))
            self._links[-1].connection.setblocking(False)
        strangers = [link for link in self._links if not link.index]
        if len(strangers) > max(_MOST_STRANGERS, self._cluster.workers):
            strangers[0].close()

    def _is_worker(self, link: _Link) -> bool:
        """Compares what a worker runs; returns False for a connection that sends anything but one hello, or ends."""
        with contextlib.suppress(OSError, RecursionError):
            link.receive()
            match (link.index, *link.inbox):
                case (0,):
                    return True  # perhaps: the line has not ended
                case (0, {"hello": int(index), "runs": dict(runs)}) if 0 < index < self._cluster.workers:
                    self._compare(self._cluster.name(index), runs)
                    if index in self._workers:
                        self._workers[index].close()  # the worker was restarted
                    link.index = index
                    link.inbox.clear()
                    return True
        return False

    def _compare(self, name: str, runs: Mapping[str, Any]) -> None:
        if (names := differing(self._runs, runs)) and not self._refusal:
            self._refused_at = time.monotonic()
            self._refusal = printable(f"{name} and the chief do not run the same job ({names}): start them alike")
        if names := differing(self._runs, runs, advisory=True):
            log.warning(printable(f"{name} and the chief may round differently ({names})"))


def _call_chief(cluster: Cluster, runs: Mapping[str, Any], timeout_seconds: float) -> _Link:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            link = _Link(socket.create_connection(_endpoint(cluster.addresses[0]), timeout=5))
            link.send({"hello": cluster.index, "runs": dict(runs)})
            match _verdict(link, deadline + REFUSAL_SECONDS):
                case {"start": True}:
                    return link
                case {"refused": str(line)}:
                    link.close()
                    raise UserError(line)
            link.close()
        time.sleep(0.2)  # the chief is not there yet, or this is the server of an older run that is about to end
    raise PlatformFault(f"{cluster.name(0)} did not answer within {timeout_seconds:.0f} seconds (see its log)")


def _verdict(link: _Link, deadline: float) -> Any:
    """Returns the first message from the chief; None if it does not come in time."""
    with contextlib.suppress(OSError):
        while (left := deadline - time.monotonic()) > 0:
            link.connection.settimeout(left)
            link.receive()
            if link.inbox:
                return link.inbox.popleft()
    return None


class Peers:
    """Holds the chief's connections to all workers, or a worker's to its chief, and watches them in a thread."""

    def __init__(
        self, cluster: Cluster, links: Sequence[_Link], timeout_seconds: float, on_loss: Callable[[str, int], None]
    ) -> None:
        self._cluster, self._peers, self._on_loss = cluster, links, on_loss
        self._timeout_seconds = self._silence_seconds = timeout_seconds
        self._beat_seconds = min(BEAT_SECONDS, timeout_seconds / 4)
        self._calls, self._stage = 0, ""  # a stage of the start that all workers take together completes "it did not …"
        self._connects_since = float("inf")  # while TensorFlow's servers wait for each other
        self._lock, self._over = threading.Lock(), threading.Event()
        self.stop_reason = ""  # of the chief's guard
        for peer in links:
            peer.last_message = peer.in_step = time.monotonic()
            peer.connection.settimeout(timeout_seconds)
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Limits the time within the block, in which TensorFlow's servers wait for each other."""
        self._calls, self._stage, self._connects_since = 1, "start TensorFlow", time.monotonic()
        yield
        self._calls, self._stage, self._connects_since = 2, "load its data and build the model", float("inf")

    def begin_call(self) -> None:
        """Counts a call to the devices, which all workers make together."""
        self._calls, self._stage = self._calls + 1, ""

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
        """Waits as the last barrier: a worker until the chief has written everything, so that the chief ends last.

        The chief, when all its work is done, waits for the workers as long as they may be late.
        """
        if self._cluster.is_chief:
            self._await(lambda peer: peer.done, max(self._timeout_seconds, GOODBYE_SECONDS))
            self._send({"done": True})
            self._await(lambda peer: peer.closed, GOODBYE_SECONDS)  # closing first could lose our message
        else:
            self._send({"done": True})
            self._await(lambda peer: peer.done, float("inf"))  # a lost chief ends this process instead
        self._close()

    def fail(self, code: int, error: str) -> None:
        """Sends the others the reason why this worker ends, so that they end for the same reason."""
        self._send({"failed": code, "error": error[:2000], "index": self._cluster.index})
        self._close()

    def await_verdict(self) -> None:
        """Waits after an error of TensorFlow, to give the watching thread time to find a lost worker as its cause."""
        self._silence_seconds = min(self._silence_seconds, SUSPECT_SECONDS)
        self._over.wait(self._silence_seconds + BEAT_SECONDS)

    def _await(self, reached: Callable[[_Link], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < deadline and not all(map(reached, self._peers)):
            time.sleep(0.02)

    def _close(self) -> None:
        self._over.set()
        self._thread.join(2 * BEAT_SECONDS)

    def _send(self, message: Mapping[str, Any], *, skip: int | None = None) -> None:
        with self._lock:
            for peer in self._peers:
                if peer.index != skip and not peer.closed:
                    peer.send(message)

    def _watch(self) -> None:
        next_beat = time.monotonic()
        while not self._over.is_set():
            if time.monotonic() >= next_beat:
                self._send({"beat": self._calls})
                next_beat = time.monotonic() + self._beat_seconds
            for peer in self._peers:
                while peer.inbox:  # also what came with the chief's start
                    self._handle(peer, peer.inbox.popleft())
            self._check(time.monotonic())
            for peer in _ready([peer for peer in self._peers if not peer.closed], 0.1):
                self._receive(peer)
        for peer in self._peers:
            peer.connection.close()

    def _receive(self, peer: _Link) -> None:
        try:
            peer.receive()
            peer.last_message = time.monotonic()
        except OSError:
            peer.closed = True
            if not peer.done:
                self._lost(peer, "its process has ended")

    def _handle(self, peer: _Link, message: Any) -> None:
        """Handles a message; ignores what none of our workers would send."""
        match message:
            case {"beat": int(calls)} if calls != peer.calls:
                peer.calls, peer.in_step = calls, time.monotonic()
            case {"done": True}:
                peer.done = True
            case {"idle": int() | float() as seconds}:
                peer.idle_s = seconds
            case {"stop": str(reason)}:
                self.stop_reason = reason
            case {"failed": int(code), "error": str(error), "index": int(index)} if 0 <= index < self._cluster.workers:
                self._send({"failed": code, "error": error, "index": index}, skip=peer.index)
                self._leave(f"{self._cluster.name(index)} stopped: {error}", code, LEAVE_SECONDS)

    def _check(self, now: float) -> None:
        """Gives up a peer that is silent, or that makes no progress while behind, and a start that takes too long."""
        # Our count of a peer's calls is as old as its newest heartbeat.
        allowed, limit = self._timeout_seconds + 2 * self._beat_seconds, f"{self._timeout_seconds:.0f} seconds"
        for peer in self._peers:
            if peer.done or peer.closed:
                continue
            if peer.calls >= self._calls:
                peer.in_step = now
            behind = now - peer.in_step > allowed
            if now - peer.last_message > self._silence_seconds:
                self._lost(peer, f"it sent nothing for {self._silence_seconds:.0f} seconds")
            elif behind and self._stage:
                self._lost(peer, f"it did not {self._stage} within {limit}")
            elif behind and self._cluster.is_chief:  # a worker does not know what the chief alone has to do
                self._lost(peer, f"it made no progress for {limit} while the others did")
        if now - self._connects_since > allowed:
            line = f"TensorFlow's servers did not connect within {limit}: let the workers reach each other's ports"
            self._leave(line, INTERRUPTED, 0.0)

    def _lost(self, peer: _Link, reason: str) -> None:
        error = f"{self._cluster.name(peer.index)} was lost: {reason}"
        self._send({"failed": INTERRUPTED, "error": error, "index": self._cluster.index}, skip=peer.index)
        advice = "run the same command again to resume from the last checkpoint"
        self._leave(f"{error}; {advice}", INTERRUPTED, 0.0)

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
