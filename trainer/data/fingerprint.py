"""Fingerprints data, so that workers that would read other data, and a run whose data have changed, are told.

Files are known before anything is read: names and sizes, checksums in a bucket, the index of prepared shards, and some
blocks of local files. Other data are known when they are loaded: their first and some keyed rows, or what the source
itself supplies by a method `fingerprint() -> str` of its examples.
"""

import hashlib
import heapq
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from trainer.config.train_config import TrainConfig, split_kind
from trainer.data.dataset import Dataset, Examples, InSequence, first_rows
from trainer.data.shards import INDEX
from trainer.data.sources import is_named
from trainer.storage import expanded, parse
from trainer.storage.staging import listing

_MOST_FILES = 64  # whose content is sampled
_BLOCKS, _BLOCK = 8, 64 * 1024  # of each of them, and bytes of a block
_FIRST, _MOST_ROWS, _MOST_BYTES = 8, 1024, 32 * 2**20


@runtime_checkable
class Fingerprinted(Protocol):
    """Represents examples whose source knows a fingerprint of them."""

    def fingerprint(self) -> str:
        """Returns a text that changes with the content of the examples, and with nothing else."""
        ...


@dataclass(frozen=True)
class Files:
    """Describes the files or objects of a data set."""

    files: int
    bytes: int
    digest: str

    def named(self) -> dict[str, Any]:
        """Returns the values by names for messages."""
        return {f"{name} of data": value for name, value in asdict(self).items()}


def files_of(config: TrainConfig) -> Files | None:
    """Returns what is known of the files of `config.data` before they are read; None for a name or a function.

    Raises UserError or PlatformFault if a bucket cannot be listed.
    """
    if is_named(config.data):
        return None
    location = split_kind(config.data)[1]
    if address := parse(location, "data"):
        found = listing(address)
        below = len(address.prefix)
        known = [(one.address.name[below:], one.size, one.crc32c or str(one.generation)) for one in found]
        return _digested(known)
    path = expanded(location)
    return _local(path) if os.path.exists(path) else None


def _local(path: Path) -> Files:
    if (path / INDEX).is_file():
        content = (path / INDEX).read_bytes()  # it holds the checksums of all shards
        return _digested([(INDEX, len(content), hashlib.sha256(content).hexdigest())])
    sizes: dict[str, int] = {}
    if path.is_dir():
        _add_sizes(str(path), "", sizes)
    else:
        sizes[""] = path.stat().st_size
    sampled = heapq.nsmallest(_MOST_FILES, sizes, key=_key)
    samples = {name: _sample(path / name if name else path, sizes[name]) for name in sampled}
    return _digested((name, size, samples.get(name, "")) for name, size in sizes.items())


def _add_sizes(folder: str, prefix: str, sizes: dict[str, int]) -> None:
    """Adds name and size of each file below a folder, without hidden ones, links to folders and unreadable parts."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name[0] == ".":
                    continue
                if entry.is_dir(follow_symlinks=False):
                    _add_sizes(entry.path, f"{prefix}{entry.name}/", sizes)
                elif entry.is_file():
                    sizes[prefix + entry.name] = entry.stat().st_size
    except OSError:  # reading the data reports it
        return


def _sample(file: Path, size: int) -> str:
    """Returns a digest of the first, the last and some blocks of a file between them."""
    offsets = [round(part * max(0, size - _BLOCK) / (_BLOCKS - 1)) for part in range(_BLOCKS)]
    total = hashlib.sha256()
    try:
        with open(file, "rb") as content:
            for offset in dict.fromkeys(offsets):
                content.seek(offset)
                total.update(content.read(_BLOCK))
    except OSError:
        return "unreadable"
    return total.hexdigest()


def _digested(known: Iterable[tuple[str, int, str]]) -> Files:
    entries = sorted(known)
    text = "\n".join([f"{name}\0{size}\0{content}" for name, size, content in entries])
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]
    return Files(len(entries), sum(size for _, size, _ in entries), digest)


def _key(name: str) -> int:
    """Returns a number by which files are drawn, the same ones on each machine."""
    return zlib.crc32(name.encode(errors="surrogateescape"))


def content_of(dataset: Dataset, rows: bool) -> dict[str, Any]:
    """Returns what is known of loaded data, valid in JSON: counts, classes, and with `rows` digests of their rows."""
    found: dict[str, Any] = {}
    for name, part in (("training", dataset.train), ("evaluation", dataset.evaluation)):
        if part is None:
            continue
        if getattr(part, "has_length", True):
            found[f"{name} examples"] = part.count
        if rows:
            found[f"{name} rows"] = _of_examples(part)
    names = json.dumps(list(dataset.class_names)).encode()
    return {**found, "classes": len(dataset.class_names), "class names": hashlib.sha256(names).hexdigest()[:16]}


def _of_examples(part: Examples | InSequence) -> str:
    if isinstance(part, Fingerprinted):
        return part.fingerprint()
    digest = hashlib.sha256()
    for array in _some_rows(part):
        digest.update(f"{array.dtype} {array.shape[1:]}\n".encode())
        digest.update(_bytes(array))
    return digest.hexdigest()[:32]


def _some_rows(part: Examples | InSequence) -> list[Any]:
    """Returns the arrays of the first and, where rows are read by number, of some keyed rows."""
    if isinstance(part, InSequence):
        return list(tf.nest.flatten(first_rows(part, _FIRST)))
    size = max(1, sum(array.nbytes for array in _arrays(part, np.zeros(1, np.int64))))
    most = max(_FIRST, min(_MOST_ROWS, _MOST_BYTES // size, getattr(part, "sampled_rows", _MOST_ROWS)))
    rows = np.arange(min(_FIRST, part.count))
    if part.count > len(rows):
        rows = np.unique(np.concatenate([rows, np.random.default_rng(part.count).integers(0, part.count, most)]))
    return _arrays(part, rows)


def _arrays(part: Examples, rows: Any) -> list[Any]:
    """Returns all arrays of the nest that `part` gives for these rows."""
    return [np.asarray(array) for array in tf.nest.flatten(part.gather(rows))]


def _bytes(array: Any) -> bytes:
    return b"\0".join(array.ravel().tolist()) if array.dtype == object else np.ascontiguousarray(array).tobytes()


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns the names and values that differ between an earlier start and this one; "" if none does."""
    names = [name for name in now if name in before and before[name] != now[name]]
    return "; ".join(f"{name}: {before[name]!r} before, {now[name]!r} now" for name in names)
