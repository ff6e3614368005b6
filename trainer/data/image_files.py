"""Finds encoded images, the files of a folder or the records of TFRecord files, and decodes them to
uint8 arrays.

A folder has class folders or is flat, also below train/ and val/ or test/. A record is a
tf.train.Example with encoded image bytes and a label. Files that are no images are counted and
reported, never skipped in silence.

Pillow decodes on all cores, and treats all images alike: the EXIF orientation is applied; more than
8 bits are scaled, not clipped; transparency is blended over white; of an animation the first frame
is used; the middle square is cropped and resized (bicubic, antialiased) to `size`. An image that
cannot be decoded ends the run or, with --skip_bad_images, is left out and named.
"""

import io
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from PIL import Image, ImageOps, UnidentifiedImageError, features

from trainer.base.errors import UserError, reason
from trainer.base.log import log
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.examples import Array, Arrays
from trainer.data.image_arrays import checked_labels, labelled, with_evaluation

# Formats are recognised by content; Pillow's plug-ins for other formats run programs. Wheels of
# Pillow read AVIF since 11.3.
_SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png", ".apng"),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    **({"AVIF": (".avif", ".avifs")} if "avif" in features.get_supported_modules() else {}),
}
IMAGE_SUFFIXES = frozenset(chain(*_SUFFIXES.values()))
MOST_PIXELS = 100_000_000  # larger images are rejected as decompression bombs

_MODES = {"L": "grey", "1": "black and white", "P": "palette", "RGB": "colour"}  # of Pillow
_DEEP_GREY = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")
_ORIENTATION = 0x0112  # of EXIF
_BITS_PER_SAMPLE = 258  # of TIFF 6.0


class BadImage(Exception):
    """Reports an image that cannot be decoded; the text is the reason."""


def decode(
    source: Path | bytes, size: int, channels: int
) -> tuple[npt.NDArray[np.uint8], list[str]]:
    """Returns the image as (size, size, channels) uint8, and the conversions made.

    Raises BadImage if that fails.
    """
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    mode = "RGB" if channels == 3 else "L"
    try:
        with Image.open(file, formats=[*_SUFFIXES]) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise BadImage(
                    f"it has {width} x {height} pixels, more than {MOST_PIXELS:,}: a decompression"
                    " bomb?"
                )
            # A JPEG is decoded at low resolution if that suffices.
            image.draft(mode, (2 * size, 2 * size))
            rawmode = image.tile[0][3] if image.tile else None
            image.load()
            converted = ["animation"] if getattr(image, "n_frames", 1) > 1 else []
            if "transparency" in image.info and (rawmode == "RGB;16B" or image.mode in _DEEP_GREY):
                raise BadImage(
                    "it has 16 bits and a transparent colour or level: convert it to 8 bits"
                )

            # Photos are turned as their camera was held.
            upright: Image.Image = image
            if image.getexif().get(_ORIENTATION, 1) not in (0, 1):
                upright = ImageOps.exif_transpose(image)
                converted.append("orientation")

            # Levels of 16 bits are scaled to 8 bits.
            plain = upright
            if upright.mode in _DEEP_GREY:
                tags = getattr(image, "tag_v2", {})  # of a TIFF file
                if upright.mode == "F" or (tags and upright.mode == "I"):
                    raise BadImage(
                        "its pixels have a sign, or 32 bits and an unknown range: convert it to 8"
                        " bits"
                    )
                bits = tags.get(_BITS_PER_SAMPLE, (16,))[0]
                converted.append(f"{bits} bits to 8")
                levels = np.rint(np.asarray(upright) * (255 / (2**bits - 1)))
                plain = Image.fromarray(levels.astype(np.uint8))

            # Transparent pixels show a white ground.
            if "transparency" in plain.info or plain.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
                converted.append("transparency over white")
                layer = plain.convert("RGBA")
                opaque = "L" if plain.mode in ("L", "LA", "1") else "RGB"
                white = Image.new("RGBA", layer.size, "white")
                plain = Image.alpha_composite(white, layer).convert(opaque)

            # Colours and size are those of the settings.
            if plain.mode != mode:
                converted.append(f"{_MODES.get(plain.mode, plain.mode)} to {_MODES[mode]}")
                plain = plain.convert(mode)
            if plain.size != (size, size):
                plain = ImageOps.fit(plain, (size, size), method=Image.Resampling.BICUBIC)
            return np.asarray(plain, np.uint8).reshape(size, size, channels), converted
    except BadImage:
        raise
    except UnidentifiedImageError:  # its text has the address of a Python object
        raise BadImage("it is no image of a known kind") from None
    except Exception as error:  # Pillow's plug-ins raise any exception for a damaged file
        raise BadImage(reason(error)) from error


