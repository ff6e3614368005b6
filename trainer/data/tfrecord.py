"""Reads TFRecord files of tf.train.Example with encoded image bytes and a label."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from trainer.base.errors import UserError, reason
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.encoded_images import Encoded, encoded_dataset
from trainer.data.image_arrays import labelled

TFRECORD_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec")
_IMAGE_KEYS, _LABEL_KEYS = ("image/encoded", "image", "image_raw"), ("image/class/label", "label")
_EVALUATION = ("val", "test")
_HEADER, _FOOTER = 8 + 4, 4  # bytes around a record: its length and the length's checksum; the record's checksum
_MOST_BYTES = 16 * 2**30  # of an unpacked file


def is_tfrecord(path: Path) -> bool:
    """Returns whether `path` is a TFRecord file, or a folder with such files."""
    return bool(_files(path)) if path.is_dir() else _is_named_so(path.name)


def load(config: TrainConfig, path: Path) -> Dataset:
    """Decodes all records. In a folder, files named val* or test* are used for evaluation."""
    files, evaluation = find(path)
    train = read(config, files)
    if not train.sources:
        raise UserError(f"data={path}: no image found in its TFRecord files")
    return encoded_dataset(config, train, read(config, evaluation) if evaluation else None)


def find(path: Path) -> tuple[list[Path], list[Path]]:
    """Returns the files for training and those for evaluation."""
    files = _files(path) if path.is_dir() else [path]
    holdout = [file for file in files if file.name.lower().startswith(_EVALUATION)]
    return [file for file in files if file not in holdout], holdout


def read(config: TrainConfig, files: list[Path]) -> Encoded:
    """Returns the images and labels of all records of `files`. Raises UserError for a damaged file."""
    records = [record for file in files for record in _records(file)]
    items = f"records ({' or '.join(_LABEL_KEYS)})"
    has_labels = labelled((label is not None for _, label, _ in records), f"data={config.data}", items)
    labels = [label or 0 for _, label, _ in records] if has_labels else None
    return Encoded([image for image, _, _ in records], labels, names=[name for *_, name in records])


def _records(file: Path) -> Iterator[tuple[bytes, int | None, Path]]:
    """Yields the image bytes, the label and the name of each record."""
    compression = "GZIP" if file.suffix == ".gz" else ""
    try:
        _check_lengths(file)
        for number, record in enumerate(tf.data.TFRecordDataset(str(file), compression_type=compression)):
            yield *_parse(record.numpy(), file), Path(f"{file}#{number}")
    except UserError:
        raise
    except Exception as error:  # TensorFlow's DataLossError for a damaged record, protobuf's DecodeError
        raise _damaged(file, reason(error)) from None


def _check_lengths(file: Path) -> None:
    """Raises UserError if a record claims more bytes than follow: TensorFlow would ask for them, and abort."""
    zipped = file.suffix == ".gz"
    with gzip.open(file, "rb") if zipped else open(file, "rb") as content:
        end, limit = 0, _MOST_BYTES if zipped else file.stat().st_size
        while header := content.read(_HEADER):
            end += _HEADER + int.from_bytes(header[:8], "little") + _FOOTER
            if end > limit or content.seek(end - 1) != end - 1 or not content.read(1):
                raise _damaged(file, f"a record ends at byte {end:,}, past the end or past {limit:,}")


def _damaged(file: Path, why: str) -> UserError:
    return UserError(
        f"{file}: damaged, or not a TFRecord file: {why}: copy it again, or end its name in .gz if it is compressed"
    )


def _parse(record: bytes, file: Path) -> tuple[bytes, int | None]:
    """Returns the image bytes and the label of a tf.train.Example. Raises UserError, naming `file`, without image."""
    feature = tf.train.Example.FromString(record).features.feature
    content = _first(feature, _IMAGE_KEYS, "bytes_list")
    if content is None:
        raise UserError(f"{file}: a record without image bytes ({' or '.join(_IMAGE_KEYS)}): it has {[*feature][:20]}")
    return content, _first(feature, _LABEL_KEYS, "int64_list")


def _first(feature: Any, keys: tuple[str, ...], kind: str) -> Any:
    values = (getattr(feature[key], kind).value for key in keys if key in feature)
    return next((value[0] for value in values if value), None)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _is_named_so(path.name) and path.is_file())


def _is_named_so(name: str) -> bool:
    name = name.lower().removesuffix(".gz")
    return name.endswith(TFRECORD_SUFFIXES) or ".tfrecord-" in name
