"""`deploy local`: what each worker finds, how a job ends, what is said of a lost worker."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.__main__ import main
from deploy.cli import local
from deploy.platform.local import JobEnd, LocalJob, LocalWorker, free_addresses, local_workers
from deploy.tiers.tier import load_tier
from tests.deploy.conftest import ROOT, Capture
from tests.workers import until

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
SMALL = [
    "--model=mlp",
    "--image_size=16",
    "--width=8",
    "--global_batch_size=8",
    "--jit_compile=false",
]


def worker(name: str, script: Path, *arguments: str) -> LocalWorker:
    environment = {"PYTHONPATH": str(script.parent), "PYTHONUNBUFFERED": "1"}
    return LocalWorker(
        name, script.stem, arguments, environment, frozenset(os.sched_getaffinity(0))
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A worker that does what its arguments say: sleeps, counts its starts in a file, exits."""
    path = tmp_path / "worker_script.py"
    path.write_text(
        "import pathlib, sys, time\nseconds, starts, codes = float(sys.argv[1]),"
        " pathlib.Path(sys.argv[2]), sys.argv[3].split(',')\nwith starts.open('a') as file:"
        " file.write('x')\ncount = len(starts.read_text())\nprint(f'start"
        " {count}')\ntime.sleep(seconds)\nprint('slept')\nsys.exit(int(codes[min(count, len(codes))"
        " - 1]))\n"
    )
    return path


def job(
    tmp_path: Path, script: Path, cases: list[tuple[str, str]], restarts: int = 0
) -> tuple[LocalJob, list[str]]:
    """Workers, each with (seconds, exit codes of its starts)."""
    printed: list[str] = []
    workers = [
        worker(name, script, seconds, str(tmp_path / f"starts{index}"), codes)
        for index, (name, (seconds, codes)) in enumerate(
            zip(("workerpool0-0", "workerpool1-0"), cases, strict=False)
        )
    ]
    return (
        LocalJob(workers, lambda name, line: printed.append(f"[{name}] {line}"), restarts),
        printed,
    )


def test_the_workers_of_a_job_have_its_arguments_and_no_core_in_common(tmp_path: Path) -> None:
    """What else they find: test_script.py."""
    chief, other = local_workers(
        load_tier("l4x1-2workers", ""), ["--seed=3", "--expect_devices=1"], tmp_path, "local-1"
    )
    assert (chief.name, other.name) == ("workerpool0-0", "workerpool1-0")
    assert other.arguments[-2:] == ("--seed=3", "--expect_devices=1")
    if len(os.sched_getaffinity(0)) > 1:
        assert not chief.cores & other.cores


def test_each_worker_runs_on_its_own_core(tmp_path: Path, script: Path) -> None:
    made, _ = job(tmp_path, script, [("0.3", "0"), ("60", "0")])
    cores = sorted(os.sched_getaffinity(0))
    own = dict(zip(("workerpool0-0", "workerpool1-0"), (cores[0], cores[-1]), strict=True))
    made.workers = [replace(each, cores=frozenset({own[each.name]})) for each in made.workers]
    seen: dict[str, set[int]] = {}

    def look(name: str, line: str) -> None:
        if line.startswith("starts as process "):
            seen[name] = os.sched_getaffinity(int(line.split()[-1]))

    made.print_line = look
    assert made.run().state == "SUCCEEDED"
    assert seen == {name: {core} for name, core in own.items()}


@pytest.mark.parametrize(
    ("cases", "restarts", "end", "starts"),
    [
        # the other is ended, not waited for
        ([("0.2", "0"), ("60", "0")], 0, JobEnd(0, "SUCCEEDED"), "x"),
        ([("1.5", "0"), ("0", "75,1,0")], 2, JobEnd(0, "SUCCEEDED", restarts=2), "xxx"),
        *(
            (
                [("0.3", "75"), ("0", codes)],
                0,
                JobEnd(
                    code,
                    "FAILED",
                    f"The replica workerpool1-0 exited with a non-zero status of {codes}.",
                    0,
                    int(codes),
                ),
                "x",
            )
            for codes, code in (("2", 2), ("75", 75), ("1", 1), ("9", 1))
        ),
    ],
    ids=["chief", "restarts", "2", "75", "1", "9"],
)
def test_a_job_ends_with_its_chief_or_with_a_worker_that_may_not_be_restarted(
    tmp_path: Path,
    script: Path,
    cases: list[tuple[str, str]],
    restarts: int,
    end: JobEnd,
    starts: str,
) -> None:
    made, said = job(tmp_path, script, cases, restarts)
    assert made.run() == end
    assert ("[workerpool1-0] slept" in said) == (cases[1][0] == "0")
    assert said.count("[workerpool1-0] start 1") == 1  # said once, and not in the error again
    assert ("[workerpool1-0] exited with status 75: restart 1 of 2" in said) == (restarts == 2)
    assert (tmp_path / "starts1").read_text() == starts


