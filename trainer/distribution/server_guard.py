"""Guards the start of TensorFlow's server: keeps this process's signal handlers, and closes its port to other machines.

TensorFlow's server listens on all interfaces, whatever address TF_CONFIG names, and serves files to whoever reaches it.
Where TF_CONFIG names loopback only, a filter on the listening socket drops what comes from other addresses. Elsewhere
the network has to: docs/security.md.
"""

import contextlib
import ctypes
import ipaddress
import os
import signal
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from typing import Any

from trainer.distribution.cluster import Cluster
from trainer.log import log

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SECONDS = 0.1
_SO_ATTACH_FILTER = 26
_ACCEPT, _DROP = 0xFFFFFFFF, 0

# A classic BPF program over the packets of an IPv4 or IPv6 socket, (operation, if true, if false, operand) each:
# https://www.kernel.org/doc/html/latest/networking/filter.html. Offsets count from the header of the IP packet.
_NET = 0xFFF00000  # SKF_NET_OFF
_LOOPBACK_SOURCES = (
    (0x30, 0, 0, _NET),  # A = first byte
    (0x54, 0, 0, 0xF0),  # A &= version
    (0x15, 0, 3, 0x40),  # version 4, or skip to version 6
    (0x30, 0, 0, _NET + 12),  # A = first byte of the source
    (0x15, 8, 0, 127),
    (0x06, 0, 0, _DROP),
    (0x20, 0, 0, _NET + 8),  # A = four bytes of the source, which is ::1 or ::ffff:127.…
    (0x15, 0, 4, 0),
    (0x20, 0, 0, _NET + 12),
    (0x15, 0, 2, 0),
    (0x20, 0, 0, _NET + 16),
    (0x15, 2, 0, 0),
    (0x06, 0, 0, _DROP),
    (0x06, 0, 0, _ACCEPT),
    (0x20, 0, 0, _NET + 20),
    (0x15, 0, 1, 1),
    (0x06, 0, 0, _ACCEPT),
    (0x06, 0, 0, _DROP),
)


@contextlib.contextmanager
def guarded_server(cluster: Cluster) -> Iterator[None]:
    """Keeps SIGINT's and SIGTERM's handlers, which TensorFlow replaces, and filters its port, from within the block on.

    A thread does both again and again, because the block waits for the other workers with TensorFlow's handlers set.
    """
    handlers = {number: _handler(number) for number in _SIGNALS}
    addresses = [address.rpartition(":") for address in cluster.addresses]
    private = all(_is_loopback(host) for host, _, _ in addresses)
    port, over = int(addresses[cluster.index][2]), threading.Event()
    _warn_of_public_addresses(cluster)

    def guard() -> None:
        for number, handler in handlers.items():
            if _handler(number) != handler:
                _set_handler(number, handler)
        if private:
            close_to_others(port)

    def repeat() -> None:
        while not over.wait(_SECONDS):
            guard()

    thread = threading.Thread(target=repeat, name="server guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        guard()


def close_to_others(port: int) -> int:
    """Drops what arrives from other machines at this process's listening sockets of `port`; returns their number.

    Returns 0 where the system has no such filters: only Linux has.
    """
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in _LOOPBACK_SOURCES))
    given = struct.pack("HP", len(_LOOPBACK_SOURCES), ctypes.addressof(program))
    found = 0
    for number in _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
            if _listens(copy, port):
                copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, given)
                found += 1
    return found


def _sockets() -> Iterator[int]:
    """Yields the descriptors of this process's sockets; none where the system has no /proc."""
    names = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    for number in map(int, names):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(number).st_mode):
                yield number


def _listens(found: socket.socket, port: int) -> bool:
    """Returns whether a socket is a TCP server's on this port."""
    is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
    return bool(is_tcp and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port)


def _is_loopback(host: str) -> bool:
    name = host.strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _warn_of_public_addresses(cluster: Cluster) -> None:
    """Logs a warning for an address that machines of the internet may reach."""
    host = cluster.addresses[cluster.index].rpartition(":")[0].strip("[]")
    with contextlib.suppress(OSError, ValueError):
        found = {ipaddress.ip_address(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
        if any(address.is_global for address in found):
            log.warning(
                f"TF_CONFIG: {host} is a public address, and whoever reaches TensorFlow's port reads and writes files "
                "as this job: use private addresses, or a firewall (docs/security.md)"
            )


def _handler(number: int) -> Any:
    """Returns the address of the C function that handles a signal."""
    read = ctypes.pythonapi.PyOS_getsig
    read.argtypes, read.restype = [ctypes.c_int], ctypes.c_void_p
    return read(number)


def _set_handler(number: int, handler: Any) -> None:
    """Sets the C function that handles a signal: unlike `signal.signal`, in any thread."""
    write = ctypes.pythonapi.PyOS_setsig
    write.argtypes, write.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    write(number, handler)
