"""Tests workers that meet in this process: failures reach the chief with their exit code, late workers may retry."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deploy.localrun.workers import free_addresses
from tests.fixtures import Make, Patch
from trainer import job
from trainer.distribution import peers
from trainer.distribution.cluster import Cluster
from trainer.distribution.meeting import meet
from trainer.distribution.peers import Peers
from trainer.errors import FAULT, INTERRUPTED, USER_MUST_CHANGE, PlatformFault, UserError
from trainer.reporting.job_directory import open_job_dir
from trainer.reporting.result import RunResult, refuse_hopeless_restart
from trainer.reporting.run_info import versions

LOST: list[tuple[str, int]] = []


@pytest.fixture
def met(monkeypatch: Patch) -> tuple[Peers, Peers]:
    """Returns a chief and a worker. The chief stops watching where it would end its process."""
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(peers, "LEAVE_SECONDS", 0.0)
    LOST.clear()
    addresses = tuple(free_addresses(2))

    def on_loss(line: str, code: int) -> None:
        LOST.append((line, code))
        chief._over.set()

    with ThreadPoolExecutor() as pool:
        worker = pool.submit(meet, Cluster(addresses, 1), {}, 10.0)
        chief = meet(Cluster(addresses), {}, 10.0, on_loss)
    return chief, worker.result()


@pytest.mark.parametrize("code", [USER_MUST_CHANGE, FAULT, INTERRUPTED])
def test_a_worker_that_fails_is_reported_with_its_exit_code(met: tuple[Peers, Peers], code: int) -> None:
    chief, worker = met
    worker.fail(code, "no such folder")
    chief._thread.join(10)
    assert [(line.partition(" stopped: ")[2], reported) for line, reported in LOST] == [("no such folder", code)]


def test_a_worker_is_lost_only_if_its_count_does_not_rise(met: tuple[Peers, Peers], monkeypatch: Patch) -> None:
    """Makes a call per second and a heartbeat per five: the chief's count of the worker is always behind."""
    for one in met:
        one._over.set()
        one._thread.join(10)
    chief, now = met[0], [time.monotonic()]
    chief._over.clear()  # from here on this test replaces the watching thread
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    (peer,) = chief._peers.values()

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


def test_the_chief_waits_for_a_worker_that_is_late_at_the_end(met: tuple[Peers, Peers]) -> None:
    chief, worker = met

    def late() -> None:
        time.sleep(0.3)
        worker.finish(10.0)

    with ThreadPoolExecutor() as pool:
        ending = pool.submit(late)
        chief.finish(0.0)
        assert all(peer.done for peer in chief._peers.values())
        ending.result()
    assert LOST == []


def test_all_workers_are_told_at_once_that_one_runs_something_else() -> None:
    addresses = tuple(free_addresses(3))
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(meet, Cluster(addresses, index), {"seed": index == 2}, 60.0) for index in range(3)]
        errors = {str(one.exception()) for one in waiting}
        assert all(isinstance(one.exception(), UserError) for one in waiting)
    line = f"worker 2 ({addresses[2]}) and the chief do not run the same job"
    assert errors == {f"{line} (seed: False on the chief, True on the worker): start them alike"}


def test_a_mistake_of_another_worker_is_not_repeated_by_a_restart(small_config: Make, monkeypatch: Patch) -> None:
    """Checks too that workers compare settings, devices and versions."""
    given: list[Any] = []
    monkeypatch.setattr(job, "meet", lambda *parts: given.extend(parts))
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "7")
    config = small_config()
    job_dir = open_job_dir(config)
    with job._workers(
        config, Cluster(("127.0.0.1:1", "127.0.0.1:2")), job_dir, RunResult.from_previous(config, {}, 0.0)
    ):
        _, runs, _, on_loss = given
        on_loss("worker 1 stopped: no such folder", USER_MUST_CHANGE)
    assert {**versions(), "devices": 1, "seed": 0}.items() <= runs.items()
    assert job_dir.read_result()["exit_code"] == USER_MUST_CHANGE
    with pytest.raises(UserError, match=r"^worker 1 stopped: no such folder$"):
        refuse_hopeless_restart(config, job_dir.read_result())


@pytest.mark.parametrize("index", [0, 1])
def test_a_late_worker_may_come_the_next_time(small_config: Make, monkeypatch: Patch, index: int) -> None:
    cluster, task = {"worker": free_addresses(2)}, {"type": "worker", "index": index}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "7")
    config = small_config("--worker_timeout_seconds=1")
    with pytest.raises(PlatformFault, match=r"did not (start|answer) within 1 seconds \(see its log\)"):
        job.run(config, ["test"], 0.0)
    if index == 0:
        result = open_job_dir(config).read_result()
        assert (result["exit_code"], result["error"].partition(" (")[0]) == (FAULT, "worker 1")
        refuse_hopeless_restart(config, result)
