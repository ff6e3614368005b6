"""Reads prepared shards: fixed-size images in a few large files, with an index; either into memory or row by row.

A folder contains index.json and shard files. A shard consists of its images, (examples, height, width, channels) uint8,
followed by its labels, if any, (examples,) little-endian int32.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from trainer.data.image_arrays import MOST_CLASSES, checked_labels
from trainer.data.in_memory import Arrays

INDEX = "index.json"
INDEX_FORMAT = "trainer-shards-2"
LABEL = np.dtype("<i4")
_FILE = re.compile(r"\w[\w.-]{,99}", re.ASCII)  # valid names of shard files
_LONGEST_SIDE = 2**16


@dataclass(frozen=True)
class Shard:
    """Describes one file of the index."""

    path: Path
    examples: int
    sha256: str

    def check_size(self, example_bytes: int) -> None:
        """Raises UserError unless the file holds exactly its examples."""
        expected = self.examples * example_bytes
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise UserError(f"data: {self.path} cannot be read ({error.strerror}): prepare it again") from None
        if size != expected:
            raise UserError(f"data: {self.path} has {size:,} bytes, its index requires {expected:,}: prepare it again")


class ShardRows(Examples):
    """Reads examples from their files on demand, so that memory holds only the labels and one batch.

    A file is open only while its rows are read, because a process may not be allowed to open all of them.
    """

    image_shape: tuple[int, int, int]

    def __init__(self, index: "ShardIndex", split: str) -> None:
        self.shards, self._classes = index.splits[split], len(index.class_names) or MOST_CLASSES
        self.image_shape = index.image_shape
        specs = (tf.TensorSpec(index.image_shape, tf.uint8), tf.TensorSpec((), tf.int32))
        self.spec = specs[: 1 + index.labelled[split]]
        self._starts = np.cumsum([0] + [shard.examples for shard in self.shards])
        self.count = int(self._starts[-1])

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
        for shard, places in groupby(np.argsort(which, kind="stable").tolist(), which.tolist().__getitem__):
            _read_into(images, places, offsets, self.shards[shard].path)
        shaped = images.reshape(*rows.shape, *self.image_shape)
        return (shaped,) if self.targets is None else (shaped, self.targets[rows])

    @cached_property
    def targets(self) -> Array | None:
        """Returns all labels, (examples,) int32. Raises UserError if one is not below the number of classes."""
        if not self.labelled:
            return None
        pixels = math.prod(self.image_shape)
        parts = [np.fromfile(shard.path, LABEL, offset=shard.examples * pixels) for shard in self.shards]
        return checked_labels(np.concatenate(parts), f"data: {self.shards[0].path.parent}", self._classes)


def _read_into(images: npt.NDArray[np.uint8], places: Iterable[int], offsets: Sequence[int], file: Path) -> None:
    """Reads these rows of `images`, each from its offset in the file."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            for place in places:
                if os.preadv(descriptor, [images[place]], offsets[place]) != images.shape[1]:
                    raise OSError("it became shorter")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PlatformFault(f"data: {file} cannot be read any more ({error.strerror or error})") from error


@dataclass(frozen=True)
class ShardIndex:
    """Holds the content of an index."""

    image_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    labelled: dict[str, bool]  # by split
    splits: dict[str, tuple[Shard, ...]]

    @property
    def file_names(self) -> set[str]:
        """Returns the names of the index and all shards."""
        return {INDEX, *(shard.path.name for shards in self.splits.values() for shard in shards)}


def load(config: TrainConfig, path: Path) -> Dataset:
    """Reads the shards of `path` into memory if they fit into data_memory_mib (verified), otherwise row by row."""
    contents = read_contents(path)
    shape = contents.image_shape
    total = sum(shard.examples for shards in contents.splits.values() for shard in shards) * math.prod(shape)
    fits = total <= config.data_memory_mib * 2**20
    parts = {name: _open_split(contents, name, fits) for name, shards in contents.splits.items() if shards}
    return Dataset(config.data, parts["train"], parts.get("evaluation"), contents.class_names, {"in_memory": fits})


def _open_split(contents: ShardIndex, split: str, in_memory: bool) -> Examples:
    """Returns the examples of one split, with their labels checked. Raises UserError if a file has the wrong size."""
    for shard in contents.splits[split]:
        shard.check_size(math.prod(contents.image_shape) + LABEL.itemsize * contents.labelled[split])
    rows = ShardRows(contents, split)
    if in_memory:
        return _in_memory(rows)
    rows.targets  # noqa: B018 (read and checked now, not in the first step)
    return rows


def read_contents(path: Path) -> ShardIndex:
    """Reads the index of `path`, not the shards. Raises UserError if it is damaged."""
    try:
        index = parse_index((path / INDEX).read_bytes(), path)
        height, width, channels = (int(side) for side in index["image_shape"])
        splits = {name: _shards(path, entries) for name, entries in index["splits"].items()}
        labelled = {name: bool(index["labelled"][name]) for name in splits}
        class_names = tuple(map(str, index["class_names"]))
        if not (1 <= min(height, width, channels) <= max(height, width, channels) <= _LONGEST_SIDE and splits["train"]):
            raise ValueError(f"image_shape {index['image_shape']}, splits {list(splits)}")
    except (OSError, KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise UserError(f"data={path}: its {INDEX} is damaged ({reason(error)}): prepare it again") from None
    return ShardIndex((height, width, channels), class_names, labelled, splits)


def parse_index(content: bytes, path: object) -> dict[str, Any]:
    """Parses the index.json of `path`, a folder or an address. Raises UserError if it does not have our format."""
    try:
        index = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"data={path}: its {INDEX} cannot be read ({error}): prepare it again") from None
    if not isinstance(index, dict) or index.get("format") != INDEX_FORMAT:
        raise UserError(f"data={path}: its {INDEX} is not of format {INDEX_FORMAT}: prepare it again")
    return index


def _shards(folder: Path, entries: list[dict[str, Any]]) -> tuple[Shard, ...]:
    shards = []
    for entry in entries:
        name, examples = str(entry["file"]), int(entry["examples"])
        if not _FILE.fullmatch(name) or not 1 <= examples < 2**31:
            raise ValueError(f"shard {name!r} of {examples} examples")
        shards.append(Shard(folder / name, examples, str(entry["sha256"])))
    return tuple(shards)


def _in_memory(rows: ShardRows) -> Arrays:
    images, end = np.empty((rows.count, *rows.image_shape), np.uint8), 0
    for shard in rows.shards:
        start, end = end, end + shard.examples
        content = images[start:end].reshape(-1).data
        with open(shard.path, "rb") as file:
            file.readinto(content)
            digest = hashlib.sha256(content)
            digest.update(file.read())  # the labels
        if digest.hexdigest() != shard.sha256:
            raise UserError(f"data: {shard.path} is damaged: its checksum differs from the index: prepare it again")
    return Arrays(images, rows.targets)
