"""Tests the guard of a persistent resource: when it deletes, what it survives, and its job as the spec holds it."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.in_job import pool_guard, starter
from deploy.spec.guard_job import guard_package, guard_spec
from deploy.spec.packages import built
from tests.deploy.emulator import PARENT, Emulator, Fault

NAME = "projects/my-proj/locations/us-central1/persistentResources/compare-1"
MACHINE = {"machineType": "n1-standard-8"}
TASK = {"machineSpec": MACHINE, "replicaCount": 1, "containerSpec": {"imageUri": "us-docker.pkg.dev/p/r/x:1"}}
RUN = {"workerPoolSpecs": [TASK], "serviceAccount": "trainer@p.iam.gserviceaccount.com", "network": "n"}
PLAN = {"resource": NAME, "jobs": "labels.persistent-resource=compare-1", "idle_s": 900.0, "poll_s": 60.0,
        "output": "gs://my-bucket/jobs/g", "record": "guard.json"}  # fmt: skip


class Watched:
    """Holds a resource, and a guard with a clock on which a look takes a minute; `at`: what happens when."""

    def __init__(self, google: Emulator, deadline_s: float) -> None:
        self.google, self.now, self.at = google, 0.0, dict[float, Callable[[], object]]()
        self.gone_at = 0.0
        google.resources.create(PARENT, "compare-1", {"resourcePools": [{"machineSpec": MACHINE, "replicaCount": 1}]})
        self.guard = pool_guard.Guard({**PLAN, "deadline": deadline_s}, lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 100_000, "the guard never ends"
        for due in [each for each in self.at if each <= self.now]:
            self.at.pop(due)()
        if not self.gone_at and "DELETE" in str(self.google.requests):
            self.gone_at = self.now

    def job(self) -> dict[str, Any]:
        """Creates a job in the resource."""
        return self.google.create(PARENT, {"displayName": "x", "jobSpec": {"workerPoolSpecs": [TASK]},
                                           "labels": {"persistent-resource": "compare-1"}})  # fmt: skip


@pytest.fixture
def watched(cloud: Emulator, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watched]:
    monkeypatch.setattr(pool_guard, "token", lambda: "of-the-job")
    monkeypatch.setattr(starter, "PAUSE_S", 0.0)
    return lambda deadline_s=50_000.0: Watched(cloud, deadline_s)


def test_it_deletes_what_no_job_uses_for_a_while(watched: Callable[..., Watched], cloud: Emulator) -> None:
    """Jobs come in pages of two; those that are over do not count."""
    one = watched()
    jobs = [one.job() for _ in range(3)]
    for job in jobs[:2]:
        cloud.end(job, "SUCCEEDED")
    one.at[6000] = lambda: cloud.end(jobs[2], "FAILED")
    one.guard.watch()
    assert 6000 + 900 - 60 <= one.gone_at <= 6000 + 900 + 120
    assert cloud.resources.found == {}


def test_it_deletes_at_its_deadline_and_the_job_with_it(watched: Callable[..., Watched], cloud: Emulator) -> None:
    """While machines are provisioned that is refused, and tried again."""
    one = watched(3000.0)
    cloud.resources.looks["compare-1"] = 70
    job = one.job()
    job["jobSpec"]["persistentResourceId"] = "compare-1"
    one.guard.watch()
    assert one.gone_at >= 3000
    assert cloud.requests.count(f"DELETE /v1/{NAME}") > 6
    assert (cloud.resources.found, job["state"]) == ({}, "JOB_STATE_CANCELLED")


def test_it_deletes_what_failed_at_once(watched: Callable[..., Watched], cloud: Emulator) -> None:
    cloud.resources.error = "Resources are insufficient."
    one = watched()
    one.job()
    one.guard.watch()
    assert one.gone_at <= 600


def test_what_was_deleted_by_others_ends_it(watched: Callable[..., Watched], cloud: Emulator) -> None:
    """One answer of 404 does not; without any resource it waits for an hour."""
    one = watched()
    one.job()
    found = cloud.resources.found
    one.at[600] = lambda: setattr(cloud.resources, "found", {})
    one.at[630] = lambda: setattr(cloud.resources, "found", found)
    one.at[6000] = found.clear
    one.guard.watch()
    assert 6000 <= one.now <= 6240
    two = watched()
    found.clear()
    cloud.resources.found.clear()
    two.guard.watch()
    assert 3600 <= two.now <= 3720


def test_a_service_that_fails_for_long_does_not_end_it(watched: Callable[..., Watched], cloud: Emulator) -> None:
    cloud.faults = [Fault("GET /v1/.*", 503, times=100), Fault("GET /v1/.*", "html", times=3)]
    one = watched()
    one.guard.watch()
    assert (cloud.resources.found, one.gone_at > 900) == ({}, True)


@pytest.mark.parametrize(
    ("match", "permission"),
    [
        ("DELETE", "persistentResources.delete"),
        ("GET .*persistentResources", "persistentResources.get"),
        ("GET .*customJobs", "customJobs.list"),
    ],
)
def test_each_permission_is_checked_and_named(
    match: str, permission: str, watched: Callable[..., Watched], cloud: Emulator
) -> None:
    """Nothing that exists is asked about."""
    cloud.faults = [Fault(match, 403)]
    guard = watched().guard
    with pytest.raises(starter.Refused, match=f"needs the permission aiplatform.{permission} "):
        guard.check()
    guard.check()
    assert cloud.resources.found["compare-1"]["state"] == "PROVISIONING"


@pytest.fixture
def started(cloud: Emulator, dist: Path, tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Returns a function that starts the command of the guard's spec, without our source on the path."""
    package = built(guard_package())
    cloud.objects[package.uri("gs://my-bucket").removeprefix("gs://")] = package.build().read_bytes()

    def start(**more: float) -> "subprocess.Popen[str]":
        plan = {**PLAN, "deadline": time.time() + 600, "poll_s": 0.1, **more}
        spec = guard_spec(plan, RUN, package, "gs://my-bucket", 900.0)
        assert (spec["serviceAccount"], spec["network"]) == (RUN["serviceAccount"], "n")
        assert spec["scheduling"] == {"timeout": "900s"}
        task = spec["workerPoolSpecs"][0]["containerSpec"]
        assert task["imageUri"] == "us-docker.pkg.dev/p/r/x:1"
        names = ("PATH", "STORAGE_EMULATOR_HOST", "CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM")
        variables = {name: os.environ[name] for name in names}
        variables |= {each["name"]: each["value"] for each in task["env"]}
        variables["GCE_METADATA_HOST"] = cloud.url.removeprefix("http://")
        return subprocess.Popen(task["command"], env=variables, cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    return start


@pytest.mark.parametrize("stopped", [False, True])
def test_its_job_says_that_it_is_ready_and_deletes(
    stopped: bool, started: Callable[..., "subprocess.Popen[str]"], watched: Callable[..., Watched], cloud: Emulator
) -> None:
    """It also deletes if its own job is cancelled."""
    watched()
    with started(idle_s=600.0 if stopped else 0.3) as process:
        for _ in range(600):
            if "my-bucket/jobs/g/guard.json" in cloud.objects and cloud.resources.found:
                break
            time.sleep(0.05)
        if stopped:
            while cloud.resources.found["compare-1"]["state"] != "RUNNING":
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert "ready" in json.loads(cloud.objects["my-bucket/jobs/g/guard.json"])
    if stopped:
        assert cloud.resources.found["compare-1"]["state"] == "STOPPING"
        assert "stopped: nothing would end the persistent resource after this" in said
    else:
        assert (cloud.resources.found, "deletes projects/my-proj/" in said) == ({}, True)
