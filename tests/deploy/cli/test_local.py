"""`deploy local`: what each worker finds, how a job ends, what is said of a lost worker."""

import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import local
from deploy.platform.local import LocalJob, LocalWorker, free_addresses
from tests.deploy.conftest import ROOT, Command
from tests.deploy.planted import content, write_files
from tests.fixtures import Patch
from tests.workers import until

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
SMALL = [
    "--model=mlp",
    "--image_size=16",
    "--width=8",
    "--global_batch_size=8",
    "--jit_compile=false",
]


SCRIPT = """
import pathlib, sys, time
seconds, starts, codes = float(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3].split(',')
with starts.open('a') as file:
    file.write('x')
count = len(starts.read_text())
print(f'start {count}')
time.sleep(seconds)
print('slept')
sys.exit(int(codes[min(count, len(codes)) - 1]))
"""


def worker(name: str, script: Path, *arguments: str) -> LocalWorker:
    environment = {"PYTHONPATH": str(script.parent), "PYTHONUNBUFFERED": "1"}
    return LocalWorker(
        name, script.stem, arguments, environment, frozenset(os.sched_getaffinity(0))
    )


@pytest.fixture
def script() -> Path:
    """A worker that does what its arguments say: sleeps, counts its starts in a file, exits."""
    path = Path("worker_script.py")
    path.write_text(SCRIPT)
    return path


def job(
    script: Path, cases: list[tuple[str, str]], restarts: int = 0
) -> tuple[LocalJob, list[str]]:
    """Workers, each with (seconds, exit codes of its starts)."""
    printed: list[str] = []
    workers = [
        worker(f"workerpool{index}-0", script, seconds, f"starts{index}", codes)
        for index, (seconds, codes) in enumerate(cases)
    ]
    made = LocalJob(workers, lambda name, line: printed.append(f"[{name}] {line}"), restarts)
    return made, printed


@pytest.mark.parametrize(
    ("chief", "other", "restarts", "code", "state"),
    [
        # the other is ended, not waited for
        (("0.2", "0"), ("60", "0"), 0, 0, "SUCCEEDED"),
        (("1.5", "0"), ("0", "75,1,0"), 2, 0, "SUCCEEDED"),
        (("0.3", "75"), ("0", "2"), 0, 2, "FAILED"),
        (("0.3", "75"), ("0", "75"), 0, 75, "FAILED"),
        (("0.3", "75"), ("0", "9"), 0, 1, "FAILED"),
    ],
)
def test_a_job_ends_with_its_chief_or_with_a_worker_that_may_not_be_restarted(
    script: Path,
    chief: tuple[str, str],
    other: tuple[str, str],
    restarts: int,
    code: int,
    state: str,
) -> None:
    made, said = job(script, [chief, other], restarts)
    end = made.run()
    assert end.code == code
    assert end.state == state
    assert end.restarts == restarts
    failed = f"The replica workerpool1-0 exited with a non-zero status of {other[1]}."
    assert end.error == (failed if code else "")
    assert ("[workerpool1-0] slept" in said) == (other[0] == "0")
    assert said.count("[workerpool1-0] start 1") == 1  # said once, and not in the error again
    assert ("[workerpool1-0] exited with status 75: restart 1 of 2" in said) == (restarts == 2)
    assert Path("starts1").read_text() == "x" * (restarts + 1)


@pytest.mark.parametrize(
    "error", [OSError("No space left on device"), ValueError("I/O operation on closed file.")]
)
def test_what_cannot_be_said_does_not_end_the_worker(script: Path, error: Exception) -> None:
    """A full disk, a closed terminal: else the next line that it prints would."""

    def say(name: str, line: str) -> None:
        raise error

    made, _ = job(script, [("0.2", "1,0")], restarts=1)
    made.print_line = say
    outcome = made.run()
    assert outcome.state == "SUCCEEDED"
    assert outcome.restarts == 1


@pytest.mark.skipif(not RANGE.exists(), reason="this system does not tell its ephemeral ports")
def test_no_outgoing_connection_can_take_a_workers_port() -> None:
    ports = [int(address.rpartition(":")[2]) for address in free_addresses(50)]
    assert len(set(ports)) == 50
    assert max(ports) < int(RANGE.read_text().split()[0])


@pytest.mark.parametrize(
    ("before", "seconds", "code", "state"),
    [(lambda number, frame: None, "20", 75, "CANCELLED"), (signal.SIG_IGN, "1", 0, "SUCCEEDED")],
)
def test_a_closed_terminal_ends_the_workers_unless_nohup_keeps_it_away(
    script: Path,
    monkeypatch: Patch,
    before: Any,
    seconds: str,
    code: int,
    state: str,
    typed: Command,
) -> None:
    starts = Path("starts")
    sleeper = worker("workerpool0-0", script, seconds, str(starts), "0")
    monkeypatch.setattr(local, "local_workers", lambda *_, **__: [sleeper])

    def hang_up() -> None:
        until(starts.exists, 20)
        os.kill(os.getpid(), signal.SIGHUP)

    # else it would end the tests where the job does not hear it
    kept = signal.signal(signal.SIGHUP, before)
    closing = threading.Thread(target=hang_up)
    closing.start()
    try:
        shown = typed("local", "cpu", "--recipe=wgan_gp_digits", "--job_dir=job", code=code)
        closing.join()
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, kept)
    assert f"JOB_STATE_{state}" in shown
    assert ("from scratch: there is no checkpoint yet" in shown) == (code == 75)


@pytest.mark.parametrize(
    ("below", "line"),
    [
        ("file", ": cannot write there (not a folder): use a folder that you can write to"),
        ("file/job", ": cannot write there (Not a directory): use a folder that"),
        ("other", " contains another run (model: 'mlp' before, 'wgan_gp' now): use another"),
    ],
)
def test_a_job_dir_that_cannot_be_is_refused_before_any_worker_starts(
    below: str, line: str, refused: Command
) -> None:
    write_files({"file": "", "other/run.json": '{"config": {"model": "mlp"}}'})
    Path("other/checkpoints/step").mkdir(parents=True)
    error = refused("local", "cpu-2workers", "--recipe=wgan_gp_digits", f"--job_dir={below}")
    assert f"job_dir={below}{line}" in error


@pytest.mark.slow
def test_ctrl_c_stops_all_and_keeps_the_state() -> None:
    flags = [*SMALL, "--steps=100000", "--report_every_steps=5", "--checkpoint_every_steps=0"]
    flags.append(f"--job_dir={Path('job').absolute()}")
    command = [sys.executable, "-m", "deploy", "local", "cpu", *flags]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    for line in process.stdout:
        if "step 10/" in line:
            break
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert "state saved at step" in output
    assert "[all] stopping: the workers save their state and exit within 20 s" in output
    assert "JOB_STATE_CANCELLED" in output
    (kept,) = (path.name for path in Path("job/checkpoints").iterdir())
    assert output.endswith(
        f"interrupted: the same command again resumes from step {int(kept[5:]):,}\n"
    )
    typed = f"python -m deploy local cpu {shlex.join(flags)}"
    assert content("job/run.json")["command"] == typed
