"""Says how well a classifier knows each class, and whether it is as often right as it is sure. Imports no TensorFlow.

The calibration error is that of Guo et al. 2017, https://arxiv.org/abs/1706.04599, equation 3: rows are put into BINS
bins of equal width by their confidence, the largest probability, of which bin m holds those in ((m-1)/BINS, m/BINS];
the error is the mean over rows of |accuracy - mean confidence| of their bin.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.base.run_files.records import Scalars, write_json

CLASS_FORMULAS = 1  # counts the changes of what is computed from the same outputs
BINS = 15
TOP, FEWEST_FOR_TOP = 5, 11  # the top-5 accuracy is given for more than ten classes
MOST_IN_MATRIX = 1000  # classes of a confusion matrix; of more, numbers by class alone

ConfusionCounts = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Classification:
    """Holds counts of the rows of an evaluation; each row counts once, whatever its sample weight."""

    names: tuple[str, ...]  # of the classes
    support: ConfusionCounts  # (classes,) rows of each class
    predicted: ConfusionCounts  # (classes,) rows predicted as each class
    correct: ConfusionCounts  # (classes,)
    in_top: ConfusionCounts  # (classes,) rows of each class that is among the TOP most probable
    bins: ConfusionCounts  # (3, BINS): rows, correct ones, sum of confidences
    confusion: ConfusionCounts | None = None  # (true class, predicted class); None for more than MOST_IN_MATRIX

    @property
    def examples(self) -> int:
        """Returns the number of rows."""
        return int(self.support.sum())

    @property
    def accuracy(self) -> float:
        """Returns the share of rows whose class is the most probable one."""
        return float(self.correct.sum() / self.examples)

    @property
    def calibration_error(self) -> float:
        """Returns the expected calibration error, from 0 to 1."""
        _, correct, confidence = self.bins
        return float(np.abs(correct - confidence).sum() / self.examples)

    @property
    def about(self) -> dict[str, int]:
        """Returns what the values must have in common to be compared."""
        return {"formulas": CLASS_FORMULAS, "examples": self.examples, "calibration_bins": BINS}

    def scalars(self) -> Scalars:
        """Returns the values to report beside the loss and the metrics of the model."""
        top = {f"top_{TOP}_accuracy": float(self.in_top.sum() / self.examples)}
        return {**(top if len(self.names) >= FEWEST_FOR_TOP else {}), "calibration_error": self.calibration_error}

    def least_accurate(self, most: int) -> list[tuple[str, float]]:
        """Returns the names and accuracies of at most so many classes, the least accurate first."""
        known = np.flatnonzero(self.support)
        accuracy = _shares(self.correct, self.support)
        order = known[np.argsort(accuracy[known], kind="stable")]
        return [(self.names[index], float(accuracy[index])) for index in order[:most]]

    def content(self) -> dict[str, Any]:
        """Returns all numbers for JSON; a class's accuracy is its recall, null without rows of it."""
        accuracy, precision = _shares(self.correct, self.support), _shares(self.correct, self.predicted)
        rows, right, confidence = self.bins
        return {
            **self.about,
            "accuracy": self.accuracy,
            **self.scalars(),
            "bins": _table(examples=_ints(rows), accuracy=_shares(right, rows), confidence=_shares(confidence, rows)),
            "classes": _table(name=self.names, examples=_ints(self.support), accuracy=accuracy, precision=precision),
            **({} if self.confusion is None else {"confusion": _ints(self.confusion).tolist()}),
        }


def write_classes(file: Path, classes: Classification) -> dict[str, Any]:
    """Writes the numbers to `file`, a .json; returns what names and describes them."""
    write_json(file, classes.content())
    return {**classes.about, "file": file.name}


def _shares(part: ConfusionCounts, whole: ConfusionCounts) -> ConfusionCounts:
    """Returns part / whole; NaN where there is nothing to divide by."""
    return np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)


def _ints(counts: ConfusionCounts) -> Any:
    return counts.astype(np.int64)


def _table(**columns: Any) -> list[dict[str, Any]]:
    """Returns a dict for each row of these columns, with plain numbers."""
    plain = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*plain, strict=True)]
