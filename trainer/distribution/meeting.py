"""Workers meet before TensorFlow starts, and say what they run.

TensorFlow starts no worker before all are there. So the chief first listens on its own address of the cluster, in
Python: each worker calls in and says what it runs. Where all run the same, TensorFlow takes the port; the connections
stay, for `Peers`.
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

_OTHERS_SECONDS = 10.0  # for the others to come and hear it too, once one worker is found to run something else


def meet(
    cluster: Cluster,
    runs: Mapping[str, Any],
    timeout_seconds: float,
    on_loss: Callable[[str, int], None] = lambda line, code: None,
) -> Peers:
    """Waits until all workers are there, and run the same: UserError on each of them where `runs` differ.

    `runs`: what must be equal everywhere, by name; what JSON can hold: texts, numbers, true, false, null. PlatformFault
    where one does not come within `timeout_seconds`: an image may still be pulled, a machine be missing.

    `on_loss` hears, just before this process ends, the line that is said when a worker is gone, and the exit code.
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
    """A server on our own address: it proves that the port is free, which TensorFlow does not (it shares ports)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        reason = "another process uses this port: end it, or take another port" if in_use else str(error)
        raise UserError(f"TF_CONFIG: this worker's address {host}:{port} cannot be opened: {reason}") from None


def _await_workers(
    cluster: Cluster, server: socket.socket, runs: Mapping[str, Any], deadline: float, timeout_seconds: float
) -> dict[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    refusal, said = "", time.monotonic()
    server.settimeout(1.0)
    while len(links) < cluster.workers - 1:
        missing = [cluster.name(index) for index in range(1, cluster.workers) if index not in links]
        if time.monotonic() > deadline:
            if refusal:
                break
            raise PlatformFault(
                f"{', '.join(missing)} did not start within {timeout_seconds:.0f} seconds (see its log)"
            )
        if time.monotonic() - said > 10:
            log.info(f"waiting for {', '.join(missing)}")
            said = time.monotonic()
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
            links[index].close()  # it was started anew
        links[index] = link
        differing = _differing(runs, hello.get("runs"))
        if differing and not refusal:
            refusal = f"{cluster.name(index)} and the chief do not run the same ({differing}): start them alike"
            deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
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
        if link.getsockname() == link.getpeername():  # a port that nobody listens on may be connected to itself
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
        link.close()  # a server of an older run that is about to end
        time.sleep(0.5)
    raise PlatformFault(f"{cluster.name(0)} did not answer within {timeout_seconds:.0f} seconds (see its log)")


def _differing(ours: Mapping[str, Any], theirs: Any) -> str:
    """Names and values that differ; empty where all are equal."""
    theirs = theirs if isinstance(theirs, dict) else {}
    ours = json.loads(json.dumps(ours))
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return "; ".join(f"{name}: {ours.get(name)!r} on the chief, {theirs.get(name)!r} there" for name in names[:3])


def _send_line(link: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it is gone: whoever waits for its answer sees that
        link.sendall(json.dumps(message).encode() + b"\n")


def _read_line(link: socket.socket, timeout_seconds: float = 5.0) -> dict[str, Any]:
    """One JSON object a line, byte by byte so that nothing behind it is taken; {} for anything else."""
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
