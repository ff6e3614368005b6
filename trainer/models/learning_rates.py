"""Provides learning rates that change over a run: warm-up, cosine, and another rate from a step
on."""

import math
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from trainer.base.settings.step_counts import Schedule
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset


def learning_rate(
    config: TrainConfig,
    dataset: Dataset,
    batches_per_step: int = 1,
    updates_per_step: int = 1,
    later: tuple[int, float] | None = None,
) -> Any:
    """Returns an optimizer's rate, a number or a schedule.

    updates_per_step: how often the optimizer updates weights in a step; later: (step, the rate from
        that step on).
    """
    if config.learning_rate_schedule == "constant" and not config.warmup_steps and not later:
        return config.learning_rate
    schedule = Schedule(
        dataset.train.count, config.global_batch_size, batches_per_step, config.seed
    )
    return StepSchedule(
        config.learning_rate,
        config.learning_rate_schedule,
        config.warmup_steps,
        schedule.total_steps(config.steps, config.epochs),
        updates_per_step,
        later,
    )


@dataclass(eq=False)
class StepSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Gives a learning rate by step, where a step is `updates_per_step` updates of the optimizer.

    Linear from 0 over `warmup_steps`; then constant, or a cosine that reaches 0 at `total_steps`
    (Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983, without restarts). `later`:
    (step, the peak from that step on).
    """

    peak: float
    kind: str
    warmup_steps: int
    total_steps: int
    updates_per_step: int = 1
    later: tuple[int, float] | None = None

    def __call__(self, update: Any) -> Any:
        """Returns the rate of the update with this number, counted from 0, as float32."""
        step = tf.cast(update // self.updates_per_step, tf.float32)
        rate = tf.constant(self.peak, tf.float32)
        if self.later:
            rate = tf.where(step >= self.later[0], tf.constant(self.later[1], tf.float32), rate)
        if self.kind == "cosine":
            share = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
            rate *= 0.5 * (1.0 + tf.cos(math.pi * tf.clip_by_value(share, 0.0, 1.0)))
        if self.warmup_steps:
            rate = tf.where(step < self.warmup_steps, rate * (step + 1.0) / self.warmup_steps, rate)
        return rate

    def get_config(self) -> dict[str, Any]:
        """Returns the settings from which Keras copies the schedule."""
        return dict(vars(self))
