"""Checkpoints: models, optimizers, averages and the step, so that the same command again goes on."""

from pathlib import Path

import keras
import tensorflow as tf


class Checkpoints:
    """The newest `keep` checkpoints of `model` in `folder`. Data order and noise follow from the step alone."""

    def __init__(self, model: keras.Model, folder: Path, keep: int) -> None:
        self._step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._checkpoint = tf.train.Checkpoint(model=model, step=self._step)
        self._manager = tf.train.CheckpointManager(self._checkpoint, str(folder), max_to_keep=keep)

    def restore(self) -> int:
        """Restores the newest checkpoint and returns its step; 0 where there is none."""
        newest = self._manager.latest_checkpoint
        if newest:
            self._checkpoint.restore(newest).assert_existing_objects_matched()
        return int(self._step.numpy())

    def save(self, step: int) -> None:
        """Saves the state after `step` steps; once only for the same step."""
        if self._manager.latest_checkpoint and self._manager.latest_checkpoint.endswith(f"-{step}"):
            return
        self._step.assign(step)
        self._manager.save(checkpoint_number=step)

    @property
    def latest(self) -> str | None:
        """Path of the newest checkpoint."""
        path: str | None = self._manager.latest_checkpoint
        return path
