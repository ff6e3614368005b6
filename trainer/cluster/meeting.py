"""Lets the workers of a job meet before TensorFlow starts; peers.py watches them while it runs.

TensorFlow waits silently until all workers have started, and aborts the survivors of a lost one in C++, often without a
useful message. So the chief first listens in Python on its own address of the cluster; each worker connects and sends
what it runs. If all run the same, TensorFlow takes over the port, and the connections stay: a killed process closes its
own at once, a frozen machine stops sending. --worker_timeout_seconds limits how long a worker may be late, silent or
behind the others. A message is a JSON object on a line:

    worker  {"hello": index, "runs": {…}}
    chief   {"start": true}, or {"refused": "…"}, when all are there
    both    {"beat": calls}, {"done": true}, {"failed": exit code, "error": "…"}
            {"idle": seconds of its GPUs}, {"stop": "…"}, from --stop_if_idle and --stop_if_over

Anyone who reaches the port may connect (docs/security.md): a connection that sends nothing, too much or nonsense holds
up no worker.
"""

import contextlib
import errno
import ipaddress
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import keras

from trainer.base.errors import PlatformFault, UserError, printable, shortened
from trainer.base.log import log
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.peers import TURN_SECONDS, Event, Link, Peers

_ANSWER_SECONDS = 10.0  # that a worker grants the chief beyond its own limit: they start at different times
_LOG_SECONDS = 10.0
_RETRY_SECONDS = 0.2  # between two tries to connect
_MOST_NAMES = 8  # of workers on a line
# Switches that workers must have in common, though their processors may differ.
_SWITCHES = re.compile(r"(TF|XLA|CUDNN|CUBLAS|NVIDIA_TF32|ONEDNN|DNNL|MKL|KERAS)_?\w*")
# What is different on each machine by right, or changes no number.
_NO_NUMBERS = re.compile(
    r"TF_CONFIG|TF_CPP_\w+|TF_NUM_\w+|TF_GPU_\w+|TF_FORCE_GPU_\w+|TF_GRPC_\w+|\w+_THREADS|KERAS_HOME|XLA_PYTHON_CLIENT_\w+|"
    r"\w*(DUMP|LOG|VERBOSE|CACHE|DIR|PATH)\w*"
)


