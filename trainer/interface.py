"""Defines what training needs from a model and what a model may offer; no other module inspects a model's attributes.

A model comes from `build(config: TrainConfig, dataset: Dataset) -> keras.Model`, which runs under the strategy's scope
and builds the optimizers. The model inherits from keras.Model and from nothing in this package. It has a `train_step`
(see `Trainable`) and may have the attributes of the other protocols.

Rows, random numbers and means come from `trainer.distribution.step.current_step()`. Gradients are applied by an
optimizer from `trainer.distribution.gradients.sum_and_build`, or by the own optimizer of a compiled model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import keras


class Trainable(Protocol):
    """Represents what every model must have. A compiled Keras model has it already."""

    def train_step(self, data: Any) -> Mapping[str, Any]:
        """Trains on this replica's rows and returns scalars by name, which are then summed over all replicas.

        `data`: (images, labels), or images alone if the source has no labels, as `fit` passes them. images: (rows,
        height, width, channels), 0 to 255 as the source holds them, in floatx; labels: (rows,) int32. A model with
        `batches_per_step` gets images alone, with one axis more in front (see `ReadsBatches`).

        Every scalar must already be divided by the GLOBAL batch. The metrics that a compiled Keras model returns are
        computed over all replicas instead. It runs in replica context, within one tf.function.
        """
        ...


class ReadsBatches(Protocol):
    """Represents a model whose step reads n global batches: `data` is images, (n, rows, height, width, channels)."""

    batches_per_step: int


class HasTemplates(Protocol):
    """Represents a model that is saved as several networks; by default the model itself is saved, as "model"."""

    def templates(self) -> Mapping[str, keras.Model]:
        """Returns the networks to save by name, the one called "model" first."""
        ...


class Serves(Protocol):
    """Represents a model that changes the template's outputs for serving; by default they are served as they are."""

    def serve(self, outputs: Any) -> Any:
        """Returns what a served model gives for these outputs of the template."""
        ...


class Samples(Protocol):
    """Represents a model that draws sample grids."""

    latent_dim: int

    def sample(self, noise: Any) -> Any:
        """Returns (count, height, width, channels) uint8 images for (count, latent_dim) noise in floatx."""
        ...


class Generates(Protocol):
    """Represents a model that FID and KID can measure."""

    latent_dim: int

    def averaged_generator(self) -> keras.Model:
        """Returns the same network at each call, with its current weights: (rows, latent_dim) -> images in [-1, 1]."""
        ...


@dataclass(frozen=True)
class ModelInterface:
    """Holds what one model offers, with defaults for what it leaves out."""

    batches_per_step: int
    stacked: bool  # whether `data` has the axis of ReadsBatches
    templates: Callable[[], Mapping[str, keras.Model]]
    serve: Callable[[Any], Any]
    sampler: Samples | None
    generator: Generates | None
    missing_for_fid: tuple[str, ...]
    optimizer: Any  # of a compiled model, else None

    @classmethod
    def of(cls, model: Any) -> "ModelInterface":
        """Reads the attributes of `model`."""
        missing = tuple(name for name in ("averaged_generator", "latent_dim") if not hasattr(model, name))
        return cls(
            batches_per_step=getattr(model, "batches_per_step", 1),
            stacked=hasattr(model, "batches_per_step"),
            templates=getattr(model, "templates", lambda: {"model": model}),
            serve=getattr(model, "serve", lambda outputs: outputs),
            sampler=model if hasattr(model, "sample") else None,
            generator=None if missing else model,
            missing_for_fid=missing,
            optimizer=getattr(model, "optimizer", None),
        )


def symbolic_inputs(model: keras.Model) -> list[Any]:
    """Returns the symbolic inputs; none for a subclassed model."""
    return getattr(model, "inputs", None) or []


def has_class_outputs(model: keras.Model) -> bool:
    """Returns whether the model has one output of shape (rows, classes), with at least two classes."""
    shape = getattr(model, "output_shape", None)
    return isinstance(shape, tuple) and len(shape) == 2 and isinstance(shape[-1], int) and shape[-1] > 1
