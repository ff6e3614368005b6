"""Decodes many images at once and collects the bad ones, which end the run or, if asked for, are skipped.

Also reports the files that are not read, and the classes that keep no image.
"""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.base.settings.train_config import TrainConfig
from trainer.data.decode import IMAGE_SUFFIXES, BadImage, decode

_CHUNK = 16  # images that a thread takes at a time: taking one costs as much as decoding a tiny one


@dataclass
class Bad:
    """Collects the files that could not be decoded, and counts conversions and files left out, over all splits."""

    files: list[tuple[Path, str]] = field(default_factory=list)
    converted: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)  # by suffix

    @property
    def notes(self) -> dict[str, Any]:
        """Returns all of it for Dataset.notes."""
        skipped = [f"{file}: {why}" for file, why in self.files]
        return {"converted": dict(self.converted), "skipped": skipped, "left_out": dict(self.left_out)}


def decode_many(
    sources: Sequence[Any], size: int, channels: int, bad: Bad, name_of: Callable[[int], Path]
) -> tuple[Any, list[int]]:
    """Decodes `sources` (paths or bytes) on all cores. Returns the images and the positions of the valid ones."""
    images = np.empty((len(sources), size, size, channels), np.uint8)

    def decode_at(position: int) -> list[str] | BadImage:
        try:
            images[position], converted = decode(sources[position], size, channels)
        except BadImage as error:
            return error
        return converted

    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # decode rejects or converts whatever Pillow warns about
        chunks = [range(first, min(first + _CHUNK, len(sources))) for first in range(0, len(sources), _CHUNK)]
        decoded = pool.map(lambda chunk: [*map(decode_at, chunk)], chunks)  # Pillow releases the GIL
        outcomes = [outcome for chunk in decoded for outcome in chunk]
    good = []
    for position, outcome in enumerate(outcomes):
        if isinstance(outcome, BadImage):
            bad.files.append((name_of(position), str(outcome)))
        else:
            if outcome:
                bad.converted.update(outcome)
            good.append(position)
    return (images if len(good) == len(images) else images[good]), good


def refuse_or_skip(config: TrainConfig, bad: Bad) -> None:
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
    return ", ".join(f"{count:,} {what}" for what, count in counts.most_common())
