"""What the export of a trained model costs, against Keras alone: `python -m benchmarks.export`."""

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import keras

from benchmarks.measure import alternate, base_parser, keep, run_main, table
from trainer.build import build_setup
from trainer.config.recipe import resolve
from trainer.distribution.strategy import make_replicas
from trainer.export import export, plain_copy

CASES = {"cnn_mnist": 1, "wgan_gp_mnist": 3}  # recipe: networks that are written


def seconds(write: Callable[[Path], object]) -> Callable[[], float]:
    """A measurement: `write` into a fresh folder."""

    def measure() -> float:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            began = time.perf_counter()
            write(Path(folder) / "model")
            return time.perf_counter() - began

    return measure


def keras_alone(model: keras.Model, folder: Path) -> None:
    """One .keras file and a SavedModel of `model`, with nothing around them."""
    folder.mkdir()
    model.save(folder / "model.keras")
    model.export(str(folder / "saved_model"))


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    return base_parser(__doc__, repeats=5)


def main() -> None:
    """Prints one table a case and keeps the raw numbers."""
    repeats = make_parser().parse_args().repeats
    raw = {}
    for recipe, networks in CASES.items():
        config = resolve([f"--recipe={recipe}", "--data=digits", "--replicas=1"]).config
        assembly = build_setup(config, make_replicas(config))
        model = assembly.model
        template = plain_copy(model.templates()["model"] if hasattr(model, "templates") else model)
        contenders = {
            "export": seconds(partial(export, model, image_shape=assembly.dataset.image_shape)),
            "Keras alone: .keras, SavedModel": seconds(partial(keras_alone, template)),
        }
        raw[recipe] = alternate(contenders, repeats)
        title = f"\nExport of {recipe}: {networks} .keras, model.h5, SavedModel"
        print("\n".join([title, "", *table(raw[recipe], "export", "seconds")]), flush=True)
    keep("export", {"command": "python -m benchmarks.export", "seconds": raw})


if __name__ == "__main__":
    run_main(main)
