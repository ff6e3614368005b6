"""Connects the workers of a job before TensorFlow starts, and watches them while it runs.

TensorFlow waits silently until all workers have started, and aborts the survivors of a lost worker
in C++, often without a useful message. So the chief first listens in Python on its own address of
the cluster; each worker connects and sends what it runs. If all run the same, TensorFlow takes over
the port, and the connections stay: a killed process closes its connection at once, a frozen machine
stops sending. --worker_timeout_seconds limits how long a worker may be late, silent or behind the
others. A message is a JSON object on a line:

    worker  {"hello": index, "runs": {…}}
    chief   {"start": true}, or {"refused": "…"}, when all are there
    both    {"beat": calls}, {"done": true}, {"failed": exit code, "error": "…"}
            {"idle": seconds of its GPUs}, {"stop": "…"}, from --stop_if_idle and --stop_if_over

Anyone who reaches the port may connect (docs/security.md): a connection that sends nothing, too
much or nonsense delays no worker.
"""

import ipaddress
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread, Timer
from typing import Any

import keras

from trainer.base.errors import (
    FAULT,
    INTERRUPTED,
    USER_MUST_CHANGE,
    PlatformFault,
    UserError,
    printable,
    shortened,
)
from trainer.base.log import log
from trainer.cluster.cluster_spec import Cluster

BEAT_SECONDS = 5.0  # between two heartbeats
# A peer without a heartbeat for so long is the likely cause of an error of TensorFlow.
SUSPECT_SECONDS = 20.0
# Workers have so long to close their connections at the end, and at least to send a message.
GOODBYE_SECONDS = 30.0
LEAVE_SECONDS = 5.0  # for our main thread to end by itself after another worker has failed
TURN_SECONDS = 0.02  # between two looks for events
_LONGEST_LINE = 256 * 1024  # bytes; the settings of a run are a few kilobytes
# How much longer a worker waits for the chief's answer than the chief for workers: they start at
# different times.
_ANSWER_SECONDS = 10.0
_LOG_SECONDS = 10.0  # between two lines that name the missing workers

_RETRY_SECONDS = 0.2  # between two tries to connect
# Environment variables that must be equal on all workers, though their processors may differ.
_SWITCHES = re.compile(r"(TF|XLA|CUDNN|CUBLAS|NVIDIA_TF32|ONEDNN|DNNL|MKL|KERAS)_?\w*")
# Of these, the variables that may differ between machines, or that change no number.
_NO_NUMBERS = re.compile(
    r"TF_CONFIG|TF_CPP_\w+|TF_NUM_\w+|TF_GPU_\w+|TF_FORCE_GPU_\w+|TF_GRPC_\w+|\w+_THREADS|KERAS_HOME|XLA_PYTHON_CLIENT_\w+|"
    r"\w*(DUMP|LOG|VERBOSE|CACHE|DIR|PATH)\w*"
)

Values = Mapping[str, Any]  # by name, all valid in JSON


class Link:
    """Holds a connection and the last known state of its other end.

    A thread adds its messages to `events`.
    """

    def __init__(self, connection: socket.socket, events: "SimpleQueue[Event]") -> None:
        self.connection = connection
        connection.setblocking(True)
        self.index = 0  # of the worker at the other end
        # It was in step when its calls last rose, or were at least as many as ours.
        self.last_message = self.in_step = time.monotonic()
        self.calls = 0  # to the devices, according to its newest heartbeat
        self.idle_s = 0.0  # for which its GPUs have been idle
        self.done = False  # a worker has no more work; the chief has written everything
        self.closed = False
        Thread(target=self._receive, args=(events,), name="link", daemon=True).start()

    def _receive(self, events: "SimpleQueue[Event]") -> None:
        """Adds each message to the events, "" for invalid JSON.

        None stands for the end of the connection, and for a line that is too long.
        """
        with suppress(OSError), self.connection.makefile("rb") as lines:
            while (line := lines.readline(_LONGEST_LINE)).endswith(b"\n"):
                self.last_message = time.monotonic()
                try:
                    events.put((self, json.loads(line)))
                except (ValueError, RecursionError):
                    events.put((self, ""))
        events.put((self, None))

    def send(self, message: Values) -> None:
        """Sends a message; a lost connection is noticed by the receiving thread."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Closes the connection."""
        self.closed = True
        with suppress(OSError):  # the other end may have closed it
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


