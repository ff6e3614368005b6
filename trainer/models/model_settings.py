"""Describes the settings that built-in models share, and checks what each model needs of a run's settings.

A model's settings are the keyword-only parameters of its function or class. This module imports no TensorFlow, as
`python -m deploy` checks the settings before it submits a job.
"""

from typing import Annotated, Any

from trainer.base.errors import UserError
from trainer.base.settings.fields import Setting
from trainer.base.settings.rules import check_known, contradiction
from trainer.base.settings.train_config import names_in

Width = Annotated[int, Setting("filters at the largest image size; a GAN has more in deeper layers", minimum=1)]
Units = Annotated[int, Setting("units of a hidden layer", minimum=1)]
Dropout = Annotated[float, Setting("share of hidden units to drop", minimum=0, maximum=0.95)]

LatentDim = Annotated[int, Setting("length of a generator's noise vector", minimum=1)]
Conditional = Annotated[bool, "give both networks of a GAN the images' labels, to generate images of a given class"]
DiffAugment = Annotated[
    str,
    "random changes of real and generated images before a GAN's critic, for little data: color, translation, cutout, "
    "or some of them",
]
EmaDecay = Annotated[
    float,
    Setting("decay per step of the generator's averaged weights; 0: no averaging", minimum=0, maximum=0.999999),
]

# Names for `diff_augment`, in the order in which they are applied.
DIFF_AUGMENTATIONS = ("color", "translation", "cutout")

# EfficientNet without weights, overriding the fine-tuning of a recipe.
FROM_SCRATCH = "--weights=none --fine_tune_from= --fine_tune_after_steps=0"


def check(config: Any) -> None:
    """Raises UserError if the settings of a run do not fit its built-in model; config has that model's settings too."""
    size, model = config.image_size, config.model
    if model == "efficientnet":
        later, advice = config.fine_tune_after_steps, f"without weights everything is trained: use {FROM_SCRATCH}"
        if config.channels != 3:
            raise UserError(f"channels={config.channels}: efficientnet takes colour images: use --channels=3")
        if size < 32:
            raise UserError(f"image_size={size}: efficientnet needs at least 32 pixels")
        if later and not config.fine_tune_from:
            raise UserError(
                f"fine_tune_after_steps={later} without fine_tune_from: name the first block to train then, for "
                f"example --fine_tune_from=block6a, or train everything from scratch: {FROM_SCRATCH}"
            )
        if config.weights == "none" and config.fine_tune_from:
            raise UserError(contradiction(config, "weights", "fine_tune_from", advice))
    elif model in ("dcgan", "wgan_gp", "r3gan"):
        near = sorted({str(min(max(near, 16), 256)) for near in (size // 8 * 8, size // 8 * 8 + 8)})
        if size % 8 or not 16 <= size <= 256:
            raise UserError(
                f"image_size={size}: {model} needs a multiple of 8 from 16 to 256: take {' or '.join(near)}"
            )
        if config.class_weights:
            raise UserError(f"class_weight={config.class_weight}: the losses of {model} have no classes: drop it")
        for name in names_in(config.diff_augment):
            check_known("diff_augment", name, "the augmentations are", DIFF_AUGMENTATIONS)
    if model == "cnn" and size < 20:
        raise UserError(f"image_size={size}: cnn needs at least 20 pixels")
