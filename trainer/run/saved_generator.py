"""Loads the generator of a run, or of a file, as a function from noise to images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError, reason
from trainer.base.run_files.run_layout import RUN_INFO
from trainer.data.images import to_uint8

_ROWS = 256  # images of one call


class SavedGenerator(NamedTuple):
    """Holds a generator that maps noise (count, latent_dim), and perhaps labels (count,), to uint8 images."""

    generate: Callable[..., Any]
    latent_dim: int
    dtype: Any  # of the noise
    classes: int  # that it takes labels of; 0: it takes none


def labels_of(asked: str, classes: int) -> list[int]:
    """Returns the classes that --label names, all without it; [] of an unconditional generator.

    Raises UserError if the generator has no such class.
    """
    if not classes:
        if asked:
            raise UserError(f"label={asked}: this generator takes no labels: drop --label, or train with --conditional")
        return []
    if asked in ("", "all"):
        return [*range(classes)]
    labels = [label.strip() for label in asked.split(",")]
    if not all(label.isdecimal() and int(label) < classes for label in labels):
        raise UserError(
            f"label={asked}: this generator has {classes} classes: use a number from 0 to {classes - 1}, several with "
            "commas, or all"
        )
    return [*map(int, labels)]


def in_batches(generate: Callable[..., Any], *inputs: Any) -> Any:
    """Returns (count, height, width, channels) uint8 images for all rows of noise and labels, some hundred a call."""
    starts = range(0, len(inputs[0]), _ROWS)
    return np.concatenate([generate(*(rows[first : first + _ROWS] for rows in inputs)) for first in starts])


def load_generator(path: Path) -> SavedGenerator:
    """Returns the generator at `path`: .keras, .h5, or a SavedModel."""
    if (path / RUN_INFO).is_file():
        raise UserError(f"{path}: this run has no model yet: wait until it is done")
    if not path.exists():
        raise UserError(f"{path}: model not found: use a .keras or .h5 file, a SavedModel folder or a job directory")
    try:
        return _load_saved_model(path) if path.is_dir() else _load_keras(path)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"{path}: not a generator that can be loaded: {reason(error)}") from error


def _load_keras(path: Path) -> SavedGenerator:
    model = keras.models.load_model(path, compile=False)
    (noise, *labels), output = model.inputs, model.output_shape
    classes = sum(layer.num_tokens for layer in model.layers if isinstance(layer, keras.layers.CategoryEncoding))
    if not (len(noise.shape) == 2 and len(labels) == bool(classes) and len(output) == 4 and output[-1] in (1, 3)):
        raise UserError(f"{path}: it maps {model.input_shape} to {output}: a generator must map noise to images")

    def generate(*inputs: Any) -> Any:
        return to_uint8(model([*inputs] if classes else inputs[0], training=False)).numpy()

    return SavedGenerator(generate, noise.shape[1], noise.dtype, classes)


def _load_saved_model(path: Path) -> SavedGenerator:
    loaded = tf.saved_model.load(str(path))
    specs = dict(loaded.signatures["serving_default"].structured_input_signature[1])
    label, classes = specs.pop("label", None), int(loaded.classes()) if hasattr(loaded, "classes") else 0
    (noise,) = specs.values()
    if len(noise.shape) != 2 or (label is not None) != bool(classes):
        raise UserError(f"{path}: its input is {tuple(noise.shape)}: a generator must take noise (count, latent_dim)")
    return SavedGenerator(lambda *inputs: loaded.serve(*inputs).numpy(), noise.shape[1], noise.dtype, classes)
