"""Tests that nothing is paid twice without a word: the same command again, at the same time, and
beside `clean`."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import vertex_trainer
from deploy.__main__ import main
from deploy.cli import clean
from deploy.platform.errors import STATE_UNKNOWN
from deploy.platform.retries import CLOCK
from tests.deploy.cli.test_interrupted import interrupts_itself
from tests.deploy.cli.test_lost_jobs import SDK, states
from tests.deploy.conftest import BY_SDK, WHERE, Command, FlyingClock, Job
from tests.deploy.emulator import POSTS, Emulator, Fault, ends
from tests.fixtures import Json, Patch
from trainer.base.errors import PlatformFault, UserError

SCRIPT = ["cpu", *WHERE, "--backend=sdk", "--script=code/train.py"]
CLEAN = ["--project=my-proj", "--bucket=gs://my-bucket", "--yes"]


@pytest.fixture
def script() -> Path:
    """Returns a script: another content of it is another source."""
    Path("code").mkdir()
    path = Path("code/train.py")
    path.write_text("print('trains')\n")
    return path


def test_a_running_job_of_the_same_command_with_other_sources_is_asked_about(
    script: Path,
    cloud: Emulator,
    flying: FlyingClock,
    monkeypatch: Patch,
    refused: Command,
    typed: Command,
) -> None:
    """The command is killed while the job is created."""
    cloud.loses_a_job()
    flying.asleep = flying.interrupt
    typed("submit", *SCRIPT, code=STATE_UNKNOWN)
    cloud.lists_nothing = 0
    flying.asleep = lambda: None
    job = cloud.job
    cloud.begin(job)
    script.write_text("print(1)\n")
    said = refused("submit", *SCRIPT)
    assert (
        f"{job['name']} (RUNNING) has the same command and other files: watch it: python -m deploy"
        in said
    )
    assert "--again" in said
    assert len(cloud.jobs) == 1
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, code, sent in (("n", 2, 1), ("y", 0, 2)):
        monkeypatch.setattr("builtins.input", lambda answer=answer: answer)
        typed("submit", *SCRIPT, "--detach", code=code)
        assert len(cloud.jobs) == sent
    script.write_text("print(2)\n")
    cloud.end(job, "SUCCEEDED")
    monkeypatch.setattr("builtins.input", lambda: "n")
    assert "customJobs/1001 (PENDING)" in refused("submit", *SCRIPT)
    cloud.end(cloud.jobs["1001"], "FAILED")
    typed("submit", *SCRIPT, "--detach")
    assert len(cloud.jobs) == 3


def test_again_sends_another_and_without_it_a_detached_job_is_found_while_it_runs(
    cloud: Emulator, typed: Command
) -> None:
    for flags, sent in (([], 1), ([], 1), (["--again"], 2), ([], 2)):
        shown = typed("submit", "cpu", *SDK, "--detach", *flags)
        assert len(cloud.jobs) == sent
    assert "continues with" in shown
    for job in cloud.jobs.values():
        cloud.end(job, "SUCCEEDED")
    typed("submit", "cpu", *SDK, "--detach")
    assert len(cloud.jobs) == 3


def test_the_same_command_at_the_same_moment_is_one_job(cloud: Emulator) -> None:
    """The second waits at the door while the first uploads."""
    cloud.faults = [Fault("POST .*/upload/.*", "slow", times=9)]
    settings: Json = dict(word[2:].split("=") for word in BY_SDK)
    with ThreadPoolExecutor() as threads:
        made = [threads.submit(vertex_trainer.submit, "cpu", **settings) for _ in range(3)]
    names = [future.result().name for future in made]
    assert names == [job["name"] for job in cloud.jobs.values()] * 3


MOMENTS = [
    pytest.param(moment, marks=[pytest.mark.slow] * (moment % 4 > 0)) for moment in range(20)
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_clean_at_any_moment_leaves_what_a_submission_needs(
    moment: int, cloud: Emulator, typed: Command
) -> None:
    """The packages were uploaded before, for a job that has ended; the first region gets no
    machines."""
    typed("submit", "cpu", *BY_SDK, "--detach")
    cloud.end(cloud.job, "FAILED")
    cloud.updated.clear()  # long ago
    needed = {name for name in cloud.objects if "/packages/" in name}
    requests = iter(range(moment))
    missing = set[str]()

    def run(google: Emulator, job: Job) -> None:
        missing.update(needed - google.objects.keys())
        if "us-east4" in job["name"]:
            google.begin(job)
            google.end(job, "SUCCEEDED")
        else:
            google.end(job, "EXPIRED")

    def interfere() -> None:
        if next(requests, None) is None:
            cloud.before_request = lambda: None
            # the emulator's times are real; the fast clock passes an hour in a second
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(vars(CLOCK), "now", time.time)
                clean.main(CLEAN)

    cloud.run = run
    cloud.before_request = interfere
    typed("submit", "cpu", "--region=us-central1,us-east4", *BY_SDK[1:])
    assert states(cloud)[1:] == ["EXPIRED", "SUCCEEDED"]
    assert not missing


MANY = [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 10)) for seed in range(200)]


# killed while a socket is closed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", MANY)
def test_no_drawn_sequence_of_commands_has_two_jobs_at_once(
    seed: int, script: Path, cloud: Emulator, flying: FlyingClock
) -> None:
    """Commands are killed at a drawn request or wait; answers are lost, and jobs listed late."""
    draw = random.Random(seed)
    most: list[int] = []

    def alive() -> list[Job]:
        return [
            job
            for job in cloud.jobs.values()
            if "endTime" not in job and "CANCEL" not in job["state"]
        ]

    def finish() -> None:
        for job in alive():
            cloud.end(job, draw.choice(["SUCCEEDED", "FAILED"]))

    def fit() -> None:
        vertex_trainer.fit(
            on="cpu",
            region="us-central1",
            bucket="gs://my-bucket",
            backend="sdk",
            script="code/train.py",
        )

    sends = [fit, lambda: main(["submit", *SCRIPT]), lambda: main(["submit", *SCRIPT, "--detach"])]
    others = [
        lambda: main(["watch"]),
        lambda: main(["cancel", "--yes"]),
        lambda: main(["clean", *CLEAN]),
        lambda: script.write_text(str(draw.random())),
        finish,
    ]
    for _ in range(8):
        cloud.run = draw.choice([None, None, ends("SUCCEEDED")])
        kinds: list[int | str] = [503, "cut", "html"]
        cloud.faults = draw.choice([[], [Fault(POSTS, draw.choice(kinds), after=True)]])
        left = draw.randrange(40)

        def count() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                interrupts_itself()

        cloud.before_request = count
        flying.asleep = draw.choice([finish, flying.interrupt])
        with suppress(UserError, PlatformFault, KeyboardInterrupt):
            draw.choice([*sends, *others])()
        cloud.faults = []
        cloud.before_request = lambda: None
        most.append(len(alive()))
    assert max(most) <= 1
