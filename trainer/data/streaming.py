"""`--stream`: TFRecord files or prepared shards in Cloud Storage that are larger than the disk, a few files at a time.

An epoch takes the files in an order drawn from (seed, epoch), and shuffles the examples within each group of `GROUP`
files: which example comes when is a function of the seed and the step alone, as ever, but is not that of a run without
--stream. On the disk are the files of the group in use, of the one before and of the one after it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.config.train_config import TrainConfig
from trainer.data import shards, tfrecord
from trainer.data.arrays import largest_label, numbered_classes
from trainer.data.dataset import Dataset, Examples, closed_on_failure, gathered
from trainer.data.image_folder import Bad, refuse_or_skip
from trainer.data.streamed_files import Facts, File, Parts, PreparedFile, RecordFile
from trainer.errors import UserError
from trainer.log import log
from trainer.storage import Address
from trainer.storage.gcs import Remote
from trainer.storage.rolling import Rolling
from trainer.storage.staging import Staged

GROUP = 4
_STREAM = 0x57EA  # keeps these permutations apart from other draws


class Streamed:
    """Examples of remote files, by row number over all of them; `sizes`: how many each file holds."""

    def __init__(
        self, files: Rolling[File], sizes: Sequence[int], image_shape: tuple[int, int, int], labelled: bool
    ) -> None:
        self._files, self._sizes = files, np.array(sizes)
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._sequence: list[int] = []  # the files in the order of the newest permutation
        self.image_shape, self.labelled = image_shape, labelled

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self._starts[-1])

    def gather(self, rows: Any) -> tuple[Any, ...]:
        """(images, labels), or (images,), of these rows, as TensorFlow operations."""
        return gathered(self.read, rows, self.image_shape, self.labelled)

    def read(self, rows: npt.NDArray[np.int32]) -> Parts:
        """Images and labels of `rows`, in their shape; the next group of files is fetched meanwhile."""
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

    def permutation(self, seed: int, number: Any) -> Any:
        """As InOwnOrder asks: files shuffled, then the rows within each group of them."""
        rows = tf.numpy_function(lambda epoch: self._shuffled(seed, int(epoch)), [number], tf.int32, stateful=True)
        return tf.ensure_shape(rows, (self.count,))

    def _shuffled(self, seed: int, number: int) -> npt.NDArray[np.int32]:
        draw = np.random.default_rng((_STREAM, seed, number))
        order = draw.permutation(len(self._sizes)).tolist()
        self._sequence = order
        rows = [np.arange(self._starts[file], self._starts[file + 1], dtype=np.int32) for file in order]
        groups = [np.concatenate(rows[first : first + GROUP]) for first in range(0, len(rows), GROUP)]
        return np.concatenate([draw.permutation(group) for group in groups])

    def _following(self, needed: list[int]) -> list[int]:
        places = [self._sequence.index(file) for file in needed if file in self._sequence]
        after = (max(places, default=-1) // GROUP + 1) * GROUP
        return self._sequence[after : after + GROUP]


def load(config: TrainConfig, address: Address) -> Dataset:
    """The data set at an address, its training part streamed. UserError for all but TFRecord files and shards."""
    staged = Staged(address, "data", config.cache_dir)
    if shards.INDEX in staged.objects:
        return _load_shards(config, staged)
    records = {name: remote for name, remote in staged.objects.items() if tfrecord.is_named_so(name or address.name)}
    if not records:
        raise UserError(
            f"stream=true and data={config.data}: neither TFRecord files nor prepared shards lie there: prepare "
            "it first (python -m trainer.data.prepare)"
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
        raise UserError(f"data={config.data}: {min(missing)}, which its {shards.INDEX} names, is not there")
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
        raise UserError(f"stream=true: {zipped} is compressed as a whole and cannot be read in part: unpack it")
    held = [name for name in records if tfrecord.is_held(name)]
    objects = [remote for name, remote in records.items() if name not in held]
    if not objects:
        raise UserError(f"data={config.data}: no TFRecord files to train on")
    files = _rolling(
        config, staged, objects, lambda number, file: RecordFile(config, str(objects[number].address), file)
    )
    with closed_on_failure(files.close):
        found = Facts(staged.home / "records.json").of_all(objects, files)
        labelled = {has_labels for count, _, has_labels in found if count}
        if len(labelled) > 1:
            raise UserError(f"data={config.data}: some files have labels and some have none")
        evaluation = None
        if held:
            folder, bad = staged.fetch(lambda name: name in held), Bad()
            evaluation = tfrecord.read(config, [folder / name for name in held], bad)
            refuse_or_skip(config, bad)
    shape = (config.image_size, config.image_size, config.channels)
    streamed = Streamed(files, [count for count, _, _ in found], shape, labelled == {True})
    names = numbered_classes(max(largest_label(evaluation), *(most for _, most, _ in found)))
    return Dataset(config.data, streamed, evaluation, names, {"streamed": True}, files.close)
