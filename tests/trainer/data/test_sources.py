"""Tests that every kind of data becomes the same dataset object, or one clear line if it does not
fit."""

import gzip
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.fixtures import Capture, Patch, parametrize
from tests.support import real_data, refused
from trainer.base.errors import UserError
from trainer.base.log import start_logging
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Arrays, Dataset
from trainer.data.sources import load_dataset


def load(data: Path | str, **settings: Any) -> Any:
    return load_dataset(
        TrainConfig(data=str(data), **{"image_size": 8, "global_batch_size": 1, **settings})
    )


def write_idx(path: Path, array: Any, kind: int = 8) -> None:
    header = bytes([0, 0, kind, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wb") as file:
        file.write(header + array.tobytes())


def levels(count: int, size: int = 8) -> Any:
    return np.broadcast_to(
        np.arange(count, dtype=np.uint8)[:, None, None], (count, size, size)
    ).copy()


@parametrize("suffix", ["", ".gz"])
def test_idx_folder(tmp_path: Path, suffix: str) -> None:
    write_idx(tmp_path / f"train-images-idx3-ubyte{suffix}", levels(5))
    write_idx(tmp_path / f"train-labels-idx1-ubyte{suffix}", np.array([0, 1, 2, 1, 0], np.uint8))
    write_idx(tmp_path / f"t10k-images-idx3-ubyte{suffix}", levels(2))
    write_idx(tmp_path / f"t10k-labels-idx1-ubyte{suffix}", np.array([2, 0], np.uint8))
    dataset = load(tmp_path)
    assert dataset.train.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert dataset.evaluation.labels.tolist() == [2, 0]
    assert dataset.class_names == ("0", "1", "2")


def test_one_idx_file_and_a_kind_that_is_said(tmp_path: Path) -> None:
    write_idx(tmp_path / "pictures", levels(3))
    dataset = load(f"idx:{tmp_path}/pictures")
    assert (dataset.train.count, dataset.train.labelled, dataset.evaluation) == (3, False, None)


@parametrize(
    "suffix, content, line",
    [
        ("", b"", "not an idx file"),
        ("", b"\0\0\x08\x03\0\0\0\5\0\0\0\x08\0\0\0\x08abc", "fewer bytes follow"),
        (
            "",
            b"\0\0\x08\x01\0\0\0\1\0\0\0\0\0\0\0\0\0",
            "unsigned bytes in 3 dimensions: its header is 00 00 08 01",
        ),
        ("", b"\0\0\x08\x03\0\0\0\1\0\0\0\1\0\0\0\1ab", "more bytes follow"),
        (".gz", b"not gzip at all", "cannot be read"),
    ],
)
def test_a_damaged_idx_file_is_named(
    tmp_path: Path, suffix: str, content: bytes, line: str
) -> None:
    (tmp_path / f"train-images-idx3-ubyte{suffix}").write_bytes(content)
    with pytest.raises(UserError, match="train-images-idx3-ubyte") as caught:
        load(tmp_path)
    assert line in str(caught.value)


def test_npz_with_keras_names_and_column_labels(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    np.savez(
        file,
        x_train=levels(4),
        y_train=np.array([[0], [1], [1], [0]]),
        x_test=levels(2),
        y_test=np.array([1, 0]),
    )
    dataset = load(file)
    assert dataset.train.labels.tolist() == [0, 1, 1, 0]
    assert dataset.evaluation is not None


@parametrize(
    "content, line",
    [
        ({"other": np.zeros(3)}, "it contains other: x_train or images is required"),
        ({"images": np.zeros((3, 8, 8))}, "images are float64: must be uint8"),
        ({"images": np.zeros((3, 8, 8, 2), np.uint8)}, "images of shape (3, 8, 8, 2)"),
        ({"images": levels(3), "labels": np.zeros(2, int)}, "labels of shape (2,)"),
    ],
)
def test_arrays_that_do_not_fit_are_one_line(
    tmp_path: Path, content: dict[str, Any], line: str
) -> None:
    np.savez(tmp_path / "x.npz", **content)
    with refused(line):
        load(tmp_path / "x.npz")


def own(monkeypatch: Patch, labels: Any, names: tuple[str, ...] = (), held: Any = (0, 1)) -> str:
    """Returns the value of --data for a user's function that returns these labels."""
    images = np.zeros((2, 8, 8, 1), np.uint8)
    dataset = Dataset(
        "own", Arrays(images, np.array(labels)), Arrays(images, np.array(held)), names
    )
    monkeypatch.setitem(globals(), "returned", lambda config: dataset)
    return f"{__name__}:returned"


def test_labels_of_a_function_of_ones_own_become_class_numbers(monkeypatch: Patch) -> None:
    dataset = load(own(monkeypatch, [0, 3], held=np.array([4, 1], np.uint64)))
    assert dataset.class_names == ("0", "1", "2", "3", "4")
    for part, labels in ((dataset.train, [0, 3]), (dataset.evaluation, [4, 1])):
        found = part.labels
        assert (found.tolist(), found.dtype) == (labels, np.int32)


@parametrize(
    "labels, names, line",
    [
        ([0, 2], ("a", "b"), "labels from 0 to 2: must be from 0 to 1"),
        ([-1, 0], (), "labels from -1 to 0"),
        ([0.0, 1.0], (), "labels of type float64: must be integers"),
        ([0, 2**40], (), "labels from 0 to 1099511627776"),
    ],
)
def test_labels_that_are_no_class_numbers_are_refused(
    labels: Any, names: tuple[str, ...], line: str, monkeypatch: Patch
) -> None:
    for given in ({"labels": labels}, {"labels": [0, 1], "held": labels}):
        with refused(line):
            load(own(monkeypatch, names=names, **given))


def save(path: Path, colour: tuple[int, ...], size: tuple[int, int] = (20, 12)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_class_folders_below_train_and_val(tmp_path: Path, capsys: Capture) -> None:
    for split, count in (("train", 3), ("val", 2), ("test", 9)):
        for i in range(count):
            save(tmp_path / split / "red" / f"{i}.png", (250, 0, 0))
            save(tmp_path / split / "blue" / "deeper" / f"{i}.JPG", (0, 0, 250))
    for name in ("red/Thumbs.db", "red/notes.txt", ".DS_Store"):
        (tmp_path / "train" / name).write_bytes(b"x")
    save(tmp_path / "train" / ".hidden" / "0.png", (1, 1, 1))
    for name in (
        "train/red/.0.png",
        "train/red/README",
        "train/blue/a.HEIC",
        "val/blue/deeper/b.heic",
        "0.png",
    ):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "train" / "red" / "gone.png").symlink_to("nowhere")
    start_logging()
    dataset = load(tmp_path, channels=3)
    assert f"warning: data={tmp_path}: 7 files are not read: 2 .heic, 1 " in capsys.readouterr().err
    assert dataset.notes["left_out"] == {
        ".heic": 2,
        ".txt": 1,
        "hidden": 1,
        "without a suffix": 1,
        ".png": 1,
        ".png beside train": 1,
    }
    assert dataset.class_names == ("blue", "red")
    assert dataset.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert dataset.evaluation.count == 4
    assert dataset.train.images[3:, 4, 4].tolist() == [[250, 0, 0]] * 3
    with refused("already has an evaluation part (4 examples): drop the flag"):
        load(tmp_path, channels=3, evaluation_fraction=0.5)


def test_a_class_called_train_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    for name in ("bus", "car", "train"):
        save(tmp_path / name / "0.png", (1, 1, 1))
    with refused("train would be the training part, but bus beside it contains images too"):
        load(tmp_path)
    for name in ("bus", "car"):
        (tmp_path / name / "0.png").unlink()
    assert load(tmp_path).train.count == 1


@parametrize(
    "files, line",
    [
        ([], r"no image files found \(recognised by"),
        (["a.txt", "b.txt"], r"no image files found, but 2 \.txt \(recognised by"),
        (
            ["red/0.png", "blue/0.heic", "blue/x/1.heic"],
            r"class blue would have no image \(2 \.heic\): convert",
        ),
        (["red/0.png", "blue/.hidden/0.png"], r"class blue would have no image \(it is empty\)"),
        (
            ["train/red/0.png", "train/blue/0.png", "val/red/0.txt", "val/blue/0.png"],
            "class red would have no image",
        ),
        (["0.png", "red/0.png"], "images beside class folders"),
        (["train/red/0.png", "val/green/0.png"], "class green is not one of the training classes"),
    ],
)
def test_a_folder_that_makes_no_sense_is_one_line(
    tmp_path: Path, files: list[str], line: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(png(1))
    with pytest.raises(UserError, match=line):
        load(tmp_path)


def test_bad_images_stop_the_run_or_are_left_out(tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"bad{i:02d}.png").write_bytes(b"<html>")
    save(tmp_path / "good.png", (9, 9, 9))
    with pytest.raises(UserError, match="12 image files cannot be decoded") as caught:
        load(tmp_path)
    assert re.findall(r"bad\d\d", str(caught.value)) == [f"bad{number:02d}" for number in range(10)]
    dataset = load(tmp_path, skip_bad_images=True)
    assert (dataset.train.count, dataset.train.labelled) == (1, False)
    assert len(dataset.notes["skipped"]) == 12


@parametrize("flags", [{"skip_bad_images": True}, {"evaluation_fraction": 0.5}])
def test_a_class_that_keeps_no_image_stops_the_run(tmp_path: Path, flags: dict[str, Any]) -> None:
    """The second class has one image: damaged, or held back for evaluation by this seed."""
    for i in range(3):
        save(tmp_path / "many" / f"{i}.png", (9, 9, 9))
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "0.png").write_bytes(b"" if "skip_bad_images" in flags else png(1))
    with refused("class one would have no image to train on"):
        load(tmp_path, seed=1, **flags)


def write_tfrecord(path: Path, examples: list[dict[str, Any]], compression: str = "") -> None:
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for example in examples:
            feature = {
                key: (
                    tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
                    if isinstance(value, bytes)
                    else tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
                )
                for key, value in example.items()
            }
            writer.write(
                tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
            )


def png(level: int) -> bytes:
    return bytes(tf.io.encode_png(tf.fill((10, 10, 1), tf.cast(level, tf.uint8))).numpy())


@parametrize("image, label", [("image/encoded", "image/class/label"), ("image", "label")])
def test_tfrecords(tmp_path: Path, image: str, label: str) -> None:
    write_tfrecord(tmp_path / "train-0.tfrecord", [{image: png(i), label: i % 2} for i in range(4)])
    write_tfrecord(tmp_path / "train-1.tfrecord.gz", [{image: png(9), label: 1}], "GZIP")
    write_tfrecord(tmp_path / "val.tfrecord", [{image: png(7), label: 0}])
    dataset = load(tmp_path)
    assert dataset.train.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 9]
    assert dataset.train.labels.tolist() == [0, 1, 0, 1, 1]
    assert dataset.evaluation.count == 1


def test_damaged_tfrecords_are_named(tmp_path: Path) -> None:
    file = tmp_path / "x.tfrecord"
    write_tfrecord(file, [{"image": png(1), "label": 1}, {"image": png(2), "label": 1}])
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content)
    with refused("x.tfrecord: damaged"):
        load(file)
    write_tfrecord(file, [{"other": b"x"}])
    with refused("a record without image bytes"):
        load(file)
    write_tfrecord(file, [{"image": png(1), "label": 1}, {"image": png(2)}])
    with refused("some records (image/class/label or label) have labels and some do not"):
        load(file)


@parametrize(
    "data, line",
    [
        ("/no/such/path", "path not found"),
        ("folder:/no/such", "path not found"),
        ("gs:/bucket/x", "did you mean gs://bucket/x?"),
        ("idxx:/tmp", "unknown kind 'idxx'; did you mean 'idx'?"),
        (
            __file__,
            "folder:PATH, or --data=package.module:function, a function of yours that reads it",
        ),
    ],
)
def test_what_is_no_source_is_one_line(data: str, line: str) -> None:
    with refused(line):
        load(data)


def test_without_a_network_keras_data_says_so(monkeypatch: Patch, tmp_path: Path) -> None:
    def offline() -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(keras.datasets.mnist, "load_data", offline)
    with refused("download failed"):
        load("mnist")


@parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_keras_data_is_converted(monkeypatch: Patch, name: str) -> None:
    shape = (32, 32, 3) if name == "cifar10" else (28, 28)
    images = np.zeros((3, *shape), np.uint8)
    loaded = ((images, np.array([[0], [1], [2]])), (images, np.array([0, 1, 2])))
    monkeypatch.setattr(getattr(keras.datasets, name), "load_data", lambda: loaded)
    dataset = load(name, image_size=16, channels=3)
    assert dataset.image_shape == (16, 16, 3)
    assert len(dataset.class_names) == (3 if name == "mnist" else 10)


@parametrize("name, classes", [("mnist", 10), ("fashion-mnist", 10)])
def test_the_real_files(name: str, classes: int) -> None:
    dataset = load(real_data(name), image_size=28)
    assert (dataset.train.count, dataset.evaluation.count, len(dataset.class_names)) == (
        60_000,
        10_000,
        classes,
    )
