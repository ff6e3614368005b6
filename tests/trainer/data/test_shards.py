"""Tests that prepared shards are written atomically from any source, and read with constant
memory."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.random import default_rng

from tests.drill import read
from tests.fixtures import SLOW, Capture, Patch, parametrize
from tests.support import refused
from tests.trainer.data.test_sources import png, write_tfrecord
from tests.workers import python
from trainer.base.errors import PlatformFault, UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.data import prepare as prepare_module
from trainer.data.dataset import Arrays, Dataset
from trainer.data.prepare import main, source_of, write_shards
from trainer.data.shards import ShardRows
from trainer.data.sources import load_dataset

SIZE = 16


def config(data: Path, **settings: Any) -> TrainConfig:
    return TrainConfig(data=str(data), **{"image_size": SIZE, "global_batch_size": 1, **settings})


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Writes class folders of 30 and 20 images, each of one grey level, and 5 for evaluation."""
    folder = tmp_path / "photos"
    for split, name, levels in (
        ("train", "a", range(30)),
        ("train", "b", range(100, 120)),
        ("val", "a", range(5)),
    ):
        (folder / split / name).mkdir(parents=True)
        for level in levels:
            (folder / split / name / f"{level:03d}.png").write_bytes(png(level))
    return folder


@pytest.fixture
def small_shards(monkeypatch: Patch) -> None:
    """Puts ten images into each shard."""
    monkeypatch.setattr(
        prepare_module, "source_of", lambda config, per_shard: source_of(config, 10)
    )


def prepare(data: Path, folder: Path, **settings: Any) -> Any:
    """Prepares `data` into `folder`; returns the content of pieces.json."""
    return write_shards(config(data, **settings), folder)


def levels_of(part: Any) -> list[int]:
    return part.gather(np.arange(part.count, dtype=np.int32))[0].numpy()[:, 0, 0, 0].tolist()


@pytest.mark.usefixtures("small_shards")
@parametrize("memory", [4096, 0])
def test_shards_hold_what_the_source_holds(photos: Path, tmp_path: Path, memory: int) -> None:
    index = prepare(photos, tmp_path / "prepared")
    assert [entry["examples"] for entry in index["splits"]["train"]] == [10] * 5
    source = load_dataset(config(photos))
    prepared = load_dataset(config(tmp_path / "prepared", data_memory_mib=memory))
    assert isinstance(prepared.train, Arrays if memory else ShardRows)
    assert levels_of(prepared.train) == levels_of(source.train)
    assert levels_of(prepared.evaluation) == levels_of(source.evaluation) == list(range(5))
    rows = np.array([[49, 0], [13, 13]], np.int32)
    for part in (source, prepared):
        images, labels = part.train.gather(rows)
        assert images.shape == (2, 2, SIZE, SIZE, 1)
        assert images.numpy()[..., 0, 0, 0].tolist() == [[119, 0], [13, 13]]
        assert labels.numpy().tolist() == [[1, 0], [0, 0]]
    assert prepared.class_names == source.class_names == ("a", "b")


