"""What `--data` names -> the dataset: a source by name, a path whose kind is recognised or said, or the user's own."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.config import DATA_SOURCES, TrainConfig
from trainer.data import idx, image_folder, npz, shards, tfrecord
from trainer.data.dataset import Dataset
from trainer.errors import UserError
from trainer.imports import load_function
from trainer.settings import nearest
from trainer.storage import local_path

KINDS: dict[str, Callable[[TrainConfig, Path], Dataset]] = {
    "idx": idx.load,
    "npz": npz.load,
    "tfrecord": tfrecord.load,
    "shards": shards.load,
    "folder": image_folder.load,
}


def load_dataset(config: TrainConfig) -> Dataset:
    """The dataset that `config.data` names; UserError where it cannot be had or does not fit the settings."""
    dataset = _load(config)
    if not isinstance(dataset, Dataset):
        raise UserError(f"data={config.data}: it returned {type(dataset).__name__}, not a trainer.data.dataset.Dataset")
    expected = (config.image_size, config.image_size, config.channels)
    for part in filter(None, (dataset.train, dataset.evaluation)):
        if part.image_shape != expected:
            raise UserError(
                f"data={config.data}: images are {part.image_shape}, the settings say {expected}: change image_size or "
                "channels, or prepare the data anew"
            )
    if dataset.train.count < config.global_batch_size:
        raise UserError(
            f"data={config.data}: {dataset.train.count} examples are fewer than global_batch_size="
            f"{config.global_batch_size}: take at most {dataset.train.count}"
        )
    return dataset


def is_named(data: str) -> bool:
    """Whether `data` is a source's name or a user's own function, not a path."""
    own = ":" in data and data.partition(":")[0] not in KINDS and "/" not in data and not Path(data).exists()
    return data in DATA_SOURCES or own


def kind_and_path(data: str) -> tuple[str, Path]:
    """`kind:path`, or a path whose kind is seen from what lies there; UserError where nothing does."""
    kind, colon, rest = data.partition(":")
    said = bool(colon) and kind in KINDS
    path = local_path(rest if said else data, "data")
    if not path.exists() and colon and not said and not Path(kind).exists():
        raise UserError(f"data={data}: no such kind '{kind}'{nearest(kind, KINDS)} Known: {', '.join(KINDS)}")
    if not path.exists():
        hint = nearest(data, DATA_SOURCES)
        raise UserError(f"data={data}: there is no such path{hint} Known names: {', '.join(DATA_SOURCES)}")
    return (kind if said else _recognise(data, path)), path


def beside_data(data: str, otherwise: Path) -> Path:
    """A folder beside the data for what is computed from it; `otherwise` where the data is no path, or read-only."""
    if is_named(data):
        return otherwise
    path = kind_and_path(data)[1]
    folder = path if path.is_dir() else path.parent
    return folder if os.access(folder, os.W_OK) else otherwise


def _load(config: TrainConfig) -> Any:
    data = config.data
    if is_named(data):
        return load_function(DATA_SOURCES.get(data, data), "data")(config)
    kind, path = kind_and_path(data)
    return KINDS[kind](config, path)


def _recognise(data: str, path: Path) -> str:
    if path.suffix == ".npz":
        return "npz"
    if shards.is_shards(path):
        return "shards"
    if tfrecord.is_tfrecord(path):
        return "tfrecord"
    if idx.is_idx(path):
        return "idx"
    if path.is_dir():
        return "folder"
    raise UserError(
        f"data={data}: its kind is not known: say it, as one of {', '.join(f'{kind}:PATH' for kind in KINDS)}"
    )
