"""Provides Adam in one operation per variable, and learning rates that change over a run."""

import math
from typing import Any

import keras
import tensorflow as tf

from trainer.base.settings.train_config import TrainConfig
from trainer.data.batches import Schedule
from trainer.data.dataset import Dataset
from trainer.invariance.compat import adam_moments


def learning_rate(
    config: TrainConfig,
    dataset: Dataset,
    batches_per_step: int = 1,
    updates_per_step: int = 1,
    later: tuple[int, float] | None = None,
) -> Any:
    """Returns the rate for a Keras optimizer that makes `updates_per_step` updates per step: a number or a schedule.

    later: (step, the rate from that step on).
    """
    if config.learning_rate_schedule == "constant" and not config.warmup_steps and not later:
        return config.learning_rate
    schedule = Schedule(dataset.train.count, config.global_batch_size, batches_per_step, config.seed)
    return StepSchedule(
        config.learning_rate,
        config.learning_rate_schedule,
        config.warmup_steps,
        schedule.total_steps(config.steps, config.epochs),
        updates_per_step,
        later,
    )


@keras.saving.register_keras_serializable("trainer")
class FusedAdam(keras.optimizers.Adam):
    """Updates a variable in one operation where Keras's Adam uses ten (Kingma and Ba 2015, arxiv.org/abs/1412.6980).

    The ten cost memory traffic on a CPU, and on a GPU time to launch, which dominates a GAN's step otherwise.
    """

    # What the variables of the update that is made share.
    _shared: dict[Any, tuple[Any, ...]] | None = None

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Makes one update; see Keras."""
        object.__setattr__(self, "_shared", {})  # Keras would track it for checkpoints
        try:
            super().apply(grads, trainable_variables)
        finally:
            object.__setattr__(self, "_shared", None)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable and its two moments; with `amsgrad`, as Keras does."""
        moments = None if self.amsgrad else adam_moments(self, variable)
        if moments is None:
            super().update_step(gradient, variable, learning_rate)
            return
        beta1, beta2 = (tf.constant(beta, variable.dtype) for beta in (self.beta_1, self.beta_2))
        power1, power2, rate = self._scalars(variable, learning_rate, beta1, beta2)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle, m=moments[0].value.handle, v=moments[1].value.handle,
            beta1_power=power1, beta2_power=power2, lr=rate,
            beta1=beta1, beta2=beta2, epsilon=tf.constant(self.epsilon, variable.dtype),
            grad=tf.cast(gradient, variable.dtype),
        )  # fmt: skip

    def _scalars(self, variable: Any, learning_rate: Any, beta1: Any, beta2: Any) -> tuple[Any, ...]:
        """Returns the powers of the betas and the learning rate, computed once an update on each device."""
        place = (tf.compat.v1.get_default_graph(), variable.device, variable.dtype)
        shared = {} if self._shared is None else self._shared
        if place not in shared:
            updates = tf.cast(keras.ops.convert_to_tensor(self.iterations), variable.dtype) + 1
            shared[place] = (beta1**updates, beta2**updates, tf.cast(learning_rate, variable.dtype))
        return shared[place]


class StepSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Gives a learning rate by step, where a step is `updates_per_step` updates of the optimizer.

    Linear from 0 over `warmup_steps`; then constant, or a cosine that reaches 0 at `total_steps` (Loshchilov and Hutter
    2017, https://arxiv.org/abs/1608.03983, without restarts). `later`: (step, the peak from that step on).
    """

    def __init__(
        self,
        peak: float,
        kind: str,
        warmup_steps: int,
        total_steps: int,
        updates_per_step: int = 1,
        later: tuple[int, float] | None = None,
    ) -> None:
        self.peak, self.kind, self.later = peak, kind, later
        self.warmup_steps, self.total_steps, self.updates_per_step = warmup_steps, total_steps, updates_per_step

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
