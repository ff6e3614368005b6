"""Submission from the command line to the end of the job, with what may go wrong on the way."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.__main__ import main
from deploy.cli import jobs, submit
from deploy.packaging.images import BuiltImage, remember
from deploy.packaging.packages import packages_with
from deploy.platform.errors import STATE_UNKNOWN, JobUnknown
from deploy.platform.gcloud_and_sdk import Session
from deploy.tiers.tier import load_tier
from tests.deploy.conftest import BY_SDK, JOB, WHERE, Capture, Job, attempts, error_of, needs_gcloud
from tests.deploy.emulator import POSTS, QUOTA, Emulator, Fault, ends


def start(task: dict[str, Any]) -> Any:
    """What the start command of a plain image is told."""
    (text,) = [variable["value"] for variable in task["env"] if variable["name"] == "TRAINER_START"]
    return json.loads(text)


def test_a_dry_run_is_a_few_lines_and_sends_nothing(cloud: Emulator, capsys: Capture) -> None:
    assert (
        main(
            [
                "submit",
                "l4x4",
                "--dry-run",
                *WHERE,
                "--recipe=wgan_gp_photos",
                "--data=gs://my-bucket/a b",
            ]
        )
        == 0
    )
    assert cloud.requests == []
    assert not Path("runs").exists()
    lines = capsys.readouterr().out.splitlines()
    assert (
        sum(line.startswith("runs in python:3.12-slim: each worker installs") for line in lines)
        == 1
    )
    assert not any("warning" in line for line in lines)
    assert any("4.63 USD an hour" in line and "111.00 USD at most" in line for line in lines)
    assert len(lines) <= 8


@needs_gcloud
def test_the_pasted_command_makes_the_same_job(cloud: Emulator, capsys: Capture) -> None:
    key = "projects/my-proj/locations/us-central1/keyRings/r/cryptoKeys/k"
    flags = ["--labels=team=vision,cost=", f"--kms_key={key}", "--out=my job.yaml"]
    image = "--image=us-docker.pkg.dev/p/r/x:1"
    assert main(["submit", "l4x4", *flags, *WHERE, *JOB, image]) == 0
    pasted = capsys.readouterr().out.splitlines()[-1]
    done = subprocess.run(["bash", "-c", pasted], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (job,) = cloud.jobs.values()
    assert job["jobSpec"]["workerPoolSpecs"][0]["containerSpec"] == {
        "imageUri": "us-docker.pkg.dev/p/r/x:1",
        "args": [*JOB, "--expect_devices=4"],
    }
    assert job["labels"]["submission"] == job["displayName"].removeprefix("mlp-l4x4-") + "-1"
    assert (job["labels"]["team"], job["labels"]["cost"]) == ("vision", "")
    assert job["encryptionSpec"] == {"kmsKeyName": key}


def test_no_quota_here_goes_on_there_and_everything_is_recorded(
    cloud: Emulator, session: Session, capsys: Capture
) -> None:
    """Quota in the first region, a stock-out on the first tier in the second; then the second
    tier."""
    cloud.faults = [Fault("POST .*/us-central1/customJobs$", 429, times=2, message=QUOTA)]
    alive: list[int] = []

    def run(google: Emulator, job: dict[str, Any]) -> None:
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
    assert "is in NAM4, the job would run in europe-west4" in error_of(
        submit.main, ["l4x2", *flags], session
    )
    assert cloud.jobs == {}
    flags[1] = "--region=us-central1,us-east4"
    assert submit.main(["l4x2", *flags], session) == 0
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
    assert "custom_model_training_nvidia_l4_gpus" in capsys.readouterr().out


def test_a_lost_answer_on_a_second_tier_does_not_find_the_first(
    cloud: Emulator, session: Session
) -> None:
    def run(google: Emulator, job: dict[str, Any]) -> None:
        if len(google.jobs) == 1:
            google.end(job, "FAILED", "Resources are insufficient in region: us-central1.")
            google.faults = [Fault(POSTS, 503)]
        else:
            ends("SUCCEEDED")(google, job)

    cloud.run = run
    assert submit.main(["l4x2", "l4x1", *BY_SDK], session) == 0
    first, second = attempts()
    assert (first["state"], second["state"]) == ("FAILED", "SUCCEEDED")
    assert first["job"] != second["job"]


def test_a_job_of_a_lost_answer_that_holds_the_quota_is_found_and_followed(
    cloud: Emulator, session: Session
) -> None:
    """It is listed late, and its own machines are why it is refused the second time."""
    cloud.run = ends("SUCCEEDED")
    cloud.faults = [Fault(POSTS, 503, after=True), Fault(POSTS, 429, message=QUOTA)]
    cloud.lists_nothing = 21  # all of the first search
    assert submit.main(["l4x2", "l4x1", *BY_SDK], session) == 0
    (job,) = cloud.jobs.values()
    (attempt,) = attempts()
    assert (attempt["state"], attempt["job"], attempt["tier"]) == ("SUCCEEDED", job["name"], "l4x2")


@pytest.mark.parametrize(
    ("where", "code", "message"),
    [
        (POSTS, 429, QUOTA),
        (POSTS, 400, "no"),
        ("GET .*/customJobs$", 403, "the list itself is refused"),
    ],
)
def test_no_other_tier_is_tried_beside_a_job_that_may_run(
    where: str, code: int, message: str, cloud: Emulator, session: Session
) -> None:
    """Covers errors of the request and of the list."""
    cloud.faults = [Fault(POSTS, 503, after=True), Fault(where, code, times=1000, message=message)]
    cloud.lists_nothing = 1000
    with pytest.raises(
        JobUnknown,
        match=r"`python -m deploy watch \S+` looks for it again, and so does the same com",
    ) as at:
        submit.main(["l4x2", "l4x1", *BY_SDK], session)
    assert at.value.exit_code == STATE_UNKNOWN
    (attempt,) = attempts()
    assert (attempt["state"], len(cloud.jobs)) == ("SUBMITTING", 1)


def test_detached_it_is_named_in_the_record_and_watched_later(
    cloud: Emulator, session: Session, capsys: Capture
) -> None:
    assert submit.main(["cpu", *BY_SDK, "--detach"], session) == 0
    (job,) = cloud.jobs.values()
    assert attempts()[0]["job"] == job["name"]
    assert f"python -m deploy watch {job['name']}" in capsys.readouterr().out
    cloud.begin(job)
    cloud.end(job, "SUCCEEDED")
    assert jobs.run_watch(["--backend=sdk"], session) == 0  # without a name: the last one
    assert attempts()[0]["state"] == "SUCCEEDED"
    assert "--detach is for one tier in one region" in error_of(
        submit.main, ["cpu", "t4x1", *BY_SDK, "--detach"], session
    )


def test_a_region_without_the_gpu_is_left_out(cloud: Emulator, capsys: Capture) -> None:
    flags = ["--bucket=gs://my-bucket", *JOB, "--dry_run"]
    assert main(["submit", "l4x1", "--region=us-west2,us-east4", *flags]) == 0
    shown = capsys.readouterr().out
    assert "left out: l4x1 in us-west2" in shown
    assert " in us-east4, " in shown
    assert main(["submit", "l4x1", "--region=us-west2", *flags]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("region=us-west2 has no NVIDIA_L4 for training: use")) == ("", 1)


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
    assert (
        main(
            [
                "submit",
                tier,
                "--region=us-central1",
                "--bucket=gs://my-bucket",
                *flags,
                "--check",
                "--spec",
            ]
        )
        == 0
    )
    text, shown = capsys.readouterr()
    spec = yaml.safe_load(text)
    (pool,) = spec["workerPoolSpecs"]
    whole = load_tier(tier)
    task = pool["containerSpec"]
    expected = f"--expect_devices={whole.accelerators}"
    # an own image has no starter
    runs = start(task)["module"] if "env" in task else task["command"][2]
    assert (runs, task["args"]) == ("trainer.check", [*recipe, expected, "--on_gpus"])
    assert (spec["scheduling"]["timeout"], spec["scheduling"]["disableRetries"]) == ("3600s", True)
    usd = whole.price_per_hour / whole.workers
    (price,) = [line for line in shown.splitlines() if " USD an hour" in line]
    assert price.startswith(f"{whole.name}: {usd:.2f} USD an hour")
    assert price.endswith(f", {usd:.2f} USD at most, until its timeout of 1:00:00")
    assert (
        "trains nothing: checks the accelerators of one machine (gpu_check.json, docs/gpus.md)"
        in shown
    )
    assert "trains wgan_gp" not in shown


@pytest.mark.parametrize("detached", [True, False])
def test_the_record_says_whether_anybody_follows_the_job(
    detached: bool, cloud: Emulator, session: Session
) -> None:
    cloud.run = ends("SUCCEEDED")
    assert submit.main(["cpu", *BY_SDK, f"--detach={detached}"], session) == 0
    (file,) = Path("runs/submitted").glob("*.json")
    (in_bucket,) = [text for name, text in cloud.objects.items() if "/submission.json" in name]
    assert json.loads(file.read_text())["detached"] == detached
    assert json.loads(in_bucket)["detached"] == detached


def test_a_fallback_has_its_packages_too(cloud: Emulator, session: Session) -> None:
    """The first job runs in the image that was built here, the second cannot."""
    (package,) = packages_with("")
    remember(
        BuiltImage(
            "eu.gcr.io/p/x:1", "tensorflow", {package.name: package.digest}, "2026-11-22 18:00"
        )
    )

    def run(google: Emulator, job: Job) -> None:
        if len(google.jobs) == 1:
            google.end(job, "FAILED", "Resources are insufficient in region: us-central1.")
        else:
            ends("SUCCEEDED")(google, job)

    cloud.run = run
    assert submit.main(["cpu", "l4x1", *BY_SDK], session) == 0
    first, second = (
        job["jobSpec"]["workerPoolSpecs"][0]["containerSpec"] for job in cloud.jobs.values()
    )
    assert first["imageUri"] == "eu.gcr.io/p/x:1"
    ((address, _),) = start(second)["packages"]
    assert address.removeprefix("gs://") in cloud.objects
