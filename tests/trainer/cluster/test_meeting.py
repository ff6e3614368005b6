"""Tests the meeting of workers: those that run something else are refused, and strangers hold up no worker."""

import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue

import pytest

from deploy.localrun.workers import free_addresses
from tests.fixtures import Log
from tests.support import refused
from trainer.base.errors import PlatformFault, UserError
from trainer.cluster import meeting
from trainer.cluster import peers as peers_module
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.meeting import meet, warn_of_open_ports
from trainer.cluster.peers import Peers

RUNS = {"seed": 3, "data": "gs://bucket/name"}
HELLOS = {
    "idle": b"",
    "deep": b"[" * 100_000 + b"\n",
    "deep object": b'{"hello":' * 20_000 + b"\n",
    "no settings": b'{"hello": 1, "runs": []}\n',
    "the chief's index": b'{"hello": 0, "runs": {}}\n',
    "an index of nobody": b'{"hello": 7, "runs": {}}\n',
    "wrong types": b'{"hello": [1], "runs": {}}\n',
    "an end for all": b'{"failed": 2, "error": "\x1b[2J"}\n',
    "long": b"x" * 600_000,
    "binary": bytes(range(256)),
}


def call(address: str) -> socket.socket:
    host, port = address.split(":")
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=10)
        except OSError:
            time.sleep(0.01)


@contextmanager
def awaiting(addresses: list[str]) -> Iterator[Future[Peers]]:
    """Yields a chief that waits for its workers."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit(meet, Cluster(tuple(addresses)), RUNS, 60.0)


def ended(*workers: Peers) -> None:
    """Ends their watching together, after a moment: one that lost another would end this process."""
    time.sleep(0.3)
    assert not any(peer.closed for worker in workers for peer in worker._peers)
    for worker in workers:
        worker._over.set()
    for worker in workers:
        worker._close()


@pytest.mark.parametrize("kind", HELLOS)
def test_strangers_do_not_keep_a_worker_out(kind: str) -> None:
    """Two of them come first; then the worker meets the chief, and both are still there a moment later."""
    addresses = free_addresses(2)
    with awaiting(addresses) as chief, ExitStack() as strangers:
        for _ in range(2):
            stranger = strangers.enter_context(call(addresses[0]))
            with suppress(OSError):  # the chief hung up
                stranger.sendall(HELLOS[kind])
        worker = meet(Cluster(tuple(addresses), 1), RUNS, 60.0)
        ended(chief.result(30), worker)


def test_a_worker_that_comes_again_takes_the_place_of_its_dead_connection() -> None:
    addresses = free_addresses(3)
    hello = json.dumps({"hello": 1, "runs": {**RUNS, "TF_CONFIG": addresses}}).encode() + b"\n"
    with awaiting(addresses) as chief, ExitStack() as killed:
        with call(addresses[0]) as dead:
            dead.sendall(hello)  # it leaves before the verdict
        killed.enter_context(call(addresses[0])).sendall(hello)  # its machine is gone, and closes nothing
        with ThreadPoolExecutor() as pool:
            workers = [pool.submit(meet, Cluster(tuple(addresses), 1), RUNS, 60.0)]
            time.sleep(0.5)  # with worker 2 before worker 1, the chief would begin with the dead connection
            workers.append(pool.submit(meet, Cluster(tuple(addresses), 2), RUNS, 60.0))
            met = [waiting.result(60) for waiting in (chief, *workers)]
        ended(*met)


@pytest.mark.parametrize("answer", [b"", b"x" * 600_000, b'{"start": 1}\n', b'{"refused": ["x"]}\n', b"SSH-2.0\r\n"])
def test_what_answers_in_the_chiefs_place_is_not_taken_for_it(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_SECONDS", 0.0)
    addresses = free_addresses(2)
    host, port = addresses[0].split(":")
    with ThreadPoolExecutor() as pool, socket.create_server((host, int(port))) as server:
        worker = pool.submit(meet, Cluster(tuple(addresses), 1), RUNS, 1.5)
        link, _ = server.accept()
        with link, suppress(OSError):
            link.sendall(answer)
            server.close()
            with pytest.raises(PlatformFault, match=r"did not answer within 2 seconds"):
                worker.result(30)


def test_what_follows_an_answer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chief may fail right after it has told a worker to start."""
    addresses, codes = free_addresses(2), SimpleQueue[int]()
    monkeypatch.setattr(os, "_exit", codes.put)
    monkeypatch.setattr(peers_module, "LEAVE_SECONDS", 0.0)
    host, port = addresses[0].split(":")
    with ThreadPoolExecutor() as pool, socket.create_server((host, int(port))) as server:
        worker = pool.submit(meet, Cluster(tuple(addresses), 1), RUNS, 60.0)
        link, _ = server.accept()
        with link:
            link.sendall(b'{"start": true}\n{"failed": 2, "error": "chief stopped: x"}\n')
            peers = worker.result(30)
            assert codes.get(timeout=10) == 2
            peers._close()


def test_all_workers_are_told_at_once_that_one_runs_something_else() -> None:
    addresses = tuple(free_addresses(3))
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(meet, Cluster(addresses, index), {"seed": index == 2}, 60.0) for index in range(3)]
        errors = {str(worker.exception()) for worker in waiting}
        assert all(isinstance(worker.exception(), UserError) for worker in waiting)
    line = f"worker 2 ({addresses[2]}) and the chief do not run the same job"
    alike = "start every worker by the same command, with the same files and versions"
    assert errors == {f"{line} (seed: False on the chief, True on the worker): {alike}"}


def test_a_port_in_use_is_one_line() -> None:
    addresses = free_addresses(2)
    host, port = addresses[0].split(":")
    with socket.create_server((host, int(port))), refused("another process uses this port"):
        meet(Cluster(tuple(addresses)), {}, 1.0)


def test_other_addresses_are_named() -> None:
    addresses = free_addresses(2)
    clusters = Cluster(tuple(addresses)), Cluster((addresses[0].replace("127.0.0.1", "localhost"), addresses[1]), 1)
    with ThreadPoolExecutor() as pool:
        for worker in [pool.submit(meet, cluster, {}, 60.0) for cluster in clusters]:
            with pytest.raises(UserError, match=r"\(TF_CONFIG: \['127.* on the chief, \['localh"):
                worker.result(60)


@pytest.mark.parametrize(("host", "index", "warned"), [
    ("8.8.8.8", 1, True), ("10.0.0.7", 0, False), ("127.0.0.1", 0, True), ("127.0.0.1", 1, False),
])  # fmt: skip
def test_ports_that_others_reach_are_warned_of_once(host: str, index: int, warned: bool, caplog: Log) -> None:
    """Of loopback the chief warns for all."""
    warn_of_open_ports(Cluster((f"{host}:2222", f"{host}:2223"), index))
    assert ("servers listen on all addresses" in caplog.text) == warned
