"""Submission from the command line to the end of the job, with what may go wrong on the way."""

import re
from pathlib import Path

import pytest
import yaml

from deploy.__main__ import main
from deploy.platform.errors import STATE_UNKNOWN
from deploy.tiers.tier import load_tier
from tests.deploy.conftest import (
    BY_SDK,
    JOB,
    WHERE,
    Capture,
    Command,
    Job,
    attempts,
    needs_gcloud,
    run,
    start_of,
    task_of,
)
from tests.deploy.emulator import POSTS, QUOTA, Emulator, Fault, ends
from tests.deploy.planted import remember_built


def test_a_dry_run_is_a_few_lines_and_sends_nothing(cloud: Emulator, typed: Command) -> None:
    data = ["--recipe=wgan_gp_photos", "--data=gs://my-bucket/a b"]
    shown = typed("submit", "l4x4", "--dry-run", *WHERE, *data)
    assert cloud.requests == []
    assert not Path("runs").exists()
    assert shown.count("runs in python:3.12-slim: each worker installs") == 1
    assert "warning" not in shown
    assert re.search(r"4\.63 USD an hour.* 111\.00 USD at most", shown)
    assert shown.count("\n") <= 8


@needs_gcloud
def test_the_pasted_command_makes_the_same_job(cloud: Emulator, typed: Command) -> None:
    key = "projects/my-proj/locations/us-central1/keyRings/r/cryptoKeys/k"
    flags = ["--labels=team=vision,cost=", f"--kms_key={key}", "--out=my job.yaml"]
    image = "--image=us-docker.pkg.dev/p/r/x:1"
    pasted = typed("submit", "l4x4", *flags, *WHERE, *JOB, image).splitlines()[-1]
    done = run(["bash", "-c", pasted])
    assert done.returncode == 0, done.stderr
    job = cloud.job
    assert task_of(job) == {
        "imageUri": "us-docker.pkg.dev/p/r/x:1",
        "args": [*JOB, "--expect_devices=4"],
    }
    assert job["labels"]["submission"] == job["displayName"].removeprefix("mlp-l4x4-") + "-1"
    assert job["labels"]["team"] == "vision"
    assert job["labels"]["cost"] == ""
    assert job["encryptionSpec"] == {"kmsKeyName": key}


def test_no_quota_here_goes_on_there_and_everything_is_recorded(
    cloud: Emulator, refused: Command, typed: Command
) -> None:
    """Quota in the first region, a stock-out on the first tier in the second; then the second
    tier."""
    cloud.faults = [Fault("POST .*/us-central1/customJobs$", 429, times=2, message=QUOTA)]
    alive: list[int] = []

    def run(google: Emulator, job: Job) -> None:
        alive.append(sum("endTime" not in other for other in google.jobs.values()))
        if len(google.jobs) == 1:
            google.end(
                job, "FAILED", "Resources are insufficient in region: us-east4. Please try another."
            )
        else:
            ends("SUCCEEDED")(google, job)

    cloud.run = run
    flags = ["l4x1", "--region=us-central1,us-east4,europe-west4", *BY_SDK[1:]]
    cloud.bucket_location = "NAM4"
    assert "is in NAM4, the job would run in europe-west4" in refused("submit", "l4x2", *flags)
    assert cloud.jobs == {}
    flags[1] = "--region=us-central1,us-east4"
    assert "custom_model_training_nvidia_l4_gpus" in typed("submit", "l4x2", *flags)
    sent = attempts()
    assert [(attempt["tier"], attempt["region"], attempt["state"]) for attempt in sent] == [
        ("l4x2", "us-central1", "NOT SUBMITTED"),
        ("l4x2", "us-east4", "FAILED"),
        ("l4x1", "us-central1", "NOT SUBMITTED"),
        ("l4x1", "us-east4", "SUCCEEDED"),
    ]
    # the next goes on where the last stopped
    assert len({attempt["output"] for attempt in sent}) == 1
    assert alive == [1, 1]  # never two at once


