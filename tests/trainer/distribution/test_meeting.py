"""Tests the meeting of workers against strangers: none of them joins, ends or delays a job, or learns a setting."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from deploy.localrun.workers import free_addresses
from tests.fixtures import Log
from tests.support import refused
from trainer.distribution import callers, meeting
from trainer.distribution.cluster import Cluster
from trainer.distribution.credentials import Secret, secret_of
from trainer.distribution.meeting import meet
from trainer.distribution.messages import Reader
from trainer.distribution.peers import Peers
from trainer.errors import PlatformFault

RUNS = {"seed": 3, "data": "gs://secret/name"}
HELLOS = {
    "idle": b"",
    "deep": b"[" * 100_000 + b"\n",
    "deep object": b'{"hello":' * 20_000 + b"\n",
    "unproved": b'{"hello": 1, "runs": {}}\n',
    "wrong proof": b'{"hello": 1, "challenge": "x", "proof": "00"}\n',
    "wrong types": b'{"hello": [1], "challenge": null, "proof": 7}\n',
    "an end for all": b'{"failed": 2, "error": "\x1b[2J", "index": 1}\n',
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


def ended(*peers: Peers) -> None:
    """Ends their watching together: one that lost the other would end this process."""
    for one in peers:
        one._over.set()
    for one in peers:
        one._close()


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
        met = chief.result(30)
        time.sleep(0.3)
        assert [peer.closed for one in (met, worker) for peer in one._peers.values()] == [False, False]
        ended(met, worker)


def test_many_idle_and_slow_strangers_are_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "_HELLO_SECONDS", 0.4, raising=False)
    addresses = free_addresses(2)
    with awaiting(addresses) as chief, ExitStack() as strangers:
        idle = [strangers.enter_context(call(addresses[0])) for _ in range(100)]

        def drip() -> None:
            for _ in range(400):
                try:
                    idle[-1].sendall(b"{")
                except OSError:
                    return
                time.sleep(0.05)
            pytest.fail("the chief listened to a drip for 20 seconds")

        dripping = threading.Thread(target=drip)
        dripping.start()
        dripping.join(30)
        for one in idle:
            one.settimeout(10)
            while one.recv(1000):  # up to its end
                pass
        worker = meet(Cluster(tuple(addresses), 1), RUNS, 60.0)
        ended(chief.result(30), worker)


def test_a_worker_that_comes_again_takes_the_place_of_its_dead_connection() -> None:
    addresses = free_addresses(3)
    first, second = Cluster(tuple(addresses), 1), Cluster(tuple(addresses), 2)
    secret = secret_of(first)
    with awaiting(addresses) as chief:
        with call(addresses[0]) as killed:
            meeting._introduce(first, killed, RUNS, secret, time.monotonic() - 10)  # it leaves before the verdict
        with ThreadPoolExecutor() as pool:
            workers = [pool.submit(meet, one, RUNS, 60.0) for one in (second, first)]
            met = [one.result(60) for one in (chief, *workers)]
        time.sleep(0.3)
        assert not any(peer.closed for one in met for peer in one._peers.values())
        ended(*met)


def test_a_stranger_in_the_chiefs_place_learns_no_setting() -> None:
    addresses = free_addresses(2)
    host, port = addresses[0].split(":")
    heard = b""
    with ThreadPoolExecutor() as pool, socket.create_server((host, int(port))) as server:
        worker = pool.submit(meet, Cluster(tuple(addresses), 1), RUNS, 1.5)
        link, _ = server.accept()
        link.settimeout(10)
        with link:
            link.sendall(b'{"challenge": "abc"}\n')
            heard += link.recv(10_000)
            link.sendall(b'{"welcome": 1, "proof": "00"}\n{"refused": "end"}\n')
            with suppress(ConnectionResetError):  # it leaves without reading the rest
                while data := link.recv(10_000):
                    heard += data
        server.close()
        with pytest.raises(PlatformFault, match=r"did not answer within 2 seconds"):
            worker.result(30)
    assert json.loads(heard)["hello"] == 1
    assert b"secret" not in heard


def test_a_wrong_secret_is_told_on_both_sides_and_the_right_one_gets_in(tmp_path: Path, caplog: Log) -> None:
    addresses = free_addresses(2)
    cluster = Cluster(tuple(addresses), 1)
    with awaiting(addresses) as chief:
        with pytest.raises(PlatformFault, match="knows another secret"):
            meet(cluster, RUNS, 1.5, secret=Secret(b"other"))
        worker = meet(cluster, RUNS, 60.0)
        ended(chief.result(30), worker)
    assert "a connection from 127.0.0.1 was refused: it does not know this job's secret" in caplog.text


def test_many_strangers_are_warned_of_five_times(caplog: Log) -> None:
    addresses = free_addresses(2)
    with awaiting(addresses) as chief:
        for _ in range(8):
            with call(addresses[0]) as stranger, suppress(ConnectionResetError):
                stranger.sendall(HELLOS["wrong proof"])
                while stranger.recv(1000):
                    pass
        worker = meet(Cluster(tuple(addresses), 1), RUNS, 60.0)
        ended(chief.result(30), worker)
    assert caplog.text.count("it does not know this job's secret") == 5


def test_the_secret_comes_from_the_file_the_variable_or_the_job(tmp_path: Path) -> None:
    cluster, file = Cluster(("a:1", "b:1")), tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    given = {"CLOUD_ML_JOB_ID": "7", "TRAINER_CLUSTER_SECRET": "x" * 20}
    keys = [secret_of(cluster, environment={}), secret_of(Cluster(("a:1", "c:1")), environment={})]
    keys += [secret_of(cluster, environment={"CLOUD_ML_JOB_ID": "7"}), secret_of(cluster, environment=given)]
    keys += [secret_of(cluster, str(file), given)]
    assert len({secret.key for secret in keys}) == 5
    assert secret_of(cluster, str(file), {}) == keys[-1]
    file.write_text("short")
    with refused(f"cluster_secret_file={file}: 5 bytes are too few"):
        secret_of(cluster, str(file))
    with refused("cannot be read (No such file or directory)"):
        secret_of(cluster, str(tmp_path / "none"))


def test_what_follows_a_message_is_left_to_the_next_reader() -> None:
    """The chief may fail right after it has told a worker to start."""
    one, other = socket.socketpair()
    with one, other:
        other.sendall(b'{"start": 1}\n{"failed": 2, "error": "x", "index": 0}\n')
        assert Reader(one).read(5) == {"start": 1}
        assert one.recv(1000) == b'{"failed": 2, "error": "x", "index": 0}\n'


def test_a_message_has_one_deadline_for_all_its_bytes() -> None:
    one, other = socket.socketpair()
    with one, other:
        ending = threading.Event()

        def drip() -> None:
            while not ending.wait(0.02):
                other.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert Reader(one).read(0.3) == {}
        finally:
            ending.set()
            dripping.join()
