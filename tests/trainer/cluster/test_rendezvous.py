"""Tests the meeting of workers: others are refused, strangers hold up no worker, failures reach all
with their code."""

import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue

import pytest

from deploy.platform.local import free_addresses
from tests.fixtures import Log, Make, Patch, parametrize
from tests.support import refused
from tests.workers import until
from trainer.base.errors import FAULT, INTERRUPTED, USER_MUST_CHANGE, PlatformFault, UserError
from trainer.base.run_files.job_directory import open_job_dir
from trainer.cluster import rendezvous
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.rendezvous import Peers, arithmetic_switches, meet, warn_of_open_ports
from trainer.reporting.result import library_versions, refuse_hopeless_restart
from trainer.run import job, start

RUNS = {"seed": 3, "data": "gs://bucket/name"}
HELLOS = {
    "idle": b"",
    "deep": b"[" * 100_000 + b"\n",
    "no settings": b'{"hello": 1, "runs": []}\n',
    "the chief's index": b'{"hello": 0, "runs": {}}\n',
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


def end_watching(*workers: Peers) -> None:
    """Ends the threads of all of them: none takes the end of another for a loss, at which it would
    end this process."""
    for worker in workers:
        for peer in worker._peers:
            peer.done = True
    for worker in workers:
        worker._over.set()
    for worker in workers:
        worker._thread.join(10)


def check_connected(*workers: Peers) -> None:
    """Checks that they are connected a moment later, and ends their threads."""
    time.sleep(0.3)
    assert not any(peer.closed for worker in workers for peer in worker._peers)
    end_watching(*workers)


@parametrize("kind", HELLOS)
def test_strangers_do_not_keep_a_worker_out(kind: str) -> None:
    """Two of them come first; then the worker meets the chief, and both are still there a moment
    later."""
    addresses = free_addresses(2)
    with ThreadPoolExecutor() as pool, ExitStack() as strangers:
        chief = pool.submit(meet, Cluster(tuple(addresses)), RUNS, 60.0)
        for _ in range(2):
            stranger = strangers.enter_context(call(addresses[0]))
            with suppress(OSError):  # the chief hung up
                stranger.sendall(HELLOS[kind])
        worker = meet(Cluster(tuple(addresses), 1), RUNS, 60.0)
        check_connected(chief.result(30), worker)


def test_a_worker_that_comes_again_takes_the_place_of_its_dead_connection() -> None:
    addresses = free_addresses(3)
    hello = json.dumps({"hello": 1, "runs": {**RUNS, "TF_CONFIG": addresses}}).encode() + b"\n"
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(meet, Cluster(tuple(addresses)), RUNS, 60.0)]
        with call(addresses[0]) as leaves:
            leaves.sendall(hello)  # it leaves before the verdict
        with call(addresses[0]) as dead:
            dead.sendall(hello)  # its machine is gone, and closes nothing
            # with worker 2 before worker 1, the chief would begin with the dead connection
            for index in (1, 2):
                waiting.append(pool.submit(meet, Cluster(tuple(addresses), index), RUNS, 60.0))
                time.sleep(0.5)
            check_connected(*(each.result(60) for each in waiting))


@contextmanager
def joining(answer: bytes, seconds: float) -> Iterator[Future[Peers]]:
    """Yields a worker whose chief is this test, which answers one connection and takes no other."""
    addresses = free_addresses(2)
    host, port = addresses[0].split(":")
    with ThreadPoolExecutor() as pool, socket.create_server((host, int(port))) as server:
        worker = pool.submit(meet, Cluster(tuple(addresses), 1), RUNS, seconds)
        link, _ = server.accept()
        server.close()
        with link:
            with suppress(OSError):  # the worker may hang up
                link.sendall(answer)
            yield worker


@parametrize(
    "answer", [b"", b"x" * 600_000, b'{"start": 1}\n', b'{"refused": ["x"]}\n', b"SSH-2.0\r\n"]
)
def test_what_answers_in_the_chiefs_place_is_not_taken_for_it(
    answer: bytes, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 0.0)
    with joining(answer, 1.5) as worker:
        error = worker.exception(30)
    assert isinstance(error, PlatformFault)
    assert "did not answer within 2 seconds" in str(error)


def test_what_follows_an_answer_is_kept(monkeypatch: Patch) -> None:
    """The chief may fail right after it has told a worker to start."""
    codes = SimpleQueue[int]()
    monkeypatch.setattr(os, "_exit", codes.put)
    monkeypatch.setattr(rendezvous, "LEAVE_SECONDS", 0.0)
    with joining(b'{"start": true}\n{"failed": 2, "error": "chief stopped: x"}\n', 60.0) as worker:
        peers = worker.result(30)
        assert codes.get(timeout=10) == 2
        peers._close()


