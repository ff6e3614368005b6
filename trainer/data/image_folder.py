"""A folder of image files: class folders or flat, also below train/ and val/ or test/."""

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
from trainer.data.arrays import with_evaluation
from trainer.data.dataset import Arrays, Dataset
from trainer.data.decode import SUFFIXES, BadImage, decode
from trainer.errors import UserError
from trainer.log import log

_TRAIN, _EVALUATION = ("train", "training"), ("val", "validation", "valid", "test")
_DROPPINGS = frozenset({"thumbs.db", "desktop.ini", "__macosx", "ehthumbs.db"})


@dataclass
class Folder:
    """The image files of one split, in the order of their names."""

    files: list[Path]
    labels: list[int] | None
    class_names: tuple[str, ...] = ()

    def part(self, start: int, stop: int) -> "Folder":
        """Files `start` to `stop` of this folder."""
        return Folder(self.files[start:stop], self.labels and self.labels[start:stop], self.class_names)


@dataclass
class Bad:
    """What could not be decoded, and what was converted, over all splits."""

    files: list[tuple[Path, str]] = field(default_factory=list)
    converted: Counter[str] = field(default_factory=Counter)

    @property
    def notes(self) -> dict[str, Any]:
        """As Dataset.notes has them."""
        return {"converted": dict(self.converted), "skipped": [f"{file}: {why}" for file, why in self.files]}


def load(config: TrainConfig, path: Path) -> Dataset:
    """All images, decoded once. UserError where there are none, or some cannot be decoded and may not be skipped."""
    train, evaluation = find(path)
    bad = Bad()
    parts = [decode_folder(config, part, bad) if part else None for part in (train, evaluation)]
    refuse_or_skip(config, bad)
    examples, held = parts
    if examples is None:
        raise UserError(f"data={path}: none of its {len(train.files):,} image files could be decoded")
    examples, held = with_evaluation(config, examples, held)
    return Dataset(config.data, examples, held, train.class_names, bad.notes)


def find(path: Path) -> tuple[Folder, Folder | None]:
    """The training and the evaluation files below `path`; UserError where there are none."""
    below = {child.name.lower(): child for child in _children(path) if child.is_dir()}
    train = next((below[name] for name in _TRAIN if name in below), path)
    if train is not path:
        _refuse_classes_beside(train, below)
    others = [below[name] for name in _EVALUATION if name in below] if train is not path else []
    evaluation = others[0] if others else None
    for unused in others[1:]:
        log.info(f"{others[0]} is for evaluation; {unused} is not read")
    folder = _folder(train, None)
    if not folder.files:
        raise UserError(f"data={path}: no image files here (known by {' '.join(sorted(SUFFIXES))})")
    return folder, _folder(evaluation, folder.class_names) if evaluation else None


def _refuse_classes_beside(train: Path, below: dict[str, Path]) -> None:
    """UserError where `train` may be a class, not a split: other folders that are no splits hold images too."""
    for name, folder in below.items():
        if name not in _TRAIN + _EVALUATION and _images_below(folder):
            raise UserError(
                f"data={train.parent}: {train.name} is taken for the training part, but {folder.name} beside it holds "
                f"images too: if {train.name} is a class, move all class folders into one folder train; else move "
                f"{folder.name} elsewhere"
            )


def refuse_or_skip(config: TrainConfig, bad: Bad) -> None:
    """UserError naming the first ten files that cannot be decoded, or a line for each with --skip_bad_images."""
    if bad.files and not config.skip_bad_images:
        first = "; ".join(f"{file}: {why}" for file, why in bad.files[:10])
        without = "prepare the data without them (python -m trainer.data.prepare … --skip_bad_images)"
        cure = without if config.stream else "leave them out with --skip_bad_images"
        raise UserError(
            f"data={config.data}: {len(bad.files):,} image files cannot be decoded: mend or remove them, or {cure}. "
            f"The first: {first}"
        )
    for file, why in bad.files:
        log.warning(f"skipped {file}: {why}")
    if bad.converted:
        log.info("converted images: " + ", ".join(f"{count:,} {what}" for what, count in bad.converted.most_common()))


def decode_many(
    sources: Sequence[Any], size: int, channels: int, bad: Bad, name_of: Callable[[int], Path]
) -> tuple[Any, list[int]]:
    """Images of `sources` (paths or bytes) on all cores, and the positions of those that could be decoded."""
    images = np.empty((len(sources), size, size, channels), np.uint8)

    def one(position: int) -> list[str] | BadImage:
        try:
            images[position], converted = decode(sources[position], size, channels)
        except BadImage as error:
            return error
        return converted

    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # what Pillow warns of is either refused or converted by decode
        outcomes = list(pool.map(one, range(len(sources))))  # Pillow lets go of Python's lock while it works
    good = []
    for position, outcome in enumerate(outcomes):
        if isinstance(outcome, BadImage):
            bad.files.append((name_of(position), str(outcome)))
        else:
            bad.converted.update(outcome)
            good.append(position)
    return (images if len(good) == len(images) else images[good]), good


def decode_folder(config: TrainConfig, folder: Folder, bad: Bad) -> Arrays | None:
    """All images of `folder`; None where not one could be decoded."""
    images, good = decode_many(folder.files, config.image_size, config.channels, bad, lambda i: folder.files[i])
    if not good:
        return None
    return Arrays(images, None if folder.labels is None else np.array(folder.labels, np.int32)[good])


def _folder(path: Path, class_names: tuple[str, ...] | None) -> Folder:
    """Class folders where the images lie one level deeper, else a flat folder without labels."""
    flat = [child for child in _children(path) if _is_image(child)]
    classes = [(child, _images_below(child)) for child in _children(path) if child.is_dir()]
    classes = [(child, files) for child, files in classes if files]
    if flat and classes:
        raise UserError(f"data={path}: images lie beside class folders ({classes[0][0].name}): move one or the other")
    if not classes:
        return Folder(flat, None)
    names = class_names if class_names is not None else tuple(child.name for child, _ in classes)
    unknown = [child.name for child, _ in classes if child.name not in names]
    if unknown:
        raise UserError(f"data={path}: class {unknown[0]} is not among the training classes {', '.join(names)}")
    labels = [names.index(child.name) for child, files in classes for _ in files]
    return Folder([file for _, files in classes for file in files], labels, names)


def _children(path: Path) -> list[Path]:
    """Without hidden files and what operating systems drop."""
    try:
        names = sorted(path.iterdir())
    except OSError as error:
        raise UserError(f"data={path}: cannot be read ({error.strerror})") from None
    return [name for name in names if not name.name.startswith(".") and name.name.lower() not in _DROPPINGS]


def _images_below(path: Path, seen: set[Path] | None = None) -> list[Path]:
    """`seen`: folders that count already, however links lead to them."""
    seen = set() if seen is None else seen
    found: list[Path] = []
    if path.resolve() not in seen:
        seen.add(path.resolve())
        for child in _children(path):
            found += _images_below(child, seen) if child.is_dir() else [child] if _is_image(child) else []
    return found


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()
