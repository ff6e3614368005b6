"""Reads what `python -m trainer.data.prepare` wrote: images in a few .npy files, either into memory or row by row.

A folder contains pieces.json, and for each piece an array of images, as train-00000.x.npy, (examples, height, width,
channels) uint8, and one of labels, if there are any, as train-00000.y.npy, (examples,) int32.
"""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
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
from trainer.data.examples import Array, Examples, unfilled
from trainer.data.image_arrays import MOST_CLASSES, checked_labels, labelled
from trainer.data.in_memory import Arrays

INDEX = "pieces.json"
FORMAT = "trainer-pieces-1"
SPLITS = ("train", "evaluation")
LABEL = np.dtype("<i4")
_LONGEST_SIDE = 2**16
_FILE = re.compile(r"\w[\w.-]{,99}", re.ASCII)  # names of files that cannot lead out of the folder


@dataclass(frozen=True)
class Piece:
    """Holds the labels of one piece, and where its images are: in `file`, from the byte `start` on."""

    file: Path
    sha256: str
    examples: int
    start: int
    labels: Array | None


class PieceRows(Examples):
    """Reads images from their files on demand, so that memory holds only the labels and one batch.

    By pread and not by a memory map: where a bucket is mounted, a read that fails would end the process by a signal. A
    file is open only while its rows are read, because a process may not be allowed to open all of them.
    """

    image_shape: tuple[int, int, int]

    def __init__(self, pieces: Sequence[Piece], image_shape: tuple[int, int, int], classes: int, origin: str) -> None:
        self.pieces, self.image_shape = pieces, image_shape
        self._starts = np.cumsum([0] + [piece.examples for piece in pieces])
        self.count = int(self._starts[-1])
        has_labels = labelled((piece.labels is not None for piece in pieces), origin, "files")
        self.spec = (tf.TensorSpec(image_shape, tf.uint8), tf.TensorSpec((), tf.int32))[: 1 + has_labels]
        labels = [piece.labels for piece in pieces if piece.labels is not None]
        self._targets = checked_labels(np.concatenate(labels), origin, classes) if has_labels else None

    @property
    def targets(self) -> Array | None:
        return self._targets

    def gather(self, rows: Any) -> tuple[Any, ...]:
        return self.read_by(self._read, rows)

    def _read(self, rows: npt.NDArray[np.int64]) -> tuple[Array, ...]:
        """Returns images and labels of `rows`, in their shape.

        Raises PlatformFault if a file cannot be read: a restart may succeed, or report by exit code 2 that it is lost.
        """
        flat = rows.ravel()
        images = unfilled((flat.size, math.prod(self.image_shape)), np.uint8)
        which = np.searchsorted(self._starts, flat, side="right") - 1
        offsets = ((flat - self._starts[which]) * images.shape[1]).tolist()
        for piece, places in groupby(np.argsort(which, kind="stable").tolist(), which.tolist().__getitem__):
            _read_into(images, places, offsets, self.pieces[piece])
        shaped = images.reshape(*rows.shape, *self.image_shape)
        return (shaped,) if self.targets is None else (shaped, self.targets[rows])

    def in_memory(self) -> Arrays:
        """Reads all images. Raises UserError if a file differs from its checksum."""
        images, end = np.empty((self.count, *self.image_shape), np.uint8), 0
        for piece in self.pieces:
            begin, end = end, end + piece.examples
            content = images[begin:end].reshape(-1).data
            with open(piece.file, "rb") as file:
                digest = hashlib.sha256(file.read(piece.start))
                file.readinto(content)
            digest.update(content)
            if digest.hexdigest() != piece.sha256:
                raise _damaged(piece.file, "differs from its checksum")
        return Arrays(images, self.targets)


def _read_into(images: npt.NDArray[np.uint8], places: Iterable[int], offsets: Sequence[int], piece: Piece) -> None:
    """Reads these rows of `images`, each from its offset in the piece."""
    try:
        descriptor = os.open(piece.file, os.O_RDONLY)
        try:
            for place in places:
                if os.preadv(descriptor, [images[place]], piece.start + offsets[place]) != images.shape[1]:
                    raise OSError("it became shorter")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PlatformFault(f"data: {piece.file} cannot be read any more ({error.strerror or error})") from error


