"""Decodes many images at once and collects the bad ones, which end the run or, if asked for, are skipped."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.train_config import TrainConfig
from trainer.data.decode import BadImage, decode
from trainer.errors import UserError
from trainer.log import log


@dataclass
class Bad:
    """Collects the files that could not be decoded, and counts the conversions, over all splits."""

    files: list[tuple[Path, str]] = field(default_factory=list)
    converted: Counter[str] = field(default_factory=Counter)

    @property
    def notes(self) -> dict[str, Any]:
        """Returns both for Dataset.notes."""
        return {"converted": dict(self.converted), "skipped": [f"{file}: {why}" for file, why in self.files]}


def decode_many(
    sources: Sequence[Any], size: int, channels: int, bad: Bad, name_of: Callable[[int], Path]
) -> tuple[Any, list[int]]:
    """Decodes `sources` (paths or bytes) on all cores. Returns the images and the positions of the valid ones."""
    images = np.empty((len(sources), size, size, channels), np.uint8)

    def one(position: int) -> list[str] | BadImage:
        try:
            images[position], converted = decode(sources[position], size, channels)
        except BadImage as error:
            return error
        return converted

    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # decode rejects or converts whatever Pillow warns about
        outcomes = list(pool.map(one, range(len(sources))))  # Pillow releases the GIL
    good = []
    for position, outcome in enumerate(outcomes):
        if isinstance(outcome, BadImage):
            bad.files.append((name_of(position), str(outcome)))
        else:
            bad.converted.update(outcome)
            good.append(position)
    return (images if len(good) == len(images) else images[good]), good


def refuse_or_skip(config: TrainConfig, bad: Bad) -> None:
    """Raises UserError naming the first ten files that cannot be decoded, or logs each with --skip_bad_images."""
    if bad.files and not config.skip_bad_images:
        first = "; ".join(f"{file}: {why}" for file, why in bad.files[:10])
        without = "prepare the data without them (python -m trainer.data.prepare … --skip_bad_images)"
        cure = without if config.stream else "skip them with --skip_bad_images"
        raise UserError(
            f"data={config.data}: {len(bad.files):,} image files cannot be decoded: fix or remove them, or {cure}. "
            f"The first: {first}"
        )
    for file, why in bad.files:
        log.warning(f"skipped {file}: {why}")
    if bad.converted:
        log.info("converted images: " + ", ".join(f"{count:,} {what}" for what, count in bad.converted.most_common()))