def arithmetic(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns settings that can change numbers, by name."""
    switches = {
        name: value
        for name, value in sorted(environment.items())
        if _SWITCHES.fullmatch(name) and not _NO_NUMBERS.fullmatch(name)
    }
    return {
        "keras.json epsilon": str(keras.config.epsilon()),
        "keras.json floatx": keras.config.floatx(),
        "keras.json image_data_format": keras.config.image_data_format(),
        "keras.json backend": keras.config.backend(),
        **switches,
    }


def meet(
    cluster: Cluster,
    runs: Mapping[str, Any],
    timeout_seconds: float,
    on_loss: Callable[[str, int], None] = lambda line, code: None,
) -> Peers:
    """Waits until all workers are connected; raises UserError on each of them if their `runs` differ.

    `runs`: values that must be equal on all workers, by name, all valid in JSON. `on_loss` is called with the error
    line and the exit code just before this process ends because a worker is lost. Raises PlatformFault if a worker does
    not connect within `timeout_seconds`, as its image is still pulled or its machine is missing.
    """
    runs = json.loads(json.dumps({**runs, "TF_CONFIG": cluster.addresses}))
    warn_of_open_ports(cluster)
    events: SimpleQueue[Event] = SimpleQueue()
    with _own_port(cluster) as server:  # TensorFlow's server takes the port afterwards
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
    """Opens a server on our own address, which proves that the port is free: TensorFlow would share it silently.

    Raises UserError if it is not.
    """
    host, port = _endpoint(cluster.addresses[cluster.index])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=max(128, cluster.workers))
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        reason = "another process uses this port: end it, or use another port" if in_use else str(error)
        raise UserError(f"TF_CONFIG: this worker's address {host}:{port} cannot be opened: {reason}") from None


def _gather(
    cluster: Cluster,
    server: socket.socket,
    runs: Mapping[str, Any],
    timeout_seconds: float,
    events: "SimpleQueue[Event]",
) -> list[Link]:
    """Returns the chief's connections to all workers. Raises UserError on all of them if one runs something else."""
    began = logged = time.monotonic()
    server.settimeout(TURN_SECONDS)
    links: list[Link] = []
    workers: dict[int, tuple[Link, Any]] = {}  # with what each runs
    try:
        while missing := [index for index in range(1, cluster.workers) if index not in workers]:
            names = ", ".join(map(cluster.name, missing[:_MOST_NAMES]))
            names += f" and {len(missing) - _MOST_NAMES} more" if len(missing) > _MOST_NAMES else ""
            if (now := time.monotonic()) > began + timeout_seconds:
                raise PlatformFault(f"{names} did not start within {timeout_seconds:.0f} seconds (see its log)")
            if now > logged + _LOG_SECONDS:
                log.info(f"waiting for {names}")
                logged = now
            with contextlib.suppress(OSError):  # nobody calls now
                links.append(Link(server.accept()[0], events))
            while not events.empty():
                link, message = events.get()
                match message:
                    case {"hello": int(index), "runs": dict(runs_there)} if 0 < index < cluster.workers:
                        link.index = index
                        workers[index] = link, runs_there  # of a worker that was restarted the newest counts
                    case _:
                        link.close()
        _compare(cluster, runs, [*workers.values()])
        return [links.pop(links.index(link)) for link, _ in workers.values()]
    finally:
        for link in links:
            link.close()


def _compare(cluster: Cluster, runs: Mapping[str, Any], workers: Sequence[tuple[Link, Any]]) -> None:
    """Tells the workers to start; tells all of them, and raises UserError, if one runs something else."""
    differences = [(link, names) for link, runs_there in workers if (names := differing(runs, runs_there))]
    refusals = [unlike(cluster.name(link.index), "run the same job", names) for link, names in differences]
    for link, _ in workers:
        link.send({"refused": str(refusals[0])} if refusals else {"start": True})
    if refusals:
        raise refusals[0]


def differing(chief: Mapping[str, Any], worker: Mapping[str, Any]) -> str:
    """Returns the names and values that differ, at most three; empty if all are equal."""
    names = [name for name in {**chief, **worker} if chief.get(name) != worker.get(name)]
    return "; ".join(
        f"{name}: {shortened(repr(chief.get(name)))} on the chief, {shortened(repr(worker.get(name)))} on the worker"
        for name in names[:3]
    )


def unlike(worker: str, action: str, names: str) -> UserError:
    """Returns the error for a worker that does not `action` as the chief; names: what differs."""
    return UserError(
        printable(
            f"{worker} and the chief do not {action} ({names}): start every worker by the same command, with the same "
            "files and versions"
        )
    )


def _join(cluster: Cluster, runs: Mapping[str, Any], timeout_seconds: float, events: "SimpleQueue[Event]") -> Link:
    """Returns a worker's connection to the chief. Raises UserError if the chief refuses it."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            link = Link(socket.create_connection(_endpoint(cluster.addresses[0]), timeout=5), events)
            link.send({"hello": cluster.index, "runs": runs})
            with contextlib.suppress(Empty):
                match events.get(timeout=max(0.0, deadline + _ANSWER_SECONDS - time.monotonic())):
                    case (_, {"start": True}):
                        return link
                    case (_, {"refused": str(line)}):
                        link.close()
                        raise UserError(line)
            link.close()
            while not events.empty():  # of this connection
                events.get()
        time.sleep(_RETRY_SECONDS)  # the chief is not there yet, or this is an older run that is about to end
    raise PlatformFault(f"{cluster.name(0)} did not answer within {timeout_seconds:.0f} seconds (see its log)")
