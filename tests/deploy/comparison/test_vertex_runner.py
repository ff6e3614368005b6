"""Tests comparisons on Vertex AI: one job per run, in parallel, with their costs, and refused
commands."""

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from deploy.cli import compare
from deploy.platform.gcloud_and_sdk import Session
from deploy.platform.local import LocalJob, local_workers
from deploy.tiers.tier import JOB_CONFIGS, load_tier
from tests.deploy.conftest import (
    JOB,
    ROOT,
    Capture,
    Command,
    FlyingClock,
    Job,
    needs_gcloud,
    output_of,
    rows,
    tier_of,
)
from tests.deploy.emulator import Emulator
from tests.deploy.planted import edit
from tests.support import refused
from trainer.base.errors import UserError
from trainer.base.storage import gcs
from trainer.base.storage.local_files import Address

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


def test_every_run_is_a_job_without_restarts_and_all_are_reported(
    command: Command, cloud: Emulator, tmp_path: Path
) -> None:
    together = threading.Barrier(4, timeout=60)  # breaks if jobs run one at a time
    trained = cloud.run

    def run(google: Emulator, job: Job) -> None:
        together.wait()
        trained(google, job)

    cloud.run = run
    shown = command("l4x1", "l4x2", "--repeats=2", "--labels=team=vision", "--spot")
    assert sorted(tier_of(job) for job in cloud.jobs.values()) == ["l4x1", "l4x1", "l4x2", "l4x2"]
    for job in cloud.jobs.values():
        scheduling = {
            key: job["jobSpec"]["scheduling"][key] for key in ("disableRetries", "strategy")
        }
        assert (scheduling, job["labels"]["team"]) == (
            {"disableRetries": True, "strategy": "SPOT"},
            "vision",
        )
    assert len({(output_of(job), job["labels"]["submission"]) for job in cloud.jobs.values()}) == 4
    one, two = rows(tmp_path)
    assert (one.machine, one.repeats, two.repeats) == ("g2-standard-12 + 1 x NVIDIA_L4", 2, 2)
    assert (one.simulated, two.simulated, two.speed_up) == ("", "", pytest.approx(2, rel=0.01))
    assert "one machine" not in shown  # each job has its own machines
    job_dir = tmp_path / "out" / "l4x2" / "repeat-1"
    kept = {
        "run.json",
        "stats.jsonl",
        "result.json",
        "submission.json",
        "billed.json",
        "step-00000500.png",
    }
    assert {file.name for file in job_dir.rglob("*") if file.is_file()} == kept
    assert "workerpool0-0  trains on 2" in Path(f"{job_dir}.log").read_text()
    assert (tmp_path / "out" / "report.html").read_text().count('alt="samples of') == 2
    before = list(cloud.requests)
    shown = command("l4x1", "l4x2", "--repeats=2", "--labels=team=vision", "--spot")
    assert shown.count(": done before") == 4
    assert cloud.requests == before
    assert "USD at most" not in shown


def test_a_dry_run_sums_over_tiers_and_repeats_and_submits_nothing(
    command: Command, cloud: Emulator, tmp_path: Path
) -> None:
    """The limit applies to each job, at the given price."""
    unpriced = tmp_path / "unpriced.yaml"
    gb200 = "a4x-highgpu-4g\n      acceleratorType: NVIDIA_GB200\n      acceleratorCount: 4"
    unpriced.write_text(
        (JOB_CONFIGS / "cpu.yaml")
        .read_text()
        .replace("machineType: n1-standard-8", f"machineType: {gb200}")
    )
    flags = ["--repeats=3", "--dry_run", "--price_per_hour=l4x1=2"]
    _, one, two, memory, together, end = command(
        "l4x1", "l4x2", *flags, "--max_cost=6"
    ).splitlines()
    assert memory.startswith(
        "l4x1, l4x2: whether it fits the memory is not known: --plan measures it"
    )
    assert (cloud.requests, (tmp_path / "out").exists()) == ([], False)
    assert one.startswith(
        "l4x1: 3 jobs, each on g2-standard-12 + 1 x NVIDIA_L4 in us-central1: 2.00 USD an hour, "
    )
    assert one.endswith(" 6.00 USD at most, until its timeout of 3:00:00")
    assert " (estimate of " in two
    assert (
        together == "these 6 jobs together may cost 36.00 USD until the timeout; there is no plan"
    )
    assert end.startswith("nothing was sent: ")
    shown = command("l4x1", str(unpriced), *flags)
    unknown = "the price of a4x-highgpu-4g + 4 x NVIDIA_GB200 is not known (--prices=FILE)"
    assert (
        f"unpriced: 3 jobs, each on a4x-highgpu-4g + 4 x NVIDIA_GB200 in us-central1: {unknown}"
        in shown
    )
    assert (
        "is not known; without it these 6 jobs together may cost 144.00 USD until the timeout"
        in shown
    )
    both = (
        r"unpriced is not known: .* as --prices=FILE; without it these 2 jobs .*: set a limit for"
        r" each, such as --max"
    )
    with pytest.raises(UserError, match=both):
        command("h100x8", str(unpriced))
    with pytest.raises(
        UserError, match=r"these 9 jobs together may cost 539\.99 USD .*, or send fewer at once"
    ):
        command("l4x4", "--repeats=9", "--max_cost=60")  # of each
    unpriced.write_text(
        (JOB_CONFIGS / "cpu.yaml").read_text()
        + "baseOutputDirectory: {outputUriPrefix: gs://b/x}\n"
    )
    with refused("its baseOutputDirectory would be the job directory of"):
        command(str(unpriced))
    assert cloud.jobs == {}


