"""Says how well a classifier knows each class. Imports no TensorFlow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.base.run_files.job_files import write_json

CLASS_FORMULAS = 1  # counts the changes of what is computed from the same outputs

_Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Classification:
    """Holds counts of the rows of an evaluation; each row counts once, whatever its sample weight."""

    names: tuple[str, ...]  # of the classes
    confusion: _Numbers  # (true class, predicted class)

    @property
    def accuracy(self) -> float:
        """Returns the share of rows whose class is the most probable one."""
        return float(self.confusion.trace() / self.confusion.sum())

    @property
    def about(self) -> dict[str, int]:
        """Returns what the values must have in common to be compared."""
        return {"formulas": CLASS_FORMULAS, "examples": int(self.confusion.sum())}

    def least_accurate(self, most: int) -> list[tuple[str, float]]:
        """Returns the names and accuracies of at most so many classes, the least accurate first."""
        accuracy = self._shares(axis=1)
        order = np.argsort(accuracy, kind="stable")  # NaN, of classes without rows, comes last
        return [(self.names[index], float(accuracy[index])) for index in order[:most] if accuracy[index] >= 0]

    def content(self) -> dict[str, Any]:
        """Returns all numbers for JSON; a class's accuracy is its recall, null without rows of it."""
        counts = self.confusion.astype(np.int64)
        examples, accuracy, precision = counts.sum(axis=1), self._shares(axis=1), self._shares(axis=0)
        columns = zip(self.names, examples.tolist(), accuracy.tolist(), precision.tolist(), strict=True)
        keys = ("name", "examples", "accuracy", "precision")
        classes = [dict(zip(keys, row, strict=True)) for row in columns]
        return {**self.about, "accuracy": self.accuracy, "classes": classes, "confusion": counts.tolist()}

    def _shares(self, axis: int) -> _Numbers:
        """Returns the correct ones of the sums along `axis`; NaN where there is nothing to divide by."""
        whole = self.confusion.sum(axis=axis)
        return np.divide(self.confusion.diagonal(), whole, out=np.full(whole.shape, np.nan), where=whole > 0)


def write_classes(file: Path, classes: Classification) -> dict[str, Any]:
    """Writes the numbers to `file`, a .json; returns what names and describes them."""
    write_json(file, classes.content())
    return {**classes.about, "file": file.name}
