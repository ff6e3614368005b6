"""Writes TensorBoard scalars and images with TensorFlow alone: a job does not need the tensorboard package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from trainer.data.images import UInt8Array, encode_png
from trainer.reporting.tensorflow_errors import tensorflow_writing


class EventFiles:
    """Writes event files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with tensorflow_writing(folder):
            self._writer = tf.summary.create_file_writer(str(folder))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one point to each curve."""
        with tensorflow_writing(self._folder), self._writer.as_default():
            for name, value in values.items():
                tf.summary.write(name, tf.constant(value, tf.float32), step=step, metadata=_plugin("scalars"))

    def image(self, step: int, name: str, picture: UInt8Array) -> None:
        """Adds a picture of shape (height, width, 1 or 3), uint8."""
        height, width = picture.shape[:2]
        value = tf.constant([str(width).encode(), str(height).encode(), encode_png(picture)])
        with tensorflow_writing(self._folder), self._writer.as_default():
            tf.summary.write(name, value, step=step, metadata=_plugin("images"))

    def flush(self) -> None:
        """Writes buffered events to disk."""
        with tensorflow_writing(self._folder):
            self._writer.flush()

    def close(self) -> None:
        """Writes buffered events to disk and closes the files."""
        with tensorflow_writing(self._folder):
            self._writer.close()


def _plugin(name: str) -> Any:
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.plugin_data.plugin_name = name
    return metadata
