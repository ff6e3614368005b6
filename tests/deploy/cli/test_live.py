"""Tests what a watch and a list of jobs show of a run: progress and money; and the command at its
end."""

import json
from datetime import UTC, datetime

import pytest

from deploy.tiers.tier import load_tier
from tests.deploy.cli.conftest import made
from tests.deploy.cli.test_watch import MINE
from tests.deploy.conftest import BY_SDK, Command, FlyingClock, Job, attempts
from tests.deploy.emulator import POSTS, QUOTA, Emulator, Fault
from tests.deploy.platform.test_backends import PARENT, SPEC
from tests.fixtures import Json

PRICE = {"usd-per-hour": "3-6000"}


def uploads(cloud: Emulator, job: Job, lines: list[Json]) -> None:
    """Puts what a trainer has written into the job's directory."""
    folder = job["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"].removeprefix("gs://")
    cloud.objects[f"{folder}/run.json"] = b'{"total_steps": 1000}'
    stats = f"{folder}/stats.jsonl"
    cloud.objects[stats] = "".join(json.dumps(line) + "\n" for line in lines).encode()
    cloud.generations[stats] = cloud.generations.get(stats, 0) + 1


def report(step: int, seconds: float) -> Json:
    return {
        "kind": "report",
        "step": step,
        "seconds": seconds,
        "step_seconds": 0.1,
        "losses": {"loss": 1 / step},
    }


@pytest.fixture
def priced(cloud: Emulator, flying: FlyingClock) -> Job:
    """Returns a job that has run for half an hour at 3.60 USD an hour, for ten hours at most."""
    job = made(cloud, **{"submission": "s", **PRICE})
    job["displayName"] = "x"
    job["jobSpec"] |= {
        "scheduling": {"timeout": "36000s"},
        "baseOutputDirectory": {"outputUriPrefix": "gs://my-bucket/7"},
    }
    cloud.begin(job)
    job["startTime"] = rfc3339(flying.time - 1800)
    return job


