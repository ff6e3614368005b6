"""A comparison on Vertex AI: a job a run, all at once, and what becomes of it when some of that goes wrong."""

import dataclasses
import json
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import compare, comparison
from deploy.__main__ import main
from deploy.arguments import parse as parse_command
from deploy.backends.local import LocalJob
from deploy.creation import ship
from deploy.desk import Desk
from deploy.measure import Row, measure
from deploy.rehearsal import workers_of
from deploy.runs import collect
from deploy.tier import JOB_CONFIGS, load_tier
from deploy.vertex import VertexRunner
from tests.deploy.conftest import FlyingClock, needs_gcloud, put
from tests.deploy.emulator import Emulator, Fault
from tests.deploy.planted import edit, noisy, plant, sample
from tests.deploy.test_submit import JOB, POSTS, QUOTA, ROOT
from trainer.errors import UserError
from trainer.storage.address import Address, parse

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

Job = dict[str, Any]
Run = Callable[[Emulator, Job], None]


def tier_of(job: Job) -> str:
    """The display name is mlp-TIER-SUBMISSION."""
    return str(job["displayName"]).split("-")[1]


def output_of(job: Job) -> Address:
    address = parse(job["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"], "output")
    assert address
    return address


def trains(folder: Path) -> Run:
    """A job that leaves a planted job directory in its bucket: the more devices, the faster."""

    def run(google: Emulator, job: Job) -> None:
        google.begin(job)
        devices = int(job["jobSpec"]["workerPoolSpecs"][0]["machineSpec"].get("acceleratorCount", 1))
        local = plant(folder / job["displayName"], noisy(0.1 / devices), devices=[f"GPU:{i}" for i in range(devices)])
        sample(local)
        (local / "checkpoints").mkdir()
        (local / "checkpoints" / "weights").write_bytes(b"large")
        google.log(job, f"trains on {devices}")
        put(local, output_of(job))
        google.end(job, "SUCCEEDED")

    return run


