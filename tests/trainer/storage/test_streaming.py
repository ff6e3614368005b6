"""Tests that --stream yields the same examples with few files on the disk, in an order of seed and step alone."""

import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.trainer.data.test_sources import png, write_tfrecord
from tests.trainer.storage.conftest import Bucket
from tests.trainer.storage.fault_proxy import FOREVER, Fault, Proxy
from tests.trainer.storage.test_remote_sources import config, content, filled, image_folder
from trainer import job
from trainer.config.train_config import TrainConfig
from trainer.data import prepare as prepare_module
from trainer.data.batches import Schedule, batches
from trainer.data.pieces import source_of
from trainer.data.sources import load_dataset
from trainer.data.streaming import GROUP, Streamed
from trainer.distribution.cluster import Cluster
from trainer.distribution.strategy import Replicas
from trainer.errors import PlatformFault, UserError
from trainer.storage.gcs import connect
from trainer.storage.rolling import Rolling


@pytest.fixture(params=["tfrecord", "shards"])
def both(
    request: pytest.FixtureRequest, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, str]:
    """Writes 20 images in 10 files to a folder and to the bucket."""
    here = tmp_path / "d"
    here.mkdir()
    if request.param == "tfrecord":
        for part in range(10):
            records = [{"image": png(level), "label": level % 4} for level in (2 * part, 2 * part + 1)]
            write_tfrecord(here / f"part-{part}.tfrecord", records)
        write_tfrecord(here / "val.tfrecord", [{"image": png(200), "label": 3}])
    else:
        monkeypatch.setattr(prepare_module, "source_of", lambda config, per_shard: source_of(config, 2))
        (tmp_path / "source").mkdir()
        image_folder(tmp_path / "source")
        prepare_module.prepare(config(tmp_path / "source", tmp_path), here, 1, lambda done, total: None)
    bucket.put_folder(here, "d")
    return here, bucket.url("d")


def streamed(url: str, cache: Path) -> Streamed:
    part = load_dataset(config(url, cache, stream=True)).train
    assert isinstance(part, Streamed)
    return part


def on_disk(cache: Path) -> int:
    return sum(file.stat().st_size for file in cache.rglob("*") if file.is_file() and "rolling" in file.parts)


