"""Opens this worker's own port before TensorFlow does, and warns of ports that others may reach."""

import contextlib
import errno
import ipaddress
import socket

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.cluster.cluster_spec import Cluster


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
