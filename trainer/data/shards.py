"""Reads prepared data, which `python -m trainer.data.prepare` writes: a few .npy files, into memory
or row by row.

A folder contains pieces.json, and for each shard an array of images, as train-00000.x.npy,
(examples, height, width, channels) uint8, and one of labels, if there are any, as
train-00000.y.npy, (examples,) int32.
"""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.base.errors import PlatformFault, UserError, reason
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.examples import Array, Arrays, Examples, unfilled
from trainer.data.image_arrays import MOST_CLASSES, checked_labels, labelled

INDEX = "pieces.json"
FORMAT = "trainer-pieces-1"
SPLITS = ("train", "evaluation")
LABEL = np.dtype("<i4")


@dataclass(frozen=True)
class ArrayFile:
    """Describes a .npy file: an array of this shape and type, which begins at the byte `start`."""

    path: Path
    sha256: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int

    def read(self) -> Array:
        """Returns the array, which cannot be written to.

        Raises UserError if the file has another checksum.
        """
        content = self.path.read_bytes()
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise _damaged(self.path, "differs from its checksum")
        array = np.frombuffer(content, self.dtype, math.prod(self.shape), self.start)
        return array.reshape(self.shape)


class ShardRows(Examples):
    """Reads images from their files on demand, so that memory holds only the labels and one batch.

    It uses pread, not a memory map, because a failed read of a mounted bucket would end the process
    by a signal. A file is open only while its rows are read, because a process may not be allowed
    to open all files at once.
    """

    image_shape: tuple[int, int, int]

    def __init__(
        self, images: Sequence[ArrayFile], labels: Array | None, image_shape: tuple[int, int, int]
    ) -> None:
        self._images = images
        self.targets = labels
        self.image_shape = image_shape
        self._starts = np.cumsum([0] + [file.shape[0] for file in images])
        self.count = int(self._starts[-1])
        specs = (tf.TensorSpec(image_shape, tf.uint8), tf.TensorSpec((), tf.int32))
        self.spec = specs[: 1 if labels is None else 2]

    def read(self, rows: npt.NDArray[np.int64]) -> tuple[Array, ...]:
        """Returns images and labels of `rows`, in their shape.

        Raises PlatformFault if a file cannot be read: a restart may succeed, or find that the file
        is lost.
        """
        # Finds the file of each row, and the place of the row in it.
        flat = rows.ravel()
        images = unfilled((flat.size, math.prod(self.image_shape)), np.uint8)
        file_of_row = np.searchsorted(self._starts, flat, side="right") - 1
        offsets = ((flat - self._starts[file_of_row]) * images.shape[1]).tolist()

        # Opens each file once for all of its rows.
        by_file = np.argsort(file_of_row, kind="stable").tolist()
        for number, places in groupby(by_file, file_of_row.tolist().__getitem__):
            file = self._images[number]
            try:
                with open(file.path, "rb", buffering=0) as content:
                    for place in places:
                        begin = file.start + offsets[place]
                        if os.preadv(content.fileno(), [images[place]], begin) != images.shape[1]:
                            raise OSError("it became shorter")
            except OSError as error:
                raise PlatformFault(
                    f"data: {file.path} cannot be read any more ({error.strerror or error})"
                ) from error
        shaped = images.reshape(*rows.shape, *self.image_shape)
        return (shaped,) if self.targets is None else (shaped, self.targets[rows])

    def in_memory(self) -> Arrays:
        """Reads all images. Raises UserError if a file differs from its checksum."""
        images = np.empty((self.count, *self.image_shape), np.uint8)
        for file, first in zip(self._images, self._starts.tolist(), strict=False):
            images[first : first + file.shape[0]] = file.read()
        return Arrays(images, self.targets)


def load(config: TrainConfig, path: Path) -> Dataset:
    """Returns the dataset in `path`.

    It is read into memory and verified if it fits into data_memory_mib, else row by row.
    """
    index = read_index(path)
    train, evaluation = (open_split(path, index, split) for split in SPLITS)
    if train is None:
        raise UserError(f"data={path}: its {INDEX} has no images to train on: prepare it again")
    total = sum(math.prod((rows.count, *rows.image_shape)) for rows in (train, evaluation) if rows)
    fits = total <= config.data_memory_mib * 2**20
    first, second = (rows.in_memory() if rows and fits else rows for rows in (train, evaluation))
    return Dataset(config.data, first or train, second, index["class_names"], {"in_memory": fits})


def read_index(folder: Path) -> dict[str, Any]:
    """Returns the content of pieces.json and checks its entries.

    Raises UserError if it is damaged.
    """
    try:
        index = json.loads((folder / INDEX).read_bytes())
        if index["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        index["image_shape"] = tuple(map(int, index["image_shape"]))
        index["class_names"] = tuple(map(str, index["class_names"]))
        for entry in itertools.chain(*(index["splits"].get(split, ()) for split in SPLITS)):
            entry["examples"] = int(entry["examples"])
            entry["files"] = {**entry["files"]}
    # A damaged file may hold any JSON, or none.
    except Exception as error:
        raise UserError(
            f"data={folder}: its {INDEX} is damaged ({reason(error)}): prepare the data again into"
            " another folder"
        ) from None
    return index


def open_split(folder: Path, index: Mapping[str, Any], split: str) -> ShardRows | None:
    """Returns the rows of one split of an index, None if it has none.

    Reads the labels, and the headers of the images. Raises UserError for a file that is not as its
    entry says.
    """
    # The headers of all files are read, and compared with their entries.
    image_files = list[ArrayFile]()
    label_files = list[ArrayFile]()
    entries = [entry for entry in index["splits"].get(split, ()) if entry["files"]]
    for entry in entries:
        count = entry["examples"]
        kinds = (
            (image_files, (count, *index["image_shape"]), np.dtype(np.uint8)),
            (label_files, (count,), LABEL),
        )
        pairs = zip(entry["files"].items(), kinds, strict=False)
        for (name, sha256), (files, shape, dtype) in pairs:
            path = folder / name
            try:
                array = np.load(path, mmap_mode="r")
                file = ArrayFile(path, sha256, array.shape, array.dtype, array.offset)
            # NumPy raises any exception for a damaged header.
            except Exception as error:
                raise _damaged(path, f"cannot be read ({reason(error)})") from None
            if (file.shape, file.dtype) != (shape, dtype):
                raise _damaged(path, f"is {file.dtype} {file.shape}: {dtype} {shape} is required")
            files.append(file)
    if not image_files:
        return None

    # Labels are read now, images when they are needed.
    labels = None
    if labelled((len(entry["files"]) > 1 for entry in entries), f"data={folder}", "files"):
        numbers = np.concatenate([file.read() for file in label_files])
        labels = checked_labels(
            numbers, f"data={folder}", len(index["class_names"]) or MOST_CLASSES
        )
    return ShardRows(image_files, labels, index["image_shape"])


def _damaged(file: Path, why: str) -> UserError:
    return UserError(f"data: {file} {why}: prepare the data again into another folder")