def test_the_same_examples(both: tuple[Path, str], tmp_path: Path) -> None:
    here = load_dataset(config(both[0], tmp_path))
    there = load_dataset(config(both[1], tmp_path / "cache", stream=True))
    assert content(there.train) == content(here.train)
    assert content(there.evaluation) == content(here.evaluation)
    assert there.class_names == here.class_names
    rows = np.array([[19, 0], [7, 7]], np.int32)
    for mine, other in zip(there.train.gather(rows), here.train.gather(rows), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert on_disk(tmp_path / "cache") == 0


def epochs(part: Streamed, first_step: int, steps: int, worker: int = 0, workers: int = 1) -> list[Any]:
    cluster = Cluster(("chief:2222", "worker:2222")[:workers] if workers > 1 else (), worker)
    replicas = Replicas(None, ("CPU:0",), rows=4 // workers, global_batch_size=4, cluster=cluster)
    data = batches(part, Schedule(part.count, 4, 1, seed=5), replicas, first_step)
    return [images.numpy()[..., 0, 0, 0].ravel().tolist() for images, _ in data.take(steps)]


def test_the_order_is_of_seed_and_step(both: tuple[Path, str], tmp_path: Path) -> None:
    part = streamed(both[1], tmp_path / "cache")
    steps = epochs(part, 0, 10)
    first, second = ([level for step in steps[n : n + 5] for level in step] for n in (0, 5))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first != sorted(first)
    assert epochs(part, 7, 3) == steps[7:]
    workers = [epochs(streamed(both[1], tmp_path / f"cache {n}"), 2, 4, worker=n, workers=2) for n in range(2)]
    assert [one + other for one, other in zip(*workers, strict=True)] == steps[2:6]


def test_examples_of_a_group_of_files_are_mixed(both: tuple[Path, str], tmp_path: Path) -> None:
    part = streamed(both[1], tmp_path / "cache")
    files = part.rows_at(0, 0, np.arange(20)) // 2
    groups = [files[start : start + 2 * GROUP] for start in range(0, 20, 2 * GROUP)]
    assert [len(set(group)) for group in groups] == [4, 4, 2]
    assert not set(groups[0]) & set(groups[1])
    assert any(one != other for one, other in zip(files[::2], files[1::2], strict=True))


def test_each_file_is_fetched_once_an_epoch(both: tuple[Path, str], proxy: Proxy, tmp_path: Path) -> None:
    part = streamed(both[1], tmp_path / "cache")
    before = proxy.count("GET", "alt=media")
    for rows in part.rows_at(0, 0, np.arange(20)).reshape(5, 4):
        part.read(rows)
    assert proxy.count("GET", "alt=media") - before <= 10


def test_a_second_start_knows_the_files(both: tuple[Path, str], proxy: Proxy, tmp_path: Path) -> None:
    streamed(both[1], tmp_path / "cache")
    before = proxy.count("GET", "alt=media")
    assert streamed(both[1], tmp_path / "cache").count == 20
    assert proxy.count("GET", "alt=media") == before


def test_a_fault_while_training_is_named_and_can_be_outlived(
    both: tuple[Path, str], proxy: Proxy, tmp_path: Path
) -> None:
    part = streamed(both[1], tmp_path / "cache")
    part._files._opened.clear()
    proxy.faults.append(Fault("flip", times=FOREVER))
    with pytest.raises(PlatformFault, match="wrong checksum after 10 downloads"):
        part.read(np.array([19], np.int32))
    proxy.heal()
    assert part.read(np.array([19], np.int32))[0][0, 0, 0, 0] in range(20)
    assert on_disk(tmp_path / "cache") == 0


def test_only_so_many_files_are_kept(bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    for number in range(6):
        bucket.put(f"d/{number}", bytes([number]) * 100)

    class Opened:
        alive: ClassVar[Any] = weakref.WeakSet()

        def __init__(self, number: int, path: Path) -> None:
            self.content = np.memmap(path, np.uint8, "r")
            self.alive.add(self)

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "rolling").mkdir()
    (tmp_path / "rolling" / f"{ended.pid}-1-0").write_bytes(b"left behind by a killed process")
    rolling = Rolling(connect().list(bucket.address("d")), tmp_path / "rolling", 2, Opened)
    for number in [0, 1, 2, 3, 4, 5, 4, 0]:
        assert rolling.get(number).content[99] == number
        rolling.ahead([number])
        assert len(Opened.alive) <= 3  # two that are open, and one that was just released
    assert proxy.count("GET", "alt=media") == 7
    assert list((tmp_path / "rolling").iterdir()) == []


def test_when_it_is_closed_nothing_more_is_fetched(bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    for number in range(6):
        bucket.put(f"d/{number}", b"x" * 100)
    begun, closed = threading.Event(), threading.Event()

    def opener(number: int, path: Path) -> int:
        begun.set()
        assert closed.wait(30)
        return number

    rolling = Rolling(connect().list(bucket.address("d")), tmp_path / "rolling", 1, opener)
    rolling.ahead(range(6))
    assert begun.wait(30)
    rolling.close()
    closed.set()
    rolling._pool.shutdown(wait=True)
    assert proxy.count("GET", "alt=media") == 1
    assert list((tmp_path / "rolling").iterdir()) == []


def put_records(bucket: Bucket, tmp_path: Path, name: str, images: list[tuple[bytes, int]]) -> None:
    """Writes a TFRecord file with these images and labels to the bucket."""
    write_tfrecord(tmp_path / "part.tfrecord", [{"image": image, "label": label} for image, label in images])
    bucket.put(name, (tmp_path / "part.tfrecord").read_bytes())


@pytest.fixture
def refused(bucket: Bucket, tmp_path: Path, small_config: Callable[..., TrainConfig]) -> Callable[..., None]:
    """Returns a check that a run fails with a line and that all fetching ends with it."""

    def check(line: str, *flags: str) -> None:
        cache = f"--cache_dir={tmp_path / 'cache'}"
        before = set(threading.enumerate())
        with pytest.raises(UserError, match=line) as caught:
            job.run(small_config("--model=mlp", f"--data={bucket.url('d')}", cache, "--stream", *flags), [], 0.0)
        fetching = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("rolling")]
        for thread in fetching:
            thread.join(30)
        assert not any(thread.is_alive() for thread in fetching)
        assert caught  # keeps the traceback, and all objects in it, alive

    return check


def test_a_damaged_image_ends_the_run_by_its_name(bucket: Bucket, tmp_path: Path, refused: Callable[..., None]) -> None:
    for part in range(6):
        images = [(png(level) if part != 3 else b"no image", level) for level in range(2)]
        put_records(bucket, tmp_path, f"d/{part}.tfrecord", images)
    refused(r"cannot be decoded: .*prepare .*--skip_bad_images\)\. .*/d/3\.tfrecord#", "--global_batch_size=4")


def test_evaluation_files_in_folders_and_an_empty_file(bucket: Bucket, tmp_path: Path) -> None:
    for number in range(2):
        put_records(bucket, tmp_path, f"d/2024/train-{number}.tfrecord", [(png(number), number)])
    put_records(bucket, tmp_path, "d/2024/val-0.tfrecord", [(png(7), 1)])
    bucket.put("d/2024/train-2.tfrecord", b"")
    dataset = load_dataset(config(bucket.url("d"), tmp_path / "cache", stream=True))
    assert (dataset.train.count, dataset.train.labelled, dataset.class_names) == (2, True, ("0", "1"))
    assert [content(part)[1] for part in (dataset.train, dataset.evaluation)] == [[0, 1], [1]]
    dataset.close()


@pytest.mark.parametrize("labels", [[0, -1], [0, 0]], ids=["a wrong label", "one class only"])
def test_wrong_labels_are_refused(
    bucket: Bucket, tmp_path: Path, refused: Callable[..., None], labels: list[int]
) -> None:
    images = [(png(level), label) for level, label in enumerate(labels)] * 2
    for number in range(4):
        put_records(bucket, tmp_path, f"d/{number}.tfrecord", images)
    refused(r"must be from 0|has only one class")


def test_what_cannot_be_streamed_is_reported(bucket: Bucket, tmp_path: Path) -> None:
    filled(bucket, tmp_path / "d", "npz")
    bucket.put("r/x.tfrecord", b"no records")
    bucket.put("z/x.tfrecord.gz", b"")
    write_tfrecord(tmp_path / "half.tfrecord", [{"image": png(1), "label": 1}, {"image": png(2)}])
    bucket.put("h/half.tfrecord", (tmp_path / "half.tfrecord").read_bytes())
    for name, line in (
        ("d", "no TFRecord files or prepared shards found"), ("z", "is compressed as a whole"),
        ("r", r"r/x\.tfrecord: damaged, or not a TFRecord file"), ("h", "some records have labels and some do not"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=line):
            load_dataset(config(bucket.url(name), tmp_path, stream=True))