def test_a_dry_run_refuses_what_the_command_would_and_reports_that_all_is_done(
    command: Command, cloud: Emulator, tmp_path: Path
) -> None:
    """A local run does not count as a finished job."""
    command("l4x1")
    assert command("l4x1", "--dry_run").splitlines()[1:] == [
        f"nothing to submit: all runs in {tmp_path / 'out'} are done"
    ]
    edit(tmp_path / "out" / "comparison.json", on="local")
    with refused("holds another comparison (on: local stored, vertex given)"):
        command("l4x1", "--dry_run")
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").write_text("a file")
    with refused("cannot write there (not a folder)"):
        command("l4x1", "--dry_run")


@pytest.mark.slow
@needs_gcloud
def test_end_to_end_with_gcloud_and_real_training(
    cloud: Emulator,
    session: Session,
    flying: FlyingClock,
    bucket: Address,
    target: list[str],
    dist: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    """Local processes train the job that gcloud submitted, by its spec alone, and write to the
    bucket."""

    def run(google: Emulator, job: Job) -> None:
        google.begin(job)
        folder = tmp_path / "trained" / job["displayName"]
        folder.mkdir(parents=True)
        spec = folder.with_suffix(".yaml")
        spec.write_text(yaml.safe_dump(job["jobSpec"]))
        folders = {
            "AIP_MODEL_DIR": "model",
            "AIP_CHECKPOINT_DIR": "checkpoints",
            "AIP_TENSORBOARD_LOG_DIR": "logs",
        }
        remote = {name: f"{output_of(job) / below}/" for name, below in folders.items()}
        remote |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)}
        given = local_workers(load_tier(str(spec)), [], folder, job["name"].rsplit("/", 1)[-1])
        workers = [
            replace(worker, environment={**worker.environment, **remote}) for worker in given
        ]
        outcome = LocalJob(workers, lambda worker, line: google.log(job, line, worker)).run()
        google.end(job, outcome.state, outcome.error)

    cloud.run = run
    # each look is a second of gcloud's
    flying.asleep = lambda: [thread.join(5) for thread in list(cloud.threads)]
    flags = [
        *(flag for flag in JOB if "steps" not in flag),
        "--steps=40",
        "--report_every_steps=10",
    ]
    assert compare.main(["cpu", "cpu-2workers", "l4x2", *target, *flags], session) == 0
    one, workers, devices = rows(tmp_path)
    assert [row.state for row in (one, workers, devices)] == ["done"] * 3
    assert [(row.devices, row.workers) for row in (one, workers, devices)] == [
        (1, 1),
        (2, 2),
        (2, 1),
    ]
    assert [row.final_loss for row in (workers, devices)] == pytest.approx(
        [one.final_loss] * 2, rel=1e-3
    )
    assert "Simulated devices: l4x2" in capsys.readouterr().out
    sent = [json.dumps(job["jobSpec"]) for job in cloud.jobs.values()]
    assert all("vertex_trainer" in spec and '"disableRetries": true' in spec for spec in sent)
    stored = gcs.connect().client.list_blobs(bucket.bucket)
    assert sum(blob.name.endswith(".whl") for blob in stored) == 1  # uploaded once