@pytest.fixture
def command(
    cloud: Emulator, desk: Desk, bucket: Address, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs `compare` of tiers on Vertex AI and returns its exit code and what it printed."""
    cloud.run = trains(tmp_path / "trained")

    def run(*arguments: str) -> tuple[int, str]:
        where = ["--region=us-central1", f"--bucket={bucket}".rstrip("/"), f"--out={tmp_path / 'out'}"]
        image = ["--backend=sdk", "--image=us-docker.pkg.dev/p/r/x:1"]
        code = compare.main([*arguments, "--on=vertex", *where, *image, *JOB], desk)
        return code, capsys.readouterr().out

    return run


def rows(tmp_path: Path) -> list[Row]:
    return measure(collect([str(tmp_path / "out")]))


def test_every_run_is_a_job_without_restarts_and_all_are_reported(
    command: Callable[..., tuple[int, str]], cloud: Emulator, tmp_path: Path
) -> None:
    together = threading.Barrier(4, timeout=60)  # one at a time would break it
    trained = cloud.run
    assert trained

    def run(google: Emulator, job: Job) -> None:
        together.wait()
        trained(google, job)

    cloud.run = run
    code, shown = command("l4x1", "l4x2", "--repeats=2")
    assert code == 0
    assert sorted(tier_of(job) for job in cloud.jobs.values()) == ["l4x1", "l4x1", "l4x2", "l4x2"]
    assert {job["jobSpec"]["scheduling"]["disableRetries"] for job in cloud.jobs.values()} == {True}
    assert len({output_of(job) for job in cloud.jobs.values()}) == 4
    assert len({job["labels"]["submission"] for job in cloud.jobs.values()}) == 4
    one, two = rows(tmp_path)
    assert (one.machine, one.repeats, two.repeats) == ("g2-standard-12 + 1 x NVIDIA_L4", 2, 2)
    assert (one.simulated, two.simulated, two.speed_up) == ("", "", pytest.approx(2, rel=0.01))
    assert "one machine" not in shown  # they had machines of their own
    job_dir = tmp_path / "out" / "l4x2" / "repeat-1"
    assert {file.name for file in job_dir.rglob("*") if file.is_file()} == {
        "run.json", "stats.jsonl", "result.json", "vertex.json", "step-00000500.png",
    }  # fmt: skip
    assert "workerpool0-0  trains on 2" in Path(f"{job_dir}.log").read_text()
    assert (tmp_path / "out" / "report.html").read_text().count('alt="samples of') == 2
    before = list(cloud.requests)
    code, shown = command("l4x1", "l4x2", "--repeats=2")
    assert (code, shown.count(": done before")) == (0, 4)
    assert cloud.requests == before
    assert "USD at most" not in shown


def test_prices_are_said_before_the_first_job_is_sent(command: Callable[..., tuple[int, str]], cloud: Emulator) -> None:
    code, shown = command("t4x1", "--price_per_hour=t4x1=2", "--precision=mixed_bfloat16")
    assert code == 0
    trained, cost, warning, together, *rest = shown.splitlines()
    assert trained.startswith("trains mlp on ")
    assert "t4x1: 1 job on n1-standard-8 + 1 x NVIDIA_TESLA_T4 in us-central1: 2.00 USD an hour, 48.00 USD at" in cost
    assert warning.startswith("warning: t4x1: precision=mixed_bfloat16: NVIDIA_TESLA_T4 computes that slowly")
    assert together == "all jobs together: 48.00 USD at most; --max_cost=USD limits each of them"
    assert any(line.startswith("submitted ") for line in rest)
    (job,) = cloud.jobs.values()
    assert job["labels"]["usd-per-hour"] == "2-0000"


def test_a_dry_run_sums_over_tiers_and_repeats_and_sends_nothing(
    command: Callable[..., tuple[int, str]], cloud: Emulator, tmp_path: Path
) -> None:
    """The limit is of each job, by the price that was given."""
    unpriced = tmp_path / "unpriced.yaml"
    unpriced.write_text((JOB_CONFIGS / "cpu.yaml").read_text().replace("n1-standard-8", "n2-standard-8"))
    flags = ["--repeats=3", "--dry_run", "--price_per_hour=l4x1=2"]
    code, shown = command("l4x1", "l4x2", *flags, "--max_cost=6")
    assert (code, cloud.requests, (tmp_path / "out").exists()) == (0, [], False)
    _, one, two, together = shown.splitlines()
    assert one.startswith("l4x1: 3 jobs, each on g2-standard-12 + 1 x NVIDIA_L4 in us-central1: 2.00 USD an hour, ")
    assert one.endswith(" 6.00 USD at most, until its timeout of 3:00:00")
    assert " (estimate of " in two
    assert together == "all jobs together: 36.00 USD at most"
    shown = command("l4x1", str(unpriced), *flags)[1]
    assert "unpriced: 3 jobs, each on n2-standard-8 in us-central1: the price of this tier is not known" in shown
    assert "all jobs together: 144.00 USD at most, and 3 without a known price; " in shown


def test_a_dry_run_refuses_what_the_command_would_and_says_that_all_is_done(
    command: Callable[..., tuple[int, str]], cloud: Emulator, tmp_path: Path
) -> None:
    """What ran at the desk is no job that is done."""
    assert command("l4x1")[0] == 0
    code, shown = command("l4x1", "--dry_run")
    assert (code, shown.splitlines()[1:]) == (0, [f"nothing to send: all runs in {tmp_path / 'out'} are done"])
    edit(tmp_path / "out" / "comparison.json", on="local")
    with pytest.raises(UserError, match=r"holds another comparison \(on: local there, vertex here\)"):
        command("l4x1", "--dry_run")
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match=r"cannot write there \(that is no folder\)"):
        command("l4x1", "--dry_run")


def test_a_stop_while_the_first_is_shipped_submits_nothing(
    cloud: Emulator, desk: Desk, bucket: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither that one nor those that wait for it."""
    where = ["--on=vertex", "--region=us-central1", f"--bucket={bucket}".rstrip("/"), "--backend=sdk"]
    names = ["l4x1", "l4x2", "l4x4"]
    found, flags = parse_command(compare._flags(), [*names, *where, "--image=us-docker.pkg.dev/p/r/x:1", *JOB])
    tiers = comparison.read_tiers(names, "", {})
    runner = VertexRunner(tiers, found, desk)
    shipped: list[Any] = []

    def stopped(*given: Any) -> None:
        ship(*given)
        shipped.append(given)
        for _ in range(1000):
            if len(list(tmp_path.glob("out/*/repeat-1.log"))) == len(names):
                break  # the others wait
            time.sleep(0.01)
        runner.stop()

    monkeypatch.setattr("deploy.vertex.ship", stopped)
    plan = comparison.Plan(tuple(tier.facts for tier in tiers), tuple(flags))
    assert comparison.compare(plan, tmp_path / "out", runner, parallel=3) == 75
    assert (len(shipped), cloud.jobs) == (1, {})


def test_without_a_login_nothing_begins_and_it_is_said_once(
    cloud: Emulator,
    bucket: Address,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That of Python programs, which reads the results."""
    where = ["--on=vertex", "--region=us-central1", f"--bucket={bucket}".rstrip("/"), f"--out={tmp_path / 'out'}"]
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    assert main(["compare", "l4x1", "l4x2", "--repeats=3", *where, *JOB]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(
        "error: Cloud Storage: no valid Google credentials: run `gcloud auth application-default"
    )
    assert (shown.err.count("\n"), shown.out.count("runs; its output")) == (1, 0)
    assert (cloud.requests, list((tmp_path / "out").iterdir())) == ([], [])


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (Fault("GET .*/customJobs$", 401, times=99), "(401): run `gcloud auth application-default login`"),
        (Fault("GET .*/customJobs$", 403, times=99), "ask for roles/aiplatform.user on my-proj"),
    ],
)
def test_what_would_keep_all_jobs_from_running_is_said_once(
    fault: Fault, line: str, command: Callable[..., tuple[int, str]], cloud: Emulator, tmp_path: Path
) -> None:
    cloud.faults = [fault]
    with pytest.raises(UserError, match=re.escape(line)):
        command("l4x1", "l4x2", "--repeats=3")
    assert len(cloud.requests) == 1


def test_data_that_are_not_there_are_missed_once(command: Callable[..., tuple[int, str]], bucket: Address) -> None:
    with pytest.raises(UserError, match="photos: nothing lies there: check with"):
        command("l4x1", "l4x2", f"--initial_model={bucket}photos")


def test_a_job_that_is_lost_sight_of_is_named_and_found_again(
    command: Callable[..., tuple[int, str]], cloud: Emulator
) -> None:
    cloud.faults = [Fault("GET .*/customJobs/", 401)]
    code, shown = command("cpu")
    (job,) = cloud.jobs.values()
    assert code == 2
    assert f"the job may go on; come back: python -m deploy watch {job['name']}" in shown
    assert command("cpu")[0] == 0
    assert len(cloud.jobs) == 1


def test_a_submission_without_a_clear_answer_is_not_called_refused(
    command: Callable[..., tuple[int, str]], cloud: Emulator, tmp_path: Path
) -> None:
    """The list is late: whether the job was made shows when the same command looks again."""
    cloud.faults = [Fault(POSTS, 503, after=True), Fault(POSTS, 429, message=QUOTA)]
    cloud.lists_nothing = 3
    code, shown = command("cpu")
    assert code == 1
    assert "no job of it is listed yet: see `python -m deploy jobs --project=my-proj" in shown
    assert "not submitted" not in shown
    assert command("cpu")[0] == 0
    assert len(cloud.jobs) == 1
    assert rows(tmp_path)[0].state == "done"


def test_a_tier_without_quota_is_recorded_and_the_rest_goes_on(
    command: Callable[..., tuple[int, str]], cloud: Emulator, tmp_path: Path
) -> None:
    cloud.faults = [Fault(POSTS, 429, times=1, message=QUOTA)]
    code, shown = command("l4x1", "l4x2", "--parallel=1")
    assert code == 2
    assert "l4x1, repeat 1: no quota left in us-central1 for aiplatform.googleapis.com/custom_model" in shown
    assert [row.state for row in rows(tmp_path)] == ["failed", "done"]
    assert "No measurements for l4x1: the run ended as 'failed': not submitted: no quota left in us-central1" in shown
    assert command("l4x1", "l4x2")[0] == 0
    assert [tier_of(job) for job in cloud.jobs.values()] == ["l4x2", "l4x1"]
    assert [row.state for row in rows(tmp_path)] == ["done", "done"]


def test_a_job_that_fails_is_submitted_again_into_the_same_output(
    command: Callable[..., tuple[int, str]], cloud: Emulator, tmp_path: Path
) -> None:
    """The reason is that of the newest attempt."""
    trained = cloud.run
    cloud.faults = [Fault(POSTS, 429, times=1, message=QUOTA)]
    assert "cpu, repeat 1: no quota left in us-central1" in command("cpu")[1]
    assert rows(tmp_path)[0].state == "failed"

    def stocked_out(google: Emulator, job: Job) -> None:
        google.end(job, "FAILED", "Resources are insufficient in region: us-central1.")

    cloud.run = stocked_out
    code, shown = command("cpu")
    assert code == 1
    assert "cpu, repeat 1: exit code 1: Resources are insufficient in region: us-central1.; the same command" in shown
    assert not (tmp_path / "out" / "report.html").exists()  # of nothing
    cloud.run = trained
    assert command("cpu")[0] == 0
    first, second = cloud.jobs.values()
    assert output_of(first) == output_of(second)
    assert first["labels"] != second["labels"]
    assert rows(tmp_path)[0].state == "done"


def test_the_trainers_own_word_wins_over_the_exit_status(
    command: Callable[..., tuple[int, str]], cloud: Emulator, tmp_path: Path
) -> None:
    def run(google: Emulator, job: Job) -> None:
        google.begin(job)
        put(plant(tmp_path / "failed", [0.1, 0.1], state="failed", error="out of memory"), output_of(job))
        google.end(job, "FAILED", "The replica workerpool0-0 exited with a non-zero status of 2.")

    cloud.run = run
    code, shown = command("cpu")
    assert code == 2
    assert "cpu, repeat 1: exit code 2: out of memory; mend that, then give the command again (" in shown
    assert "2 means the trainer refused" in (tmp_path / "out" / "cpu" / "repeat-1.log").read_text()


def test_an_interrupted_comparison_finds_its_jobs_again(
    command: Callable[..., tuple[int, str]], cloud: Emulator, flying: FlyingClock, tmp_path: Path
) -> None:
    trained, goes_on, killed = cloud.run, threading.Event(), []
    assert trained

    def run(google: Emulator, job: Job) -> None:
        google.begin(job)
        goes_on.wait(60)
        trained(google, job)

    def terminate() -> None:
        if len(cloud.jobs) == 2 and not killed:
            killed.append(True)
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # does not wake the main thread

    cloud.run, flying.asleep = run, terminate
    code, shown = command("l4x1", "l4x2")
    assert code == 75
    for job in cloud.jobs.values():
        assert f"{job['name']} goes on; end it: python -m deploy cancel {job['name']}" in shown
    goes_on.set()
    assert command("l4x1", "l4x2")[0] == 0
    assert len(cloud.jobs) == 2
    assert [row.state for row in rows(tmp_path)] == ["done", "done"]


def test_a_run_that_was_fetched_in_part_is_fetched_again(
    command: Callable[..., tuple[int, str]], cloud: Emulator, tmp_path: Path
) -> None:
    job_dir = tmp_path / "out" / "cpu" / "repeat-1"
    (job_dir / "stats.jsonl" / "stats.jsonl").mkdir(parents=True)  # in the way of the file
    assert command("cpu")[0] == 1
    assert not (job_dir / "result.json").exists()
    shutil.rmtree(job_dir / "stats.jsonl")
    assert command("cpu")[0] == 0
    assert (len(cloud.jobs), rows(tmp_path)[0].step_seconds is None) == (1, False)


def test_an_output_for_all_runs_of_a_tier_is_refused(
    command: Callable[..., tuple[int, str]], cloud: Emulator, tmp_path: Path
) -> None:
    tier = tmp_path / "mine.yaml"
    into = "baseOutputDirectory:\n  outputUriPrefix: gs://my-bucket/x\n"
    tier.write_text((JOB_CONFIGS / "cpu.yaml").read_text() + into)
    with pytest.raises(UserError, match="its baseOutputDirectory would be the job directory of every run: drop it"):
        command(str(tier), "--repeats=2")
    assert cloud.requests == []


def test_a_result_that_is_gone_is_said(command: Callable[..., tuple[int, str]], cloud: Emulator) -> None:
    def run(google: Emulator, job: Job) -> None:
        google.begin(job)
        google.end(job, "SUCCEEDED")

    cloud.run = run
    code, shown = command("cpu")
    assert code == 2
    assert "cpu, repeat 1: output=gs://" in shown
    assert "nothing lies there" in shown


def test_a_damaged_record_is_named(command: Callable[..., tuple[int, str]], cloud: Emulator, tmp_path: Path) -> None:
    file = tmp_path / "out" / "cpu" / "repeat-1" / "vertex.json"
    assert command("cpu")[0] == 0
    (file.parent / "result.json").unlink()
    file.write_text('{"job": 1}')
    code, shown = command("cpu")
    assert (code, len(cloud.jobs)) == (2, 1)
    assert f"{file} is damaged: see `python -m deploy jobs`" in shown


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--bucket=gs://my-bucket"], "--bucket is for jobs of Vertex AI: add --on=vertex, or leave it out"),
        (["--backend=sdk"], "--backend is for jobs of Vertex AI: add --on=vertex, or leave it out"),
        (["--on=vertex", "--bucket=gs://my-bucket"], "region is missing"),
        (["--on=vertex", "--region=us-central1"], "bucket is missing"),
        (["--on=vertex", "--dry_run"],
         "us-central1`; bucket is missing: say --bucket=gs://NAME, a bucket of yours in the job's region; project is "),
        (["--on=vertex", "--region=us-central1", "--bucket=gs://my-bucket"], "project is missing"),
        (["--on=vertex", "--region=us-central1", "--bucket=gs://my-bucket", "--project=p", "--data=x/y"],
         "data=x/y: the job's machines do not see this disk"),
        (["--on=vertex", "--region=us-west2", "--bucket=gs://my-bucket", "--project=p"], "us-west2 has no NVIDIA_L4"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "l4x1", *JOB, *arguments]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.slow
@needs_gcloud
def test_end_to_end_with_gcloud_and_real_training(
    cloud: Emulator, desk: Desk, bucket: Address, dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """What gcloud sent is trained by processes of this machine, which write to the bucket as they would there."""

    def run(google: Emulator, job: Job) -> None:
        google.begin(job)
        folder = tmp_path / "trained" / job["displayName"]
        folder.mkdir(parents=True)
        spec = folder.with_suffix(".yaml")
        spec.write_text(yaml.safe_dump(job["jobSpec"]))
        given = workers_of(load_tier(str(spec)), [], folder, job["name"].rsplit("/", 1)[-1])
        there = {"AIP_MODEL_DIR": "model", "AIP_CHECKPOINT_DIR": "checkpoints", "AIP_TENSORBOARD_LOG_DIR": "logs"}
        remote = {name: f"{output_of(job) / below}/" for name, below in there.items()}
        remote["XDG_CACHE_HOME"] = str(folder)
        workers = [dataclasses.replace(one, environment={**one.environment, **remote}) for one in given]
        outcome = LocalJob(workers, folder, lambda worker, line: google.log(job, line, worker)).run()
        google.end(job, outcome.state, outcome.error)

    cloud.run = run
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    where = ["--region=us-central1", f"--bucket={bucket}".rstrip("/"), f"--out={tmp_path / 'out'}"]
    flags = [*(flag for flag in JOB if "steps" not in flag), "--steps=40", "--report_every_steps=10"]
    assert compare.main(["cpu", "cpu-2workers", "l4x2", "--on=vertex", *where, *flags], desk) == 0
    one, workers, devices = rows(tmp_path)
    assert [row.state for row in (one, workers, devices)] == ["done"] * 3
    assert [(row.devices, row.workers) for row in (one, workers, devices)] == [(1, 1), (2, 2), (2, 1)]
    assert [row.final_loss for row in (workers, devices)] == pytest.approx([one.final_loss] * 2, rel=1e-3)
    assert "Simulated devices: l4x2" in capsys.readouterr().out
    sent = [json.dumps(job["jobSpec"]) for job in cloud.jobs.values()]
    assert all("packageUris" in spec and '"disableRetries": true' in spec for spec in sent)
    assert len(cloud.objects) == 1  # the wheel was sent once
