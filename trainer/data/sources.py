"""What `--data` names -> the dataset: a source by name, a path whose kind is recognised or said, or the user's own."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.config.fields import nearest
from trainer.config.train_config import DATA_KINDS, DATA_SOURCES, TrainConfig, said_kind
from trainer.config.user_code import load_function
from trainer.data import idx, image_folder, npz, shards, streaming, tfrecord
from trainer.data.arrays import MOST_CLASSES, checked_labels, largest_label, numbered_classes
from trainer.data.dataset import Arrays, Dataset, closed_on_failure
from trainer.errors import UserError
from trainer.storage import Address, is_remote, local_path, parse
from trainer.storage.staging import Staged

KINDS: dict[str, Callable[[TrainConfig, Path], Dataset]] = {
    "idx": idx.load,
    "npz": npz.load,
    "tfrecord": tfrecord.load,
    "shards": shards.load,
    "folder": image_folder.load,
}
assert set(KINDS) == set(DATA_KINDS)


def load_dataset(config: TrainConfig) -> Dataset:
    """The dataset that `config.data` names; UserError where it cannot be had or does not fit the settings."""
    try:
        dataset = _load(config)
    except MemoryError:
        raise UserError(
            f"data={config.data}: it does not fit into memory: prepare it (python -m trainer.data.prepare)"
        ) from None
    except (OSError, RecursionError) as error:
        raise UserError(f"data={config.data}: cannot be read: {error}") from None
    if not isinstance(dataset, Dataset):
        raise UserError(f"data={config.data}: it returned {type(dataset).__name__}, not a trainer.data.dataset.Dataset")
    with closed_on_failure(dataset.close):
        _refuse_what_does_not_fit(config, dataset)
        return _with_classes(config, dataset)


def _refuse_what_does_not_fit(config: TrainConfig, dataset: Dataset) -> None:
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
    if config.evaluation_fraction and dataset.evaluation is None:
        raise UserError(
            f"evaluation_fraction={config.evaluation_fraction}: {config.data} has no evaluation part, and none is held "
            "back of prepared shards or of what a function of your own returns: drop the flag, prepare the data anew "
            "with it, or let the function return such a part"
        )


def _with_classes(config: TrainConfig, dataset: Dataset) -> Dataset:
    """`dataset` with labels in memory as int32, each below the number of classes; numbers for names where none are."""

    def checked(part: Any) -> Any:
        if not isinstance(part, Arrays) or part.labels is None:
            return part
        labels = checked_labels(part.labels, f"data={config.data}", len(dataset.class_names) or MOST_CLASSES)
        return part if labels is part.labels else dataclasses.replace(part, labels=labels)

    train, evaluation = checked(dataset.train), checked(dataset.evaluation)
    in_memory = [part for part in (train, evaluation) if isinstance(part, Arrays)]
    names = dataset.class_names or numbered_classes(largest_label(*in_memory))
    return dataclasses.replace(dataset, train=train, evaluation=evaluation, class_names=names)


def is_named(data: str) -> bool:
    """Whether `data` is a source's name or a user's own function, not a path."""
    if is_remote(data):
        return False
    own = ":" in data and data.partition(":")[0] not in KINDS and "/" not in data and not os.path.exists(data)
    return data in DATA_SOURCES or own


def kind_and_path(data: str, cache_dir: str = "") -> tuple[str, Path]:
    """`kind:path`, or a path whose kind is seen from what lies there; UserError where nothing does.

    What lies in Cloud Storage is fetched to `cache_dir` first, as far as its kind needs it.
    """
    said, where = said_kind(data)
    address = parse(where, "data")
    path = _fetched(address, cache_dir) if address else local_path(where, "data")
    kind, colon, _ = where.partition(":")
    if not os.path.exists(path) and colon and not os.path.exists(kind):
        raise UserError(f"data={data}: no such kind '{kind}'{nearest(kind, KINDS)} Known: {', '.join(KINDS)}")
    if not os.path.exists(path):
        hint = nearest(data, DATA_SOURCES)
        raise UserError(f"data={data}: there is no such path{hint} Known names: {', '.join(DATA_SOURCES)}")
    return said or recognise(data, path), path


def beside_data(data: str, otherwise: Path) -> Path:
    """A folder beside the data for what is computed from it; `otherwise` where the data is no path, or read-only."""
    if is_named(data) or is_remote(data):
        return otherwise
    path = kind_and_path(data)[1]
    folder = path if path.is_dir() else path.parent
    return folder if os.access(folder, os.W_OK) else otherwise


def _load(config: TrainConfig) -> Any:
    data = config.data
    if config.stream:
        address = parse(said_kind(data)[1], "data")
        assert address is not None, "trainer.config.rules lets only addresses pass"
        return streaming.load(config, address)
    if is_named(data):
        return load_function(DATA_SOURCES.get(data, data), "data")(config)
    kind, path = kind_and_path(data, config.cache_dir)
    return KINDS[kind](config, path)


def _fetched(address: Address, cache_dir: str) -> Path:
    """The local copy of an address: all of it, or of prepared shards those that their index names."""
    staged = Staged(address, "data", cache_dir)
    if shards.INDEX not in staged.objects:
        return staged.fetch()
    names = shards.read_contents(staged.fetch(lambda name: name == shards.INDEX)).file_names
    return staged.fetch(lambda name: name in names)


def recognise(data: str, path: Path) -> str:
    """The kind of what lies at `path`, seen from names alone; UserError where it is not known."""
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
