"""Divides any data source into pieces, each of which becomes one prepared shard."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import numpy as np

from trainer.base.settings.train_config import TrainConfig, split_kind
from trainer.base.storage import parse
from trainer.base.storage.staging import naming
from trainer.data import image_folder, sources, tfrecord
from trainer.data.encoded_images import DecodingReport
from trainer.data.examples import Examples
from trainer.data.fingerprint import content_of, files_of
from trainer.data.in_memory import Arrays


@dataclass(frozen=True)
class Piece:
    """Describes one shard: the number of source items (files or examples) in it, and how to get them."""

    items: int
    get: Callable[[DecodingReport], Arrays | None]


@dataclass(frozen=True)
class Source:
    """Holds the pieces of each split. The fingerprint changes with everything that would change a shard."""

    splits: dict[str, list[Piece]]
    class_names: tuple[str, ...]  # empty: the labels' numbers
    fingerprint: str
    left_out: Counter[str] = field(default_factory=Counter)  # files that are no images, by suffix


def source_of(config: TrainConfig, per_shard: int) -> Source:
    """Divides `config.data` into pieces of `per_shard` images; TFRecord files into one piece each."""
    known = files_of(config)  # before they are read: they may change meanwhile
    if sources.is_named(config.data):
        return _loaded(config, per_shard, known)
    kind, path = sources.kind_and_path(config.data, config.cache_dir)
    with naming(path, parse(split_kind(config.data)[1], "SRC")):
        if config.evaluation_fraction or kind not in ("folder", "tfrecord"):
            return _loaded(config, per_shard, known)
        if kind == "tfrecord":  # one piece a file: the number of its records is unknown until it is read
            parts = [[_record_piece(config, file) for file in split] for split in tfrecord.find(path)]
            return Source(_named(*parts), (), _fingerprint(config, 0, known))
        splits = [split for split in image_folder.find(path) if split]
        parts = [
            [Piece(len(part.sources), partial(part.decode, config)) for part in split.parts(per_shard)]
            for split in splits
        ]
        left_out = sum((split.left_out for split in splits), Counter[str]())
        return Source(_named(*parts), splits[0].class_names, _fingerprint(config, per_shard, known), left_out)


def _named(train: list[Piece], evaluation: list[Piece] | None = None) -> dict[str, list[Piece]]:
    return {"train": train} if evaluation is None else {"train": train, "evaluation": evaluation}


def _record_piece(config: TrainConfig, file: Any) -> Piece:
    return Piece(1, lambda bad: tfrecord.read(config, [file]).decode(config, bad))


def _loaded(config: TrainConfig, per_shard: int, known: Mapping[str, Any]) -> Source:
    """Divides a dataset that is loaded as a whole; data of a name or a function change without a file."""
    keras.utils.set_random_seed(config.seed)  # before a function of the user's is imported, as in every command
    dataset = sources.load_dataset(config)
    names = ["train", *(["evaluation"] if dataset.evaluation else [])]
    parts = [_slices(dataset.images(name), per_shard) for name in names]
    fingerprint = _fingerprint(config, per_shard, known or content_of(dataset, rows=True))
    return Source(_named(*parts), dataset.class_names, fingerprint)


def _slices(examples: Examples, per_shard: int) -> list[Piece]:
    def piece(start: int) -> Piece:
        rows = np.arange(start, min(start + per_shard, examples.count), dtype=np.int64)
        return Piece(len(rows), lambda bad: Arrays(*(part.numpy() for part in examples.gather(rows))))

    return [*map(piece, range(0, examples.count, per_shard))]


def _fingerprint(config: TrainConfig, per_shard: int, known: Mapping[str, Any]) -> str:
    """Returns a digest of the settings and of what is known of the data."""
    settings = (config.data, config.image_size, config.channels, config.evaluation_fraction, config.seed, per_shard)
    return hashlib.sha256(json.dumps([*settings, known], sort_keys=True).encode()).hexdigest()
