"""Generates images from the generator of a run: `python -m trainer.generate RUN --count=64 --seed=1
--out=grid.png`.

From a conditional one those of the classes in `--label`, one a row; in each column the noise is the
same.
"""

import sys
from collections.abc import Sequence

from trainer.base.errors import DONE, UserError
from trainer.base.log import ANSWER, log, set_verbose
from trainer.base.run_files.serving_file import model_folder
from trainer.base.settings.fields import VERBOSE, Usage, options_class, parse_options, setting
from trainer.base.storage import local_path, make_writable, write_whole
from trainer.user_code.command import command, quiet_start

# if --count is not given
_IMAGES = 64
_IMAGES_PER_CLASS = 10


USAGE = Usage(
    "python -m trainer.generate",
    "RUN [--count=64] [--label=7] [--seed=1] [--out=grid.png]",
    __doc__,
)


@options_class
class GenerateOptions:
    """Holds the options of `trainer.generate`."""

    run: str = setting(
        meaning="a job directory or its model/; also at gs://", metavar="RUN", positional=True
    )
    count: int = setting(
        0,
        f"number of images (default: {_IMAGES}); of each class, if there are several"
        f" ({_IMAGES_PER_CLASS})",
        minimum=1,
        maximum=100_000,
    )
    label: str = setting(
        "", "class of a conditional model, from 0: 7, or 0,3,7, or all (default: all)"
    )
    seed: int = setting(1, "fixes the noise", minimum=0, maximum=2**31 - 1)
    out: str = setting("grid.png", "the PNG to write", metavar="FILE")
    verbose: bool = VERBOSE


@command("starts from scratch", answers=True)
def main(arguments: Sequence[str]) -> int:
    """Loads the model, draws noise from the seed, writes one PNG and returns the exit code."""
    options = parse_options(GenerateOptions, arguments, USAGE)
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

    # the same images on every device
    tf.config.experimental.enable_tensor_float_32_execution(False)
    generator = ServedModel(folder, options.run)
    if not generator.about.latent_dim:
        raise UserError(
            f"{options.run}: its model is no generator, which maps noise to images: use the run of"
            " a GAN"
        )
    labels = labels_of(options.label, generator.about.classes)
    count = options.count or (_IMAGES_PER_CLASS if len(labels) > 1 else _IMAGES)
    noise, row_labels = sample_grids.noise_and_labels(
        options.seed, count, labels or [0], generator.about.latent_dim, generator.noise_type
    )
    pictures = generator.images(noise, row_labels) if labels else generator.images(noise)
    write_whole(
        out, sample_grids.encode_png(sample_grids.grid(pictures, count if len(labels) > 1 else 0))
    )
    log.info(f"{len(pictures)} image{'s' if len(pictures) > 1 else ''} in {out}", extra=ANSWER)
    return DONE


def labels_of(label: str, classes: int) -> list[int]:
    """Returns the classes of --label, by default all; [] for an unconditional generator.

    Raises UserError if the generator has no such class.
    """
    if not classes:
        if label:
            raise UserError(
                f"label={label}: this generator takes no labels: drop --label, or train with"
                " --conditional"
            )
        return []
    if label in ("", "all"):
        return [*range(classes)]
    labels = [number.strip() for number in label.split(",")]
    if not all(number.isdecimal() and int(number) < classes for number in labels):
        raise UserError(
            f"label={label}: this generator has {classes} classes: use a number from 0 to"
            f" {classes - 1}, several with commas, or all"
        )
    return [*map(int, labels)]


if __name__ == "__main__":
    sys.exit(main())
