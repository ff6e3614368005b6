"""Reads memory-mapped files for streaming, prepared shards and TFRecord files, and records their lengths and labels."""

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
from trainer.data.arrays import checked_labels, labelled
from trainer.data.bad_images import Bad, decode_many, refuse_or_skip
from trainer.errors import UserError
from trainer.storage import write_whole
from trainer.storage.gcs import Remote
from trainer.storage.rolling import Rolling

Parts = tuple[npt.NDArray[Any], ...]


class File(Protocol):
    """Represents one downloaded file."""

    def read(self, rows: npt.NDArray[np.int64]) -> Parts:
        """Returns images (rows, height, width, channels) uint8, and labels (rows,) int32, if any."""
        ...


class PreparedFile:
    """Reads one prepared shard through a memory map."""

    def __init__(self, path: Path, examples: int, contents: shards.Contents) -> None:
        size = examples * math.prod(contents.image_shape)
        if path.stat().st_size != size + contents.labelled["train"] * examples * shards.LABEL.itemsize:
            raise UserError(f"{path}: {path.stat().st_size:,} bytes are not {examples:,} examples: prepare it again")
        self._images = np.memmap(path, np.uint8, "r", shape=(examples, *contents.image_shape))
        labels = np.fromfile(path, shards.LABEL, offset=size)
        self._labels = checked_labels(labels, str(path), contents.classes) if labels.size else None

    def read(self, rows: npt.NDArray[np.int64]) -> Parts:
        return (self._images[rows],) if self._labels is None else (self._images[rows], self._labels[rows])


class RecordFile:
    """Reads one TFRecord file through a memory map.

    https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
    """

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
                raise tfrecord.damaged(name, f"a record ends at byte {at:,}, past the end")

    @cached_property
    def labels(self) -> list[int | None]:
        """Returns one label per record."""
        return [self._record(row)[1] for row in range(len(self._spans))]

    def read(self, rows: npt.NDArray[np.int64]) -> Parts:
        bad = Bad()
        contents, labels = zip(*(self._record(row) for row in rows.tolist()), strict=True)
        size, channels = self._config.image_size, self._config.channels
        images, _ = decode_many(contents, size, channels, bad, lambda index: Path(f"{self._name}#{rows[index]}"))
        refuse_or_skip(self._config, Bad(bad.files))  # without the conversions, which would be logged at every step
        return (images,) if None in labels else (images, np.array(labels, np.int32))

    def _record(self, row: int) -> tuple[bytes, int | None]:
        start, length = self._spans[row]
        return tfrecord.parse(self._bytes[start : start + length].tobytes(), Path(self._name))


class Facts:
    """Caches the number of records, the largest label and whether there are labels, found by reading each file once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            cached = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            cached = None
        self._cached: dict[str, Any] = cached if isinstance(cached, dict) else {}

    def of_all(self, objects: Sequence[Remote], files: Rolling[File]) -> list[tuple[int, int, bool]]:
        """Returns (records, largest label or -1, labelled) of each file. Raises UserError for invalid labels."""
        keys = [f"{remote.address} {remote.crc32c}" for remote in objects]
        new = [number for number, key in enumerate(keys) if key not in self._cached]
        for index, number in enumerate(new):
            files.ahead(new[index : index + 3])
            self._cached[keys[number]] = _facts_of(objects[number], files.get(number))
            write_whole(self._path, json.dumps(self._cached))
        return [(int(count), int(most), bool(flag)) for count, most, flag in (self._cached[key] for key in keys)]


def _facts_of(remote: Remote, file: File) -> tuple[int, int, bool]:
    assert isinstance(file, RecordFile)
    has_labels = labelled((label is not None for label in file.labels), str(remote.address), "records")
    labels = [label for label in file.labels if label is not None]
    checked_labels(np.array(labels, np.int64), str(remote.address))
    return len(file.labels), max(labels, default=-1), has_labels
