"""One streamed file at hand, mapped: a prepared shard or a TFRecord file; and what only reading one tells."""

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainer.config.train_config import TrainConfig
from trainer.data import shards, tfrecord
from trainer.data.arrays import checked_labels
from trainer.data.image_folder import Bad, decode_many, refuse_or_skip
from trainer.errors import UserError
from trainer.storage import write_whole
from trainer.storage.gcs import Remote
from trainer.storage.rolling import Rolling

Parts = tuple[npt.NDArray[Any], ...]


class File(Protocol):
    """One file at hand."""

    def read(self, rows: npt.NDArray[np.int64]) -> Parts:
        """Images (rows, height, width, channels) uint8, and labels (rows,) int32 where there are any."""
        ...


class PreparedFile:
    """One prepared shard, mapped."""

    def __init__(self, path: Path, examples: int, contents: shards.Contents) -> None:
        size = examples * math.prod(contents.image_shape)
        if path.stat().st_size != size + contents.labelled["train"] * examples * shards.LABEL.itemsize:
            raise UserError(f"{path}: {path.stat().st_size:,} bytes are not {examples:,} examples: prepare it anew")
        self._images = np.memmap(path, np.uint8, "r", shape=(examples, *contents.image_shape))
        labels = np.fromfile(path, shards.LABEL, offset=size)
        self._labels = checked_labels(labels, str(path), contents.classes) if labels.size else None

    def read(self, rows: npt.NDArray[np.int64]) -> Parts:
        """As File."""
        return (self._images[rows],) if self._labels is None else (self._images[rows], self._labels[rows])


class RecordFile:
    """One TFRecord file, mapped: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details"""

    def __init__(self, config: TrainConfig, name: str, path: Path) -> None:
        self._config, self._name = config, name
        self._bytes = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        self._spans: list[tuple[int, int]] = []
        at = 0
        while at < len(self._bytes):
            length = int.from_bytes(self._bytes[at : at + 8].tobytes(), "little")
            self._spans.append((at + tfrecord.HEADER, length))
            at += tfrecord.HEADER + length + tfrecord.FOOTER
            if at > len(self._bytes):
                raise UserError(f"{name}: damaged, or not a TFRecord file: a record ends at byte {at:,}")

    @cached_property
    def labels(self) -> list[int | None]:
        """One a record."""
        return [self._record(row)[1] for row in range(len(self._spans))]

    def read(self, rows: npt.NDArray[np.int64]) -> Parts:
        """As File. UserError where an image cannot be decoded."""
        records, bad = [self._record(row) for row in rows.tolist()], Bad()
        contents, labels = [content for content, _ in records], [label for _, label in records]
        size, channels = self._config.image_size, self._config.channels
        images, _ = decode_many(contents, size, channels, bad, lambda place: Path(f"{self._name}#{rows[place]}"))
        refuse_or_skip(self._config, Bad(bad.files))
        return (images,) if None in labels else (images, np.array(labels, np.int32))

    def _record(self, row: int) -> tuple[bytes, int | None]:
        start, length = self._spans[row]
        return tfrecord.parse(self._bytes[start : start + length].tobytes(), Path(self._name))


class Facts:
    """How many records each file has, its largest label, whether all have one: found once, by reading the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            known = None
        self._known: dict[str, Any] = known if isinstance(known, dict) else {}

    def of_all(self, objects: Sequence[Remote], files: Rolling[File]) -> list[tuple[int, int, bool]]:
        """(records, largest label or -1, labelled) of each file. UserError where labels do not count from 0."""
        keys = [f"{remote.address} {remote.crc32c}" for remote in objects]
        new = [number for number, key in enumerate(keys) if key not in self._known]
        for place, number in enumerate(new):
            files.ahead(new[place : place + 3])
            self._known[keys[number]] = _facts_of(objects[number], files.get(number))
            write_whole(self._path, json.dumps(self._known))
        return [(int(count), int(most), bool(labelled)) for count, most, labelled in (self._known[key] for key in keys)]


def _facts_of(remote: Remote, file: File) -> tuple[int, int, bool]:
    assert isinstance(file, RecordFile)
    labels = [label for label in file.labels if label is not None]
    if labels and len(labels) < len(file.labels):
        raise UserError(f"{remote.address}: labels are missing: all records have one or none has")
    checked_labels(np.array(labels, np.int64), str(remote.address))
    return len(file.labels), max(labels, default=-1), bool(labels)
