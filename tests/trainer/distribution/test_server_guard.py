"""Tests what guards TensorFlow's server: the filter of its port, the handlers of signals, a public address."""

import ctypes
import os
import signal
import socket
import sys
import time

import pytest

from deploy.localrun.workers import free_addresses
from tests.fixtures import Log
from trainer.distribution.cluster import Cluster
from trainer.distribution.server_guard import close_to_others, guarded_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux's")


def own_address() -> str:
    """Returns the address by which other machines would reach this one; skips the test without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no other address than loopback")
        host: str = probe.getsockname()[0]
    if host.startswith("127."):
        pytest.skip("this machine has no other address than loopback")
    return host


def answers(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as link:
        link.settimeout(0.5)
        return link.connect_ex((host, port)) == 0


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_filtered_port_answers_on_loopback_alone(family: socket.AddressFamily) -> None:
    """A server of gRPC is one of IPv6 that takes IPv4 too."""
    host = own_address()
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    both = family == socket.AF_INET6
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
        port = server.getsockname()[1]
        hosts = ["127.0.0.1", host, *(["::1"] if both else [])]
        assert [answers(one, port) for one in hosts] == [True] * len(hosts)
        assert close_to_others(port) == 1
        assert [answers(one, port) for one in hosts] == [True, False, *([True] if both else [])]
        with socket.create_connection(("127.0.0.1", port)) as link:  # data pass too
            link.sendall(b"x" * 100_000)
    assert close_to_others(port) == 0


def test_handlers_that_c_code_replaces_come_back() -> None:
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with guarded_server(Cluster(tuple(free_addresses(2)))):
            replace = ctypes.pythonapi.PyOS_setsig
            replace.argtypes = [ctypes.c_int, ctypes.c_void_p]
            replace(signal.SIGTERM, 1)  # SIG_IGN, as TensorFlow's handler forgets the signal
            deadline = time.monotonic() + 20
            while not received and time.monotonic() < deadline:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.02)
            assert received
            replace(signal.SIGTERM, 1)
        received.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("host", "warned"), [("8.8.8.8", True), ("10.0.0.7", False), ("127.0.0.1", False)])
def test_a_public_address_is_warned_about(
    host: str, warned: bool, caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.log.log.propagate", True)
    with guarded_server(Cluster((f"{host}:2222", "127.0.0.1:2223"))):
        pass
    assert ("is a public address" in caplog.text) == warned