@pytest.mark.usefixtures("small_shards")
def test_an_interrupted_prepare_leaves_no_index_and_starts_anew(
    photos: Path, tmp_path: Path
) -> None:
    destination = tmp_path / "prepared"

    def stop_after_three(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(config(photos), destination, stop_after_three)
    with refused("No such file"):
        load_dataset(config(Path(f"shards:{destination}")))
    prepare(photos, destination)
    assert levels_of(load_dataset(config(destination)).train) == levels_of(
        load_dataset(config(photos)).train
    )


def test_shards_of_something_else_are_left_alone(photos: Path, tmp_path: Path) -> None:
    destination = tmp_path / "prepared"
    index = prepare(photos, destination)
    assert prepare(photos, destination) == index
    with refused("other data or settings: use another"):
        prepare(photos, destination, image_size=32)
    (photos / "train" / "a" / "000.png").write_bytes(png(77))
    with refused("other data or settings: use another"):
        prepare(photos, destination)


def test_a_fraction_of_prepared_data_is_refused(photos: Path, tmp_path: Path) -> None:
    shutil.rmtree(photos / "val")
    prepare(photos, tmp_path / "prepared")
    with pytest.raises(UserError, match=r"evaluation_fraction=0\.2: .* has no evaluation part"):
        load_dataset(config(tmp_path / "prepared", evaluation_fraction=0.2))
    prepare(photos, tmp_path / "parts", evaluation_fraction=0.2)
    assert load_dataset(config(tmp_path / "parts", evaluation_fraction=0.2)).evaluation is not None


def test_bad_images_are_told_and_may_be_left_out(photos: Path, tmp_path: Path) -> None:
    (photos / "train" / "a" / "zzz.png").write_bytes(b"no image")
    with refused("1 image files cannot be decoded"):
        prepare(photos, tmp_path / "prepared")
    index = prepare(photos, tmp_path / "prepared", skip_bad_images=True)
    assert len(index["skipped"]) == 1
    assert sum(entry["examples"] for entry in index["splits"]["train"]) == 50


def test_only_the_training_images_may_have_labels(photos: Path, tmp_path: Path) -> None:
    (photos / "val").rename(tmp_path / "other")
    (photos / "test").mkdir()
    (photos / "test" / "7.png").write_bytes(png(7))
    prepare(photos, tmp_path / "prepared")
    source = load_dataset(config(photos))
    prepared = load_dataset(config(tmp_path / "prepared", data_memory_mib=0))
    for found in (source, prepared):
        assert (found.train.labelled, found.evaluation.labelled) == (True, False)
        assert levels_of(found.evaluation) == [7]
    assert prepared.train.gather(np.array([49], np.int32))[1].numpy().tolist() == [1]


LEVELS = [1, 2]


def of_a_function(config: TrainConfig) -> Dataset:
    return Dataset(
        "made", Arrays(np.full((2, SIZE, SIZE, 1), np.array(LEVELS).reshape(2, 1, 1, 1), np.uint8))
    )


def test_shards_of_a_function_are_made_again_only_in_another_folder(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    named = Path(f"{__name__}:of_a_function")
    assert prepare(named, tmp_path / "prepared") == prepare(named, tmp_path / "prepared")
    monkeypatch.setattr(sys.modules[__name__], "LEVELS", [1, 3])
    with refused("contains shards of other data or settings"):
        prepare(named, tmp_path / "prepared")


def test_other_sources_can_be_prepared(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", images=np.arange(20, dtype=np.uint8).repeat(64).reshape(20, 8, 8))
    write_tfrecord(
        tmp_path / "r.tfrecord", [{"image": png(level), "label": level} for level in range(7)]
    )
    for name, count in (("x.npz", 20), ("r.tfrecord", 7), ("digits", 1797)):
        source = name if name == "digits" else str(tmp_path / name)
        destination = tmp_path / f"{name}-prepared"
        assert main([source, str(destination), f"--image-size={SIZE}"]) == 0
        given = load_dataset(TrainConfig(data=source, image_size=SIZE, global_batch_size=1))
        found = load_dataset(config(destination))
        assert found.train.count == given.train.count == count
        assert found.class_names == given.class_names
        assert levels_of(found.train) == levels_of(given.train)


@parametrize(
    "arguments, line",
    [
        (["nothing", "prepared", "--image_size=zero"], "image_size"),
        (["nothing", "prepared", "--width=3"], "width"),
        (["nothing", "prepared"], "no such data"),
        (
            ["digits", "gs://my-bucket/there", "--image_size=8"],
            "gcloud storage cp -r shards gs://my-bucket/there",
        ),
        (
            ["digits", "/gcs/my-bucket/there", "--image_size=8"],
            "gcloud storage cp -r shards gs://my-bucket/there",
        ),
    ],
)
def test_prepare_says_what_is_wrong(arguments: list[str], line: str, capsys: Capture) -> None:
    assert main(arguments) == 2
    found = capsys.readouterr().err
    assert (found.count("\n"), line in found) == (1, True)


Damage = Callable[[Path], object]


@parametrize(
    "damage, line",
    [
        (lambda f: (f / "pieces.json").write_text("{"), "pieces.json is damaged"),
        (
            lambda f: (f / "pieces.json").write_text('{"format": "trainer-shards-2"}'),
            "its format is not trainer-pieces-1",
        ),
        (lambda f: (f / "pieces.json").unlink(), "No such file"),
        (lambda f: (f / "train-00000.x.npy").unlink(), "cannot be read"),
        (
            lambda f: os.truncate(f / "train-00000.x.npy", 50 * 256),
            "cannot be read (mmap length is greater than file size",
        ),
        (lambda f: flip(f / "train-00000.x.npy"), "differs from its checksum"),
        (
            lambda f: np.save(f / "train-00000.x.npy", np.zeros((50, 16, 16, 1), np.int8)),
            "int8 (50, 16, 16, 1)",
        ),
        (lambda f: np.save(f / "train-00000.y.npy", np.zeros(50)), "float64 (50,)"),
        (lambda f: changed(f, examples=49), "uint8 (49, 16, 16, 1) is required"),
        (lambda f: changed(f, files=3), "pieces.json is damaged"),
        (lambda f: changed(f, files={}), "its pieces.json has no images to train on"),
    ],
)
def test_damaged_shards_are_named(photos: Path, tmp_path: Path, damage: Damage, line: str) -> None:
    prepare(photos, tmp_path / "prepared")
    damage(tmp_path / "prepared")
    with refused(line):
        load_dataset(config(Path(f"shards:{tmp_path}/prepared")))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def changed(folder: Path, **changes: Any) -> None:
    index = read(folder / "pieces.json")
    index["splits"]["train"][0].update(changes)
    (folder / "pieces.json").write_text(json.dumps(index))


@parametrize(
    "damage, line",
    [
        (Path.unlink, "train-00000.x.npy cannot be read any more (No such file or directory)"),
        (
            lambda file: file.write_bytes(b"x"),
            "train-00000.x.npy cannot be read any more (it became shorter)",
        ),
    ],
)
def test_a_shard_that_goes_while_it_is_read_is_named(
    photos: Path, tmp_path: Path, damage: Damage, line: str
) -> None:
    """Expects a PlatformFault, because a restart may find the file again."""
    prepare(photos, tmp_path / "prepared")
    train = load_dataset(config(tmp_path / "prepared", data_memory_mib=0)).train
    damage(tmp_path / "prepared" / "train-00000.x.npy")
    with pytest.raises(PlatformFault) as caught:
        train.gather(np.array([3], np.int32))
    assert str(caught.value) == f"data: {tmp_path}/prepared/{line}"


_STREAM = """
import sys
import numpy as np, tensorflow as tf
from trainer.base.settings.train_config import TrainConfig
from trainer.base.settings.step_counts import Schedule
from trainer.data.batches import batches
from trainer.data.sources import load_dataset
from trainer.cluster.strategy import make_replicas
from trainer.reporting.resources import memory_gib

limit = int(sys.argv[2])
sizes = {"image_size": 64, "channels": 3, "global_batch_size": 64}
given = TrainConfig(data=sys.argv[1], data_memory_mib=limit, **sizes)
empty = memory_gib()
train = load_dataset(given).train
rows = iter(batches(train, Schedule(train.count, 64, 1, 0), make_replicas(given)))
for _ in range(10):
    next(rows)
before = memory_gib()
for _ in range(2 * train.count // 64):
    next(rows)
after = memory_gib()
grown = [round(1024 * (after - earlier)) for earlier in (empty, before)]
print(type(train).__name__, train.count, *grown)
del rows  # ends prefetching before the interpreter exits
"""


@SLOW
def test_memory_stays_flat_while_a_set_of_four_times_the_limit_streams(tmp_path: Path) -> None:
    images = default_rng(0).integers(0, 256, (5500, 64, 64, 3), np.uint8)  # 64 MiB
    np.savez(tmp_path / "images.npz", images=images)
    flags = ["--image_size=64", "--channels=3"]
    assert main([str(tmp_path / "images.npz"), str(tmp_path / "prepared"), *flags]) == 0
    done = python("-c", _STREAM, str(tmp_path / "prepared"), "16")
    kind, count, taken_mib, grown_mib = done.stdout.split()[-4:]
    assert (kind, count) == (ShardRows.__name__, "5500")
    assert int(taken_mib) < 48, "more than the pipeline alone: the set, or much of it, is in memory"
    assert int(grown_mib) < 16, "two epochs went through memory, and some of it stayed"
