"""Loads the dataset that `--data` names: a built-in source, a path whose kind is recognised or
named, or a function.

Each kind has its loader in another module; here they are chosen, and what they return is checked
against the settings.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.base.settings.fields import nearest
from trainer.base.settings.own_settings import is_named
from trainer.base.settings.train_config import DATA_SOURCES, TrainConfig, split_kind
from trainer.base.storage import parse
from trainer.base.storage.staging import naming, stage
from trainer.data import image_arrays, image_files, shards
from trainer.data.dataset import Dataset
from trainer.data.examples import Arrays
from trainer.data.image_arrays import MOST_CLASSES, checked_labels, numbered_classes
from trainer.data.user_data import own_dataset
from trainer.user_code.mistakes import load_function, where_raised

LOADERS: dict[str, Callable[[TrainConfig, Path], Dataset]] = {
    "idx": image_arrays.load_idx,
    "npz": image_arrays.load_npz,
    "tfrecord": image_files.load_tfrecord,
    "shards": shards.load,
    "folder": lambda config, path: image_files.encoded_dataset(
        config, *image_files.find_images(path)
    ),
}


def load_dataset(config: TrainConfig, *, trains: bool = True) -> Dataset:
    """Loads the dataset of `config.data`.

    Raises UserError if it cannot be read or does not fit the settings.
    trains: whether it will be trained on, for which at least one global batch of rows is needed.
    """
    # A name stands for a function, and all else for files.
    data = config.data
    origin = f"data={data}"
    try:
        if is_named(data):
            function = load_function(DATA_SOURCES.get(data, data), "data", ("config",), config)
            dataset = own_dataset(config, function, trains=trains)
        else:
            kind, path = kind_and_path(data, config.cache_dir)
            with naming(path, parse(split_kind(data)[1], "data")):
                dataset = LOADERS[kind](config, path)
    except MemoryError:
        raise UserError(
            f"{origin}: it does not fit into memory: prepare it (python -m trainer.data.prepare)"
        ) from None
    except (OSError, RecursionError) as error:
        if where_raised(error):
            raise
        raise UserError(f"{origin}: cannot be read: {error}") from None

    # The settings must fit the data.
    shapes = [examples.image_shape for examples in (dataset.train, dataset.evaluation) if examples]
    # Of data without images nothing reads these settings, so that giving them is refused.
    for shape in filter(None, shapes):
        expected = (config.image_size, config.image_size, config.channels)
        if shape != expected:
            raise UserError(
                f"{origin}: images are {shape}, but the settings require {expected}:"
                " change image_size or channels, or prepare the data again"
            )
    count = dataset.train.count if trains else config.global_batch_size
    if count < config.global_batch_size:
        raise UserError(
            f"{origin}: {count} examples are fewer than"
            f" global_batch_size={config.global_batch_size}: use at most {count}"
        )
    if config.evaluation_fraction and dataset.evaluation is None:
        raise UserError(
            f"evaluation_fraction={config.evaluation_fraction}: {config.data} has no evaluation"
            " part, and the flag does not apply to prepared data, nor to a Dataset of your own:"
            " drop it, prepare the data anew with it, or give the rows as third argument:"
            " Dataset(name, training, evaluation)"
        )

    # Labels in memory become int32, and classes without names are called by their numbers.
    largest = []
    parts = list[Any]((dataset.train, dataset.evaluation))
    for place, part in enumerate(parts):
        if isinstance(part, Arrays) and part.labels is not None:
            most = len(dataset.class_names) or MOST_CLASSES
            labels = checked_labels(part.labels, origin, most)
            largest.append(int(labels.max()))
            parts[place] = part if labels is part.labels else Arrays(part.images, labels)
    names = dataset.class_names or numbered_classes(largest)
    return dataclasses.replace(dataset, train=parts[0], evaluation=parts[1], class_names=names)


def kind_and_path(data: str, cache_dir: str = "") -> tuple[str, Path]:
    """Returns the kind, named in `kind:path` or recognised from the files, and the path.

    Raises UserError if missing. An address in Cloud Storage is downloaded to `cache_dir` first.
    """
    kind, location = split_kind(data)
    path = stage(location, "data", cache_dir)
    if not os.path.exists(path):
        prefix, colon, _ = location.partition(":")
        if colon and not os.path.exists(prefix):
            raise UserError(
                f"data={data}: unknown kind '{prefix}'{nearest(prefix, LOADERS)} Known:"
                f" {', '.join(LOADERS)}"
            )
        raise UserError(
            f"data={data}: path not found{nearest(data, DATA_SOURCES)} Known names:"
            f" {', '.join(DATA_SOURCES)}"
        )

    # A kind is recognised by its signs, from the narrowest to the widest.
    recognised = {
        "npz": path.suffix == ".npz",
        "shards": (path / shards.INDEX).is_file(),
        "tfrecord": image_files.is_tfrecord(path),
        "idx": image_arrays.is_idx(path),
        "folder": path.is_dir(),
    }
    if kind := kind or next((kind for kind, is_kind in recognised.items() if is_kind), ""):
        return kind, path
    kinds = ", ".join(f"{kind}:PATH" for kind in LOADERS)
    raise UserError(
        f"data={data}: unknown kind of data: use one of {kinds}, or --data=package.module:function,"
        " a function of yours that reads it (examples/table.py reads a CSV file)"
    )
