"""Tests that of two runs on one job directory in a bucket one writes, on any machines, and that a dead one yields."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import Patch
from tests.trainer.base.storage.conftest import Bucket
from tests.trainer.base.storage.fault_proxy import FOREVER, Fault, Proxy
from tests.workers import ROOT
from trainer.base.errors import USER_MUST_CHANGE, PlatformFault, UserError
from trainer.base.run_files.mirror import Mirror
from trainer.base.storage import gcs, lease, uploader
from trainer.base.storage.gcs import connect
from trainer.base.storage.lease import Lease
from trainer.base.storage.uploader import Uploader

SETTING = "job_dir=gs://x/runs/7"


class Clock:
    """Passes the seconds that are slept; `meanwhile` is called in each of them."""

    def __init__(self, meanwhile: Any = lambda: None) -> None:
        self.now, self.meanwhile = 0.0, meanwhile

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


def lease_of(bucket: Bucket, lost: list[Exception]) -> Lease:
    return Lease(connect(), bucket.address("runs/7/lease.json"), SETTING, lost.append)


def held_by(bucket: Bucket, **holder: str) -> None:
    metadata = {"trainer-host": socket.gethostname(), "trainer-boot": "other", "trainer-process": "7"}
    metadata |= {f"trainer-{name}": value for name, value in holder.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gcs, "writer", lambda: metadata)
        connect().upload(json.dumps(metadata).encode(), bucket.address("runs/7/lease.json"))


@pytest.mark.parametrize(("holder", "seconds"), [
    ({}, lease.STALE_SECONDS),  # of another machine, which may be alive
    ({"boot": "here", "process": "0"}, 0),  # is no process
    ({"boot": "here", "process": str(os.getpid())}, 0),
    ({"job": "1234"}, 0),  # an earlier start of the same Vertex AI job
    ({"job": "1235"}, lease.STALE_SECONDS),
])  # fmt: skip
def test_a_dead_run_yields_at_once_or_when_its_lease_is_stale(
    bucket: Bucket, monkeypatch: Patch, holder: dict[str, str], seconds: float
) -> None:
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "1234")
    if "boot" in holder:
        holder = {**holder, "boot": gcs.writer()["trainer-boot"]}
        if holder["process"] == "0":
            with subprocess.Popen([sys.executable, "-c", ""]) as ended:
                pass
            holder["process"] = str(ended.pid)
    held_by(bucket, **holder)
    clock, lost = Clock(), list[Exception]()
    taken = lease_of(bucket, lost)
    monkeypatch.setattr(lease, "time", clock)
    monkeypatch.setattr(lease, "_POLL_SECONDS", 5.0)
    taken.acquire()
    assert clock.now == seconds
    assert json.loads(bucket.content("runs/7/lease.json"))["trainer-process"] == str(os.getpid())
    taken.release()
    assert (bucket.names(), lost) == ([], [])


def test_a_run_that_renews_its_lease_refuses_another(bucket: Bucket, monkeypatch: Patch) -> None:
    held_by(bucket)
    clock: Clock = Clock(lambda: held_by(bucket, process=str(clock.now)))
    monkeypatch.setattr(lease, "time", clock)
    host = socket.gethostname()
    with pytest.raises(UserError, match=rf"{SETTING}: another run is writing to it \(host {host} process [\d.]+, 2"):
        lease_of(bucket, []).acquire()


def test_damaged_leases_and_races_end_in_one_holder(bucket: Bucket, proxy: Proxy) -> None:
    held_by(bucket, boot=gcs.writer()["trainer-boot"], process="no number")
    first = lease_of(bucket, [])
    first.acquire()
    first.release()
    proxy.faults.append(Fault(412, "POST", "/upload/", times=3))  # others were faster
    with pytest.raises(UserError, match="it has just ended"):
        lease_of(bucket, []).acquire()


def test_a_run_whose_lease_was_taken_over_ends(bucket: Bucket, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    (tmp_path / "run.json").write_text("{}")
    with closing(Mirror({tmp_path: bucket.address("runs/7")})) as mirror:
        mirror.claim(tmp_path)
        mirror.put(tmp_path / "run.json")
        mirror.finish(10)
        bucket.put("runs/7/lease.json", b"{}")
        with pytest.raises(UserError, match="another run is writing to it"):
            for _ in range(200):
                mirror.put(tmp_path / "run.json")
                time.sleep(0.05)
    assert "runs/7/lease.json" in bucket.names()  # it is that of the other run


def test_a_second_start_of_another_machine_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    """The second process has another cache, and believes to be on another machine."""
    elsewhere = (
        "import os, sys; from trainer.base.storage import gcs, lease; gcs._MACHINE = '/none'; name = os.uname(); "
    )
    elsewhere += "name = type(name)((name[0], sys.argv.pop(1), *name[2:])); os.uname = lambda: name; "
    hold = "from trainer.base.storage.gcs import connect; from trainer.base.storage.address import parse; "
    hold += "lease.RENEW_SECONDS = 0.2; lease.Lease(connect(), parse(sys.argv[1], ''), '', print).acquire(); "
    hold += "sys.stdin.read()"
    address, run = bucket.url("runs/7"), "from trainer.task import main; sys.exit(main(sys.argv[1:]))"
    first = subprocess.Popen(
        [sys.executable, "-c", elsewhere + hold, "one", f"{address}/lease.json"], cwd=ROOT, stdin=subprocess.PIPE
    )
    with first:
        while "runs/7/lease.json" not in bucket.names() and first.poll() is None:
            time.sleep(0.1)
        flags = ["--recipe=wgan_gp_digits", f"--job_dir={address}", f"--cache_dir={tmp_path}"]
        second = subprocess.run(
            [sys.executable, "-c", elsewhere + run, "two", *flags],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=100,
        )
        first.kill()
    assert second.returncode == USER_MUST_CHANGE, second.stderr
    assert "another run is writing to it (host one process " in second.stderr
    assert "Traceback" not in second.stderr


@pytest.fixture
def sender(bucket: Bucket, tmp_path: Path, monkeypatch: Patch) -> Any:
    """Returns an uploader of tmp_path, and the seconds of its clock."""
    clock = Clock()
    monkeypatch.setattr(uploader, "time", clock)
    with closing(Uploader({tmp_path: bucket.address("runs/7")}, "manifest.json")) as sender:
        yield sender, clock


def test_an_object_that_others_keep_changing_ends_the_uploads(
    bucket: Bucket, proxy: Proxy, sender: Any, tmp_path: Path
) -> None:
    uploads, file = sender[0], tmp_path / "result.json"
    connect().upload(b"old", bucket.address("runs/7/result.json"))
    file.write_text("{}")
    proxy.faults.append(Fault(412, "POST", "/upload/", times=FOREVER))
    uploads.put(file)
    assert uploads.join(20) == [str(file)]
    with pytest.raises(PlatformFault, match=r"kept changing: .* Last written by host .* 20.* UTC$"):
        uploads.put(file)


def test_what_is_refused_is_kept_and_tried_again_for_a_stated_time(
    bucket: Bucket, proxy: Proxy, sender: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("trainer.base.log.log.propagate", True)
    limit, line = (
        uploader._REFUSED_SECONDS,
        "no valid Google credentials: .*: given up after 1:00:00; what was not sent",
    )
    (uploads, clock), file = sender, tmp_path / "result.json"
    connect().upload(b"old", bucket.address("runs/7/result.json"))
    file.write_text("{}")
    fault = Fault(401, "POST", "/upload/", times=FOREVER)
    proxy.faults.append(fault)
    uploads.put(file)
    until(lambda: "until then kept in" in caplog.text)
    proxy.heal()
    assert uploads.join(20) == []  # it was survived
    clock.now += 5 * limit
    fault.times = FOREVER
    file.write_text("{ }")
    told = caplog.text.count("until then kept in")
    uploads.put(file)
    until(lambda: caplog.text.count("until then kept in") > told)
    assert uploads.rejection is None
    clock.now += limit
    until(lambda: uploads.rejection is not None)
    with pytest.raises(UserError, match=line):
        uploads.put(file)
    assert uploads.unsent


def until(happened: Any) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_files_that_could_not_be_sent_are_kept_by_the_next_start(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("trainer.base.log.log.propagate", True)
    scratch = tmp_path / "run"
    scratch.mkdir()
    (scratch / "result.json").write_text("last words")
    proxy.faults.append(Fault(401, "POST", "/upload/", times=FOREVER))
    with closing(Mirror({scratch: bucket.address("runs/7")})) as mirror:
        mirror.put(scratch / "result.json")
        mirror.leave(0.3)
    proxy.heal()
    with closing(Mirror({scratch: bucket.address("runs/7")})) as mirror:
        mirror.outline(scratch, scratch / "checkpoints")
    (kept,) = tmp_path.glob("unsent-*")
    assert (kept / "result.json").read_text() == "last words"
    assert str(kept) in caplog.text
