"""Tests comparisons on Vertex AI: one job per run, in parallel, with their costs, and refused
commands."""

import re
import shutil
import threading
from pathlib import Path

import pytest

from deploy.tiers.tier import JOB_CONFIGS
from tests.deploy.conftest import Command, Job, output_of, rows, tier_of
from tests.deploy.emulator import Emulator
from tests.deploy.planted import edit

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


def test_every_run_is_a_job_without_restarts_and_all_are_reported(
    command: Command, cloud: Emulator
) -> None:
    together = threading.Barrier(4, timeout=60)  # breaks if jobs run one at a time
    trained = cloud.run

    def run(google: Emulator, job: Job) -> None:
        together.wait()
        trained(google, job)

    cloud.run = run
    words = ["l4x1", "l4x2", "--repeats=2", "--labels=team=vision", "--spot"]
    shown = command(*words)
    jobs = cloud.jobs.values()
    assert sorted(map(tier_of, jobs)) == ["l4x1", "l4x1", "l4x2", "l4x2"]
    for job in jobs:
        wanted = {"disableRetries": True, "strategy": "SPOT"}
        assert wanted.items() <= job["jobSpec"]["scheduling"].items()
        assert job["labels"]["team"] == "vision"
    assert len({(output_of(job), job["labels"]["submission"]) for job in jobs}) == 4
    one, two = rows()
    assert one.machine == "g2-standard-12 + 1 x NVIDIA_L4, spot"
    assert one.repeats == two.repeats == 2
    assert one.simulated == two.simulated == ""
    assert two.speed_up == pytest.approx(2, rel=0.01)
    assert "one machine" not in shown  # each job has its own machines
    job_dir = Path("out/l4x2/repeat-1")
    names = "billed.json result.json run.json stats.jsonl step-00000500.png submission.json"
    files = [file.name for file in job_dir.rglob("*") if file.is_file()]
    assert " ".join(sorted(files)) == names
    assert "workerpool0-0  trains on 2" in Path(f"{job_dir}.log").read_text()
    assert Path("out/report.html").read_text().count('alt="samples of') == 2
    before = list(cloud.requests)
    shown = command(*words)
    assert shown.count(": done before") == 4
    assert cloud.requests == before
    assert "USD at most" not in shown


def test_a_dry_run_sums_over_tiers_and_repeats_and_submits_nothing(
    command: Command, cloud: Emulator
) -> None:
    """The limit applies to each job, at the given price."""
    unpriced = Path("unpriced.yaml")
    gb200 = ": a4x-highgpu-4g\n      acceleratorType: NVIDIA_GB200\n      acceleratorCount: 4"
    text = (JOB_CONFIGS / "cpu.yaml").read_text()
    unpriced.write_text(text.replace(": n1-standard-8", gb200))
    flags = ["--repeats=3", "--dry_run", "--price_per_hour=l4x1=2"]
    _, one, two, memory, *rest = command("l4x1", "l4x2", *flags, "--max_cost=6").splitlines()
    assert "l4x1, l4x2: whether it fits the memory is not known: --plan measures it" in memory
    assert cloud.requests == []
    assert not Path("out").exists()
    assert "l4x1: 3 jobs, each on g2-standard-12 + 1 x NVIDIA_L4 in us-central1: 2.00 USD" in one
    assert one.endswith(" 6.00 USD at most, until its timeout of 3:00:00")
    assert " (estimate of " in two
    assert rest[0].startswith("these 6 jobs together may cost 36.00 USD until the timeout; there")
    assert rest[1].startswith("nothing was sent: ")
    shown = command("l4x1", "unpriced.yaml", *flags)
    on = "unpriced: 3 jobs, each on a4x-highgpu-4g + 4 x NVIDIA_GB200 in us-central1: the"
    assert re.search(rf"{re.escape(on)} \w+ price of", shown)
    assert "without it these 6 jobs together may cost 144.00 USD until the timeout" in shown
    both = "unpriced is not known: .* without it these 2 jobs .*: set a limit for each, such as --m"
    assert re.search(both, command("h100x8", "unpriced.yaml", code=2))
    shown = command("l4x4", "--repeats=9", "--max_cost=60", code=2)  # of each
    assert re.search(r"these 9 jobs together may cost 539\.99 USD .*, or send", shown)
    unpriced.write_text(f"{text}baseOutputDirectory: {{outputUriPrefix: gs://b/x}}\n")
    line = "its baseOutputDirectory would be the job directory of"
    assert line in command("unpriced.yaml", code=2)
    assert cloud.jobs == {}


def test_a_dry_run_refuses_what_the_command_would_and_reports_that_all_is_done(
    command: Command,
) -> None:
    """A local run does not count as a finished job."""
    command("l4x1")
    assert "\nnothing to submit: all runs in out are done\n" in command("l4x1", "--dry_run")
    edit("out/comparison.json", on="local")
    line = "holds another comparison (on: local stored, vertex given)"
    assert line in command("l4x1", "--dry_run", code=2)
    shutil.rmtree(Path("out"))
    Path("out").write_text("a file")
    assert "cannot write there (not a folder)" in command("l4x1", "--dry_run", code=2)
