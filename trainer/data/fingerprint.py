"""Fingerprints data, to detect workers that would read other data, and a resumed run whose data
have changed.

Files are described before they are read: by names and sizes, checksums in a bucket, the index of
prepared data, and a sample of the content of local files (their times differ between copies). Other
data are described when they are loaded: arrays by all bytes, others by a sample of rows or by the
method `fingerprint() -> str` of their examples. docs/data.md states the chance to find one changed
row.
"""

import hashlib
import heapq
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer.base.settings.own_settings import is_named
from trainer.base.settings.train_config import TrainConfig, split_kind
from trainer.base.storage import expanded, parse
from trainer.base.storage.staging import listing
from trainer.data.dataset import Dataset
from trainer.data.shards import INDEX

_FILES = 1024  # files whose content is sampled, plus the square root of the number of all files
# So many blocks are read of all sampled files, at least two of each, which takes two seconds.
_BLOCKS = 2048
_BLOCK = 64 * 1024
_THREADS = 16  # so many because files on a network answer late


def files_of(config: TrainConfig) -> dict[str, Any]:
    """Returns number, size and digest of the files of `config.data`, without loading them.

    {} for a built-in name or a function. Raises UserError or PlatformFault if a bucket cannot be
    listed.
    """
    if is_named(config.data):
        return {}
    location = split_kind(config.data)[1]
    if address := parse(location, "data"):
        begin = len(address.prefix)
        files = []
        for remote in listing(address):
            checksum = remote.crc32c or f"{remote.generation}"
            files.append((remote.address.name[begin:], remote.size, checksum))
        return _digested(files)

    # Of prepared data the index says all.
    path = expanded(location)
    if not os.path.exists(path):
        return {}
    if (path / INDEX).is_file():
        content = (path / INDEX).read_bytes()  # it holds the checksums of all shards
        return _digested([(INDEX, len(content), hashlib.sha256(content).hexdigest())])

    # Of other files all names and sizes are taken, but not those in links to folders, nor in
    # folders that cannot be listed.
    sizes = {}
    if path.is_dir():
        for parent, folders, names in os.walk(path):
            folders[:] = [name for name in folders if name[0] != "."]
            for file in (os.path.join(parent, name) for name in names if name[0] != "."):
                if os.path.isfile(file):
                    sizes[os.path.relpath(file, path)] = os.path.getsize(file)
    else:
        sizes[""] = path.stat().st_size

    # The sampled files are drawn by their names, so that they are the same on each machine.
    sampled = heapq.nsmallest(
        _FILES + math.isqrt(len(sizes)),
        sizes,
        key=lambda name: zlib.crc32(name.encode(errors="surrogateescape")),
    )
    most = max(2, _BLOCKS // max(1, len(sampled)))

    # A sample is the first, the last and some blocks between them, or all of a small file.
    def sample(name: str) -> str:
        blocks = min(most, max(2, math.ceil(sizes[name] / _BLOCK)))
        last = max(0, sizes[name] - _BLOCK)
        offsets = [round(block * last / (blocks - 1)) for block in range(blocks)]
        total = hashlib.sha256()
        try:
            with open(path / name if name else path, "rb") as content:
                for offset in dict.fromkeys(offsets):
                    content.seek(offset)
                    total.update(content.read(_BLOCK))
        except OSError:
            return "unreadable"
        return total.hexdigest()

    with ThreadPoolExecutor(_THREADS) as pool:
        samples = dict(zip(sampled, pool.map(sample, sampled), strict=True))
    entries = [(name, size, samples.get(name, "")) for name, size in sizes.items()]
    return _digested(entries, "sample")


def _digested(files: Iterable[tuple[str, int, str]], name: str = "digest") -> dict[str, Any]:
    """Describes files by number, size and digest.

    name: "digest", or "sample" if it covers a part of the content.
    """
    entries = sorted(files)
    text = "\n".join([f"{file}\0{size}\0{content}" for file, size, content in entries])
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]
    total = sum(size for _, size, _ in entries)
    return {"files of data": len(entries), "bytes of data": total, f"{name} of data": digest}


def content_of(dataset: Dataset, rows: bool) -> dict[str, Any]:
    """Describes loaded data: counts, classes and, with `rows`, digests of their rows."""
    content: dict[str, Any] = {}
    for name, examples in (("training", dataset.train), ("evaluation", dataset.evaluation)):
        if examples and examples.has_length:
            content[f"{name} examples"] = examples.count
        if examples and rows:
            content[f"{name} digest"] = examples.fingerprint()
    names = json.dumps(list(dataset.class_names)).encode()
    return {
        **content,
        "classes": len(dataset.class_names),
        "class names": hashlib.sha256(names).hexdigest()[:16],
    }


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns the names and values that differ between an earlier start and this one.

    It is "" if none does.
    """
    names = [name for name in now if name in before and before[name] != now[name]]
    return "; ".join(f"{name}: {before[name]!r} before, {now[name]!r} now" for name in names)
