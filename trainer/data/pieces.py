"""Divides any data source into pieces, each of which becomes one prepared shard."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from trainer.base.settings.train_config import TrainConfig, split_kind
from trainer.base.storage import parse
from trainer.base.storage.staging import naming
from trainer.data import image_folder, sources, tfrecord
from trainer.data.bad_images import Bad
from trainer.data.examples import Examples
from trainer.data.fingerprint import content_of, files_of
from trainer.data.in_memory import Arrays


@dataclass(frozen=True)
class Piece:
    """Describes one shard: the number of source items (files or examples) in it, and how to get them."""

    items: int
    get: Callable[[Bad], Arrays | None]


@dataclass(frozen=True)
class Source:
    """Holds the pieces of each split. The fingerprint changes with everything that would change a shard."""

    splits: dict[str, list[Piece]]
    class_names: tuple[str, ...]  # empty: the labels' numbers
    fingerprint: str
    left_out: Counter[str] = field(default_factory=Counter)  # files that are no images, by suffix


def source_of(config: TrainConfig, per_shard: int) -> Source:
    """Divides `config.data` into pieces of `per_shard` images; TFRecord files into one piece each."""
    files = files_of(config)  # before they are read: they may change meanwhile
    known = files.named() if files else {}
    if sources.is_named(config.data):
        return _loaded_source(config, per_shard, known)
    kind, path = sources.kind_and_path(config.data, config.cache_dir)
    with naming(path, parse(split_kind(config.data)[1], "SRC")):
        if kind == "folder" and not config.evaluation_fraction:
            return _folder_source(config, path, per_shard, known)
        if kind == "tfrecord" and not config.evaluation_fraction:
            return _tfrecord_source(config, path, known)
        return _loaded_source(config, per_shard, known)


def _folder_source(config: TrainConfig, path: Path, per_shard: int, known: Mapping[str, Any]) -> Source:
    train, evaluation = image_folder.find(path)
    folders = {"train": train} | ({"evaluation": evaluation} if evaluation else {})

    def piece(part: image_folder.Folder) -> Piece:
        return Piece(len(part.files), lambda bad: image_folder.decode_folder(config, part, bad))

    splits = {
        name: [piece(folder.part(start, start + per_shard)) for start in range(0, len(folder.files), per_shard)]
        for name, folder in folders.items()
    }
    left_out = image_folder.left_out(train, evaluation)
    return Source(splits, train.class_names, _fingerprint(config, per_shard, known), left_out)


def _tfrecord_source(config: TrainConfig, path: Path, known: Mapping[str, Any]) -> Source:
    """Makes one piece per file, because the number of records in a file is unknown until it is read."""

    def piece(file: Path) -> Piece:
        return Piece(1, lambda bad: tfrecord.read(config, [file], bad))

    train, evaluation = tfrecord.find(path)
    splits = {"train": [*map(piece, train)], "evaluation": [*map(piece, evaluation)]}
    return Source(splits, (), _fingerprint(config, 0, known))


def _loaded_source(config: TrainConfig, per_shard: int, known: Mapping[str, Any]) -> Source:
    """Divides a dataset that is loaded as a whole; data of a name or a function change without a file."""
    keras.utils.set_random_seed(config.seed)  # before a function of the user's is imported, as in every command
    dataset = sources.load_dataset(config)
    names = ["train", *(["evaluation"] if dataset.evaluation else [])]
    splits = {name: list(_slices(dataset.images(name), per_shard)) for name in names}
    fingerprint = _fingerprint(config, per_shard, known or content_of(dataset, rows=True))
    return Source(splits, dataset.class_names, fingerprint)


def _slices(part: Examples, per_shard: int) -> Iterator[Piece]:
    for start in range(0, part.count, per_shard):
        rows = np.arange(start, min(start + per_shard, part.count), dtype=np.int64)

        def get(bad: Bad, rows: Any = rows) -> Arrays:
            return Arrays(*(tensor.numpy() for tensor in part.gather(rows)))

        yield Piece(len(rows), get)


def _fingerprint(config: TrainConfig, per_shard: int, known: Mapping[str, Any]) -> str:
    """Returns a digest of the settings and of what is known of the data."""
    settings = (config.data, config.image_size, config.channels, config.evaluation_fraction, config.seed, per_shard)
    return hashlib.sha256(json.dumps([*settings, known], sort_keys=True).encode()).hexdigest()
