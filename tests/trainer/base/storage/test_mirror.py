"""Tests uploads in the background: in order, complete, and with the names of pending files."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.fixtures import Log, Patch, parametrize
from tests.trainer.base.storage.conftest import Bucket
from tests.trainer.base.storage.fault_proxy import FOREVER, Fault, Proxy
from tests.workers import until
from trainer.base.errors import UserError
from trainer.base.run_files.mirror import Mirror
from trainer.base.storage import gcs


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def write_one(root: Path, name: str) -> Path:
    (root / name).write_bytes(b"1")
    return root / name


@contextmanager
def opened(bucket: Bucket, root: Path) -> Iterator[Mirror]:
    """Mirrors the folder to runs/7 as a run does that has locked it."""
    with closing(Mirror({root: bucket.address("runs/7")})) as mirror:
        mirror.prepare(root, root / "checkpoints")
        yield mirror


@pytest.fixture
def sender(bucket: Bucket, root: Path) -> Iterator[Mirror]:
    with opened(bucket, root) as mirror:
        yield mirror


def checkpoint(root: Path, step: int, content: bytes = b"weights") -> Path:
    folder = root / "checkpoints" / f"step-{step:08d}"
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "data").write_bytes(content)
    (folder / "index").write_bytes(b"index")
    (folder / "manifest.json").write_bytes(b"{}")
    return folder


def test_a_manifest_is_sent_last_and_deleted_first(
    bucket: Bucket, proxy: Proxy, sender: Mirror, root: Path
) -> None:
    for number in range(5):  # the newest content of a file wins
        (root / "stats.jsonl").write_text(f"{number}\n")
        sender.put(root / "stats.jsonl")
    for step in (5, 6):
        sender.put(checkpoint(root, step))
    assert sender.join(10) == []
    at = "runs/7/checkpoints/step-0000000"
    files = ("index", "manifest.json", "model/data")
    assert bucket.names() == [
        *(f"{at}{step}/{file}" for step in (5, 6) for file in files),
        "runs/7/stats.jsonl",
    ]
    assert bucket.content("runs/7/stats.jsonl") == b"4\n"
    assert proxy.count("POST", f"ifGenerationMatch=0 {at}") == 6
    sender.remove(root / "checkpoints" / "step-00000005")
    assert sender.join(10) == []
    deleted = [request for request in proxy.requests if request.startswith("DELETE")]
    assert "manifest.json" in deleted[0]
    assert {name.split("/")[3] for name in bucket.names() if "step" in name} == {"step-00000006"}
    proxy.faults.append(Fault(403, "POST", "/upload/", times=FOREVER, after=1))
    sender.put(checkpoint(root, 6, b"other weights"))
    assert sender.join(10) == [bucket.url(f"{at}6")]
    assert not any(name.endswith("manifest.json") for name in bucket.names())


def test_logs_go_along_once_a_minute_and_at_the_end(
    bucket: Bucket, proxy: Proxy, sender: Mirror, root: Path
) -> None:
    logs = root / "logs"
    logs.mkdir()
    sender.begin(logs)
    write_one(logs, "events")
    sender.put(write_one(root, "result.json"))
    until(bucket.names)
    assert bucket.names() == ["runs/7/result.json"]
    for _ in range(2):
        sender.finish(10)
    assert proxy.count("POST", "/upload/") == 2  # unchanged: not sent again
    (logs / "events").write_bytes(b"12")
    sender._logs_due = 0.0
    sender.put(Path("/elsewhere"))
    until(lambda: bucket.content("runs/7/logs/events") == b"12")


@parametrize("status", [503, 401])
def test_an_outage_is_outlived(
    bucket: Bucket, proxy: Proxy, sender: Mirror, root: Path, status: int
) -> None:
    proxy.faults.append(Fault(status, "POST", "/upload/", times=FOREVER))
    sender.put(write_one(root, "x"))
    assert sender.join(0.3) == [bucket.url("runs/7/x")]
    proxy.heal()
    assert sender.join(20) == []
    assert bucket.content("runs/7/x") == b"1"


def test_of_two_runs_in_one_folder_the_first_ends(
    bucket: Bucket, sender: Mirror, root: Path, monkeypatch: Patch
) -> None:
    sender.put(write_one(root, "result.json"))
    assert sender.join(10) == []
    with monkeypatch.context() as patch:
        patch.setattr(gcs, "writer", lambda: {"trainer-writer": "host other process 7"})
        gcs.connect().upload(b"of another run", bucket.address("runs/7/result.json"))
    (root / "result.json").write_bytes(b"2")
    sender.put(root / "result.json")
    assert sender.join(10) == [bucket.url("runs/7/result.json")]
    told = (
        r"result.json: another run writes it: host other process 7, 20.* UTC: wait until it has"
        r" ended, or use another"
    )
    # no fault, to which "the same command resumes" is added
    with pytest.raises(UserError, match=told):
        sender.put(root / "result.json")
    assert bucket.content("runs/7/result.json") == b"of another run"


def test_what_a_closed_one_could_not_send_is_kept_by_the_next_start(
    bucket: Bucket, proxy: Proxy, root: Path, caplog: Log
) -> None:
    proxy.faults.append(Fault(503, "POST", "/upload/", times=FOREVER))
    with opened(bucket, root) as mirror:
        mirror.put(write_one(root, "result.json"))
        until(lambda: proxy.count("POST", "/upload/"))
        mirror.join(0.3)
    mirror._thread.join(30)
    assert not mirror._thread.is_alive(), "it tries no longer"
    assert mirror.join(0) == [bucket.url("runs/7/result.json")]
    proxy.heal()
    with opened(bucket, root):
        pass
    kept = root.parent / "unsent"
    assert (kept / "result.json").read_bytes() == b"1"
    assert str(kept) in caplog.text


def test_checkpoints_made_faster_than_they_are_sent(
    bucket: Bucket, proxy: Proxy, sender: Mirror, root: Path
) -> None:
    """Uploads thirty and keeps two: after the first complete one the bucket always has one."""
    made = []
    seen = 0
    for step in range(1, 31):
        made.append(checkpoint(root, step))
        sender.put(made[-1])
        for old in made[:-2]:
            sender.remove(old)
        whole = [name for name in bucket.names() if name.endswith("manifest.json")]
        assert whole or not seen
        seen += bool(whole)
    assert sender.join(20) == []
    assert seen
    assert {name.split("/")[3] for name in bucket.names()} == {"step-00000029", "step-00000030"}
    assert {path.name for path in (root / "checkpoints").iterdir()} == {
        "step-00000029",
        "step-00000030",
    }


def test_a_checkpoint_made_again_is_kept(
    bucket: Bucket, proxy: Proxy, sender: Mirror, root: Path
) -> None:
    """Simulates a damaged checkpoint that was skipped."""
    proxy.faults.append(Fault("stall", "POST", "/upload/", times=1))
    sender.put(write_one(root, "first"))
    folder = checkpoint(root, 5)
    sender.remove(folder)
    assert not folder.exists()
    sender.put(checkpoint(root, 5, b"anew"))
    assert sender.join(10) == []
    assert bucket.content("runs/7/checkpoints/step-00000005/model/data") == b"anew"
    assert folder.exists()
