"""Finds encoded images: the files of a folder, or the records of TFRecord files; `decode.py` decodes them.

A folder has class folders or is flat, also below train/ and val/ or test/. A record is a tf.train.Example with encoded
image bytes and a label. Files that are no images are counted and reported, never skipped in silence.
"""

import gzip
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from trainer.base.errors import UserError, reason
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.decode import IMAGE_SUFFIXES, Encoded, counted, encoded_dataset
from trainer.data.image_arrays import labelled

_TRAIN_FOLDERS, _EVALUATION_FOLDERS = ("train", "training"), ("val", "validation", "valid", "test")
_SYSTEM_FILES = frozenset({".ds_store", "thumbs.db", "desktop.ini", "__macosx", "ehthumbs.db"})


def find_images(path: Path) -> tuple[Encoded, Encoded | None]:
    """Finds the training and the evaluation files below `path`, by name. Raises UserError if there are none."""
    children = _children(path)
    below = {child.name.lower(): Path(child.path) for child in children if child.is_dir()}
    train = next((below[name] for name in _TRAIN_FOLDERS if name in below), path)
    splits = [_split(train, None)]
    if train is not path:
        for name, folder in below.items():  # `train` may be a class, if folders beside it contain images too
            if name not in _TRAIN_FOLDERS + _EVALUATION_FOLDERS and _images_below(folder, Counter(), set()):
                raise UserError(
                    f"data={path}: {train.name} would be the training part, but {folder.name} beside it contains "
                    f"images too: if {train.name} is a class, move all class folders into one folder train; otherwise "
                    f"move {folder.name} elsewhere"
                )
        splits[0].left_out.update(f"{_kind(child)} beside {train.name}" for child in children if not child.is_dir())
        evaluation = [below[name] for name in _EVALUATION_FOLDERS if name in below]
        splits += [_split(folder, splits[0].class_names) for folder in evaluation[:1]]
    if not splits[0].sources:
        why = f", but {counted(splits[0].left_out)}" if splits[0].left_out else ""
        raise UserError(f"data={path}: no image files found{why} (recognised by {' '.join(sorted(IMAGE_SUFFIXES))})")
    return splits[0], splits[1] if len(splits) > 1 else None


def _split(path: Path, class_names: tuple[str, ...] | None) -> Encoded:
    """Returns the files of class folders, if there are any with images, or of a flat folder without labels."""
    others: Counter[str] = Counter()
    children = _children(path)
    flat = [Path(child.path) for child in children if not child.is_dir() and _is_image(child, others)]
    kinds = {Path(child.path): Counter[str]() for child in children if child.is_dir()}
    classes = {child: _images_below(child, counts, set()) for child, counts in kinds.items()}
    others.update(sum(kinds.values(), Counter()))
    full = [child for child in classes if classes[child]]
    if flat and full:
        raise UserError(f"data={path}: images beside class folders ({full[0].name}): move one or the other")
    if not full:
        return Encoded(flat, None, left_out=others)
    if empty := next((child for child in classes if not classes[child]), None):
        raise UserError(
            f"data={path}: class {empty.name} would have no image ({counted(kinds[empty]) or 'it is empty'}): convert "
            "its files, or move the folder elsewhere"
        )
    names = tuple(child.name for child in classes) if class_names is None else class_names
    if unknown := [child.name for child in classes if child.name not in names]:
        raise UserError(f"data={path}: class {unknown[0]} is not one of the training classes {', '.join(names)}")
    labels = [names.index(child.name) for child, files in classes.items() for _ in files]
    return Encoded([file for files in classes.values() for file in files], labels, names, left_out=others)


def _children(path: Path) -> list[os.DirEntry[str]]:
    """Returns the entries of a folder, sorted by name, without hidden folders and files of operating systems."""
    try:
        with os.scandir(path) as entries:
            children = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"data={path}: cannot be read ({error.strerror})") from None
    visible = [entry for entry in children if entry.name.lower() not in _SYSTEM_FILES]
    return [entry for entry in visible if not (entry.name.startswith(".") and entry.is_dir())]


def _images_below(path: Path, others: Counter[str], visited: set[Path]) -> list[Path]:
    """Returns all images below `path`, and counts the other files in `others`.

    visited: resolved folders already visited, so that links cannot form a loop.
    """
    images: list[Path] = []
    if path.resolve() not in visited:
        visited.add(path.resolve())
        for child in _children(path):
            if child.is_dir():
                images += _images_below(Path(child.path), others, visited)
            elif _is_image(child, others):
                images.append(Path(child.path))
    return images


