"""Decodes images of files or records of any kind to (size, size, channels) uint8, with Pillow, on all cores.

All images are treated alike: the EXIF orientation is applied; more than 8 bits are scaled, not clipped; transparency
is blended over white; of an animation the first frame is used; the middle square is cropped and resized (bicubic,
antialiased) to `size`. An image that cannot be decoded ends the run or, with --skip_bad_images, is left out and named.
"""

import io
import os
import warnings
from collections import Counter
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError, features

from trainer.base.errors import UserError, reason
from trainer.base.log import log
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.examples import Arrays
from trainer.data.image_arrays import checked_labels, with_evaluation

# Formats are recognised by content; Pillow's plug-ins for other formats run programs. Wheels of Pillow read AVIF since
# 11.3.
_SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"), "PNG": (".png", ".apng"), "GIF": (".gif",), "BMP": (".bmp",),
    "WEBP": (".webp",), "TIFF": (".tif", ".tiff"), "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    **({"AVIF": (".avif", ".avifs")} if "avif" in features.get_supported_modules() else {}),
}  # fmt: skip
IMAGE_SUFFIXES = frozenset(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)
MOST_PIXELS = 100_000_000  # larger images are rejected as decompression bombs

_MODES = {"L": "grey", "1": "black and white", "P": "palette", "RGB": "colour"}  # of Pillow
_DEEP_GREY = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")
_ORIENTATION = 0x0112  # of EXIF
_BITS_PER_SAMPLE, _SAMPLE_FORMAT, _SIGNED = 258, 339, 2  # of TIFF 6.0


class BadImage(Exception):
    """Represents a file that cannot be decoded; the text is the reason."""