# A thread takes so many images at a time: taking a task costs as much as decoding a tiny image.
_CHUNK = 16


@dataclass
class DecodingReport:
    """Collects the files of all splits that could not be decoded, and why.

    It also counts conversions, and files that are left out.
    """

    skipped: list[str] = field(default_factory=list)
    converted: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)  # by suffix


@dataclass(frozen=True)
class Encoded:
    """Holds the images of one split as files, or as the bytes of records.

    names: what messages call them; left_out: the number of files that are no images, by suffix.
    """

    sources: Sequence[Path | bytes]
    labels: Sequence[int] | None
    class_names: tuple[str, ...] = ()
    names: Sequence[str] = ()
    left_out: Counter[str] = field(default_factory=Counter)

    def parts(self, size: int) -> "list[Encoded]":
        """Returns the images in parts of `size`."""
        parts = []
        for begin in range(0, len(self.sources), size):
            labels = self.labels and self.labels[begin : begin + size]
            parts.append(Encoded(self.sources[begin : begin + size], labels, self.class_names))
        return parts

    def decode(self, config: TrainConfig, bad: DecodingReport) -> Arrays | None:
        """Decodes the images on all cores, in their order, without the bad ones.

        Returns None if all are bad.
        """
        shape = config.image_size, config.image_size, config.channels
        images = np.empty((len(self.sources), *shape), np.uint8)

        def decode_at(position: int) -> list[str] | BadImage:
            try:
                images[position], converted = decode(
                    self.sources[position], config.image_size, config.channels
                )
            except BadImage as error:
                return error
            return converted

        # Pillow releases the interpreter's lock, so that threads decode on all cores.
        with warnings.catch_warnings(), ThreadPool() as pool:
            warnings.simplefilter("ignore")  # `decode` rejects or converts what Pillow warns about
            outcomes = pool.map(decode_at, range(len(images)), _CHUNK)

        # The report names the bad images, and the others stay.
        good = []
        for position, outcome in enumerate(outcomes):
            if isinstance(outcome, BadImage):
                name = (self.names or self.sources)[position]
                bad.skipped.append(f"{name}: {outcome}")  # type: ignore[str-bytes-safe]
            else:
                bad.converted.update(outcome)
                good.append(position)
        if not good:
            return None
        labels = None
        if self.labels is not None:
            labels = checked_labels(np.array(self.labels)[good], f"data={config.data}")
        return Arrays(images if len(good) == len(images) else images[good], labels)


def encoded_dataset(config: TrainConfig, train: Encoded, evaluation: Encoded | None) -> Dataset:
    """Decodes the images of both splits to a dataset.

    Raises UserError if images cannot be decoded and may not be skipped, if none is left, or if a
    class has none left.
    """
    splits = [split for split in (train, evaluation) if split]
    bad = DecodingReport(left_out=sum((split.left_out for split in splits), Counter()))
    examples, *holdout = [split.decode(config, bad) for split in splits]
    refuse_or_skip(config, bad)
    if examples is None:
        raise UserError(
            f"data={config.data}: none of its {len(train.sources):,} images could be decoded"
        )
    examples, evaluated = with_evaluation(config, examples, holdout[0] if holdout else None)
    refuse_empty_classes(config, train.class_names, examples.labels)
    return Dataset(config.data, examples, evaluated, train.class_names, vars(bad))