def _is_image(file: os.DirEntry[str], others: Counter[str]) -> bool:
    """Returns whether a file is read as an image; if not, counts it in `others`."""
    kind = _kind(file)
    readable = kind in IMAGE_SUFFIXES and file.is_file()
    if not readable:
        others[kind] += 1
    return readable


def _kind(file: os.DirEntry[str]) -> str:
    """Returns the suffix, or another reason, by which a file that is left out is counted."""
    hidden = file.name.startswith(".")
    return "hidden" if hidden else os.path.splitext(file.name)[1].lower() or "without a suffix"


TFRECORD_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec")
_IMAGE_KEYS, _LABEL_KEYS = ("image/encoded", "image", "image_raw"), ("image/class/label", "label")
_EVALUATION_FILES = ("val", "test")
_HEADER, _FOOTER = 8 + 4, 4  # bytes around a record: its length and the length's checksum; the record's checksum
_MOST_BYTES = 16 * 2**30  # of an unpacked file


def is_tfrecord(path: Path) -> bool:
    """Returns whether `path` is a TFRecord file, or a folder with such files."""
    names = (file.name.lower().removesuffix(".gz") for file in (path.iterdir() if path.is_dir() else [path]))
    return any(name.endswith(TFRECORD_SUFFIXES) or ".tfrecord-" in name for name in names)


def load_tfrecord(config: TrainConfig, path: Path) -> Dataset:
    """Decodes all records. In a folder, files named val* or test* are used for evaluation."""
    files, evaluation = find_records(path)
    held_out = read_records(config, evaluation) if evaluation else None
    return encoded_dataset(config, read_records(config, files), held_out)


def find_records(path: Path) -> tuple[list[Path], list[Path]]:
    """Returns the files for training and those for evaluation."""
    files = sorted(file for file in path.iterdir() if file.is_file() and is_tfrecord(file)) if path.is_dir() else [path]
    holdout = [file for file in files if file.name.lower().startswith(_EVALUATION_FILES)]
    return [file for file in files if file not in holdout], holdout


def read_records(config: TrainConfig, files: list[Path]) -> Encoded:
    """Returns the images and labels of all records of `files`. Raises UserError for a damaged file."""
    records = [record for file in files for record in _records(file)]
    items = f"records ({' or '.join(_LABEL_KEYS)})"
    has_labels = labelled((label is not None for _, label, _ in records), f"data={config.data}", items)
    labels = [label or 0 for _, label, _ in records] if has_labels else None
    return Encoded([image for image, _, _ in records], labels, names=[name for *_, name in records])


def _records(file: Path) -> Iterator[tuple[bytes, int | None, Path]]:
    """Yields the image bytes, the label and the name of each record. Raises UserError for a damaged file."""
    zipped = file.suffix == ".gz"
    try:
        # TensorFlow would allocate as many bytes as a damaged record claims to have, and abort.
        with gzip.open(file, "rb") if zipped else open(file, "rb") as content:
            end, limit = 0, _MOST_BYTES if zipped else file.stat().st_size
            while header := content.read(_HEADER):
                end += _HEADER + int.from_bytes(header[:8], "little") + _FOOTER
                if end > limit or content.seek(end - 1) != end - 1 or not content.read(1):
                    raise ValueError(f"a record ends at byte {end:,}, past the end or past {limit:,}")
        records = tf.data.TFRecordDataset(str(file), compression_type="GZIP" if zipped else "")
        for number, record in enumerate(records):
            feature = tf.train.Example.FromString(record.numpy()).features.feature
            images = [feature[key].bytes_list.value[:1] for key in _IMAGE_KEYS if key in feature]
            labels = [feature[key].int64_list.value[:1] for key in _LABEL_KEYS if key in feature]
            if not (image := next(filter(None, images), None)):
                keys = f"({' or '.join(_IMAGE_KEYS)}): it has {[*feature][:20]}"
                raise UserError(f"{file}: a record without image bytes {keys}")
            label = next(filter(None, labels), [None])
            yield image[0], label[0], Path(f"{file}#{number}")
    except UserError:
        raise
    except Exception as error:  # TensorFlow's DataLossError for a damaged record, protobuf's DecodeError
        raise UserError(
            f"{file}: damaged, or not a TFRecord file: {reason(error)}: copy it again, or end its name in .gz if it is "
            "compressed"
        ) from None