def test_all_workers_are_told_at_once_that_one_runs_something_else() -> None:
    addresses = tuple(free_addresses(3))
    with ThreadPoolExecutor() as pool:
        waiting = [
            pool.submit(meet, Cluster(addresses, index), {"seed": index == 2}, 60.0)
            for index in range(3)
        ]
        errors = {str(worker.exception()) for worker in waiting}
        assert all(isinstance(worker.exception(), UserError) for worker in waiting)
    line = f"worker 2 ({addresses[2]}) and the chief do not run the same job"
    alike = "start every worker by the same command, with the same files and versions"
    assert errors == {f"{line} (seed: False on the chief, True on the worker): {alike}"}


def test_a_chief_whose_name_has_no_address_is_told_at_once_and_at_the_end(caplog: Log) -> None:
    own = free_addresses(1)[0]
    chief = "chief.invalid:2222"
    with caplog.at_level("WARNING"), pytest.raises(PlatformFault) as error:
        meet(Cluster((chief, own), 1), {}, 1.5)
    (line,) = [each for each in caplog.messages if "TF_CONFIG" in each]
    assert line.startswith(f"waiting for chief ({chief}); TF_CONFIG: {chief}: ")
    assert f"did not answer within 2 seconds (see its log; TF_CONFIG: {chief}: " in str(error.value)


def test_a_port_in_use_is_one_line() -> None:
    addresses = free_addresses(2)
    host, port = addresses[0].split(":")
    with (
        socket.create_server((host, int(port))),
        refused("cannot be opened: Address already in use"),
    ):
        meet(Cluster(tuple(addresses)), {}, 1.0)


@parametrize(
    "host, index, warned",
    [("8.8.8.8", 1, True), ("10.0.0.7", 0, False), ("127.0.0.1", 0, True), ("127.0.0.1", 1, False)],
)
def test_ports_that_others_reach_are_warned_of_once(
    host: str, index: int, warned: bool, caplog: Log
) -> None:
    """Of loopback the chief warns for all."""
    warn_of_open_ports(Cluster((f"{host}:2222", f"{host}:2223"), index))
    assert ("servers listen on all addresses" in caplog.text) == warned


LOST: list[tuple[str, int]] = []


@pytest.fixture
def met(monkeypatch: Patch) -> Iterator[tuple[Peers, Peers]]:
    """Yields a chief and a worker. The chief stops watching where it would end its process."""
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(rendezvous, "LEAVE_SECONDS", 0.0)
    LOST.clear()
    addresses = tuple(free_addresses(2))

    def on_loss(line: str, code: int) -> None:
        LOST.append((line, code))
        chief._over.set()

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(meet, Cluster(addresses, 1), {}, 10.0)
        chief = meet(Cluster(addresses), {}, 10.0, on_loss)
        worker = waiting.result()
    yield chief, worker
    end_watching(chief, worker)


@parametrize("code", [USER_MUST_CHANGE, FAULT, INTERRUPTED])
def test_a_worker_that_fails_is_reported_with_its_exit_code(
    met: tuple[Peers, Peers], code: int
) -> None:
    chief, worker = met
    worker.fail(code, "no such \x1b[31mfolder\nnew line")
    chief._thread.join(10)
    error = r"no such \x1b[31mfolder\nnew line"
    assert [(line.partition(" stopped: ")[2], reported) for line, reported in LOST] == [
        (error, code)
    ]


def test_a_worker_is_lost_only_if_its_count_does_not_rise(
    met: tuple[Peers, Peers], monkeypatch: Patch
) -> None:
    """Makes a call per second and a heartbeat per five: the chief's count of the worker is always
    behind."""
    end_watching(*met)  # from here on this test replaces the watching thread
    chief = met[0]
    now = [time.monotonic()]
    chief._over.clear()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    (peer,) = chief._peers
    peer.closed = False
    peer.done = False

    def pass_seconds(count: int) -> None:
        for _ in range(count):
            now[0] += 1
            peer.last_message = now[0]
            chief._check(now[0])

    for _ in range(20):
        chief.begin_call()
        pass_seconds(4)
        chief._handle(peer, {"beat": chief._calls})
        chief.begin_call()
        pass_seconds(1)
    assert LOST == []
    pass_seconds(60)  # as long as it may be late, and its newest heartbeat as old as it can be
    lines = [line.partition(" was lost: ")[2].partition(";")[0] for line, _ in LOST]
    assert lines == ["it made no progress for 10 seconds while the others did"]


