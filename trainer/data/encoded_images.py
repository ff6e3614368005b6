"""Decodes images of files or records to arrays; what cannot be decoded ends the run or, if asked for, is skipped."""

import os
import warnings
from collections import Counter
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.decode import IMAGE_SUFFIXES, BadImage, decode
from trainer.data.image_arrays import checked_labels, with_evaluation
from trainer.data.in_memory import Arrays

_CHUNK = 16  # images that a thread takes at a time: taking one costs as much as decoding a tiny one


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
    """Holds the images of one split as files, or as the bytes of records, which `names` then names in messages.

    `left_out`: the numbers of files that are no images, by suffix.
    """

    sources: Sequence[Path | bytes]
    labels: Sequence[int] | None
    class_names: tuple[str, ...] = ()
    names: Sequence[Path] = ()
    left_out: Counter[str] = field(default_factory=Counter)

    def parts(self, size: int) -> "list[Encoded]":
        """Returns the images in parts of `size`."""
        starts = range(0, len(self.sources), size)
        return [
            Encoded(self.sources[at : at + size], self.labels and self.labels[at : at + size], self.class_names)
            for at in starts
        ]

    def decode(self, config: TrainConfig, bad: DecodingReport) -> Arrays | None:
        """Decodes the images on all cores, in their order, without the bad ones; None if there is no other."""
        shape = config.image_size, config.image_size, config.channels
        images = np.empty((len(self.sources), *shape), np.uint8)

        def decode_at(position: int) -> list[str] | BadImage:
            try:
                images[position], converted = decode(self.sources[position], config.image_size, config.channels)
            except BadImage as error:
                return error
            return converted

        with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
            warnings.simplefilter("ignore")  # decode rejects or converts whatever Pillow warns about
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
    """Decodes all images.

    Raises UserError if some cannot be decoded and must not be skipped, if none is left, or if a class keeps none.
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
    """Raises UserError naming the first ten files that cannot be decoded, or logs each with --skip_bad_images.

    Also logs what was left out and what was converted.
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
    """Returns the counts in words, the largest first."""
    return ", ".join(f"{count:,} {noun}" for noun, count in counts.most_common())
