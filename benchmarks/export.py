"""Measures the export of a trained model against Keras alone: `python -m benchmarks.export`."""

import contextlib
import io
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import keras

from benchmarks.runner import compare, elapsed, make_parser, program, save
from benchmarks.trainer_loop import setup_of
from trainer.run.export import export, plain_copy

CASES = {"cnn_mnist": 1, "wgan_gp_mnist": 3}  # by recipe: the number of networks that are written
PARSER = make_parser(__doc__, repeats=5)


def seconds(write: Callable[[Path], object]) -> float:
    """Measures `write` into a new folder."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return elapsed(lambda: write(Path(folder) / "model"))


def export_with_keras(model: keras.Model, folder: Path) -> None:
    """Writes one .keras file and a SavedModel of `model`."""
    folder.mkdir()
    model.save(folder / "model.keras")
    model.export(str(folder / "saved_model"))


@program
def main() -> None:
    """Prints one table per case and saves the raw numbers."""
    repeats, raw = PARSER.parse_args().repeats, {}
    for recipe, networks in CASES.items():
        setup = setup_of(f"--recipe={recipe}", "--data=digits", "--replicas=1")
        model = setup.model
        template = plain_copy(model.templates()["model"] if hasattr(model, "templates") else model)
        candidates = {
            "export": partial(seconds, partial(export, model, input_spec=setup.dataset.input_spec)),
            "Keras alone: .keras, SavedModel": partial(seconds, partial(export_with_keras, template)),
        }
        raw[recipe] = compare(f"Export of {recipe}: {networks} .keras, model.h5, SavedModel", candidates, repeats)
    save("export", seconds=raw)
