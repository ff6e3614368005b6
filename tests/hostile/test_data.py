"""Tests damaged and forged idx, npz, TFRecord, prepared and image files: one line, little memory,
nothing written."""

import gzip
import hashlib
import io
import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.fixtures import Json, Patch
from tests.fuzz import NUMBERS, at_most, damaged, examples, json_like, one_line
from trainer.base.errors import UserError
from trainer.base.settings.request import Overrides
from trainer.base.settings.train_config import TrainConfig
from trainer.data.image_files import BadImage, decode
from trainer.data.sources import load_dataset

IMAGES = np.arange(4 * 64, dtype=np.uint8).reshape(4, 8, 8)
LABELS = np.array([0, 1, 2, 1], np.uint8)
MIB = 64  # memory limit for files of a few bytes
# a folder without the files of other tests: `load` looks through it each time
HERE = "hostile_data"


def config(path: Path, *flags: str) -> TrainConfig:
    return Overrides.parse(
        [f"--data={path}", "--model=mlp", "--image_size=8", "--global_batch_size=2", *flags]
    ).config


def load(path: Path, *flags: str) -> Any:
    """Returns the dataset, or None if it is rejected in one line; checks that no file changes."""
    before = sorted(path.parent.rglob("*"))
    with at_most(MIB):
        dataset = one_line(lambda: load_dataset(config(path, *flags)))
    if dataset is not None:
        rows = dataset.train.gather(np.arange(dataset.train.count, dtype=np.int32))
        if dataset.train.labelled:
            assert (
                0
                <= int(tf.reduce_min(rows[1]))
                <= int(tf.reduce_max(rows[1]))
                < len(dataset.class_names)
            )
    assert sorted(path.parent.rglob("*")) == before
    return dataset


def refused(path: Path, *flags: str) -> str:
    with at_most(MIB), pytest.raises(UserError) as caught:
        load_dataset(config(path, *flags))
    assert str(caught.value).isprintable()
    return str(caught.value)