def refuse_or_skip(config: TrainConfig, bad: DecodingReport) -> None:
    """Raises UserError naming the first ten files that cannot be decoded.

    With --skip_bad_images, logs each of them. Also logs which files were left out and which
    conversions were made.
    """
    if bad.left_out:
        log.warning(
            f"data={config.data}: {bad.left_out.total():,} files are not read:"
            f" {counted(bad.left_out)} (images are recognised by"
            f" {' '.join(sorted(IMAGE_SUFFIXES))})"
        )
    if not config.skip_bad_images and bad.skipped:
        raise UserError(
            f"data={config.data}: {len(bad.skipped):,} image files cannot be decoded: fix or remove"
            " them, or skip them with --skip_bad_images. The first:"
            f" {'; '.join(bad.skipped[:10])}"
        )
    for line in bad.skipped:
        log.warning(f"skipped {line}")
    if bad.converted:
        log.info(f"converted images: {counted(bad.converted)}")


def refuse_empty_classes(
    config: TrainConfig, class_names: Sequence[str], labels: Array | None
) -> None:
    """Raises UserError for the first class whose number is not among the labels, if any."""
    present = range(len(class_names)) if labels is None else set(np.unique(labels).tolist())
    for number, name in enumerate(class_names):
        if number not in present:
            raise UserError(
                f"data={config.data}: class {name} would have no image to train on: all of its"
                " files are skipped, or held back by evaluation_fraction: add images, or move its"
                " folder elsewhere"
            )


def counted(counts: Counter[str]) -> str:
    """Returns the counts in words, the largest first, as in "12 .txt, 3 hidden"."""
    return ", ".join(f"{count:,} {noun}" for noun, count in counts.most_common())


_TRAIN_FOLDERS = ("train", "training")
_EVALUATION_FOLDERS = ("val", "validation", "valid", "test")
_SYSTEM_FILES = frozenset({".ds_store", "thumbs.db", "desktop.ini", "__macosx", "ehthumbs.db"})


def find_images(path: Path) -> tuple[Encoded, Encoded | None]:
    """Finds the training and the evaluation files below `path`, by name.

    Raises UserError if there are none.
    """
    children = _children(path)
    below = {child.name.lower(): Path(child.path) for child in children if child.is_dir()}
    train = next((below[name] for name in _TRAIN_FOLDERS if name in below), path)
    splits = [_images_in(train, None)]
    if train is not path:
        # `train` may be a class, if folders beside it contain images too.
        for name, folder in below.items():
            is_split = name in _TRAIN_FOLDERS + _EVALUATION_FOLDERS
            if not is_split and _images_below(folder, Counter(), set()):
                raise UserError(
                    f"data={path}: {train.name} would be the training part, but {folder.name}"
                    f" beside it contains images too: if {train.name} is a class, move all class"
                    f" folders into one folder train; otherwise move {folder.name} elsewhere"
                )

        # Files beside it are left out, and the first folder for evaluation is taken.
        files = [child for child in children if not child.is_dir()]
        splits[0].left_out.update(f"{_kind(file)} beside {train.name}" for file in files)
        evaluation = [below[name] for name in _EVALUATION_FOLDERS if name in below]
        splits += [_images_in(folder, splits[0].class_names) for folder in evaluation[:1]]
    if not splits[0].sources:
        why = f", but {counted(splits[0].left_out)}" if splits[0].left_out else ""
        raise UserError(
            f"data={path}: no image files found{why} (recognised by"
            f" {' '.join(sorted(IMAGE_SUFFIXES))})"
        )
    return splits[0], splits[1] if len(splits) > 1 else None


