"""Generates images from the generator of a run: `python -m trainer.generate RUN --count=64 --seed=1 --out=grid.png`.

From a conditional one those of the classes in `--label`, one a row; in each column the noise is the same.
"""

import sys
from collections.abc import Sequence

from trainer.base.errors import DONE, UserError
from trainer.base.log import log, set_verbose
from trainer.base.run_files.serving_file import model_folder
from trainer.base.settings.fields import VERBOSE, Parser, integer_in
from trainer.base.storage import local_path, make_writable, write_whole
from trainer.user_code.command import command, quiet_start

_IMAGES, _IMAGES_PER_CLASS = 64, 10  # if --count is not given


@command("starts from scratch")
def main(arguments: Sequence[str]) -> int:
    """Loads the model, draws noise from the seed, writes one PNG and returns the exit code."""
    options = command_parser().parse_args(arguments)
    set_verbose(options.verbose)
    out = local_path(options.out, "out")
    if out.suffix != ".png":
        raise UserError(f"out={out}: the output is a PNG: use a name that ends in .png")
    make_writable(out.parent, "out")  # before the model is loaded
    folder = model_folder(options.run)
    with quiet_start():
        import tensorflow as tf

        from trainer.data import sample_grids
        from trainer.run.served_model import ServedModel

    tf.config.experimental.enable_tensor_float_32_execution(False)  # the same images on every device
    generator = ServedModel(folder, options.run)
    if not generator.about.latent_dim:
        raise UserError(f"{options.run}: its model is no generator, which maps noise to images: use the run of a GAN")
    labels = labels_of(options.label, generator.about.classes)
    count = options.count or (_IMAGES_PER_CLASS if len(labels) > 1 else _IMAGES)
    noise, row_labels = sample_grids.noise_and_labels(
        options.seed, count, labels or [0], generator.about.latent_dim, generator.noise_type
    )
    pictures = generator.images(noise, row_labels) if labels else generator.images(noise)
    write_whole(out, sample_grids.encode_png(sample_grids.grid(pictures, count if len(labels) > 1 else 0)))
    log.info(f"{len(pictures)} image{'s' if len(pictures) > 1 else ''} in {out}")
    return DONE


def labels_of(label: str, classes: int) -> list[int]:
    """Returns the classes that --label names, or all if it names none; [] for an unconditional generator.

    Raises UserError if the generator has no such class.
    """
    if not classes:
        if label:
            raise UserError(f"label={label}: this generator takes no labels: drop --label, or train with --conditional")
        return []
    if label in ("", "all"):
        return [*range(classes)]
    labels = [number.strip() for number in label.split(",")]
    if not all(number.isdecimal() and int(number) < classes for number in labels):
        raise UserError(
            f"label={label}: this generator has {classes} classes: use a number from 0 to {classes - 1}, several with "
            "commas, or all"
        )
    return [*map(int, labels)]


def command_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="python -m trainer.generate", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("run", metavar="RUN", help="a job directory or its model/; also at gs://")
    parser.add_argument(
        "--count", type=integer_in(1, 100_000),
        help=f"number of images (default: {_IMAGES}); of each class, if there are several ({_IMAGES_PER_CLASS})",
    )  # fmt: skip
    parser.add_argument(
        "--label", default="", help="class of a conditional model, from 0: 7, or 0,3,7, or all (default: all)"
    )
    parser.add_argument("--seed", type=integer_in(0, 2**31 - 1), default=1, help="fixes the noise (default: 1)")
    parser.add_argument("--out", default="grid.png", help="the PNG to write (default: grid.png)")
    parser.add_boolean("verbose", VERBOSE)
    return parser


if __name__ == "__main__":
    sys.exit(main())
