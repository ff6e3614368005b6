"""Finds the image files of a folder: class folders or flat, also below train/ and val/ or test/."""

import os
from collections import Counter
from pathlib import Path

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.decode import IMAGE_SUFFIXES
from trainer.data.encoded_images import Encoded, counted, encoded_dataset

_TRAIN, _EVALUATION = ("train", "training"), ("val", "validation", "valid", "test")
_SYSTEM_FILES = frozenset({".ds_store", "thumbs.db", "desktop.ini", "__macosx", "ehthumbs.db"})


def load(config: TrainConfig, path: Path) -> Dataset:
    """Decodes all images. Raises UserError if none is found, or as `encoded_dataset`."""
    return encoded_dataset(config, *find(path))


def find(path: Path) -> tuple[Encoded, Encoded | None]:
    """Finds the training and the evaluation files below `path`, by name. Raises UserError if there are none."""
    children = _children(path)
    below = {child.name.lower(): Path(child.path) for child in children if child.is_dir()}
    train = next((below[name] for name in _TRAIN if name in below), path)
    splits = [_split(train, None)]
    if train is not path:
        _refuse_classes_beside(train, below)
        splits[0].left_out.update(f"{_kind(child)} beside {train.name}" for child in children if not child.is_dir())
        evaluation = [below[name] for name in _EVALUATION if name in below]
        splits += [_split(folder, splits[0].class_names) for folder in evaluation[:1]]
        for unused in evaluation[1:]:
            log.info(f"{evaluation[0]} is used for evaluation; {unused} is ignored")
    if not splits[0].sources:
        why = f", but {counted(splits[0].left_out)}" if splits[0].left_out else ""
        raise UserError(f"data={path}: no image files found{why} (recognised by {' '.join(sorted(IMAGE_SUFFIXES))})")
    return splits[0], splits[1] if len(splits) > 1 else None


def _refuse_classes_beside(train: Path, below: dict[str, Path]) -> None:
    """Raises UserError if `train` may be a class: folders beside it that are not splits contain images too."""
    for name, folder in below.items():
        if name not in _TRAIN + _EVALUATION and _images_below(folder, Counter()):
            raise UserError(
                f"data={train.parent}: {train.name} would be the training part, but {folder.name} beside it contains "
                f"images too: if {train.name} is a class, move all class folders into one folder train; otherwise move "
                f"{folder.name} elsewhere"
            )


def _split(path: Path, class_names: tuple[str, ...] | None) -> Encoded:
    """Returns the files of class folders, if there are any with images, or of a flat folder without labels."""
    others: Counter[str] = Counter()
    children = _children(path)
    flat = [Path(child.path) for child in children if not child.is_dir() and _is_image(child, others)]
    kinds = {Path(child.path): Counter[str]() for child in children if child.is_dir()}
    classes = {child: _images_below(child, counts) for child, counts in kinds.items()}
    others.update(sum(kinds.values(), Counter()))
    full = [child for child in classes if classes[child]]
    if flat and full:
        raise UserError(f"data={path}: images beside class folders ({full[0].name}): move one or the other")
    if not full:
        return Encoded(flat, None, left_out=others)
    if empty := next((child for child in classes if not classes[child]), None):
        raise UserError(
            f"data={path}: class {empty.name} would have no image ({counted(kinds[empty]) or 'it is empty'}): convert "
            "its files, or move the folder elsewhere"
        )
    names = tuple(child.name for child in classes) if class_names is None else class_names
    if unknown := [child.name for child in classes if child.name not in names]:
        raise UserError(f"data={path}: class {unknown[0]} is not one of the training classes {', '.join(names)}")
    labels = [names.index(child.name) for child, files in classes.items() for _ in files]
    return Encoded([file for files in classes.values() for file in files], labels, names, left_out=others)


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
    readable = not file.name.startswith(".") and _suffix(file) in IMAGE_SUFFIXES and file.is_file()
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
