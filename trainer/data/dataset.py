"""Defines the dataset that every source returns: examples for training and evaluation, and their
classes.

It turns what sources hold into what a model is called with, as `fit` would pass it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.data.examples import (
    AnyExamples,
    Arrays,
    Examples,
    Nest,
    NestedArrays,
    described,
    with_axes,
)

# A user's data function may import these names from here.
__all__ = ["Arrays", "Dataset", "Examples", "NestedArrays"]


@dataclass(frozen=True)
class Dataset:
    """Holds what a source returns; notes: what was converted or skipped, for run.json.

    class_names may be left empty for labels in Arrays: load_dataset then uses their numbers.
    """

    name: str
    train: AnyExamples
    evaluation: AnyExamples | None = None
    class_names: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    drawn: bool = False  # whether two readings of the same rows differ

    @property
    def holds_images(self) -> bool:
        """Returns whether x are grey levels of images, which steps cast to floatx."""
        return self.train.image_shape is not None

    @property
    def unit(self) -> str:
        """Returns "images" or "examples", for messages."""
        return "images" if self.holds_images else "examples"

    @property
    def spec(self) -> tuple[Nest, ...]:
        """Returns the tf.TensorSpec of one example: (x,), (x, y) or (x, y, sample_weight)."""
        return self.train.spec

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Returns (height, width, channels). Raises UserError if x is not an image."""
        if self.train.image_shape is not None:
            return self.train.image_shape
        x = self.spec[0]
        if tf.nest.is_nested(x) or len(x.shape) != 3:
            raise UserError(
                f"data={self.name}: an example is {described(x)}, not an image (height, width,"
                " channels): use a model of your own for it (--model=package.module:function)"
            )
        return tuple(x.shape)

    def images(self, split: str) -> Examples:
        """Returns the split "train" or "evaluation".

        Raises UserError if its examples are not images by row number.
        """
        examples = self.train if split == "train" else self.evaluation
        if not isinstance(examples, Examples) or examples.image_shape is None:
            raise UserError(
                f"data={self.name}: its examples are {self.shape}, not images of a source, which"
                " FID and prepared data need"
            )
        return examples

    @property
    def shape(self) -> str:
        """Describes one example for people: the size of an image, or types and shapes."""
        if self.holds_images:
            return "x".join(map(str, self.image_shape))
        return " -> ".join(described(part) for part in self.spec)

    @property
    def input_spec(self) -> Nest:
        """Returns the tf.TensorSpec of a model's input, as x, of any number of rows."""
        if self.holds_images:
            return tf.TensorSpec((None, *self.image_shape), keras.config.floatx(), name="images")
        return with_axes(self.spec[0], None)

    def zeros(self, rows: int) -> Any:
        """Returns what `fit` would pass for so many rows of zeros."""
        return self.step_data(
            tf.nest.map_structure(lambda leaf: tf.zeros((rows, *leaf.shape), leaf.dtype), self.spec)
        )

    def step_data(self, parts: tuple[Nest, ...]) -> Any:
        """Returns the argument of train_step and test_step: x, (x, y) or (x, y, sample_weight)."""
        x, *others = parts
        if self.holds_images:
            x = tf.cast(x, keras.config.floatx())
        return (x, *others) if others or tf.nest.is_nested(x) else x

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Replaces TensorFlow's errors in the block by those of the examples, or by a UserError."""
        parts = [*filter(None, (self.train, self.evaluation))]
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            shaped = any(part.shaped_as_first for part in parts)
            if shaped and "not compatible with expected shape" in str(error):
                raise UserError(
                    f"data={self.name}: a batch of its tf.data.Dataset has other lengths than the"
                    f" first one, {self.shape}: pad them, by padded_batch or to_tensor(shape=…)"
                ) from error
            raise
        except tf.errors.UnknownError as error:
            for examples in parts:
                if examples.failure:
                    raise examples.failure from error
            raise
