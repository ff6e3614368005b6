"""Lets the workers of a job meet before TensorFlow starts, and checks that all of them run the same job.

TensorFlow waits silently until all workers have started. So the chief first listens in Python on its own address of the
cluster; each worker connects, both prove that they know the job's secret, and the worker sends what it runs. If all run
the same, TensorFlow takes over the port, and `Peers` keeps the connections.

    chief   {"challenge": C}
    worker  {"hello": index, "challenge": W, "proof": of C}
    chief   {"welcome": index, "proof": of W}, or {"stranger": true}
    worker  {"runs": {…}}
    chief   {"start": index}, or {"refused": "…"}, when all are there
"""

import errno
import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from trainer.distribution.callers import Callers, differing
from trainer.distribution.cluster import Cluster
from trainer.distribution.credentials import Secret, new_challenge, secret_of
from trainer.distribution.messages import Reader, send, text
from trainer.distribution.peers import Peers
from trainer.errors import PlatformFault, UserError
from trainer.log import log

_REFUSAL_SECONDS = 10.0  # how long other workers may still connect and be refused too, once one runs something else
_LOG_SECONDS = 10.0
_MOST_NAMES = 8  # of workers on a line
_ANSWER_SECONDS = 10.0  # for each answer of the chief but the last


def meet(
    cluster: Cluster,
    runs: Mapping[str, Any],
    timeout_seconds: float,
    on_loss: Callable[[str, int], None] = lambda line, code: None,
    secret: Secret | None = None,
) -> Peers:
    """Waits until all workers are connected; raises UserError on each of them if their `runs` differ.

    `runs`: values that must be equal on all workers, by name, all valid in JSON; those whose name ends in "?" are only
    compared, and a difference is logged. Raises PlatformFault if a worker does not connect within `timeout_seconds`, as
    its image is still pulled or its machine is missing. `secret`: by default that of the job's id and addresses.

    `on_loss` is called with the error line and the exit code just before this process ends because a worker is lost.
    """
    host, _, port = cluster.addresses[cluster.index].rpartition(":")
    server = _own_port(host.strip("[]"), int(port), cluster.workers)
    deadline = time.monotonic() + timeout_seconds
    secret = secret or secret_of(cluster)
    try:
        if cluster.is_chief:
            links = _await_workers(cluster, server, runs, secret, deadline, timeout_seconds)
        else:
            links = {0: _call_chief(cluster, runs, secret, deadline, timeout_seconds)}
    finally:
        server.close()  # TensorFlow's server takes the port
    return Peers(cluster, links, timeout_seconds, on_loss)


def _own_port(host: str, port: int, workers: int) -> socket.socket:
    """Opens a server on our own address, which proves that the port is free: TensorFlow would share it silently."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=max(128, workers))
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        reason = "another process uses this port: end it, or use another port" if in_use else str(error)
        raise UserError(f"TF_CONFIG: this worker's address {host}:{port} cannot be opened: {reason}") from None


def _await_workers(
    cluster: Cluster,
    server: socket.socket,
    runs: Mapping[str, Any],
    secret: Secret,
    deadline: float,
    timeout_seconds: float,
) -> dict[int, socket.socket]:
    refusal, logged, compared = "", time.monotonic(), dict[int, Mapping[str, Any]]()
    with Callers(cluster, server, secret) as callers:
        while missing := set(range(1, cluster.workers)) - callers.runs.keys():
            if time.monotonic() > deadline:
                if refusal:
                    break
                names = _names(cluster, missing)
                raise PlatformFault(f"{names} did not start within {timeout_seconds:.0f} seconds (see its log)")
            if time.monotonic() - logged > _LOG_SECONDS:
                log.info(f"waiting for {_names(cluster, missing)}")
                logged = time.monotonic()
            callers.serve(1.0)
            new = {index: worker for index, worker in callers.runs.items() if compared.get(index) is not worker}
            compared |= new
            if not refusal and (refusal := _refusal(cluster, runs, new)):
                deadline = min(deadline, time.monotonic() + _REFUSAL_SECONDS)
        for index, worker in sorted(callers.runs.items()):
            if names := differing(runs, worker, advisory=True):
                log.warning(f"{cluster.name(index)} and the chief may round differently ({names})")
        return callers.answer(refusal)


def _names(cluster: Cluster, indices: Collection[int]) -> str:
    """Returns the names of workers, of many the first ones only."""
    first, more = sorted(indices)[:_MOST_NAMES], len(indices) - _MOST_NAMES
    return ", ".join(map(cluster.name, first)) + (f" and {more} more" if more > 0 else "")


def _refusal(cluster: Cluster, chief: Mapping[str, Any], found: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns the line for the first worker that runs something else; "" if all run the same."""
    for index, worker in sorted(found.items()):
        if names := differing(chief, worker):
            return f"{cluster.name(index)} and the chief do not run the same job ({names}): start them alike"
    return ""


def _call_chief(
    cluster: Cluster, runs: Mapping[str, Any], secret: Secret, deadline: float, timeout_seconds: float
) -> socket.socket:
    host, _, port = cluster.addresses[0].rpartition(":")
    chief, strange = cluster.name(0), False
    while time.monotonic() < deadline:
        try:
            link = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
        except OSError:
            time.sleep(0.2)
            continue
        # Without a listener, the socket may connect to itself.
        verdict = {} if link.getsockname() == link.getpeername() else _introduce(cluster, link, runs, secret, deadline)
        if "start" in verdict:
            return link
        link.close()
        if "refused" in verdict:
            raise UserError(text(verdict, "refused"))
        strange = strange or "stranger" in verdict
        time.sleep(0.5)  # the server belongs to an older run that is about to end
    if strange:
        raise PlatformFault(f"{chief} knows another secret: use the same cluster_secret_file and job on all workers")
    raise PlatformFault(f"{chief} did not answer within {timeout_seconds:.0f} seconds (see its log)")


def _introduce(
    cluster: Cluster, link: socket.socket, runs: Mapping[str, Any], secret: Secret, deadline: float
) -> dict[str, Any]:
    """Returns the chief's verdict; {} if what answers is not the chief."""
    reader, own = Reader(link), new_challenge()
    challenge = text(reader.read(_ANSWER_SECONDS), "challenge")
    if not challenge:
        return {}
    proof = secret.proof("worker", cluster.index, challenge, own)
    send(link, {"hello": cluster.index, "challenge": own, "proof": proof})
    welcome = reader.read(_ANSWER_SECONDS)
    if not secret.accepts(welcome.get("proof"), "chief", cluster.index, own, challenge):
        return {name: True for name in welcome if name == "stranger"}
    send(link, {"runs": dict(runs)})
    return reader.read(max(1.0, deadline - time.monotonic() + _REFUSAL_SECONDS))
