"""Tests faults of network and server: the result is right or the error clear, no file is partial,
nothing hangs."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fixtures import Patch, parametrize
from tests.support import refused
from tests.trainer.base.storage.conftest import QUICK, Bucket
from tests.trainer.base.storage.fault_proxy import FOREVER, Fault, Proxy
from tests.workers import ROOT, until
from trainer.base.errors import INTERRUPTED, PlatformFault, UserError
from trainer.base.storage import gcs
from trainer.base.storage.gcs import RefusedToken, connect, crc32c_of
from trainer.base.storage.staging import Staged, stage

CONTENT = bytes(range(256)) * 400


@pytest.fixture
def filled(bucket: Bucket) -> Bucket:
    for number in range(6):
        bucket.put(f"d/{number}", CONTENT + bytes([number]))
    return bucket


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


KINDS = (503, 429, 500, 408, 401, "reset", "short", "flip", "stall", "drip", "lost")


@parametrize(
    "kind, path, requests",
    [
        *((kind, "alt=media", 6) for kind in KINDS),
        *((kind, "/o?", 1) for kind in (503, 401, "drip")),
    ],
)
def test_a_fault_that_passes_leaves_no_trace(
    filled: Bucket, proxy: Proxy, tmp_path: Path, kind: int | str, path: str, requests: int
) -> None:
    proxy.faults.append(Fault(kind, path=path, times=2))
    folder = stage(filled.url("d"), "data", str(tmp_path))
    contents = {str(number): CONTENT + bytes([number]) for number in range(6)}
    assert {file.name: file.read_bytes() for file in files(folder)} == contents
    assert proxy.count("GET", path) >= requests + 2


@parametrize(
    "kind, method, path",
    [
        *((kind, "GET", "alt=media") for kind in (503, "short", "stall", "drip")),
        ("drip", "GET", "/o?"),
        ("drip", "POST", "/upload/"),
    ],
)
def test_a_fault_for_good_ends_in_a_line_within_the_limits(
    filled: Bucket,
    proxy: Proxy,
    tmp_path: Path,
    kind: int | str,
    method: str,
    path: str,
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(gcs, "LIMITS", replace(QUICK, retry=0.7))
    proxy.faults.append(Fault(kind, method, path, times=FOREVER))
    with pytest.raises(
        PlatformFault, match=rf"^gs://{filled.name}/.*: request to Cloud Storage failed"
    ) as caught:
        if method == "POST":
            connect().upload(b"1", filled.address("new"))
        else:
            stage(filled.url("d"), "data", str(tmp_path))
    assert proxy.count(method, path) < 200  # 0.7 seconds of retries: a full minute has more
    assert kind != "drip" or str(caught.value).endswith(": no complete answer within 0.5 s")
    assert len(str(caught.value).splitlines()) == 1
    assert files(tmp_path) == []


def test_a_damaged_object_is_fetched_again_and_never_kept(
    filled: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.faults.append(Fault("flip", path="/3?", times=2))
    assert len(files(stage(filled.url("d"), "data", str(tmp_path / "one")))) == 6
    proxy.faults.append(Fault("flip", path="/3?", times=FOREVER))
    with pytest.raises(
        PlatformFault, match=r"/d/3: wrong checksum after 3 downloads: .*: upload it again"
    ):
        stage(filled.url("d"), "data", str(tmp_path / "two"))
    assert proxy.count("GET", "/3?") == 3 + 3
    assert all(file.name != "3" for file in files(tmp_path / "two"))


@parametrize("kind", ["drip", 503])
def test_ctrl_c_ends_downloads_that_wait(
    filled: Bucket, proxy: Proxy, tmp_path: Path, kind: int | str
) -> None:
    """Uses the limits of a run: the drip would be cut after 20 seconds, and 503 repeated for two
    minutes."""
    proxy.faults.append(Fault(kind, path="/d/", times=FOREVER))
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from"
        " trainer.user_code.command import command; from trainer.base.storage.staging import"
        f" stage; sys.exit(command('begins again')(lambda _: stage({filled.url('d')!r}, 'data',"
        f" {str(tmp_path)!r}) and 0)())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        until(lambda: proxy.count("GET", "alt=media") >= 6)  # all of its files
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == INTERRUPTED
    assert files(tmp_path) == []


@parametrize(
    "fault, kind, line",
    [
        (
            Fault(403, times=FOREVER, after=3),
            UserError,
            r"no permission to read it \(roles/storage\.objectViewer\)",
        ),
        (Fault(400, times=FOREVER), UserError, "requester pays"),
        (Fault(401, path="/o?", times=FOREVER), RefusedToken, "no valid Google credentials"),
        (Fault(403, path="/o?", times=FOREVER), UserError, "no permission to list its objects"),
        (
            Fault(404, times=FOREVER, after=3),
            PlatformFault,
            "deleted or replaced while it was read$",
        ),
    ],
)
def test_what_no_retry_can_help_is_reported_at_once(
    filled: Bucket, proxy: Proxy, tmp_path: Path, fault: Fault, kind: type[Exception], line: str
) -> None:
    proxy.faults.append(fault)
    with pytest.raises(kind, match=line) as caught:
        stage(filled.url("d"), "data", str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1
    whole = {CONTENT + bytes([number]) for number in range(6)}
    assert {file.read_bytes() for file in files(tmp_path)} <= whole
    proxy.heal()
    assert len(files(stage(filled.url("d"), "data", str(tmp_path)))) == 6


@parametrize("size", [10, 3 * 2**20])  # one piece, three pieces
def test_what_is_replaced_once_it_was_listed_is_never_taken_for_it(
    bucket: Bucket, tmp_path: Path, size: int
) -> None:
    bucket.put("x", b"1" * size)
    listed = Staged(bucket.address("x"), "data", str(tmp_path))
    bucket.put("x", b"2" * size)
    with pytest.raises(PlatformFault, match=r"/x: deleted or replaced while it was read$"):
        listed.fetch()
    assert files(tmp_path) == []
    assert stage(bucket.url("x"), "data", str(tmp_path)).read_bytes() == b"2" * size


def test_a_reset_late_in_a_long_object_costs_one_piece(
    bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    content = bytes(range(256)) * 4096 * 2 + b"rest"  # a little over 2 MiB: three pieces
    bucket.put("big", content)
    proxy.faults.append(Fault("reset", after=2))
    assert stage(bucket.url("big"), "data", str(tmp_path)).read_bytes() == content
    assert proxy.count("GET", "alt=media") == 3 + 1


@parametrize("kind", [503, 401, "lost", "stall", "reset"])
def test_an_upload_arrives_once(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, kind: int | str
) -> None:
    file = tmp_path / "file"
    file.write_bytes(CONTENT)
    proxy.faults.append(Fault(kind, "POST", "/upload/", times=1))
    generation = connect().upload(file, bucket.address("out"))
    blob = bucket.bucket.get_blob("out")
    assert (bucket.content("out"), blob.generation, blob.crc32c) == (
        CONTENT,
        generation,
        crc32c_of(file),
    )
    if kind == "lost":  # stored at the first attempt; the precondition rejected the second
        assert proxy.count("POST", "/upload/") == 2
        assert len(list(bucket.client.list_blobs(bucket.name, versions=True))) == 1


def test_an_upload_replaces_only_what_it_has_looked_up(bucket: Bucket, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"first")
    first = connect().upload(file, bucket.address("out"))
    # as after a restart: the content is the same
    assert connect().upload(file, bucket.address("out")) == first
    file.write_bytes(b"second")
    assert connect().upload(file, bucket.address("out"), replaced=first) != first
    file.write_bytes(b"third")
    # without the generation: looked up, then replaced
    connect().upload(file, bucket.address("out"))
    assert bucket.content("out") == b"third"


def test_a_lost_answer_to_a_delete_is_no_error(bucket: Bucket, proxy: Proxy) -> None:
    bucket.put("x", b"1")
    found = connect().get(bucket.address("x"))
    assert found is not None
    proxy.faults.append(Fault("lost", "DELETE", "/o/x"))
    connect().delete(found)
    assert bucket.names() == []


def test_gzip_encoded_objects_are_refused(bucket: Bucket, tmp_path: Path) -> None:
    blob = bucket.bucket.blob("d/x")
    blob.content_encoding = "gzip"
    blob.upload_from_string(b"\x1f\x8b")
    with refused("Content-Encoding gzip: upload it without"):
        stage(bucket.url("d"), "data", str(tmp_path))
