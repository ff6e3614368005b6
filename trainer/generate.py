"""Generates images from a saved generator: `python -m trainer.generate MODEL --count=64 --seed=1 --out=grid.png`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.command import quiet_start, run_command
from trainer.config.flags import VERBOSE, Parser, whole
from trainer.errors import DONE, UserError, reason
from trainer.log import log, set_verbose
from trainer.storage import local_path, make_writable, write_whole
from trainer.storage.initial import fetch_model
from trainer.storage.run_layout import RUN_INFO

_ROWS = 256  # images of one call


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
    generate, latent_dim, dtype = load_generator(model)
    pictures = in_batches(generate, images.noise(options.seed, options.count, latent_dim, dtype))
    write_whole(out, images.encode_png(images.grid(pictures)))
    log.info(f"{options.count} image{'s' if options.count > 1 else ''} in {out}")
    return DONE


def in_batches(generate: Callable[[Any], Any], noise: Any) -> Any:
    """Returns (count, height, width, channels) uint8 images for all rows of `noise`, a few hundred rows a call."""
    import numpy as np

    return np.concatenate([generate(noise[first : first + _ROWS]) for first in range(0, len(noise), _ROWS)])


def load_generator(path: Path) -> tuple[Callable[[Any], Any], int, Any]:
    """Returns the generator at `path` (.keras, .h5, SavedModel) as noise -> uint8 images, its latent_dim and dtype."""
    if (path / RUN_INFO).is_file():
        raise UserError(f"{path}: this run has no model yet: wait until it is done")
    if not path.exists():
        raise UserError(f"{path}: model not found: use a .keras or .h5 file, a SavedModel folder or a job directory")
    try:
        return _load_saved_model(path) if path.is_dir() else _load_keras(path)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"{path}: not a generator that can be loaded: {reason(error)}") from error


def _load_keras(path: Path) -> tuple[Callable[[Any], Any], int, Any]:
    import keras

    from trainer.data.images import to_uint8

    model = keras.models.load_model(path, compile=False)
    shape, output = model.input_shape, model.output_shape
    if not (len(shape) == 2 and len(output) == 4 and output[-1] in (1, 3)):
        raise UserError(f"{path}: it maps {shape} to {output}: a generator must map noise to images")
    return lambda noise: to_uint8(model(noise, training=False)).numpy(), shape[1], model.inputs[0].dtype


def _load_saved_model(path: Path) -> tuple[Callable[[Any], Any], int, Any]:
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))
    (spec,) = loaded.signatures["serving_default"].structured_input_signature[1].values()
    if len(spec.shape) != 2:
        raise UserError(f"{path}: its input is {tuple(spec.shape)}: a generator must take noise (count, latent_dim)")
    return lambda noise: loaded.serve(noise).numpy(), spec.shape[1], spec.dtype


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m trainer.generate", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("model", help="a .keras or .h5 file, a SavedModel folder, or a job directory; also at gs://")
    parser.add_argument("--count", type=whole(1, 100_000), default=64, help="number of images (default: 64)")
    parser.add_argument("--seed", type=whole(0, 2**31 - 1), default=1, help="fixes the noise (default: 1)")
    parser.add_argument("--out", default="grid.png", help="the PNG to write (default: grid.png)")
    parser.add_boolean("verbose", VERBOSE)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
