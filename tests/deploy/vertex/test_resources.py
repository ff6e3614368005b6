"""Tests persistent resources through gcloud and the SDK, and how `jobs` and `cancel` find and end what is left."""

from typing import Any

import pytest

from deploy.cli import cancel, jobs
from deploy.vertex import resources
from deploy.vertex.api import ApiError, Backend, PersistentResource
from deploy.vertex.resources import delete_and_wait
from deploy.vertex.session import Session
from tests.deploy.conftest import Capture, FlyingClock, needs_gcloud
from tests.deploy.emulator import PARENT, Emulator, Fault
from tests.deploy.vertex.test_backends import SPEC

MACHINE = {"machineType": "g2-standard-12", "acceleratorType": "NVIDIA_L4", "acceleratorCount": 1}
POOL = {"machineSpec": MACHINE, "replicaCount": 2, "diskSpec": {"bootDiskType": "pd-ssd", "bootDiskSizeGb": 100}}
NETWORK, KEY = "projects/1/global/networks/n", f"{PARENT[4:]}/keyRings/r/cryptoKeys/k"
LABELS = {"submission": "compare-1", "usd-per-hour": "2-5000"}
REQUEST = PersistentResource("compare-1", [POOL], LABELS, NETWORK, KEY, own_account=True)
NAME = "projects/my-proj/locations/us-central1/persistentResources/compare-1"


@pytest.fixture(params=[pytest.param("gcloud", marks=[needs_gcloud, pytest.mark.slow]), "sdk"])
def backend(request: pytest.FixtureRequest, session: Session) -> Backend:
    return session.open(request.param, "my-proj", "us-central1")


@pytest.fixture
def resource(cloud: Emulator, flying: FlyingClock) -> dict[str, Any]:
    """Returns one that runs."""
    cloud.resources.time = lambda: flying.time
    cloud.resources.create(PARENT, "compare-1", {"resourcePools": [POOL], "labels": LABELS})
    cloud.resources.get("compare-1")
    cloud.resources.get("compare-1")
    return cloud.resources.found["compare-1"]


def guard(cloud: Emulator, *more: str) -> dict[str, Any]:
    """Creates its guard, or with `more` a job with this label."""
    label, value = more or ("guards", "compare-1")
    labels = {"submission": "s", label: value}
    return cloud.create(PARENT, {"displayName": "x", "jobSpec": SPEC, "labels": labels})


def test_a_resource_from_its_creation_to_its_end(backend: Backend, cloud: Emulator) -> None:
    backend.create_resource(REQUEST)
    made = cloud.resources.found["compare-1"]
    (pool,) = made["resourcePools"]
    assert (pool["machineSpec"], pool["diskSpec"], pool["replicaCount"]) == (MACHINE, POOL["diskSpec"], "2")
    assert (made["labels"], made["network"]) == (LABELS, NETWORK)
    assert made["encryptionSpec"] == {"kmsKeyName": KEY}
    assert made["resourceRuntimeSpec"] == {"serviceAccountSpec": {"enableCustomServiceAccount": True}}
    first = backend.resource("compare-1")
    assert (first.state, first.started, first.display_name) == ("PROVISIONING", None, "compare-1")
    with pytest.raises(ApiError) as again:
        backend.create_resource(REQUEST)
    assert again.value.code == 409
    for number in range(3):
        labels = LABELS if number else {}
        cloud.resources.create(PARENT, f"other-{number}", {"resourcePools": [POOL], "labels": labels})
    assert [found.display_name for found in backend.resources()] == ["compare-1", "other-1", "other-2"]
    backend.resource("compare-1")
    assert backend.resource("compare-1").started
    backend.delete_resource("compare-1")
    assert [backend.resource("compare-1").state for _ in range(2)] == ["STOPPING"] * 2
    for call in (backend.resource, backend.delete_resource):
        with pytest.raises(ApiError) as gone:
            call("compare-1")
        assert gone.value.code == 404


@pytest.mark.parametrize("backend", ["sdk"], indirect=True)
def test_what_is_being_made_is_deleted_as_soon_as_it_can_be(
    backend: Backend, cloud: Emulator, session: Session
) -> None:
    cloud.resources.provisioning = 3
    backend.create_resource(REQUEST)
    last = delete_and_wait(backend, "compare-1", session.clock)
    assert last
    assert (last.state, cloud.resources.found) == ("STOPPING", {})
    assert delete_and_wait(backend, "compare-1", session.clock) is None


@pytest.mark.parametrize("backend", ["sdk"], indirect=True)
def test_a_resource_that_stays_is_said(
    backend: Backend, cloud: Emulator, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "WAIT_S", 60.0)
    cloud.resources.provisioning = 10**6
    backend.create_resource(REQUEST)
    with pytest.raises(ApiError, match="compare-1 is still PROVISIONING"):
        delete_and_wait(backend, "compare-1", session.clock)


WHERE = ["--project=my-proj", "--region=us-central1", "--backend=sdk"]


def test_jobs_shows_a_guarded_resource_and_what_it_costs(
    cloud: Emulator, session: Session, flying: FlyingClock, resource: dict[str, Any], capsys: Capture
) -> None:
    guard(cloud)
    flying.time += 7200
    assert jobs.main(WHERE, session) == 0
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shown.startswith("persistent resource compare-1: RUNNING, ran for 2:00:0")
    assert ", 5.00 USD, 2.50 USD an hour: python -m deploy cancel projects/" in shown
    assert resource["state"] == "RUNNING"


@pytest.mark.parametrize("label", ["persistent-resource", "other"])
def test_jobs_deletes_what_nobody_would_end(
    label: str, cloud: Emulator, session: Session, resource: dict[str, Any], capsys: Capture
) -> None:
    """A guard that has ended is none; a job that runs in it is left alone."""
    cloud.end(guard(cloud), "FAILED", "lost")
    guard(cloud, label, "compare-1")
    assert jobs.main(WHERE, session) == 0
    shown = capsys.readouterr().out
    assert ", without a guard: python -m deploy cancel projects/123456/" in shown
    assert ("its deletion is requested" in shown) == (label == "other")
    assert (resource["state"] == "STOPPING") == (label == "other")


def test_an_account_that_may_not_list_resources_still_sees_its_jobs(
    cloud: Emulator, session: Session, capsys: Capture
) -> None:
    cloud.faults = [Fault("GET .*/persistentResources$", 403)]
    guard(cloud)
    assert jobs.main(WHERE, session) == 0
    assert "PENDING" in capsys.readouterr().out


def test_cancel_deletes_a_resource_and_ends_its_guard(
    cloud: Emulator, session: Session, resource: dict[str, Any], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, other = guard(cloud), guard(cloud, "guards", "compare-2")
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    assert cancel.main([NAME, "--backend=sdk"], session) == 0
    assert asked[0].startswith("delete persistent resource compare-1 and cancel the jobs in it (RUNNING, 0:00:0")
    assert (cloud.resources.found, watch["state"], other["state"]) == ({}, "JOB_STATE_CANCELLED", "JOB_STATE_PENDING")
    assert "persistent resource compare-1: DELETED, 0:00:" in capsys.readouterr().out
    assert cancel.main([NAME, "--backend=sdk", "--yes"], session) == 0
    assert capsys.readouterr().out == "persistent resource compare-1: gone\n"