def decode(source: Path | bytes, size: int, channels: int) -> tuple[npt.NDArray[np.uint8], list[str]]:
    """Returns the image as (size, size, channels) uint8, and the conversions made. Raises BadImage if that fails."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=[*_SUFFIXES]) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise BadImage(f"it has {width} x {height} pixels, more than {MOST_PIXELS:,}: a decompression bomb?")
            image.draft("RGB" if channels == 3 else "L", (2 * size, 2 * size))  # a JPEG is decoded at low resolution
            rawmode = image.tile[0][3] if image.tile else None
            image.load()
            converted = ["animation"] if getattr(image, "n_frames", 1) > 1 else []
            if rawmode == "RGB;16B" and "transparency" in image.info:  # Pillow compares its high bytes only
                raise BadImage("it has 16 bits per colour and a transparent one: convert it to 8 bits")
            upright: Image.Image = image
            if image.getexif().get(_ORIENTATION, 1) not in (0, 1):
                upright = ImageOps.exif_transpose(image)
                converted.append("orientation")
            plain = _with_8_bits(upright, getattr(image, "tag_v2", {}), converted)
            if "transparency" in plain.info or plain.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
                converted.append("transparency over white")
                layer, opaque = plain.convert("RGBA"), "L" if plain.mode in ("L", "LA", "1") else "RGB"
                plain = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert(opaque)
            mode = "RGB" if channels == 3 else "L"
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


def _with_8_bits(image: Image.Image, tags: Any, converted: list[str]) -> Image.Image:
    """Converts a grey image of 16 bits per pixel to 8, with an alpha channel if one of its levels is transparent.

    tags: the tags of a TIFF file.
    """
    if image.mode not in _DEEP_GREY:
        return image
    bits = tags.get(_BITS_PER_SAMPLE, (16,))[0]
    levels = np.asarray(image)
    if image.mode == "F" or bits > 16 or levels.min() < 0:
        raise BadImage("its pixels are numbers below 0, or of 32 bits and unknown range: convert it to 8 or 16 bits")
    white = 2 ** (bits - (tags.get(_SAMPLE_FORMAT, (1,))[0] == _SIGNED)) - 1
    converted.append(f"{bits} bits to 8")
    grey = Image.fromarray(np.rint(levels * (255 / white)).astype(np.uint8))
    if "transparency" in image.info:
        grey.putalpha(Image.fromarray((levels != image.info["transparency"]).astype(np.uint8) * 255))
    return grey


_CHUNK = 16  # images that a thread takes at a time: taking a task costs as much as decoding a tiny image


@dataclass
class DecodingReport:
    """Collects the files that could not be decoded, and counts conversions and files left out, over all splits."""

    files: list[tuple[Path, str]] = field(default_factory=list)
    converted: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)  # by suffix

    @property
    def notes(self) -> dict[str, Any]:
        """Returns all of it for Dataset.notes."""
        skipped = [f"{file}: {why}" for file, why in self.files]
        return {"converted": dict(self.converted), "skipped": skipped, "left_out": dict(self.left_out)}


@dataclass(frozen=True)
class Encoded:
    """Holds the images of one split as files, or as the bytes of records, with their `names` for messages.

    left_out: the number of files that are no images, by suffix.
    """

    sources: Sequence[Path | bytes]
    labels: Sequence[int] | None
    class_names: tuple[str, ...] = ()
    names: Sequence[Path] = ()
    left_out: Counter[str] = field(default_factory=Counter)

    def parts(self, size: int) -> "list[Encoded]":
        """Returns the images in parts of `size`."""
        return [
            Encoded(self.sources[at : at + size], self.labels and self.labels[at : at + size], self.class_names)
            for at in range(0, len(self.sources), size)
        ]

    def decode(self, config: TrainConfig, bad: DecodingReport) -> Arrays | None:
        """Decodes the images on all cores, in their order, without the bad ones; returns None if all are bad."""
        shape = config.image_size, config.image_size, config.channels
        images = np.empty((len(self.sources), *shape), np.uint8)

        def decode_at(position: int) -> list[str] | BadImage:
            try:
                images[position], converted = decode(self.sources[position], config.image_size, config.channels)
            except BadImage as error:
                return error
            return converted

        with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
            warnings.simplefilter("ignore")  # `decode` rejects or converts what Pillow warns about
            chunks = [range(first, min(first + _CHUNK, len(images))) for first in range(0, len(images), _CHUNK)]
            decoded = pool.map(lambda chunk: [*map(decode_at, chunk)], chunks)  # Pillow releases the GIL
            outcomes = [outcome for chunk in decoded for outcome in chunk]
        good = []
        for position, outcome in enumerate(outcomes):
            if isinstance(outcome, BadImage):
                bad.files.append((Path((self.names or self.sources)[position]), str(outcome)))  # type: ignore[arg-type]
            else:
                bad.converted.update(outcome)
                good.append(position)
        if not good:
            return None
        labels = None if self.labels is None else checked_labels(np.array(self.labels)[good], f"data={config.data}")
        return Arrays(images if len(good) == len(images) else images[good], labels)


def encoded_dataset(config: TrainConfig, train: Encoded, evaluation: Encoded | None) -> Dataset:
    """Decodes all images of a dataset.

    Raises UserError if images cannot be decoded and may not be skipped, if none is left, or if a class has none left.
    """
    splits = [split for split in (train, evaluation) if split]
    bad = DecodingReport(left_out=sum((split.left_out for split in splits), Counter()))
    examples, *holdout = [split.decode(config, bad) for split in splits]
    refuse_or_skip(config, bad)
    if examples is None:
        raise UserError(f"data={config.data}: none of its {len(train.sources):,} images could be decoded")
    examples, evaluated = with_evaluation(config, examples, holdout[0] if holdout else None)
    if examples.labels is not None:
        refuse_empty_classes(config, train.class_names, set(np.unique(examples.labels).tolist()))
    return Dataset(config.data, examples, evaluated, train.class_names, bad.notes)


def refuse_or_skip(config: TrainConfig, bad: DecodingReport) -> None:
    """Raises UserError naming the first ten files that cannot be decoded; with --skip_bad_images, logs each of them.

    Also logs which files were left out and which conversions were made.
    """
    if bad.left_out:
        log.warning(
            f"data={config.data}: {bad.left_out.total():,} files are not read: {counted(bad.left_out)} (images are "
            f"recognised by {' '.join(sorted(IMAGE_SUFFIXES))})"
        )
    if bad.files and not config.skip_bad_images:
        first = "; ".join(f"{file}: {why}" for file, why in bad.files[:10])
        raise UserError(
            f"data={config.data}: {len(bad.files):,} image files cannot be decoded: fix or remove them, or skip them "
            f"with --skip_bad_images. The first: {first}"
        )
    for file, why in bad.files:
        log.warning(f"skipped {file}: {why}")
    if bad.converted:
        log.info(f"converted images: {counted(bad.converted)}")


def refuse_empty_classes(config: TrainConfig, class_names: Sequence[str], present: Container[int]) -> None:
    """Raises UserError for the first class whose number is not among the labels `present` for training."""
    for number, name in enumerate(class_names):
        if number not in present:
            raise UserError(
                f"data={config.data}: class {name} would have no image to train on: all of its files are skipped, or "
                "held back by evaluation_fraction: add images, or move its folder elsewhere"
            )


def counted(counts: Counter[str]) -> str:
    """Returns the counts with their nouns, the largest first."""
    return ", ".join(f"{count:,} {noun}" for noun, count in counts.most_common())