def load(config: TrainConfig, path: Path) -> Dataset:
    """Reads the pieces of `path` into memory if they fit into data_memory_mib (verified), otherwise row by row."""
    index = read_index(path)
    if not index.get("complete"):
        raise UserError(f"data={path}: prepare was interrupted: run the same command again")
    train, evaluation = (open_split(path, index, split) for split in SPLITS)
    if train is None:
        raise UserError(f"data={path}: its {INDEX} has no images to train on: prepare it again")
    total = sum(math.prod((rows.count, *rows.image_shape)) for rows in (train, evaluation) if rows)
    fits = total <= config.data_memory_mib * 2**20

    def held(rows: PieceRows) -> Examples:
        return rows.in_memory() if fits else rows

    return Dataset(config.data, held(train), evaluation and held(evaluation), index["class_names"], {"in_memory": fits})


def read_index(folder: Path) -> dict[str, Any]:
    """Returns the content of pieces.json, whose entries are then sound. Raises UserError if it is damaged."""
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
        if index["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        height, width, channels = index["image_shape"] = tuple(map(int, index["image_shape"]))
        if not 1 <= min(height, width, channels) <= max(height, width, channels) <= _LONGEST_SIDE:
            raise ValueError(f"image_shape is {index['image_shape']}")
        index["class_names"] = tuple(map(str, index["class_names"]))
        for entry in (entry for split in SPLITS for entry in index["splits"].get(split, ())):
            entry["examples"], names = int(entry["examples"]), [*entry["files"].keys()]
            sound = 0 <= entry["examples"] < 2**31 and len(names) <= 2 and bool(names) == bool(entry["examples"])
            if not sound or not all(map(_FILE.fullmatch, names)):
                raise ValueError(f"a piece of {entry['examples']} examples in the files {names}")
    except (OSError, KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        raise UserError(
            f"data={folder}: its {INDEX} is damaged ({reason(error)}): prepare the data again into another folder"
        ) from None
    return index


def open_split(folder: Path, index: Mapping[str, Any], split: str) -> PieceRows | None:
    """Returns the rows of one split of an index, None if it has none. Raises UserError for a file unlike its entry."""
    shape, entries = index["image_shape"], index["splits"].get(split, ())
    pieces = [open_piece(folder, entry, shape) for entry in entries if entry["examples"]]
    return PieceRows(pieces, shape, len(index["class_names"]) or MOST_CLASSES, f"data={folder}") if pieces else None


def open_piece(folder: Path, entry: Mapping[str, Any], image_shape: tuple[int, int, int]) -> Piece:
    """Reads the labels of a piece and the header of its images. Raises UserError if a file is not as its entry says."""
    (file, sha256), *others = entry["files"].items()
    start, labels = _start(folder / file, (entry["examples"], *image_shape), np.dtype(np.uint8)), None
    for name, checksum in others:
        at, content = _start(folder / name, (entry["examples"],), LABEL), (folder / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != checksum:
            raise _damaged(folder / name, "differs from its checksum")
        labels = np.frombuffer(content, LABEL, offset=at)
    return Piece(folder / file, sha256, entry["examples"], start, labels)


def _start(file: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Returns where the array of a .npy file begins. Raises UserError if it is another array, cut short, or a link."""
    try:
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is a link or no file")
        with open(file, "rb") as content:
            np.lib.format.read_magic(content)
            header = np.lib.format.read_array_header_1_0(content)
            start = content.tell()
    except Exception as error:  # numpy's header reader raises any exception for a damaged file
        raise _damaged(file, f"cannot be read ({reason(error)})") from None
    expected = start + math.prod(shape) * dtype.itemsize
    if header != (shape, False, dtype) or status.st_size != expected:
        raise _damaged(file, f"has {status.st_size:,} bytes of {header[2]} {header[0]}: {dtype} {shape} is required")
    return start


def _damaged(file: Path, why: str) -> UserError:
    return UserError(f"data: {file} {why}: prepare the data again into another folder")
