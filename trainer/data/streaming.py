"""Implements `--stream`: reads TFRecord files or prepared shards larger than the disk from Cloud Storage.

An epoch takes the files in an order drawn from (seed, epoch), and shuffles the examples within each group of `GROUP`
files: the order of the examples is a function of the seed and the step alone, but differs from a run without --stream.
The disk holds the files of the current group, of the previous and of the next one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.config.train_config import TrainConfig
from trainer.data import shards, tfrecord
from trainer.data.arrays import labelled, largest_label, numbered_classes
from trainer.data.bad_images import Bad, refuse_or_skip
from trainer.data.dataset import Dataset, Examples, closed_on_failure, gathered, image_spec
from trainer.data.order import Rows, shuffled
from trainer.data.streamed_files import Facts, File, Parts, PreparedFile, RecordFile
from trainer.errors import UserError
from trainer.log import log
from trainer.storage import Address
from trainer.storage.gcs import Remote
from trainer.storage.rolling import Rolling
from trainer.storage.staging import Staged

GROUP = 4


class Streamed:
    """Provides the examples of remote files, by row number over all of them; `sizes`: the number in each file."""

    def __init__(
        self, files: Rolling[File], sizes: Sequence[int], image_shape: tuple[int, int, int], labelled: bool
    ) -> None:
        self._files, self._sizes = files, np.array(sizes)
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._sequence: list[int] = []  # the files in the order of the latest pass
        self.image_shape, self.labelled = image_shape, labelled

    @property
    def count(self) -> int:
        return int(self._starts[-1])

    def gather(self, rows: Any) -> tuple[Any, ...]:
        return gathered(self.read, rows, image_spec(self.image_shape, self.labelled))

    def read(self, rows: Rows) -> Parts:
        """Returns images and labels of `rows`, in their shape, and starts to download the next group of files."""
        flat = rows.ravel()
        which = np.searchsorted(self._starts, flat, side="right") - 1
        needed = np.unique(which).tolist()
        self._files.ahead(needed)
        self._files.ahead(self._following(needed))
        images = np.empty((flat.size, *self.image_shape), np.uint8)
        labels = np.empty(flat.size, np.int32)
        for number in needed:
            places = which == number
            images[places], *found = self._files.get(number).read(flat[places] - self._starts[number])
            for of_file in found:
                labels[places] = of_file
        shaped = images.reshape(*rows.shape, *self.image_shape)
        return (shaped, labels.reshape(rows.shape)) if self.labelled else (shaped,)

    def rows_at(self, seed: int, number: int, positions: Rows) -> Rows:
        files = shuffled(np.arange(len(self._sizes)), len(self._sizes), seed, "files", number)
        self._sequence = files.tolist()
        starts = np.concatenate([[0], np.cumsum(self._sizes[files])])  # of each file in this pass
        groups = np.append(starts[:-1:GROUP], starts[-1])
        rows, which = np.empty_like(positions), np.searchsorted(groups, positions, side="right") - 1
        for group in np.unique(which).tolist():
            places, start, end = which == group, groups[group], groups[group + 1]
            stream = f"group {group} of files"
            within = start + shuffled(positions[places] - start, int(end - start), seed, stream, number)
            file = np.searchsorted(starts, within, side="right") - 1
            rows[places] = self._starts[files[file]] + within - starts[file]
        return rows

    def _following(self, needed: list[int]) -> list[int]:
        places = [self._sequence.index(file) for file in needed if file in self._sequence]
        after = (max(places, default=-1) // GROUP + 1) * GROUP
        return self._sequence[after : after + GROUP]


def load(config: TrainConfig, address: Address) -> Dataset:
    """Returns the data set at an address, its training part streamed. Raises UserError for other kinds of data."""
    staged = Staged(address, "data", config.cache_dir)
    if shards.INDEX in staged.objects:
        return _load_shards(config, staged)
    records = {name: remote for name, remote in staged.objects.items() if tfrecord.is_named_so(name or address.name)}
    if not records:
        raise UserError(
            f"stream=true and data={config.data}: no TFRecord files or prepared shards found: prepare the data first "
            "(python -m trainer.data.prepare)"
        )
    return _load_records(config, staged, records)


def _rolling(config: TrainConfig, staged: Staged, objects: list[Remote], opener: Any) -> Rolling[File]:
    largest = max(remote.size for remote in objects)
    log.info(
        f"data={config.data}: {len(objects):,} files, {sum(remote.size for remote in objects) / 1e9:,.2f} GB, are "
        f"streamed: at most {3 * GROUP * largest / 1e9:,.2f} GB of disk at a time"
    )
    return Rolling(objects, staged.home / "rolling", 3 * GROUP, opener)


def _load_shards(config: TrainConfig, staged: Staged) -> Dataset:
    path = staged.fetch(lambda name: name == shards.INDEX)
    contents = shards.read_contents(path)
    held = {shard.path.name for shard in contents.splits.get("evaluation", ())}
    missing = contents.file_names - staged.objects.keys()
    if missing:
        raise UserError(f"data={config.data}: {min(missing)}, listed in its {shards.INDEX}, does not exist")
    staged.fetch(lambda name: name in held | {shards.INDEX})
    train, shape = contents.splits["train"], contents.image_shape
    files = _rolling(
        config, staged, [staged.objects[shard.path.name] for shard in train],
        lambda number, file: PreparedFile(file, train[number].examples, contents),
    )  # fmt: skip
    streamed = Streamed(files, [shard.examples for shard in train], shape, contents.labelled["train"])
    with closed_on_failure(files.close):
        evaluation: Examples | None = shards.open_split(contents, "evaluation", in_memory=False) if held else None
    return Dataset(config.data, streamed, evaluation, contents.class_names, {"streamed": True}, files.close)


def _load_records(config: TrainConfig, staged: Staged, records: dict[str, Remote]) -> Dataset:
    zipped = next((name for name in records if name.endswith(".gz")), None)
    if zipped:
        raise UserError(f"stream=true: {zipped} is compressed as a whole and cannot be read in parts: decompress it")
    held = [name for name in records if tfrecord.is_held(name)]
    objects = [remote for name, remote in records.items() if name not in held]
    if not objects:
        raise UserError(f"data={config.data}: no TFRecord files to train on")
    files = _rolling(
        config, staged, objects, lambda number, file: RecordFile(config, str(objects[number].address), file)
    )
    with closed_on_failure(files.close):
        found = Facts(staged.home / "records.json").of_all(objects, files)
        has_labels = labelled((flag for count, _, flag in found if count), f"data={config.data}", "files")
        evaluation = None
        if held:
            folder, bad = staged.fetch(lambda name: name in held), Bad()
            evaluation = tfrecord.read(config, [folder / name for name in held], bad)
            refuse_or_skip(config, bad)
    shape = (config.image_size, config.image_size, config.channels)
    streamed = Streamed(files, [count for count, _, _ in found], shape, has_labels)
    names = numbered_classes(max(largest_label(evaluation), *(most for _, most, _ in found)))
    return Dataset(config.data, streamed, evaluation, names, {"streamed": True}, files.close)