@parametrize("late", ["worker", "chief"])
def test_at_the_end_both_wait_for_the_late_one_and_the_chief_ends_last(
    met: tuple[Peers, Peers], late: str
) -> None:
    """A chief that still exports must not be left: if it is lost then, the run is not done."""
    ends = dict(zip(("chief", "worker"), met, strict=True))
    first = ends.pop("worker" if late == "chief" else "chief")
    with ThreadPoolExecutor() as pool:
        ending = pool.submit(first.finish)
        time.sleep(0.3)
        assert not ending.done()
        ends[late].finish()
        ending.result()
    assert all(peer.done for side in met for peer in side._peers)
    assert LOST == []


def test_a_worker_whose_chief_is_lost_while_it_exports_does_not_leave_as_done(
    met: tuple[Peers, Peers], monkeypatch: Patch
) -> None:
    chief, worker = met
    left = SimpleQueue[int]()
    monkeypatch.setattr(os, "_exit", left.put)
    with ThreadPoolExecutor() as pool:
        ending = pool.submit(worker.finish)
        chief._over.set()  # closes its connections, as its end does
        assert left.get(timeout=10) == INTERRUPTED
        worker._peers[0].done = True  # the process would have ended
        ending.result()


@parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"a":' * 5_000,
        b'{"beat": "x"}',
        b'{"beat": null}',
        b'{"beat": -1}',
        b'{"beat": true}',
        b"\xff",
        b'{"failed": 2}',
        b'{"failed": "x", "error": "x"}',
        b'{"done": "no"}',
        b'{"failed": 2, "error": null}',
        b'{"failed": 2, "error": []}',
        b"\0" * 1000,
    ],
)
def test_messages_that_no_worker_sends_end_nothing(met: tuple[Peers, Peers], line: bytes) -> None:
    """Checks that the chief still watches: it notices the loss of the worker afterwards."""
    chief, worker = met
    worker._calls = 9  # for its own heartbeats
    worker._peers[0].connection.sendall(line + b'\n{"beat": 9}\n')
    (peer,) = chief._peers
    until(lambda: peer.calls == 9)
    assert (LOST, peer.done, chief._thread.is_alive()) == ([], False, True)
    worker._close()
    until(lambda: bool(LOST))
    assert LOST[0][0].partition(" was lost: ")[2].startswith("its process has ended")


def test_the_chief_knows_for_how_long_each_workers_gpus_were_idle_and_stops_all(
    met: tuple[Peers, Peers],
) -> None:
    chief, worker = met
    worker.share_idle(7.0)
    until(lambda: chief.share_idle(1.0) == [1.0, 7.0])
    chief.stop("all GPUs are idle")
    until(lambda: worker.stop_reason == "all GPUs are idle")


def test_servers_that_do_not_connect_are_told_within_the_time_that_was_asked_for(
    met: tuple[Peers, Peers], monkeypatch: Patch
) -> None:
    chief, _ = met
    # which would name the worker, as it makes no call
    monkeypatch.setattr(chief, "_check", lambda now: None)
    chief._timeout_seconds = chief._beat_seconds = 0.05
    with chief.connecting():
        until(lambda: bool(LOST))
    assert LOST[0][0].startswith("TensorFlow's servers did not connect within 0 seconds")
    assert LOST[0][1] == INTERRUPTED


def test_a_mistake_of_another_worker_is_not_repeated_by_a_restart(
    small_config: Make, monkeypatch: Patch
) -> None:
    """Checks too that workers compare settings, devices and versions."""
    arguments = []
    monkeypatch.setattr(start, "meet", lambda *values: arguments.extend(values))
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "7")
    config = small_config()
    begun = start.StartedJob.open(config, [], 0.0)
    begun.cluster = Cluster(("127.0.0.1:1", "127.0.0.1:2"))
    begun.files = {"x": 1}
    job_dir = begun.job_dir
    with begun.workers():
        _, runs, _, on_loss = arguments
        on_loss("worker 1 stopped: no such folder", USER_MUST_CHANGE)
    assert {
        **library_versions(),
        **arithmetic_switches(),
        "devices": 1,
        "seed": 0,
        "x": 1,
    }.items() <= runs.items()
    assert job_dir.read_result()["exit_code"] == USER_MUST_CHANGE
    with pytest.raises(UserError, match=r"^worker 1 stopped: no such folder$"):
        refuse_hopeless_restart(config, job_dir.read_result())


@parametrize("index", [0, 1])
def test_a_late_worker_may_come_the_next_time(
    small_config: Make, monkeypatch: Patch, index: int
) -> None:
    cluster = {"worker": free_addresses(2)}
    task = {"type": "worker", "index": index}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "7")
    config = small_config("--worker_timeout_seconds=1")
    with pytest.raises(
        PlatformFault, match=r"did not (start|answer) within 1 seconds \(see its log\)"
    ):
        job.run(config, ["test"], 0.0)
    if index == 0:
        result = open_job_dir(config).read_result()
        assert (result["exit_code"], result["error"].partition(" (")[0]) == (FAULT, "worker 1")
        refuse_hopeless_restart(config, result)
