"""Computes how accurate a classifier is on each class. Imports no TensorFlow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.base.run_files.job_files import write_json

# The version rises when these computations change, so that old values are not compared.
CLASS_FORMULAS = 1

_Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Classification:
    """Holds the confusion matrix of an evaluation.

    Each row counts once, whatever its sample weight.
    """

    names: tuple[str, ...]  # of the classes
    confusion: _Numbers  # numbers of rows, of shape (true class, predicted class)

    @property
    def accuracy(self) -> float:
        """Returns the share of rows whose true class got the highest score."""
        return float(self.confusion.trace() / self.confusion.sum())

    @property
    def about(self) -> dict[str, int]:
        """Returns what must be equal for two evaluations to be comparable."""
        return {"formulas": CLASS_FORMULAS, "examples": int(self.confusion.sum())}

    def least_accurate(self, most: int) -> list[tuple[str, float]]:
        """Returns names and accuracies of classes that have rows, the least accurate first.

        most: of so many classes at most.
        """
        accuracy = self._shares(axis=1)
        indexes = np.argsort(accuracy, kind="stable")  # NaN, of classes without rows, comes last
        worst = [index for index in indexes[:most] if accuracy[index] >= 0]
        return [(self.names[index], float(accuracy[index])) for index in worst]

    def content(self) -> dict[str, Any]:
        """Returns all numbers for JSON.

        A class's accuracy is its recall, NaN (null in the file) if it has no rows.
        """
        counts = self.confusion.astype(np.int64)
        examples = counts.sum(axis=1)
        columns = (examples.tolist(), self._shares(axis=1).tolist(), self._shares(axis=0).tolist())
        keys = ("name", "examples", "accuracy", "precision")
        rows = zip(self.names, *columns, strict=True)
        return {
            **self.about,
            "accuracy": self.accuracy,
            "classes": [dict(zip(keys, row, strict=True)) for row in rows],
            "confusion": counts.tolist(),
        }

    def _shares(self, axis: int) -> _Numbers:
        """Returns, by class, the correct share of the rows summed along `axis`.

        It is NaN for a class without rows.
        """
        whole = self.confusion.sum(axis=axis)
        unknown = np.full(whole.shape, np.nan)
        return np.divide(self.confusion.diagonal(), whole, out=unknown, where=whole > 0)


def write_classes(file: Path, classes: Classification) -> dict[str, Any]:
    """Writes all numbers to `file`, a .json; returns its name and `about`, for result.json."""
    write_json(file, classes.content())
    return {**classes.about, "file": file.name}
