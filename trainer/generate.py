"""Generates images from a saved generator: `python -m trainer.generate MODEL --count=64 --seed=1 --out=grid.png`.

From a conditional one those of the classes in `--label`, one a row; in each column the noise is the same.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from trainer.base.errors import DONE, UserError
from trainer.base.log import log, set_verbose
from trainer.base.run_files.initial import fetch_model
from trainer.base.settings.flags import VERBOSE, Parser, whole
from trainer.base.storage import local_path, make_writable, write_whole
from trainer.user_code.command import quiet_start, run_command

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
        from trainer.run.saved_generator import in_batches, labels_of, load_generator

    tf.config.experimental.enable_tensor_float_32_execution(False)  # the same images on every device
    generator = load_generator(model)
    labels = labels_of(options.label, generator.classes)
    count = options.count or (_IMAGES_OF_A_CLASS if len(labels) > 1 else _IMAGES)
    kind = generator.latent_dim, generator.dtype
    inputs: tuple[Any, ...] = (images.noise(options.seed, count, *kind),)
    if labels:
        inputs = images.noise_and_labels(options.seed, count, labels, *kind)
    pictures = in_batches(generator.generate, *inputs)
    write_whole(out, images.encode_png(images.grid(pictures, count if len(labels) > 1 else 0)))
    log.info(f"{len(pictures)} image{'s' if len(pictures) > 1 else ''} in {out}")
    return DONE


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
