"""Draws what a classifier predicts: its confusion matrix, the accuracy of each class, and a reliability diagram.

Pillow draws it, with the font that it holds. Imports no TensorFlow.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.base.storage import write_whole
from trainer.reporting.canvas import GREY, TEXT, WHITE, Canvas, width_of
from trainer.reporting.classification import BINS, TOP, Classification, as_json

_SIDE = 640  # pixels of the matrix, if that gives its cells a size within _CELL
_CELL = (10, 44)  # pixels of a cell whose class is named
_MOST_NAMED = 100  # classes; those of a larger matrix have no names, and cells of 1 to 8 pixels
_LARGEST = 900  # pixels of a matrix without names, if its cells are not the smallest
_NUMBERED = 28  # pixels of the smallest cell with a number in it
_NAME = 18  # letters shown of a name
_GAP, _PANEL, _DIAGRAM = 14, 300, 236
_LISTED = 8  # least accurate classes beside the matrix
_RIGHT, _WRONG = (22, 78, 150), (200, 62, 20)


class _Layout(NamedTuple):
    """Holds where the matrix lies, in pixels."""

    cell: int
    names: int  # width of the names; 0 without
    side: int
    font: int


def write_classes(file: Path, found: Classification) -> dict[str, Any]:
    """Writes the numbers to `file`, a .json, and the picture beside it; returns what names and describes them."""
    picture = file.with_suffix(".png")
    write_whole(file, as_json(found))
    write_whole(picture, draw(found))
    return {**found.about, "file": file.name, "picture": picture.name}


def draw(found: Classification) -> bytes:
    """Returns the picture as a PNG; of more classes than a matrix has, only the diagrams."""
    classes = len(found.names)
    named = classes <= _MOST_NAMED
    cell = min(max(_SIDE // classes, _CELL[0]), _CELL[1]) if named else max(1, _LARGEST // classes)
    font = min(cell, 13)
    names = max(width_of(_short(name), font) for name in found.names) + 6 if named else 0
    layout = _Layout(cell, names, cell * classes if found.confusion is not None else 0, font)
    shares = 4 * font if named else 0  # the column of accuracies
    panel = 4 * _GAP + names + layout.side + shares if layout.side else _GAP
    height = max(layout.side + names + 4 * _GAP, 640)
    canvas = Canvas(panel + _PANEL, height)
    if found.confusion is not None:
        _matrix(canvas, found, found.confusion, layout)
    _panel(canvas, found, panel)
    return canvas.png()


def _matrix(canvas: Canvas, found: Classification, confusion: npt.NDArray[np.float64], layout: _Layout) -> None:
    """Draws the true classes as rows and the predicted ones as columns, each row shaded by its shares."""
    cell, names, side, font = layout
    left, top = 2 * _GAP + names, 2 * _GAP
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    depth = (shares**0.4)[..., None]  # one error in a hundred is seen
    colours = np.where(np.eye(len(confusion), dtype=bool)[..., None], _RIGHT, _WRONG)
    pixels = (np.array(WHITE) + depth * (colours - np.array(WHITE))).astype(np.uint8)
    canvas.paste(left, top, pixels.repeat(cell, axis=0).repeat(cell, axis=1))
    canvas.box(left - 1, top - 1, left + side, top + side, line=GREY)
    canvas.upright(_GAP, top + min(side, 200), "true class", 12)
    canvas.text(left, top - 4, "predicted class", 12, "ls")
    if not names:
        return
    canvas.text(left + side + 6, top - 4, "accuracy", min(font, 12), "ls")
    for index, name in enumerate(found.names):
        middle = index * cell + cell / 2
        canvas.text(left - 5, top + middle, _short(name), font, "rm")
        canvas.upright(left + middle, top + side + 5, _short(name), font)
        if found.support[index]:
            share = f"{found.correct[index] / found.support[index]:.3f}"
            canvas.text(left + side + 6, top + middle, share, font, "lm")
    if cell >= _NUMBERED:
        for row, column in np.argwhere(confusion):
            number, x, y = int(confusion[row, column]), left + column * cell + cell / 2, top + row * cell + cell / 2
            fill = WHITE if shares[row, column] > 0.3 else TEXT
            canvas.text(x, y, str(number) if number < 10_000 else f"{number / 1000:.0f}k", 12, "mm", fill)


def _panel(canvas: Canvas, found: Classification, left: int) -> None:
    """Draws the numbers, how often the classifier is right when it is so sure, and the least accurate classes."""
    canvas.text(left, 30, f"accuracy {found.accuracy:.4f}", 20, "ls")
    values = found.scalars()
    lines = [f"{found.examples:,} examples, {len(found.names):,} classes"]
    if (top := values.get(f"top_{TOP}_accuracy")) is not None:
        lines.append(f"top-{TOP} accuracy {top:.4f}")
    lines.append(f"calibration error {values['calibration_error']:.4f} ({BINS} bins)")
    for number, line in enumerate(lines):
        canvas.text(left, 52 + 18 * number, line, 13, "ls")
    _reliability(canvas, found, left + 28, 116)
    canvas.text(left, 456, "least accurate", 13, "ls")
    for number, (name, share) in enumerate(found.least_accurate(_LISTED)):
        canvas.text(left, 476 + 18 * number, f"{share:.3f}  {_short(name)}", 13, "ls")


def _reliability(canvas: Canvas, found: Classification, left: int, top: int) -> None:
    """Draws the accuracy of each bin of confidence as a bar, its mean confidence as a line, and its rows below."""
    rows, correct, confidence = found.bins
    bottom, width = top + _DIAGRAM, _DIAGRAM / BINS
    canvas.box(left, top, left + _DIAGRAM, bottom, line=GREY)
    for index in np.flatnonzero(rows):
        x, share = left + index * width, correct[index] / rows[index]
        canvas.box(x + 1, bottom - _DIAGRAM * share, x + width - 1, bottom, fill=_RIGHT)
        tallest = 40 * rows[index] / rows.max()
        canvas.box(x + 1, bottom + 62 - tallest, x + width - 1, bottom + 62, fill=GREY)
    canvas.line((left, bottom), (left + _DIAGRAM, top), fill=GREY)
    for index in np.flatnonzero(rows):
        x, y = left + index * width, bottom - _DIAGRAM * confidence[index] / rows[index]
        canvas.line((x, y), (x + width, y), fill=_WRONG, width=3)
    canvas.text(left - 4, top, "1", 12, "rt")
    canvas.text(left - 4, bottom, "0", 12, "rs")
    canvas.text(left, bottom + 4, "0", 12, "lt")
    canvas.text(left + _DIAGRAM, bottom + 4, "1", 12, "rt")
    canvas.text(left + _DIAGRAM / 2, bottom + 4, "confidence", 12, "mt")
    canvas.upright(left - 14, top + 84, "accuracy", 12)
    canvas.text(left - 14, bottom + 62, "rows", 12, "rs")
    canvas.text(left, bottom + 66, "blue: accuracy, red: mean confidence", 12, "lt")


def _short(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"
