"""Exchanges JSON objects, one a line, over sockets; opens this worker's own port, and warns of ports open to others."""

import errno
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.cluster.cluster_spec import Cluster

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
        with suppress(OSError), self.connection.makefile("rb") as lines:
            while (line := lines.readline(_LONGEST_LINE)).endswith(b"\n"):
                self.last_message = time.monotonic()
                try:
                    events.put((self, json.loads(line)))
                except (ValueError, RecursionError):
                    events.put((self, ""))
        events.put((self, None))

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message; whoever receives from a lost connection notices it."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Closes the connection."""
        self.closed = True
        with suppress(OSError):  # the other end may have closed it
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


Event = tuple[Link, Any]  # a connection, and a message that came by it


def endpoint(address: str) -> tuple[str, int]:
    """Returns host and port of an address in TF_CONFIG."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def warn_of_open_ports(cluster: Cluster) -> None:
    """Logs a warning where others may reach the ports: on a public address, and where only loopback was named."""
    host, _ = endpoint(cluster.addresses[cluster.index])
    with suppress(OSError, ValueError):
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