def _images_in(path: Path, class_names: tuple[str, ...] | None) -> Encoded:
    """Returns the images of class folders, if any has images, or of a flat folder, unlabelled.

    class_names: those of the training images; None for the training images themselves.
    """
    others: Counter[str] = Counter()
    children = _children(path)
    files = [child for child in children if not child.is_dir()]
    flat = [Path(file.path) for file in files if _is_image(file, others)]

    # Other files are counted by class, so that an empty class can be explained.
    counts = {Path(child.path): Counter[str]() for child in children if child.is_dir()}
    classes = {child: _images_below(child, count, set()) for child, count in counts.items()}
    others.update(sum(counts.values(), Counter()))
    with_images = [child for child in classes if classes[child]]
    if flat and with_images:
        raise UserError(
            f"data={path}: images beside class folders ({with_images[0].name}): move one or the"
            " other"
        )
    if not with_images:
        return Encoded(flat, None, left_out=others)
    if empty := next((child for child in classes if not classes[child]), None):
        raise UserError(
            f"data={path}: class {empty.name} would have no image"
            f" ({counted(counts[empty]) or 'it is empty'}): convert its files, or move the folder"
            " elsewhere"
        )

    # A class is numbered by its place among those of training.
    names = tuple(child.name for child in classes) if class_names is None else class_names
    if unknown := [child.name for child in classes if child.name not in names]:
        raise UserError(
            f"data={path}: class {unknown[0]} is not one of the training classes {', '.join(names)}"
        )
    images = []
    labels = []
    for child, paths in classes.items():
        images += paths
        labels += [names.index(child.name)] * len(paths)
    return Encoded(images, labels, names, left_out=others)


def _children(path: Path) -> list[os.DirEntry[str]]:
    """Returns the entries of a folder by name, without hidden folders and system files."""
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
    images = []
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
_IMAGE_KEYS = ("image/encoded", "image", "image_raw")
_LABEL_KEYS = ("image/class/label", "label")
_EVALUATION_FILES = ("val", "test")


def is_tfrecord(path: Path) -> bool:
    """Returns whether `path` is a TFRecord file, or a folder with such files."""
    files = path.iterdir() if path.is_dir() else [path]
    names = (file.name.lower().removesuffix(".gz") for file in files)
    return any(name.endswith(TFRECORD_SUFFIXES) or ".tfrecord-" in name for name in names)


def load_tfrecord(config: TrainConfig, path: Path) -> Dataset:
    """Returns the dataset of all records.

    In a folder, files named val* or test* are for evaluation.
    """
    files, evaluation = find_records(path)
    holdout = read_records(config, evaluation) if evaluation else None
    return encoded_dataset(config, read_records(config, files), holdout)


def find_records(path: Path) -> tuple[list[Path], list[Path]]:
    """Returns the files for training and those for evaluation."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and is_tfrecord(file))
    holdout = [file for file in files if file.name.lower().startswith(_EVALUATION_FILES)]
    return [file for file in files if file not in holdout], holdout


def read_records(config: TrainConfig, files: list[Path]) -> Encoded:
    """Returns the images and labels of all records of `files`.

    Raises UserError for a damaged file.
    """
    images = []
    labels = []
    names = []
    for file in files:
        try:
            compression = "GZIP" if file.suffix == ".gz" else ""
            records = tf.data.TFRecordDataset(str(file), compression_type=compression)
            for number, record in enumerate(records):
                feature = tf.train.Example.FromString(record.numpy()).features.feature
                named = [feature[key] for key in _IMAGE_KEYS if key in feature]
                image = [*chain(*(entry.bytes_list.value for entry in named))]
                named = [feature[key] for key in _LABEL_KEYS if key in feature]
                label = [*chain(*(entry.int64_list.value for entry in named))]
                if not image:
                    raise UserError(
                        f"{file}: a record without image bytes ({' or '.join(_IMAGE_KEYS)}): it has"
                        f" {[*feature][:20]}"
                    )
                images.append(image[0])
                labels.append(label[0] if label else None)
                names.append(f"{file}#{number}")
        except UserError:
            raise
        # TensorFlow raises DataLossError for a damaged record, and protobuf DecodeError.
        except Exception as error:
            raise UserError(
                f"{file}: damaged, or not a TFRecord file: {reason(error)}: copy it again, or end"
                " its name in .gz if it is compressed"
            ) from None
    has_labels = labelled(
        (label is not None for label in labels),
        f"data={config.data}",
        f"records ({' or '.join(_LABEL_KEYS)})",
    )
    return Encoded(images, [label or 0 for label in labels] if has_labels else None, names=names)
