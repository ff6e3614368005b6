"""Reads a folder of image files: class folders or flat, also below train/ and val/ or test/."""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.base.settings.train_config import TrainConfig
from trainer.data.arrays import with_evaluation
from trainer.data.bad_images import Bad, counted, decode_many, refuse_empty_classes, refuse_or_skip
from trainer.data.dataset import Dataset
from trainer.data.decode import IMAGE_SUFFIXES
from trainer.data.in_memory import Arrays

_TRAIN, _EVALUATION = ("train", "training"), ("val", "validation", "valid", "test")
_SYSTEM_FILES = frozenset({".ds_store", "thumbs.db", "desktop.ini", "__macosx", "ehthumbs.db"})


@dataclass
class Folder:
    """Holds the image files of one split, in the order of their names, and counts the other files by suffix."""

    files: list[Path]
    labels: list[int] | None
    class_names: tuple[str, ...] = ()
    left_out: Counter[str] = field(default_factory=Counter)

    def part(self, start: int, stop: int) -> "Folder":
        """Returns files `start` to `stop` of this folder."""
        return Folder(self.files[start:stop], self.labels and self.labels[start:stop], self.class_names)


def load(config: TrainConfig, path: Path) -> Dataset:
    """Decodes all images.

    Raises UserError if none is found, if some cannot be decoded and must not be skipped, or if a class keeps none.
    """
    train, evaluation = find(path)
    bad = Bad(left_out=left_out(train, evaluation))
    parts = [decode_folder(config, part, bad) if part else None for part in (train, evaluation)]
    refuse_or_skip(config, bad)
    examples, holdout = parts
    if examples is None:
        raise UserError(f"data={path}: none of its {len(train.files):,} image files could be decoded")
    examples, holdout = with_evaluation(config, examples, holdout)
    if examples.labels is not None:
        refuse_empty_classes(config, train.class_names, set(np.unique(examples.labels).tolist()))
    return Dataset(config.data, examples, holdout, train.class_names, bad.notes)


def find(path: Path) -> tuple[Folder, Folder | None]:
    """Finds the training and the evaluation files below `path`. Raises UserError if there are none."""
    below = {child.name.lower(): Path(child.path) for child in _children(path) if child.is_dir()}
    train = next((below[name] for name in _TRAIN if name in below), path)
    if train is not path:
        _refuse_classes_beside(train, below)
    others = [below[name] for name in _EVALUATION if name in below] if train is not path else []
    evaluation = others[0] if others else None
    for unused in others[1:]:
        log.info(f"{others[0]} is used for evaluation; {unused} is ignored")
    folder = _folder(train, None)
    if train is not path:
        beside = [child for child in _children(path) if not child.is_dir()]
        folder.left_out.update(f"{_kind(child)} beside {train.name}" for child in beside)
    if not folder.files:
        why = f", but {counted(folder.left_out)}" if folder.left_out else ""
        raise UserError(f"data={path}: no image files found{why} (recognised by {' '.join(sorted(IMAGE_SUFFIXES))})")
    return folder, _folder(evaluation, folder.class_names) if evaluation else None


def left_out(*folders: Folder | None) -> Counter[str]:
    """Returns the numbers of files that are no images, by suffix."""
    return sum((folder.left_out for folder in folders if folder), Counter())


def _refuse_classes_beside(train: Path, below: dict[str, Path]) -> None:
    """Raises UserError if `train` may be a class: folders beside it that are not splits contain images too."""
    for name, folder in below.items():
        if name not in _TRAIN + _EVALUATION and _images_below(folder, Counter()):
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
    others: Counter[str] = Counter()
    children = _children(path)
    flat = [Path(child.path) for child in children if not child.is_dir() and _is_image(child, others)]
    kinds = {Path(child.path): Counter[str]() for child in children if child.is_dir()}
    classes = {child: _images_below(child, kinds[child]) for child in kinds}
    others.update(sum(kinds.values(), Counter()))
    full = [child for child in classes if classes[child]]
    if flat and full:
        raise UserError(f"data={path}: images beside class folders ({full[0].name}): move one or the other")
    if not full:
        return Folder(flat, None, left_out=others)
    empty = next((child for child in classes if not classes[child]), None)
    if empty:
        raise UserError(
            f"data={path}: class {empty.name} would have no image ({counted(kinds[empty]) or 'it is empty'}): convert "
            "its files, or move the folder elsewhere"
        )
    names = class_names if class_names is not None else tuple(child.name for child in classes)
    unknown = [child.name for child in classes if child.name not in names]
    if unknown:
        raise UserError(f"data={path}: class {unknown[0]} is not one of the training classes {', '.join(names)}")
    labels = [names.index(child.name) for child, files in classes.items() for _ in files]
    return Folder([file for files in classes.values() for file in files], labels, names, others)


def _children(path: Path) -> list[os.DirEntry[str]]:
    """Returns the entries of a folder, sorted, without hidden folders and files of operating systems."""
    try:
        with os.scandir(path) as entries:
            children = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"data={path}: cannot be read ({error.strerror})") from None
    visible = [entry for entry in children if entry.name.lower() not in _SYSTEM_FILES]
    return [entry for entry in visible if not (entry.name.startswith(".") and entry.is_dir())]


def _images_below(path: Path, others: Counter[str], visited: set[Path] | None = None) -> list[Path]:
    """Returns all images below `path`, and counts in `others` the files that are none.

    `visited`: resolved folders already visited, so that links cannot form a loop.
    """
    visited = set() if visited is None else visited
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
    """Returns whether a file is read; counts it in `others` if not."""
    readable = _suffix(file) in IMAGE_SUFFIXES and file.is_file() and not file.name.startswith(".")
    if not readable:
        others[_kind(file)] += 1
    return readable


def _suffix(file: os.DirEntry[str]) -> str:
    return os.path.splitext(file.name)[1].lower()


def _kind(file: os.DirEntry[str]) -> str:
    """Returns the suffix, or another reason, by which a file that is left out is counted."""
    if file.name.startswith("."):
        return "hidden"
    if not os.path.exists(file.path):
        return "broken links"
    return _suffix(file) or "without a suffix"
