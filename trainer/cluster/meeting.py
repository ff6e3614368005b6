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
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from trainer.base.errors import PlatformFault, UserError
from trainer.base.log import log
from trainer.cluster.agreement import differing, unlike
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.connections import Event, Link, endpoint, own_port, warn_of_open_ports
from trainer.cluster.peers import TURN_SECONDS, Peers

_ANSWER_SECONDS = 10.0  # that a worker grants the chief beyond its own limit: they start at different times
_LOG_SECONDS = 10.0
_RETRY_SECONDS = 0.2  # between two tries to connect
_MOST_NAMES = 8  # of workers on a line


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
    with own_port(cluster) as server:  # TensorFlow's server takes the port afterwards
        if cluster.is_chief:
            links = _gather(cluster, server, runs, timeout_seconds, events)
        else:
            links = [_join(cluster, runs, timeout_seconds, events)]
    return Peers(cluster, links, events, timeout_seconds, on_loss)


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


def _join(cluster: Cluster, runs: Mapping[str, Any], timeout_seconds: float, events: "SimpleQueue[Event]") -> Link:
    """Returns a worker's connection to the chief. Raises UserError if the chief refuses it."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            link = Link(socket.create_connection(endpoint(cluster.addresses[0]), timeout=5), events)
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