def test_a_job_of_a_lost_answer_that_holds_the_quota_is_found_and_followed(
    cloud: Emulator, typed: Command
) -> None:
    """It is listed late, and its own machines are why it is refused the second time."""
    cloud.run = ends("SUCCEEDED")
    cloud.faults = [Fault(POSTS, 503, after=True), Fault(POSTS, 429, message=QUOTA)]
    cloud.lists_nothing = 21  # all of the first search
    typed("submit", "l4x2", "l4x1", *BY_SDK)
    (attempt,) = attempts()
    assert attempt["state"] == "SUCCEEDED"
    assert attempt["job"] == cloud.job["name"]
    assert attempt["tier"] == "l4x2"


@pytest.mark.parametrize(
    ("where", "code", "message"),
    [
        (POSTS, 429, QUOTA),
        (POSTS, 400, "no"),
        ("GET .*/customJobs$", 403, "the list itself is refused"),
    ],
)
def test_no_other_tier_is_tried_beside_a_job_that_may_run(
    where: str, code: int, message: str, cloud: Emulator, typed: Command
) -> None:
    """Covers errors of the request and of the list."""
    cloud.faults = [Fault(POSTS, 503, after=True), Fault(where, code, times=1000, message=message)]
    cloud.lists_nothing = 1000
    shown = typed("submit", "l4x2", "l4x1", *BY_SDK, code=STATE_UNKNOWN)
    again = r"`python -m deploy watch \S+` looks for it again, and so does the same com"
    assert re.search(again, shown)
    (attempt,) = attempts()
    assert attempt["state"] == "SUBMITTING"
    assert len(cloud.jobs) == 1


def test_a_region_without_the_gpu_is_left_out(cloud: Emulator, typed: Command) -> None:
    shown = typed("submit", "l4x1", "--region=us-west2,us-east4", *BY_SDK[1:], "--dry_run")
    assert "left out: l4x1 in us-west2" in shown
    assert " in us-east4, " in shown


@pytest.mark.parametrize(
    ("tier", "flags", "recipe"),
    [
        ("l4x1-2workers", ["--image=us-docker.pkg.dev/p/r/x:1"], ["--recipe=wgan_gp_digits"]),
        ("h100x2", ["--model=mlp", "--seed=1"], ["--model=mlp", "--seed=1"]),
    ],
)
def test_a_check_of_a_tier_is_a_short_job_on_one_machine(
    tier: str, flags: list[str], recipe: list[str], cloud: Emulator, capsys: Capture
) -> None:
    assert main(["submit", tier, *WHERE, *flags, "--check", "--spec"]) == 0
    text, shown = capsys.readouterr()
    spec = yaml.safe_load(text)
    assert len(spec["workerPoolSpecs"]) == 1
    whole = load_tier(tier)
    task = task_of(spec)
    # an own image has no bootstrap
    assert (start_of(task)["module"] if "env" in task else task["command"][2]) == "trainer.check"
    assert task["args"] == [*recipe, f"--expect_devices={whole.accelerators}", "--on_gpus"]
    assert spec["scheduling"]["timeout"] == "3600s"
    assert spec["scheduling"]["disableRetries"]
    usd = whole.price_per_hour / whole.workers
    assert f"{tier}: {usd:.2f} USD an hour" in shown
    assert f", {usd:.2f} USD at most, until its timeout of 1:00:00\n" in shown
    assert "trains nothing: checks the accelerators of one machine" in shown
    assert "trains wgan_gp" not in shown


def test_a_fallback_has_its_packages_too(cloud: Emulator, typed: Command) -> None:
    """The first job runs in the image that was built here, the second cannot; a lost answer for the
    second does not find the first."""
    remember_built("tensorflow")

    def run(google: Emulator, job: Job) -> None:
        if len(google.jobs) == 1:
            google.end(job, "FAILED", "Resources are insufficient in region: us-central1.")
            google.faults = [Fault(POSTS, 503)]
        else:
            ends("SUCCEEDED")(google, job)

    cloud.run = run
    typed("submit", "cpu", "l4x1", *BY_SDK)
    assert [attempt["state"] for attempt in attempts()] == ["FAILED", "SUCCEEDED"]
    first, second = map(task_of, cloud.jobs.values())
    assert first["imageUri"] == "us-docker.pkg.dev/p/r/mine:1"
    ((address, _),) = start_of(second)["packages"]
    assert address.removeprefix("gs://") in cloud.objects
