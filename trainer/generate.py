"""Generates images from a saved generator: `python -m trainer.generate MODEL --count=64 --seed=1 --out=grid.png`.

From a conditional one those of the classes in `--label`, one a row; in each column the noise is the same.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.command import quiet_start, run_command
from trainer.config.flags import VERBOSE, Parser, whole
from trainer.errors import DONE, UserError, reason
from trainer.log import log, set_verbose
from trainer.storage import local_path, make_writable, write_whole
from trainer.storage.initial import fetch_model
from trainer.storage.run_layout import RUN_INFO

_ROWS = 256  # images of one call
_IMAGES, _IMAGES_OF_A_CLASS = 64, 10  # if --count is not given


def main(arguments: Sequence[str] | None = None) -> int:
    """Loads the model, draws noise from the seed, writes one PNG and returns the exit code."""
    return run_command(lambda: _generate(arguments), "starts from scratch")


def _generate(arguments: Sequence[str] | None) -> int:
    options = _parse(arguments)
    set_verbose(options.verbose)
    out = local_path(options.out, "out")
    if out.suffix != ".png":
        raise UserError(f"out={out}: the output is a PNG: use a name that ends in .png")
    make_writable(out.parent, "out")  # before the model is loaded
    model = fetch_model(options.model, "model")
    with quiet_start():
        import tensorflow as tf

        from trainer.data import images

    tf.config.experimental.enable_tensor_float_32_execution(False)  # the same images on every device
    generator = load_generator(model)
    labels = labels_of(options.label, generator.classes)
    count = options.count or (_IMAGES_OF_A_CLASS if len(labels) > 1 else _IMAGES)
    kind = generator.latent_dim, generator.dtype
    given: tuple[Any, ...] = (images.noise(options.seed, count, *kind),)
    if labels:
        given = images.noise_and_labels(options.seed, count, labels, *kind)
    pictures = in_batches(generator.generate, *given)
    write_whole(out, images.encode_png(images.grid(pictures, count if len(labels) > 1 else 0)))
    log.info(f"{len(pictures)} image{'s' if len(pictures) > 1 else ''} in {out}")
    return DONE


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
    given = [each.strip() for each in asked.split(",")]
    if not all(each.isdecimal() and int(each) < classes for each in given):
        raise UserError(
            f"label={asked}: this generator has {classes} classes: use a number from 0 to {classes - 1}, several with "
            "commas, or all"
        )
    return [int(each) for each in given]


def in_batches(generate: Callable[..., Any], *given: Any) -> Any:
    """Returns (count, height, width, channels) uint8 images for all rows of noise and labels, some hundred a call."""
    import numpy as np

    starts = range(0, len(given[0]), _ROWS)
    return np.concatenate([generate(*(each[first : first + _ROWS] for each in given)) for first in starts])


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
    import keras

    from trainer.data.images import to_uint8

    model = keras.models.load_model(path, compile=False)
    (noise, *labels), output = model.inputs, model.output_shape
    classes = sum(layer.num_tokens for layer in model.layers if isinstance(layer, keras.layers.CategoryEncoding))
    if not (len(noise.shape) == 2 and len(labels) == bool(classes) and len(output) == 4 and output[-1] in (1, 3)):
        raise UserError(f"{path}: it maps {model.input_shape} to {output}: a generator must map noise to images")

    def generate(*given: Any) -> Any:
        return to_uint8(model([*given] if classes else given[0], training=False)).numpy()

    return SavedGenerator(generate, noise.shape[1], noise.dtype, classes)


def _load_saved_model(path: Path) -> SavedGenerator:
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))
    specs = dict(loaded.signatures["serving_default"].structured_input_signature[1])
    label, classes = specs.pop("label", None), int(loaded.classes()) if hasattr(loaded, "classes") else 0
    (noise,) = specs.values()
    if len(noise.shape) != 2 or (label is not None) != bool(classes):
        raise UserError(f"{path}: its input is {tuple(noise.shape)}: a generator must take noise (count, latent_dim)")
    return SavedGenerator(lambda *given: loaded.serve(*given).numpy(), noise.shape[1], noise.dtype, classes)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m trainer.generate", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("model", help="a .keras or .h5 file, a SavedModel folder, or a job directory; also at gs://")
    parser.add_argument(
        "--count", type=whole(1, 100_000),
        help=f"number of images (default: {_IMAGES}); of each class, if there are several ({_IMAGES_OF_A_CLASS})",
    )  # fmt: skip
    parser.add_argument(
        "--label", default="", help="class of a conditional model, from 0: 7, or 0,3,7, or all (default: all)"
    )
    parser.add_argument("--seed", type=whole(0, 2**31 - 1), default=1, help="fixes the noise (default: 1)")
    parser.add_argument("--out", default="grid.png", help="the PNG to write (default: grid.png)")
    parser.add_boolean("verbose", VERBOSE)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
