"""TFRecord files of tf.train.Example: encoded image bytes and a label."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.config.train_config import TrainConfig
from trainer.data.arrays import MOST_BYTES, checked_labels, with_evaluation
from trainer.data.dataset import Arrays, Dataset
from trainer.data.image_folder import Bad, decode_many, refuse_or_skip
from trainer.errors import UserError, reason

SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec")
_IMAGE_KEYS, _LABEL_KEYS = ("image/encoded", "image", "image_raw"), ("image/class/label", "label")
_EVALUATION = ("val", "test")
HEADER, FOOTER = 8 + 4, 4  # bytes around a record: its length and the length's checksum; its own checksum


def is_tfrecord(path: Path) -> bool:
    """Whether `path` is a TFRecord file, or a folder that holds some."""
    return bool(_files(path)) if path.is_dir() else is_named_so(path.name)


def load(config: TrainConfig, path: Path) -> Dataset:
    """All records, decoded once. In a folder, files named val* or test* are for evaluation."""
    train_files, held_files = find(path)
    bad = Bad()
    train = read(config, train_files, bad)
    held = read(config, held_files, bad) if held_files else None
    refuse_or_skip(config, bad)
    if train is None:
        raise UserError(f"data={path}: no image in its TFRecord files")
    train, held = with_evaluation(config, train, held)
    return Dataset(config.data, train, held, notes=bad.notes)


def find(path: Path) -> tuple[list[Path], list[Path]]:
    """The files for training and those for evaluation."""
    files = _files(path) if path.is_dir() else [path]
    held = [file for file in files if is_held(file.name)]
    return [file for file in files if file not in held], held


def is_held(name: str) -> bool:
    """Whether a file of that name, with the folders before it, is for evaluation."""
    return any(part.startswith(_EVALUATION) for part in name.lower().split("/"))


def read(config: TrainConfig, files: list[Path], bad: Bad) -> Arrays | None:
    """All records of `files`, decoded; None where there is none."""
    contents: list[bytes] = []
    labels: list[int | None] = []
    names: list[Path] = []
    for file in files:
        for number, (content, label) in enumerate(_records(file)):
            contents.append(content)
            labels.append(label)
            names.append(Path(f"{file}#{number}"))
    if not contents:
        return None
    if len({label is None for label in labels}) > 1:
        raise UserError(
            f"data={config.data}: some records have a label ({' or '.join(_LABEL_KEYS)}) and some have none"
        )
    images, good = decode_many(contents, config.image_size, config.channels, bad, lambda i: names[i])
    if not good:
        return None
    if labels[0] is None:
        return Arrays(images)
    return Arrays(images, checked_labels(np.array(labels, np.int64)[good], f"data={config.data}"))


def _records(file: Path) -> Iterator[tuple[bytes, int | None]]:
    compression = "GZIP" if file.suffix == ".gz" else ""
    try:
        _check_lengths(file)
        for record in tf.data.TFRecordDataset(str(file), compression_type=compression):
            yield parse(record.numpy(), file)
    except UserError:
        raise
    except Exception as error:  # a damaged record: TensorFlow's DataLossError
        raise _damaged(file, reason(error)) from None


def _check_lengths(file: Path) -> None:
    """UserError where a record claims more bytes than follow: TensorFlow would ask for that much memory first."""
    zipped = file.suffix == ".gz"
    with gzip.open(file, "rb") if zipped else open(file, "rb") as content:
        end, most = 0, MOST_BYTES if zipped else file.stat().st_size
        while header := content.read(HEADER):
            end += HEADER + int.from_bytes(header[:8], "little") + FOOTER
            if end > most or content.seek(end - 1) != end - 1 or not content.read(1):
                raise _damaged(file, f"a record ends at byte {end:,}, past the end or past {most:,}")


def _damaged(file: Path, why: str) -> UserError:
    return UserError(f"{file}: damaged, or not a TFRecord file: {why}")


def parse(record: bytes, file: Path) -> tuple[bytes, int | None]:
    """The image bytes and the label of one tf.train.Example; UserError, naming `file`, where it has no image."""
    try:
        feature = tf.train.Example.FromString(record).features.feature
    except Exception as error:  # protobuf's DecodeError
        raise _damaged(file, reason(error)) from None
    content = _first(feature, _IMAGE_KEYS, "bytes_list")
    if content is None:
        raise UserError(f"{file}: a record without image bytes ({' or '.join(_IMAGE_KEYS)}): it has {[*feature][:20]}")
    return content, _first(feature, _LABEL_KEYS, "int64_list")


def _first(feature: Any, keys: tuple[str, ...], kind: str) -> Any:
    for key in keys:
        if key in feature and getattr(feature[key], kind).value:
            return getattr(feature[key], kind).value[0]
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if is_named_so(path.name) and path.is_file())


def is_named_so(name: str) -> bool:
    """Whether TFRecord files have such names."""
    name = name.lower().removesuffix(".gz")
    return name.endswith(SUFFIXES) or ".tfrecord-" in name
