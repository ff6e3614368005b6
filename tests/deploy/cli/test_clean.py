"""Tests that `clean` removes only what ended jobs alone name, and nothing but packages."""

import json

import pytest

from deploy.cli import clean
from tests.deploy.conftest import Command
from tests.deploy.emulator import Emulator, Fault, now
from tests.deploy.image_emulator import REPOSITORY
from tests.fixtures import Capture

FLAGS = ["--project=my-proj", "--bucket=gs://my-bucket/x"]


@pytest.fixture
def used(cloud: Emulator) -> Emulator:
    """Returns the emulator with results, and packages of jobs that have ended, that run, of a
    tuning job, of none."""
    for name in ("old", "shared", "running", "tuned", "unsent"):
        cloud.objects[f"my-bucket/x/packages/{name}/a.whl"] = name.encode()
    cloud.objects |= {
        f"my-bucket/x/jobs/demo/{name}": b"kept" for name in ("result.json", "packages/old/a.whl")
    }
    cloud.objects["my-bucket/packages/old/a.whl"] = b"of another folder"

    def job(region: str, state: str, *names: str) -> None:
        plan = json.dumps(
            {"packages": [[f"gs://my-bucket/x/packages/{name}/a.whl", "0"] for name in names]}
        )
        task = {"imageUri": "x", "env": [{"name": "TRAINER_START", "value": plan}]}
        pool = {
            "machineSpec": {"machineType": "e2-standard-4"},
            "replicaCount": 1,
            "containerSpec": task,
        }
        made = cloud.create(
            f"projects/my-proj/locations/{region}",
            {"displayName": "x", "jobSpec": {"workerPoolSpecs": [pool]}},
        )
        made["state"] = f"JOB_STATE_{state}"

    job("us-central1", "SUCCEEDED", "old", "shared")
    job("us-central1", "FAILED", "shared", "tuned")
    job("europe-west4", "RUNNING", "running", "shared")
    cloud.tuning_jobs = [
        {"state": "JOB_STATE_SUCCEEDED", "args": ["gs://my-bucket/x/packages/tuned/a.whl"]}
    ]
    return cloud


def test_only_what_ended_jobs_alone_name_is_removed(used: Emulator, typed: Command) -> None:
    before = dict(used.objects)
    address = "gs://my-bucket/x/packages/old"
    first, last = typed("clean", *FLAGS).splitlines()
    assert first.endswith(f"  {address}")
    assert last.startswith("found 0.00 MB of 1 packages that only ended jobs name: --yes")
    made = json.loads(typed("clean", *FLAGS, "--json"))
    assert made["packages"] == [{"address": address, "bytes": 3}]
    assert used.objects == before
    typed("clean", *FLAGS, "--yes")
    assert before.keys() - used.objects.keys() == {"my-bucket/x/packages/old/a.whl"}
    assert typed("clean", *FLAGS, "--yes").endswith(
        "removed 0.00 MB of 0 packages that only ended jobs name\n"
    )


def test_images_that_no_recent_job_used_are_listed_with_their_sizes(
    used: Emulator, capsys: Capture
) -> None:
    """One is named by a job, one is of last week, one of another name."""
    names = ["auto@sha256:1", "auto@sha256:2", "auto@sha256:3", "auto@sha256:4", "trainer@sha256:5"]
    times = ["2020-01-01T00:00:00Z"] * 5
    times[2] = now()
    used.images = [
        {"uri": f"{REPOSITORY}/{name}", "imageSizeBytes": "3500000000", "uploadTime": time}
        for name, time in zip(names, times, strict=True)
    ]
    first, second, *_ = used.jobs.values()
    for job, name, created in ((first, names[0], now()), (second, names[1], times[0])):
        job["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["imageUri"] = f"{REPOSITORY}/{name}"
        job["createTime"] = created
    assert clean.main([*FLAGS, "--json"]) == 0
    *shown, document = capsys.readouterr().out.splitlines()
    assert [image["address"] for image in json.loads(document)["images"]] == [
        f"{REPOSITORY}/{name}" for name in (names[1], names[3])
    ]
    assert shown[-1] == (
        "  3500.00 MB  no job of the last 30 days used it:"
        f" `gcloud artifacts docker images delete {REPOSITORY}/{names[3]} --delete-tags`"
    )


def test_nothing_is_removed_if_a_region_cannot_be_asked(used: Emulator, refused: Command) -> None:
    used.faults = [Fault("GET .*/asia-east1/customJobs", 403)]
    before = dict(used.objects)
    assert "roles/aiplatform.user" in refused("clean", *FLAGS, "--yes")
    assert used.objects == before
