"""Exchanges JSON objects, one a line, over sockets; opens this worker's own port, and warns of ports open to others."""

import contextlib
import errno
import ipaddress
import json
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.cluster.cluster_spec import Cluster

_LONGEST_LINE = 256 * 1024  # bytes; the settings of a run are a few kilobytes


@dataclass(eq=False)
class Link:
    """Holds one connection, what arrived by it, and the last known state of the worker at its other end."""

    connection: socket.socket
    index: int = 0  # of that worker
    inbox: deque[Any] = field(default_factory=deque)  # of messages; None for a line that is no JSON
    rest: bytes = b""  # of a line that has not ended
    last_message: float = 0.0
    calls: int = 0  # to the devices, according to its newest heartbeat
    in_step: float = 0.0  # when its count last rose, or was as high as ours
    idle_s: float = 0.0  # of its GPUs
    done: bool = False  # it has no more work; of the chief: it has finished last
    closed: bool = False

    def __post_init__(self) -> None:
        self.connection.setblocking(True)  # for `send`

    def receive(self) -> None:
        """Moves what has arrived to the inbox, without waiting; closes a connection that has ended or says too much."""
        try:
            data = self.connection.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, self.rest = (self.rest + data).split(b"\n")
        self.inbox += map(_parse, lines)
        self.last_message = time.monotonic()
        if not data or len(self.rest) > _LONGEST_LINE:
            self.close()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message; whoever receives from a lost connection notices it."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Closes the connection."""
        self.closed = True
        self.connection.close()


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def endpoint(address: str) -> tuple[str, int]:
    """Returns host and port of an address in TF_CONFIG."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def warn_of_open_ports(cluster: Cluster) -> None:
    """Logs a warning where others may reach the ports: on a public address, and where only loopback was named."""
    host, _ = endpoint(cluster.addresses[cluster.index])
    with contextlib.suppress(OSError, ValueError):
        addresses = [ipaddress.ip_address(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
        if any(address.is_global or (address.is_loopback and cluster.is_chief) for address in addresses):
            log.warning(
                f"TensorFlow's servers listen on all addresses of their machines, not on {host} alone, and whoever "
                "reaches a port of TF_CONFIG reads and writes files as this job: close these ports to others "
                "(docs/security.md)"
            )


def own_port(cluster: Cluster) -> socket.socket:
    """Opens a server on our own address, which proves that the port is free: TensorFlow would share it silently.

    Raises UserError if it is not.
    """
    host, port = endpoint(cluster.addresses[cluster.index])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=max(128, cluster.workers))
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        reason = "another process uses this port: end it, or use another port" if in_use else str(error)
        raise UserError(f"TF_CONFIG: this worker's address {host}:{port} cannot be opened: {reason}") from None