Event = tuple[Link, Any]  # a connection, and a message that came by it


@dataclass(eq=False)
class Peers:
    """Holds the chief's connections to all workers, or a worker's to its chief.

    A thread watches them.
    """

    _cluster: Cluster
    _peers: Sequence[Link]
    _events: "SimpleQueue[Event]"
    _timeout_seconds: float
    _on_loss: Callable[[str, int], None]

    def __post_init__(self) -> None:
        self._silence_seconds = self._timeout_seconds
        self._beat_seconds = min(BEAT_SECONDS, self._timeout_seconds / 4)
        self._calls = 0
        self._lock = Lock()
        self._over = threading.Event()
        self.stop_reason = ""  # why the chief tells all workers to end
        for peer in self._peers:  # the first to come may have waited for long
            peer.last_message = peer.in_step = time.monotonic()
        self._thread = Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Limits the time within the block, in which TensorFlow's servers wait for each other."""
        line = (
            f"TensorFlow's servers did not connect within {self._timeout_seconds:.0f} seconds: let"
            " the workers reach each other's ports"
        )
        # A worker that did not start TensorFlow is reported by name before the timer ends.
        seconds = self._timeout_seconds + 3 * self._beat_seconds
        timer = Timer(seconds, self._leave, (line, INTERRUPTED, 0.0))
        timer.start()
        self.begin_call()
        try:
            yield
        finally:
            timer.cancel()
        self.begin_call()

    def begin_call(self) -> None:
        """Counts a call to the devices, or another stage that all workers begin together."""
        self._calls += 1

    def share_idle(self, seconds: float) -> list[float]:
        """Sends for how long our GPUs have been idle.

        On the chief, returns the times of all workers by index.
        """
        self._send({"idle": seconds})
        peers = sorted(self._peers, key=lambda peer: peer.index)
        return [seconds, *(peer.idle_s for peer in peers)]

    def stop(self, reason: str) -> None:
        """Tells all workers to end by themselves, for `reason`."""
        self.stop_reason = reason
        self._send({"stop": reason})

    def abandon(self) -> None:
        """Tells the others that this process is about to end and is not lost."""
        self._send({"done": True})

    def finish(self) -> None:
        """Waits until all workers are done; a worker waits until the chief has written all."""
        chief = self._cluster.is_chief
        self._send({"done": True})  # a lost chief ends a worker that waits for this
        limit = max(self._timeout_seconds, GOODBYE_SECONDS) if chief else float("inf")
        self._await(lambda peer: peer.done, limit)
        if chief:
            # The workers close first, as closing here could lose our message.
            self._await(lambda peer: peer.closed, GOODBYE_SECONDS)
        self._close()

    def fail(self, code: int, error: str) -> None:
        """Sends the others why this worker ends, so that they end for the same reason."""
        line = f"{self._cluster.name(self._cluster.index)} stopped: {error[:2000]}"
        self._send({"failed": code, "error": line})
        self._close()

    def await_verdict(self) -> None:
        """Waits, after an error of TensorFlow, until a lost worker may be found as its cause."""
        self._silence_seconds = min(self._silence_seconds, SUSPECT_SECONDS)
        self._over.wait(self._silence_seconds + BEAT_SECONDS)

    def _await(self, reached: Callable[[Link], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < deadline:
            if all(map(reached, self._peers)):
                return
            time.sleep(TURN_SECONDS)

    def _close(self) -> None:
        self._over.set()
        self._thread.join(2 * BEAT_SECONDS)

    def _send(self, message: Values, *, skip: Link | None = None) -> None:
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
            with suppress(Empty):
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
                peer.calls = calls
                peer.in_step = time.monotonic()
            case {"done": True}:
                peer.done = True
            case {"idle": int() | float() as seconds}:
                peer.idle_s = seconds
            case {"stop": str(reason)}:
                self.stop_reason = reason
            case {"failed": int(code), "error": str(line)}:
                self._send(message, skip=peer)  # the chief passes it on to the other workers
                self._leave(line, code, LEAVE_SECONDS)

    def _check(self, now: float) -> None:
        """Ends the job if a peer has ended or is silent.

        On the chief also if it is behind and makes no progress.
        """
        # The known count of a peer's calls is as old as its newest heartbeat.
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
            # Workers do not check the chief, which may be behind: it has work of its own, as
            # writing checkpoints.
            elif self._cluster.is_chief and now - peer.in_step > allowed:
                seconds = self._timeout_seconds
                self._lost(
                    peer, f"it made no progress for {seconds:.0f} seconds while the others did"
                )

    def _lost(self, peer: Link, reason: str) -> None:
        line = (
            f"{self._cluster.name(peer.index)} was lost: {reason}; run the same command again to"
            " resume from the last checkpoint"
        )
        self._send({"failed": INTERRUPTED, "error": line}, skip=peer)
        self._leave(line, INTERRUPTED, 0.0)

    def _leave(self, line: str, code: int, grace_seconds: float) -> None:
        """Ends this process by force.

        Its main thread may wait in C++ for a worker that never responds.
        """
        if self._over.wait(grace_seconds):
            return
        line = printable(line)
        code = code if code in (USER_MUST_CHANGE, INTERRUPTED) else FAULT
        log.error("%s", line)
        try:
            self._on_loss(line, code)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def arithmetic_switches(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the settings outside of TrainConfig that can change numbers, by name."""
    variables = [name for name in sorted(environment) if _SWITCHES.fullmatch(name)]
    variables = [name for name in variables if not _NO_NUMBERS.fullmatch(name)]
    switches = {name: environment[name] for name in variables}
    names = ("epsilon", "floatx", "image_data_format", "backend")
    return {f"keras.json {name}": str(getattr(keras.config, name)()) for name in names} | switches


def meet(
    cluster: Cluster,
    runs: Values,
    timeout_seconds: float,
    on_loss: Callable[[str, int], None] = lambda line, code: None,
) -> Peers:
    """Waits until all workers are connected.

    Raises UserError on each of them if their `runs` differ.
    runs: values that must be equal on all workers, by name, all valid in JSON. on_loss is called
        with the error line and the exit code just before this process ends because a worker is
        lost. Raises PlatformFault if a worker does not connect within `timeout_seconds`, as when
        its image is still pulled or its machine is missing, and UserError if this worker's own port
        is in use.
    """
    runs = json.loads(json.dumps({**runs, "TF_CONFIG": cluster.addresses}))
    warn_of_open_ports(cluster)
    events: SimpleQueue[Event] = SimpleQueue()
    host, port = _endpoint(cluster.addresses[cluster.index])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    backlog = max(128, cluster.workers)
    try:  # this proves that the port is free: TensorFlow would share it silently
        server = socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        raise UserError(
            f"TF_CONFIG: this worker's address {host}:{port} cannot be opened: {error.strerror}:"
            " end the process that uses the port, or use another port"
        ) from None
    with server:  # TensorFlow's server takes the port afterwards
        if cluster.is_chief:
            links = _gather(cluster, server, runs, timeout_seconds, events)
        else:
            links = [_join(cluster, runs, timeout_seconds, events)]
    return Peers(cluster, links, events, timeout_seconds, on_loss)


def _endpoint(address: str) -> tuple[str, int]:
    """Returns host and port of an address in TF_CONFIG."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def warn_of_open_ports(cluster: Cluster) -> None:
    """Logs a warning if others may reach the ports.

    They may on a public address or, on the chief, by a loopback address.
    """
    host, _ = _endpoint(cluster.addresses[cluster.index])
    with suppress(OSError, ValueError):
        addresses = [ipaddress.ip_address(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
        is_public = any(address.is_global for address in addresses)
        is_loopback = any(address.is_loopback for address in addresses)
        if is_public or (is_loopback and cluster.is_chief):
            log.warning(
                f"TensorFlow's servers listen on all addresses of their machines, not on {host}"
                " alone, and whoever reaches a port of TF_CONFIG reads and writes files as this"
                " job: close these ports to others (docs/security.md)"
            )


def _gather(
    cluster: Cluster,
    server: socket.socket,
    runs: Values,
    timeout_seconds: float,
    events: "SimpleQueue[Event]",
) -> list[Link]:
    """Returns the chief's connections to all workers.

    Raises UserError on all of them if one runs something else.
    """
    # Connections are accepted until each worker has said what it runs.
    began = time.monotonic()
    logged = began
    server.settimeout(TURN_SECONDS)
    links = []
    workers = {}  # connection and `runs` by index
    try:
        while missing := [index for index in range(1, cluster.workers) if index not in workers]:
            names = ", ".join(map(cluster.name, missing))
            if (now := time.monotonic()) > began + timeout_seconds:
                raise PlatformFault(
                    f"{names} did not start within {timeout_seconds:.0f} seconds (see its log)"
                )
            if now > logged + _LOG_SECONDS:
                log.info(f"waiting for {names}")
                logged = now
            with suppress(OSError):  # no connection is waiting
                links.append(Link(server.accept()[0], events))
            while not events.empty():
                link, message = events.get()
                match message:
                    case {"hello": int(index), "runs": dict(runs_there)} if (
                        0 < index < cluster.workers
                    ):
                        link.index = index
                        # After a restart of a worker its newest connection counts.
                        workers[index] = link, runs_there
                    case _:
                        link.close()

        # All start, or are told of the first worker that differs.
        refusals = []
        for link, runs_there in workers.values():
            if differences := differing(runs, runs_there):
                refusals.append(unlike(cluster.name(link.index), "run the same job", differences))
        for link, _ in workers.values():
            link.send({"refused": str(refusals[0])} if refusals else {"start": True})
        if refusals:
            raise refusals[0]
        # Those of the workers stay open; `finally` closes the others.
        joined = [link for link, _ in workers.values()]
        links = [link for link in links if link not in joined]
        return joined
    finally:
        for link in links:
            link.close()


def differing(chief: Values, worker: Values) -> str:
    """Returns the names and values that differ, at most three; empty if all are equal."""
    names = [name for name in {**chief, **worker} if chief.get(name) != worker.get(name)]
    lines = []
    for name in names[:3]:
        ours = shortened(repr(chief.get(name)))
        theirs = shortened(repr(worker.get(name)))
        lines.append(f"{name}: {ours} on the chief, {theirs} on the worker")
    return "; ".join(lines)


def unlike(worker: str, action: str, names: str) -> UserError:
    """Returns the error for a worker unlike the chief.

    action: such as "run the same job"; names: what differs.
    """
    return UserError(
        printable(
            f"{worker} and the chief do not {action} ({names}): start every worker by the same"
            " command, with the same files and versions"
        )
    )


def _join(
    cluster: Cluster, runs: Values, timeout_seconds: float, events: "SimpleQueue[Event]"
) -> Link:
    """Returns a worker's connection to the chief.

    Raises UserError if refused, PlatformFault without an answer.
    """
    deadline = time.monotonic() + timeout_seconds
    unknown = ""  # why the chief's name has no address
    while time.monotonic() < deadline:
        with suppress(OSError):
            try:
                connection = socket.create_connection(_endpoint(cluster.addresses[0]), timeout=5)
            except socket.gaierror as error:  # its machine may not have started yet
                if not unknown:
                    unknown = f"; TF_CONFIG: {cluster.addresses[0]}: {error.strerror}"
                    chief = cluster.name(0)
                    log.warning(f"waiting for {chief}{unknown}: check its name if it lasts")
                raise
            link = Link(connection, events)
            link.send({"hello": cluster.index, "runs": runs})
            with suppress(Empty):
                match events.get(timeout=max(0.0, deadline + _ANSWER_SECONDS - time.monotonic())):
                    case (_, {"start": True}):
                        return link
                    case (_, {"refused": str(line)}):
                        link.close()
                        raise UserError(line)
            link.close()
            while not events.empty():  # left by this connection
                events.get()
        # The chief has not started yet, or its port is still that of an earlier run.
        time.sleep(_RETRY_SECONDS)
    raise PlatformFault(
        f"{cluster.name(0)} did not answer within {timeout_seconds:.0f} seconds (see its"
        f" log{unknown})"
    )