def rfc3339(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat().replace("+00:00", "Z")


def test_a_watch_shows_progress_and_money_that_can_be_recomputed(
    cloud: Emulator, priced: Job, flying: FlyingClock, typed: Command
) -> None:
    """By hand: 0.5 h x 3.60 = 1.80 USD, and 10 h x 3.60 at most; 750 steps at 20 s / 100 steps are
    150 s."""
    uploads(cloud, priced, [report(50, 10), report(150, 30), report(250, 50)])

    def end() -> None:
        cloud.end(priced, "SUCCEEDED")
        priced["endTime"] = rfc3339(flying.time)

    def restarted() -> None:
        """Resumes from step 200: Vertex AI restarted the worker, which repeats steps; the clock of
        the job goes on."""
        uploads(cloud, priced, [report(50, 10), report(150, 30), report(200, 60)])
        flying.after(180, end)

    flying.asleep = restarted
    _, *shown, last = typed("watch", priced["name"], *MINE).splitlines()
    assert [line.split("  ", 1)[-1] for line in shown[:3]] == [
        "step 250 of 1,000 (25%), 0:02:30 left, loss 0.004; 1.80 USD so far, 36.00 at most",
        # A minute later; 50 s for 150 steps.
        "step 200 of 1,000 (20%), 0:04:27 left, loss 0.005; 1.86 USD so far, 36.00 at most",
        "SUCCEEDED",
    ]
    hours = (flying.slept - 15 + 1800) / 3600  # without the wait for the last lines of the log
    assert last.endswith(f", about {hours * 3.6:.2f} USD")


def test_jobs_are_listed_region_by_region_with_machine_labels_progress_and_money(
    cloud: Emulator, priced: Job, typed: Command
) -> None:
    uploads(cloud, priced, [report(10, 0), report(20, 300), report(30, 601)])
    done = made(cloud)
    done |= {
        "labels": {"submission": "t", **PRICE, "user": "ana", "team": "vision"},
        "createTime": "2026-11-20T09:58:00Z",
        "startTime": "2026-11-20T10:00:00Z",
        "endTime": "2026-11-20T11:30:00Z",
        "state": "JOB_STATE_SUCCEEDED",
    }
    elsewhere = PARENT.replace("us-central1", "europe-west4")
    waited = cloud.create(
        elsewhere, {"displayName": "y", "jobSpec": SPEC, "labels": {"submission": "w"}}
    )
    cloud.end(waited, "EXPIRED")
    made(cloud)  # not of this package

    def listed(*flags: str) -> list[str]:
        return typed("jobs", *MINE, *flags).splitlines()

    header, first, _, progress, second, about = listed("--region=us-central1")
    assert header.startswith("created (UTC)  ")
    assert first.endswith(priced["name"])
    assert progress.startswith("  step 30 of 1,000 (3%), ")
    assert progress.endswith("; 1.80 USD so far, 36.00 at most")
    words = f"2026-11-20 09:58 SUCCEEDED 1:30:00 5.40 USD demo {done['name']}"
    assert " ".join(second.split()) == words
    assert about == "  g2-standard-12 + 1 x NVIDIA_L4 in us-central1, user=ana, team=vision"
    none, _, expired, *_ = listed("--region=us-east4,europe-west4")
    assert none == "no jobs of this package in us-east4"
    assert expired.endswith(f"{waited['name']}: it got no machines while it waited (--max_wait)")
    for flag, names in (
        ("--state=RUNNING", ["x"]),
        ("--limit=1", ["x"]),
        ("--labels=user=ana", ["demo"]),
        ("--labels=a=", []),
    ):
        lines = listed("--region=us-central1", flag)
        assert [line.split()[-2] for line in lines if "/customJobs/" in line] == names
        assert lines[-1].startswith("the newest 1 of 2: --limit= shows") == (flag == "--limit=1")


def test_progress_that_cannot_be_read_ends_no_watch(
    cloud: Emulator, priced: Job, flying: FlyingClock, typed: Command
) -> None:
    cloud.faults = [Fault("GET /storage", 403, times=99)]
    flying.after(201, lambda: cloud.end(priced, "SUCCEEDED"))
    line = "no progress: gs://my-bucket/7/stats.jsonl: no permission to read it"
    assert typed("watch", priced["name"], *MINE).count(line) == 1


def test_the_bill_holds_every_job_that_wrote_to_the_directory(
    cloud: Emulator, typed: Command
) -> None:
    """By hand: an hour of the first tier until its machines are taken away, which no other follows
    by itself."""

    def run(google: Emulator, job: Job) -> None:
        job |= {"startTime": "2026-11-20T10:00:00Z", "endTime": "2026-11-20T11:00:00Z"}
        if len(google.jobs) == 1:
            google.faults = [Fault(POSTS, 429, message=QUOTA)]
            message = "Resources are insufficient in region: us-central1."
            job |= {"state": "JOB_STATE_FAILED", "error": {"code": 3, "message": message}}
        else:
            job["state"] = "JOB_STATE_SUCCEEDED"

    cloud.run = run
    flags = ["l4x1", *BY_SDK, "--job_dir=gs://my-bucket/runs/7"]
    first, second = (load_tier(tier).price_per_hour or 0 for tier in ("l4x2", "l4x1"))
    typed("submit", "l4x2", *flags, code=1)
    (attempt,) = attempts()
    assert attempt["state"] == "FAILED"
    assert attempt["spent_usd"] == pytest.approx(first)
    assert f", about {second:.2f} USD\n" in typed("submit", "t4x2", *flags)
    typed("submit", *flags)
    bill = json.loads(cloud.objects["my-bucket/runs/7/billed.json"])["jobs"]
    usd = sum(job["usd"] for job in bill.values())
    assert usd == pytest.approx(first + 2 * second, abs=0.01)
