"""Lets the workers of a job meet before TensorFlow starts, and checks that all of them run the same job.

TensorFlow waits silently until all workers have started. So the chief first listens in Python on its own address of the
cluster; each worker connects and sends what it runs. If all run the same, TensorFlow takes over the port, and `Peers`
keeps the connections.
"""

import contextlib
import errno
import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer.distribution.cluster import Cluster
from trainer.distribution.peers import Peers, parse
from trainer.errors import PlatformFault, UserError
from trainer.log import log

_REFUSAL_SECONDS = 10.0  # how long other workers may still connect and be refused too, once one runs something else


def meet(
    cluster: Cluster,
    runs: Mapping[str, Any],
    timeout_seconds: float,
    on_loss: Callable[[str, int], None] = lambda line, code: None,
) -> Peers:
    """Waits until all workers are connected; raises UserError on each of them if their `runs` differ.

    `runs`: values that must be equal on all workers, by name, all valid in JSON. Raises PlatformFault if a worker does
    not connect within `timeout_seconds`, as its image is still pulled or its machine is missing.

    `on_loss` is called with the error line and the exit code just before this process ends because a worker is lost.
    """
    host, _, port = cluster.addresses[cluster.index].rpartition(":")
    server = _own_port(host.strip("[]"), int(port))
    deadline = time.monotonic() + timeout_seconds
    try:
        if cluster.is_chief:
            links = _await_workers(cluster, server, runs, deadline, timeout_seconds)
        else:
            links = {0: _call_chief(cluster, runs, deadline, timeout_seconds)}
    finally:
        server.close()  # TensorFlow's server takes the port
    return Peers(cluster, links, timeout_seconds, on_loss)


def _own_port(host: str, port: int) -> socket.socket:
    """Opens a server on our own address, which proves that the port is free: TensorFlow would share it silently."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        reason = "another process uses this port: end it, or use another port" if in_use else str(error)
        raise UserError(f"TF_CONFIG: this worker's address {host}:{port} cannot be opened: {reason}") from None


def _await_workers(
    cluster: Cluster, server: socket.socket, runs: Mapping[str, Any], deadline: float, timeout_seconds: float
) -> dict[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    refusal, logged = "", time.monotonic()
    server.settimeout(1.0)
    while len(links) < cluster.workers - 1:
        missing = ", ".join(cluster.name(index) for index in range(1, cluster.workers) if index not in links)
        if time.monotonic() > deadline:
            if refusal:
                break
            raise PlatformFault(f"{missing} did not start within {timeout_seconds:.0f} seconds (see its log)")
        if time.monotonic() - logged > 10:
            log.info(f"waiting for {missing}")
            logged = time.monotonic()
        try:
            link, _ = server.accept()
        except TimeoutError:
            continue
        hello = _read_line(link)
        index = hello.get("hello")
        if not isinstance(index, int) or not 0 < index < cluster.workers:
            link.close()
            continue
        _send_line(link, {"welcome": index})
        if index in links:
            links[index].close()  # the worker was restarted
        links[index] = link
        differing = _differing(runs, hello.get("runs"))
        if differing and not refusal:
            refusal = f"{cluster.name(index)} and the chief do not run the same job ({differing}): start them alike"
            deadline = min(deadline, time.monotonic() + _REFUSAL_SECONDS)
    for index, link in links.items():
        _send_line(link, {"refused": refusal} if refusal else {"start": index})
    if refusal:
        for link in links.values():
            link.close()
        raise UserError(refusal)
    return links


def _call_chief(cluster: Cluster, runs: Mapping[str, Any], deadline: float, timeout_seconds: float) -> socket.socket:
    host, _, port = cluster.addresses[0].rpartition(":")
    while time.monotonic() < deadline:
        try:
            link = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
        except OSError:
            time.sleep(0.2)
            continue
        if link.getsockname() == link.getpeername():  # without a listener, the socket may connect to itself
            link.close()
            continue
        _send_line(link, {"hello": cluster.index, "runs": dict(runs)})
        if _read_line(link).get("welcome") == cluster.index:
            verdict = _read_line(link, deadline - time.monotonic())
            if "start" in verdict:
                return link
            if "refused" in verdict:
                link.close()
                raise UserError(verdict["refused"])
        link.close()  # the server belongs to an older run that is about to end
        time.sleep(0.5)
    raise PlatformFault(f"{cluster.name(0)} did not answer within {timeout_seconds:.0f} seconds (see its log)")


def _differing(chief: Mapping[str, Any], worker: Any) -> str:
    """Returns the names and values that differ; empty if all are equal."""
    worker = worker if isinstance(worker, dict) else {}
    chief = json.loads(json.dumps(chief))
    names = [name for name in {**chief, **worker} if chief.get(name) != worker.get(name)]
    return "; ".join(
        f"{name}: {chief.get(name)!r} on the chief, {worker.get(name)!r} on the worker" for name in names[:3]
    )


def _send_line(link: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the reader of the response notices a lost connection
        link.sendall(json.dumps(message).encode() + b"\n")


def _read_line(link: socket.socket, timeout_seconds: float = 5.0) -> dict[str, Any]:
    """Reads one JSON object, byte by byte so that no later data is consumed; returns {} for anything else."""
    link.settimeout(max(0.1, timeout_seconds))
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < 65536:
            byte = link.recv(1)
            if not byte:
                return {}
            line += byte
    except OSError:
        return {}
    return parse(line)
