"""Workers that meet, in this process: who fails is heard with its exit code, who is late may come the next time."""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deploy.localrun.workers import free_addresses
from trainer import job
from trainer.config.train_config import TrainConfig
from trainer.distribution import peers
from trainer.distribution.cluster import Cluster
from trainer.distribution.meeting import meet
from trainer.distribution.peers import Peers
from trainer.errors import FAULT, INTERRUPTED, USER_MUST_CHANGE, PlatformFault, UserError
from trainer.reporting.job_directory import open_job_dir
from trainer.reporting.result import RunResult, refuse_hopeless_restart
from trainer.reporting.run_info import versions

Make = Callable[..., TrainConfig]
HEARD: list[tuple[str, int]] = []


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> tuple[Peers, Peers]:
    """A chief and a worker. The chief ends its watch where it would end its process."""
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(peers, "LEAVE_SECONDS", 0.0)
    HEARD.clear()
    addresses = tuple(free_addresses(2))

    def on_loss(line: str, code: int) -> None:
        HEARD.append((line, code))
        chief._over.set()

    with ThreadPoolExecutor() as pool:
        worker = pool.submit(meet, Cluster(addresses, 1), {}, 10.0)
        chief = meet(Cluster(addresses), {}, 10.0, on_loss)
    return chief, worker.result()


@pytest.mark.parametrize("code", [USER_MUST_CHANGE, FAULT, INTERRUPTED])
def test_a_worker_that_fails_is_heard_with_its_exit_code(met: tuple[Peers, Peers], code: int) -> None:
    chief, worker = met
    worker.fail(code, "no such folder")
    chief._thread.join(10)
    assert [(line.partition(" stopped: ")[2], heard) for line, heard in HEARD] == [("no such folder", code)]


def test_a_worker_whose_count_moves_is_not_lost_and_one_that_stands_still_is(
    met: tuple[Peers, Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of a second, beats of five: what the chief knows of the worker is always behind."""
    for one in met:
        one._over.set()
        one._thread.join(10)
    chief, now = met[0], [time.monotonic()]
    chief._over.clear()  # from here on this test is its watch
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    (peer,) = chief._peers.values()

    def pass_seconds(count: int) -> None:
        for _ in range(count):
            now[0] += 1
            peer.heard = now[0]
            chief._check(now[0])

    for _ in range(20):
        chief.begin_call()
        pass_seconds(4)
        chief._understand(peer, {"beat": chief._calls})
        chief.begin_call()
        pass_seconds(1)
    assert HEARD == []
    pass_seconds(60)  # it is late for as long as it may be, and what we know of it as old as it can be
    assert [line.partition(" is gone: ")[2].partition(";")[0] for line, _ in HEARD] == [
        "it has stayed behind the others for 10 seconds"
    ]


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
    assert HEARD == []


def test_all_workers_hear_at_once_that_one_runs_something_else() -> None:
    addresses = tuple(free_addresses(3))
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(meet, Cluster(addresses, index), {"seed": index == 2}, 60.0) for index in range(3)]
        errors = {str(one.exception()) for one in waiting}
        assert all(isinstance(one.exception(), UserError) for one in waiting)
    line = f"worker 2 ({addresses[2]}) and the chief do not run the same (seed: False on the chief, True there)"
    assert errors == {f"{line}: start them alike"}


def test_a_mistake_of_another_worker_is_not_repeated_by_a_restart(
    small_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they compare what they run: settings, devices, versions."""
    given: list[Any] = []
    monkeypatch.setattr(job, "meet", lambda *parts: given.extend(parts))
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "7")
    config = small_config()
    job_dir = open_job_dir(config)
    with job._peers(config, Cluster(("127.0.0.1:1", "127.0.0.1:2")), job_dir, RunResult.from_previous(config, {}, 0.0)):
        _, runs, _, on_loss = given
        on_loss("worker 1 stopped: no such folder", USER_MUST_CHANGE)
    assert {**versions(), "devices": 1, "seed": 0}.items() <= runs.items()
    assert job_dir.read_result()["exit_code"] == USER_MUST_CHANGE
    with pytest.raises(UserError, match=r"^worker 1 stopped: no such folder$"):
        refuse_hopeless_restart(config, job_dir.read_result())


@pytest.mark.parametrize("index", [0, 1])
def test_who_is_late_may_come_the_next_time(small_config: Make, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    addresses = free_addresses(2)
    task = {"type": "worker", "index": index}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": addresses}, "task": task}))
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "7")
    config = small_config("--worker_timeout_seconds=1")
    with pytest.raises(PlatformFault, match=r"did not (start|answer) within 1 seconds \(see its log\)"):
        job.run(config, ["test"], 0.0)
    if index == 0:
        result = open_job_dir(config).read_result()
        assert (result["exit_code"], result["error"].partition(" (")[0]) == (FAULT, "worker 1")
        refuse_hopeless_restart(config, result)
