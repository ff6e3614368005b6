"""Checkpoints: models, optimizers, averages and the step, so that the same command again goes on."""

from pathlib import Path

import keras
import tensorflow as tf

from trainer.errors import UserError
from trainer.log import log


class Checkpoints:
    """The newest `keep` checkpoints of `model` in `folder`. Data order and noise follow from the step alone."""

    def __init__(self, model: keras.Model, folder: Path, keep: int) -> None:
        self._step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._checkpoint = tf.train.Checkpoint(model=model, step=self._step)
        self._kept_step = -1  # the newest step that is known to be kept whole
        self.restored: str | None = None  # the path that restore() read
        self._manager = tf.train.CheckpointManager(self._checkpoint, str(folder), max_to_keep=keep)

    def restore(self) -> int:
        """Restores the newest checkpoint that can be read and returns its step; 0 where there is none.

        UserError where there are some and none can be read: nothing is overwritten then.
        """
        for path in reversed(self._manager.checkpoints):
            try:
                self._checkpoint.restore(path).assert_existing_objects_matched()
                self.restored, self._kept_step = path, int(self._step.numpy())
                return self._kept_step
            except Exception as error:  # TensorFlow raises IndexError, DataLossError, NotFoundError and more
                log.warning(
                    f"checkpoint {path} is damaged ({' '.join(str(error).split())[:120]}): trying the one before"
                )
        if self._manager.checkpoints:
            raise UserError(f"{self._manager.directory}: none of its checkpoints can be read: give another --job_dir")
        return 0

    def save(self, step: int) -> None:
        """Saves the state after `step` steps; once only for the same step."""
        if step == self._kept_step:
            return
        self._kept_step = step
        self._step.assign(step)
        self._manager.save(checkpoint_number=step)

    @property
    def latest(self) -> str | None:
        """Path of the newest checkpoint."""
        path: str | None = self._manager.latest_checkpoint
        return path
