"""Tests that data of a bucket are downloaded once, with the same bytes, never outside the cache."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fixtures import Patch, parametrize
from tests.support import refused
from tests.trainer.base.storage.conftest import Bucket
from tests.trainer.base.storage.fault_proxy import Proxy
from trainer.base.errors import UserError
from trainer.base.storage.staging import Staged, _refuse_names, home_of, stage


def staged(bucket: Bucket, name: str, cache: Path) -> Path:
    return stage(bucket.url(name), "data", str(cache))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_a_folder_is_fetched_once(bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    wanted = {f"class {i % 3}/ü {i}.png": bytes([i]) * (i * 1000) for i in range(12)}
    for name, content in wanted.items():
        bucket.put(f"photos/{name}", content)
    bucket.put("photos/", b"")
    bucket.put("photos/class 0/", b"")
    bucket.put("photos-old/x.png", b"x")
    parts = home_of(bucket.address("photos"), str(tmp_path)) / "parts"
    parts.mkdir(parents=True)
    (parts / "7").write_bytes(b"half")  # of a process that was killed
    folder = staged(bucket, "photos", tmp_path)
    assert contents(folder) == wanted
    assert folder.name == "photos"
    reads = proxy.count("GET", "alt=media")
    assert reads == sum(content != b"" for content in wanted.values())
    assert staged(bucket, "photos/", tmp_path) == folder
    assert proxy.count("GET", "alt=media") == reads
    assert not list(parts.iterdir())


def test_what_changed_is_fetched_anew_and_what_is_gone_goes(
    bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    for name in ("a/1", "a/2", "a/3"):
        bucket.put(f"d/{name}", b"first " + name.encode())
    folder = staged(bucket, "d", tmp_path)
    bucket.put("d/a/1", b"other a/1")  # same length as before
    (folder / "a" / "2").write_bytes(b"wrong a/2")
    bucket.bucket.delete_blob("d/a/3")
    bucket.put("d/b", b"new")
    before = proxy.count("GET", "alt=media")
    assert contents(staged(bucket, "d", tmp_path)) == {
        "a/1": b"other a/1",
        "a/2": b"first a/2",
        "b": b"new",
    }
    assert proxy.count("GET", "alt=media") == before + 3
    bucket.bucket.delete_blob("d/a/1")
    bucket.bucket.delete_blob("d/a/2")
    bucket.put("d/a", b"a file now")
    assert contents(staged(bucket, "d", tmp_path)) == {"a": b"a file now", "b": b"new"}


def test_one_object_a_whole_bucket_and_only_what_is_needed(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("sub/x.npz", b"content")
    bucket.put("sub/x.npz2", b"other")
    file = staged(bucket, "sub/x.npz", tmp_path)
    assert (file.name, file.read_bytes()) == ("x.npz", b"content")
    assert contents(staged(bucket, "", tmp_path)) == {
        "sub/x.npz": b"content",
        "sub/x.npz2": b"other",
    }
    bucket.bucket.delete_blob("sub/x.npz")
    bucket.put("sub/x.npz/y", b"a folder now")
    assert contents(staged(bucket, "sub/x.npz", tmp_path)) == {"y": b"a folder now"}
    bucket.put("sub/z", b"z")
    found = Staged(bucket.address("sub"), "data", str(tmp_path))
    assert contents(found.fetch(lambda name: name == "z")) == {"z": b"z"}
    assert contents(found.fetch(lambda name: name == "x.npz2")) == {"z": b"z", "x.npz2": b"other"}
    bucket.put("full/", b"a folder's object that is not empty")
    bucket.put("full/x", b"x")
    with refused("the object '' cannot be a local file"):
        Staged(bucket.address("full"), "data", str(tmp_path))
    bucket.put("empty/", b"")
    for name in ("none", "empty", "empt"):
        with refused("no objects found"):
            staged(bucket, name, tmp_path)


def test_a_full_disk_is_refused_with_the_sizes(
    bucket: Bucket, tmp_path: Path, monkeypatch: Patch
) -> None:
    bucket.put("d/x", b"x" * 1000)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=999))
    with pytest.raises(UserError, match=r"0\.00 GB free in .*--cache_dir=FOLDER.*/gcs/BUCKET/"):
        staged(bucket, "d", tmp_path)


@parametrize(
    "name, line",
    [
        *(
            (name, "it contains an empty part")
            for name in ("../x", "a/../../x", "/x", "a//b", "a/./b", "a/")
        ),
        *(
            (name, "it contains a backslash or a control character")
            for name in ("a\\b", "a\nb", "a\x00b")
        ),
        ("x" * 256, "it is too long"),
        ("/".join(["y" * 200] * 30), "it is too long"),
        (
            "fine/b",
            "the object 'fine/b' cannot be a local file: 'fine' is an object too: rename it",
        ),
    ],
)
def test_names_that_no_local_file_can_have(name: str, line: str, tmp_path: Path) -> None:
    with refused(line):
        _refuse_names(["fine", name], tmp_path, "data=gs://b/d")


def test_two_workers_of_one_machine_fetch_once(
    bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    for number in range(8):
        bucket.put(f"d/{number}", bytes([number]) * 1000)
    with ThreadPoolExecutor(2) as workers:
        folders = list(workers.map(lambda _: staged(bucket, "d", tmp_path), range(2)))
    assert folders[0] == folders[1]
    assert proxy.count("GET", "alt=media") == 8