@pytest.mark.parametrize(
    "error", [OSError("No space left on device"), ValueError("I/O operation on closed file.")]
)
def test_what_cannot_be_said_does_not_end_the_worker(
    tmp_path: Path, script: Path, error: Exception
) -> None:
    """A full disk, a closed terminal: else the next line that it prints would."""

    def say(name: str, line: str) -> None:
        raise error

    made, _ = job(tmp_path, script, [("0.2", "1,0")], restarts=1)
    made.print_line = say
    outcome = made.run()
    assert (outcome.state, outcome.restarts) == ("SUCCEEDED", 1)


@pytest.mark.skipif(not RANGE.exists(), reason="this system does not tell its ephemeral ports")
def test_no_outgoing_connection_can_take_a_workers_port() -> None:
    ports = [int(address.rpartition(":")[2]) for address in free_addresses(50)]
    assert len(set(ports)) == 50
    assert max(ports) < int(RANGE.read_text().split()[0])


@pytest.mark.parametrize(
    ("before", "seconds", "code", "state"),
    [(lambda number, frame: None, "20", 75, "CANCELLED"), (signal.SIG_IGN, "1", 0, "SUCCEEDED")],
    ids=["closed", "nohup"],
)
def test_a_closed_terminal_ends_the_workers_unless_nohup_keeps_it_away(
    tmp_path: Path,
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    before: Any,
    seconds: str,
    code: int,
    state: str,
) -> None:
    starts = tmp_path / "starts"
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
        assert (
            local.main(["cpu", "--recipe=wgan_gp_digits", f"--job_dir={tmp_path / 'job'}"]) == code
        )
        closing.join()
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, kept)
    shown = capsys.readouterr().out
    assert f"JOB_STATE_{state}" in shown
    assert ("the same command again starts from scratch: there is no checkpoint yet" in shown) == (
        state == "CANCELLED"
    )


@pytest.mark.parametrize(
    ("below", "line"),
    [
        (
            "file",
            "job_dir={}: cannot write there (not a folder): use a folder that you can write to",
        ),
        (
            "file/job",
            "job_dir={}: cannot write there (Not a directory): use a folder that you can write to",
        ),
        (
            "other",
            (
                "job_dir={} contains another run (model: 'mlp' before, 'wgan_gp' now): use another"
                " --job_dir"
            ),
        ),
    ],
)
def test_a_job_dir_that_cannot_be_is_refused_before_any_worker_starts(
    below: str, line: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "file").write_text("a file where a folder belongs")
    (tmp_path / "other" / "checkpoints" / "step").mkdir(parents=True)
    (tmp_path / "other" / "run.json").write_text('{"config": {"model": "mlp"}}')
    assert (
        main(["local", "cpu-2workers", "--recipe=wgan_gp_digits", f"--job_dir={tmp_path / below}"])
        == 2
    )
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {line.format(tmp_path / below)}")
    assert (shown.err.count("\n"), shown.out) == (1, "")


LOCAL = [sys.executable, "-m", "deploy", "local"]


@pytest.mark.slow
def test_ctrl_c_stops_all_and_keeps_the_state(tmp_path: Path) -> None:
    flags = [*SMALL, "--steps=100000", "--report_every_steps=5", "--checkpoint_every_steps=0"]
    flags += [f"--job_dir={tmp_path / 'job'}"]
    command = [*LOCAL, "cpu", *flags]
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
    (kept,) = (path.name for path in (tmp_path / "job" / "checkpoints").iterdir())
    assert output.endswith(
        f"interrupted: the same command again resumes from step {int(kept[5:]):,}\n"
    )
    typed = shlex.join(["python", "-m", "deploy", "local", "cpu", *flags])
    assert json.loads((tmp_path / "job" / "run.json").read_text())["command"] == typed
