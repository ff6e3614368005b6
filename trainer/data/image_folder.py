"""Reads a folder of image files: class folders or flat, also below train/ and val/ or test/."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.config.train_config import TrainConfig
from trainer.data.arrays import with_evaluation
from trainer.data.bad_images import Bad, decode_many, refuse_or_skip
from trainer.data.dataset import Arrays, Dataset
from trainer.data.decode import SUFFIXES
from trainer.errors import UserError
from trainer.log import log

_TRAIN, _EVALUATION = ("train", "training"), ("val", "validation", "valid", "test")
_SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini", "__macosx", "ehthumbs.db"})


@dataclass
class Folder:
    """Holds the image files of one split, in the order of their names."""

    files: list[Path]
    labels: list[int] | None
    class_names: tuple[str, ...] = ()

    def part(self, start: int, stop: int) -> "Folder":
        """Returns files `start` to `stop` of this folder."""
        return Folder(self.files[start:stop], self.labels and self.labels[start:stop], self.class_names)


def load(config: TrainConfig, path: Path) -> Dataset:
    """Decodes all images. Raises UserError if none is found, or some cannot be decoded and must not be skipped."""
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
    """Finds the training and the evaluation files below `path`. Raises UserError if there are none."""
    below = {child.name.lower(): child for child in _children(path) if child.is_dir()}
    train = next((below[name] for name in _TRAIN if name in below), path)
    if train is not path:
        _refuse_classes_beside(train, below)
    others = [below[name] for name in _EVALUATION if name in below] if train is not path else []
    evaluation = others[0] if others else None
    for unused in others[1:]:
        log.info(f"{others[0]} is used for evaluation; {unused} is ignored")
    folder = _folder(train, None)
    if not folder.files:
        raise UserError(f"data={path}: no image files found (recognised by {' '.join(sorted(SUFFIXES))})")
    return folder, _folder(evaluation, folder.class_names) if evaluation else None


def _refuse_classes_beside(train: Path, below: dict[str, Path]) -> None:
    """Raises UserError if `train` may be a class: folders beside it that are not splits contain images too."""
    for name, folder in below.items():
        if name not in _TRAIN + _EVALUATION and _images_below(folder):
            raise UserError(
                f"data={train.parent}: {train.name} would be the training part, but {folder.name} beside it contains "
                f"images too: if {train.name} is a class, move all class folders into one folder train; otherwise move "
                f"{folder.name} elsewhere"
            )


def decode_folder(config: TrainConfig, folder: Folder, bad: Bad) -> Arrays | None:
    """Decodes all images of `folder`. Returns None if none could be decoded."""
    images, good = decode_many(folder.files, config.image_size, config.channels, bad, lambda i: folder.files[i])
    if not good:
        return None
    return Arrays(images, None if folder.labels is None else np.array(folder.labels, np.int32)[good])


def _folder(path: Path, class_names: tuple[str, ...] | None) -> Folder:
    """Returns the files of class folders, if there are any with images, or of a flat folder without labels."""
    flat = [child for child in _children(path) if _is_image(child)]
    classes = [(child, _images_below(child)) for child in _children(path) if child.is_dir()]
    classes = [(child, files) for child, files in classes if files]
    if flat and classes:
        raise UserError(f"data={path}: images beside class folders ({classes[0][0].name}): move one or the other")
    if not classes:
        return Folder(flat, None)
    names = class_names if class_names is not None else tuple(child.name for child, _ in classes)
    unknown = [child.name for child, _ in classes if child.name not in names]
    if unknown:
        raise UserError(f"data={path}: class {unknown[0]} is not one of the training classes {', '.join(names)}")
    labels = [names.index(child.name) for child, files in classes for _ in files]
    return Folder([file for _, files in classes for file in files], labels, names)


def _children(path: Path) -> list[Path]:
    """Returns the entries of a folder, sorted, without hidden files and files of operating systems."""
    try:
        names = sorted(path.iterdir())
    except OSError as error:
        raise UserError(f"data={path}: cannot be read ({error.strerror})") from None
    return [name for name in names if not name.name.startswith(".") and name.name.lower() not in _SYSTEM_FILES]


def _images_below(path: Path, seen: set[Path] | None = None) -> list[Path]:
    """Returns all images below `path`. `seen`: resolved folders already visited, so that links cannot form a loop."""
    seen = set() if seen is None else seen
    found: list[Path] = []
    if path.resolve() not in seen:
        seen.add(path.resolve())
        for child in _children(path):
            found += _images_below(child, seen) if child.is_dir() else [child] if _is_image(child) else []
    return found


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()
