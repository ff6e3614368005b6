"""Declares the settings of each built-in model: those of every run, and those that this model alone
takes.

A class here is TrainConfig with the fields of one model; its `check_model` refuses what does not
fit the model. Its own `__eq__` would only slow down the start of each command: that of TrainConfig
does.
"""

from dataclasses import dataclass
from typing import NamedTuple

from trainer.base.errors import UserError
from trainer.base.settings.fields import as_text
from trainer.base.settings.train_config import TrainConfig, contradiction, in_group

# EfficientNet without weights, overriding the fine-tuning of a recipe.
FROM_SCRATCH = "--weights=none --fine_tune_from= --fine_tune_after_steps=0"
# Names for `diff_augment`, in the order in which they are applied.
DIFF_AUGMENTATIONS = ("color", "translation", "cutout")


_of_model = in_group("settings of the model")
_DROPOUT = _of_model(0.0, "share of hidden units to drop", minimum=0, maximum=0.95)


@dataclass(frozen=True, eq=False)
class MLPConfig(TrainConfig):
    """Holds every setting of a run of the dense classifier."""

    width: int = _of_model(32, "units of a hidden layer", minimum=1)
    dropout: float = _DROPOUT


@dataclass(frozen=True, eq=False)
class CNNConfig(TrainConfig):
    """Holds every setting of a run of the convolutional classifier."""

    width: int = _of_model(32, "filters of each convolution", minimum=1)
    dropout: float = _DROPOUT

    def check_model(self) -> None:
        """Raises UserError if the images are too small."""
        if self.image_size < 20:
            raise UserError(f"image_size={self.image_size}: cnn needs at least 20 pixels")


@dataclass(frozen=True, eq=False)
class EfficientNetConfig(TrainConfig):
    """Holds every setting of a run of EfficientNet."""

    variant: str = _of_model(
        "B2", "variant of EfficientNet", choices=tuple(f"B{number}" for number in range(8))
    )
    weights: str = _of_model(
        "imagenet", "initial weights of EfficientNet: imagenet, none, or a weights file", reads=True
    )
    dropout: float = _DROPOUT
    fine_tune_from: str = _of_model(
        "", "first block of EfficientNet to train, as block6a; none: only the head is trained"
    )
    fine_tune_after_steps: int = _of_model(
        0, "steps in which only EfficientNet's head is trained", unit="steps", minimum=0
    )
    fine_tune_learning_rate: float = _of_model(
        1e-5,
        "learning_rate from fine_tune_after_steps on",
        above=0,
        used_with="fine_tune_after_steps",
    )

    def check_model(self) -> None:
        """Raises UserError for images that it does not take, and for fine-tuning that contradicts
        its weights."""
        if self.channels != 3:
            raise UserError(
                f"channels={self.channels}: efficientnet takes colour images: use --channels=3"
            )
        if self.image_size < 32:
            raise UserError(f"image_size={self.image_size}: efficientnet needs at least 32 pixels")
        if self.fine_tune_after_steps and not self.fine_tune_from:
            raise UserError(
                f"fine_tune_after_steps={self.fine_tune_after_steps} without fine_tune_from: name"
                " the first block to train then, for example --fine_tune_from=block6a, or train"
                f" everything from scratch: {FROM_SCRATCH}"
            )
        if self.weights == "none" and self.fine_tune_from:
            advice = f"without weights everything is trained: use {FROM_SCRATCH}"
            raise contradiction(self, "weights", "fine_tune_from", advice)


@dataclass(frozen=True, eq=False)
class GANConfig(TrainConfig):
    """Holds every setting of a run of a GAN."""

    width: int = _of_model(
        32, "filters at the largest image size; deeper layers have more", minimum=1
    )
    latent_dim: int = _of_model(128, "length of a generator's noise vector", minimum=1)
    conditional: bool = _of_model(
        False, "give both networks the images' labels, to generate images of a given class"
    )
    diff_augment: tuple[str, ...] = _of_model(
        (),
        "random changes of real and generated images before the critic, for little data",
        choices=DIFF_AUGMENTATIONS,
    )
    ema_decay: float = _of_model(
        0.999,
        "decay per step of the generator's averaged weights; 0: no averaging",
        minimum=0,
        maximum=0.999999,
    )

    def check_model(self) -> None:
        """Raises UserError for images of a size that its networks cannot halve, and for weights of
        classes."""
        size = self.image_size
        if size % 8 or not 16 <= size <= 256:
            raise UserError(
                f"image_size={size}: {self.model} needs a multiple of 8 from 16 to 256: take one"
            )
        if self.class_weight:
            raise UserError(
                f"class_weight={as_text(self.class_weight)}: the losses of {self.model} have no"
                " classes: drop it"
            )


@dataclass(frozen=True, eq=False)
class WGANGPConfig(GANConfig):
    """Holds every setting of a run of WGAN-GP."""

    critic_steps: int = _of_model(5, "critic updates before each generator update", minimum=1)
    gradient_penalty_weight: float = _of_model(
        10.0, "weight of the critic's gradient penalty", minimum=0
    )


@dataclass(frozen=True, eq=False)
class R3GANConfig(GANConfig):
    """Holds every setting of a run of R3GAN."""

    gradient_penalty_weight: float = _of_model(
        10.0, "gamma of the paper, half of which counts", minimum=0
    )


class BuiltInModel(NamedTuple):
    """Describes a built-in model: its function, as package.module:function, its settings, and what
    its steps report."""

    function: str
    settings: type[TrainConfig]
    metrics: tuple[str, ...]


_OF_A_CLASSIFIER = ("accuracy", "loss")
_OF_A_CRITIC = ("critic_loss", "generator_loss", "gradient_penalty")
MODELS = {
    "mlp": BuiltInModel("trainer.models.classifiers:mlp", MLPConfig, _OF_A_CLASSIFIER),
    "cnn": BuiltInModel("trainer.models.classifiers:cnn", CNNConfig, _OF_A_CLASSIFIER),
    "efficientnet": BuiltInModel(
        "trainer.models.efficientnet:build", EfficientNetConfig, _OF_A_CLASSIFIER
    ),
    "dcgan": BuiltInModel(
        "trainer.models.dcgan:DCGAN", GANConfig, ("discriminator_loss", "generator_loss")
    ),
    "wgan_gp": BuiltInModel(
        "trainer.models.wgan_gp:WGANGP", WGANGPConfig, (*_OF_A_CRITIC, "wasserstein_distance")
    ),
    "r3gan": BuiltInModel("trainer.models.r3gan:R3GAN", R3GANConfig, _OF_A_CRITIC),
}


def function_of(model: str) -> str:
    """Returns the package.module:function that builds a model: a built-in one by its name, or the
    user's own."""
    return MODELS[model].function if model in MODELS else model


CLASSIFIERS = tuple(name for name, model in MODELS.items() if model.metrics is _OF_A_CLASSIFIER)