def put(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def idx(array: np.ndarray, shape: tuple[int, ...] | None = None) -> bytes:
    shape = shape or array.shape
    return (
        bytes([0, 0, 8, len(shape)])
        + b"".join(struct.pack(">I", side) for side in shape)
        + array.tobytes()
    )


# more than follows
CLAIMS = [idx(IMAGES, shape) for shape in ((2**31, 2, 2), (2**32 - 1,) * 3, (10**6, 100, 100))]


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(**members: bytes | np.ndarray) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as content:
        for name, member in members.items():
            content.writestr(
                f"{name}.npy", saved(member) if isinstance(member, np.ndarray) else member
            )
    return file.getvalue()


def npy(header: str) -> bytes:
    return (
        b"\x93NUMPY\1\0" + struct.pack("<H", len(header) + 1) + header.encode() + b"\n" + bytes(64)
    )


_TYPES = ["|u1", "<i4", "|O", "<U9", "|V8", "<M8[s]", "<f2", "x"]
_FIELDS = [[("a", "|u1")], [("a", "<i4", (10**9,))], 3]
# Without 2^31: of so many bytes NumPy reserves the memory, touches none of it, and finds the end of
# the file.
_SIZES = [n for n in NUMBERS if not 2**30 < n < 2**40]
_BROKEN = ["", "{", "(" * 5000, "{'descr': 3}", "__import__(0)"]
_LONG = ["9" * 9000, "{" * 60_000, "\0", "()" * 99]
_header = st.builds(
    lambda kind, order, shape: repr({"descr": kind, "fortran_order": order, "shape": tuple(shape)}),
    st.sampled_from([*_TYPES, *_FIELDS]),
    st.booleans() | st.just("x"),
    st.lists(st.sampled_from([*_SIZES, "x", None, True, 0.5]), max_size=5),
) | st.sampled_from([*_BROKEN, *_LONG])


class Runs:
    """Runs code when unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Path]]:
        return Path.touch, (Path("was-run"),)


def test_npz_pickles_and_lone_arrays(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "pickle.npz", x_train=np.array([Runs()], object))
    assert "cannot be read" in refused(tmp_path / "pickle.npz")
    assert not Path("was-run").exists()
    np.save(tmp_path / "lone.npy", IMAGES)
    assert "cannot be read" in refused((tmp_path / "lone.npy").rename(tmp_path / "lone.npz"))


def masked(content: bytes) -> bytes:
    crc = google_crc32c.value(content)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def record(content: bytes) -> bytes:
    size = struct.pack("<Q", len(content))
    return size + masked(size) + content + masked(content)


def encoded(image: np.ndarray, kind: str, **more: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, kind, **more)
    return file.getvalue()


def example(image: bytes, label: int) -> bytes:
    feature = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


SUBMISSIONS = b"".join(
    record(example(encoded(image, "PNG"), int(label)))
    for image, label in zip(IMAGES, LABELS, strict=True)
)
_records = st.lists(
    damaged(example(encoded(IMAGES[0], "PNG"), 1)).map(record), min_size=2, max_size=3
).map(b"".join)


@pytest.mark.parametrize("label", [-1, 2**20, 2**31 - 2, 2**31, 2**63 - 1])
def test_labels_that_would_be_a_billion_classes(label: int, tmp_path: Path) -> None:
    records = b"".join(record(example(encoded(image, "PNG"), label)) for image in IMAGES)
    put(
        tmp_path, **{"x.tfrecord": records, "x.npz": npz(x_train=IMAGES, y_train=np.full(4, label))}
    )
    for name in ("x.tfrecord", "x.npz"):
        assert "must be from 0" in refused(tmp_path / name)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


PIECE = {
    "train-00000.x.npy": saved(IMAGES[..., np.newaxis]),
    "train-00000.y.npy": saved(LABELS.astype("<i4")),
}
INDEX: Json = {
    "format": "trainer-pieces-1",
    "image_shape": [8, 8, 1],
    "class_names": ["a", "b", "c"],
    "splits": {
        "train": [
            {"examples": 4, "files": {name: sha256(content) for name, content in PIECE.items()}}
        ]
    },
}


_pieces = st.sampled_from(sorted(PIECE)).flatmap(
    lambda name: (damaged(PIECE[name]) | _header.map(npy)).map(lambda content: {name: content})
)


def with_pieces(files: dict[str, bytes], sealed: bool) -> dict[str, bytes]:
    """Returns the files of prepared data with these in place of their own; sealed: with the sums
    that they have."""
    whole = {**PIECE, **(files if sealed else {})}
    entry = {"examples": 4, "files": {name: sha256(content) for name, content in whole.items()}}
    return {
        **PIECE,
        **files,
        "pieces.json": json.dumps({**INDEX, "splits": {"train": [entry]}}).encode(),
    }


def zipped(name: str, content: bytes, whole: bool) -> dict[str, bytes]:
    return {name: content} if whole else {f"{name}.gz": gzip.compress(content)}


FILES: dict[str, st.SearchStrategy[dict[str, bytes]]] = {
    "idx": st.builds(
        lambda images, labels, whole: {
            **zipped("train-images-idx3-ubyte", images, whole),
            "train-labels-idx1-ubyte": labels,
        },
        damaged(idx(IMAGES)) | st.sampled_from(CLAIMS),
        damaged(idx(LABELS)),
        st.booleans(),
    ),
    "npz": damaged(npz(x_train=IMAGES, y_train=LABELS)).map(lambda content: {"x.npz": content}),
    "headers of images": _header.map(lambda header: {"x.npz": npz(x_train=npy(header))}),
    "headers of labels": _header.map(
        lambda header: {"x.npz": npz(x_train=IMAGES, y_train=npy(header))}
    ),
    "tfrecord": st.builds(
        zipped, st.just("x.tfrecord"), damaged(SUBMISSIONS) | _records, st.booleans()
    ),
    "index of pieces": json_like(INDEX).map(lambda index: {**PIECE, "pieces.json": index}),
    "pieces": st.builds(with_pieces, _pieces, st.booleans()),
}


@pytest.mark.filterwarnings("ignore:.*Python 2")  # of numpy
@pytest.mark.parametrize("kind", FILES)
@examples(16)
@given(data=st.data(), memory=st.sampled_from(["0", "1"]))
def test_files(
    kind: str, data: st.DataObject, memory: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / HERE / kind
    shutil.rmtree(folder, ignore_errors=True)
    files = data.draw(FILES[kind])
    put(folder, **files)
    load(folder / min(files) if len(files) == 1 else folder, f"--data_memory_mib={memory}")


RGB = np.repeat(IMAGES[0][..., np.newaxis], 3, -1)
PICTURES = {kind: encoded(RGB, kind) for kind in ("PNG", "JPEG", "BMP", "PPM")} | {
    kind: encoded(RGB, kind, save_all=True, append_images=[Image.fromarray(RGB)])
    for kind in ("GIF", "WEBP", "TIFF")
}
_picture = st.sampled_from(sorted(PICTURES)).flatmap(lambda kind: damaged(PICTURES[kind]))


@pytest.mark.filterwarnings("ignore")  # as Encoded.decode does
@examples(60)
@given(content=_picture, size=st.sampled_from([1, 8, 32]), channels=st.sampled_from([1, 3]))
def test_images(content: bytes, size: int, channels: int) -> None:
    try:
        image, _ = decode(content, size, channels)
    except BadImage as error:
        assert str(error)
    else:
        assert image.shape == (size, size, channels)
        assert image.dtype == np.uint8
