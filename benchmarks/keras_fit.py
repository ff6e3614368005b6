"""The peer: Keras `fit` on the same networks, optimizers and input pipeline; a GAN by a `train_step` of its own."""

import time
from typing import Any

import keras
import tensorflow as tf

from benchmarks.ours import batches_alike, networks, new_optimizers, work_of
from benchmarks.turns import Run, Work
from benchmarks.tutorial import gan
from trainer.build import TrainingSetup, build_setup
from trainer.config.train_config import TrainConfig
from trainer.distribution.strategy import make_replicas
from trainer.export import plain_copy


def contender(config: TrainConfig, option: str = "1") -> tuple[Run, Work]:
    """`option`: steps per execution; with an x behind, compiled by XLA, which `compile` does where it is not asked."""
    assembly = build_setup(config, make_replicas(config))
    model = model_for(assembly, int(option.rstrip("x")), jit_compile=option.endswith("x"))
    batches, clock = batches_for(assembly), Clock()

    def run(steps: int) -> float:
        model.fit(batches, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[clock])
        return clock.seconds

    return run, work_of(networks(assembly.model), new_optimizers(assembly.model))


class Clock(keras.callbacks.Callback):
    """From before the first step of an epoch to after its last: what surrounds them is paid once a run, not counted."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins anew with the next step."""
        self.began = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Of the first step, or of a call of several."""
        self.began = self.began or time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """The last one counts."""
        self.seconds = time.perf_counter() - self.began


class FittedGAN(keras.Model):
    """A GAN as Keras's examples write it: all updates of a step in `train_step`."""

    def __init__(self, assembly: TrainingSetup) -> None:
        super().__init__()
        self.gan = gan(assembly)
        self.generator, self.critic = self.gan.generator, self.gan.critic
        self.critic_steps = assembly.schedule.batches_per_step

    def train_step(self, data: Any) -> dict[str, Any]:
        """data: (critic_steps, rows, height, width, channels) grey levels in [0, 255]."""
        for index in range(self.critic_steps):
            critic_loss = self.gan.train_critic(data[index])
        return {"critic_loss": critic_loss, "generator_loss": self.gan.train_generator()}


def model_for(assembly: TrainingSetup, steps_per_execution: int, *, jit_compile: bool) -> keras.Model:
    """A compiled model on plain copies of the networks in `assembly`."""
    how = {"steps_per_execution": steps_per_execution, "jit_compile": jit_compile}
    if hasattr(assembly.model, "critic"):
        model = FittedGAN(assembly)
        model.gan.critic_optimizer.build(model.critic.trainable_variables)  # fit traces, and cannot make variables
        model.gan.generator_optimizer.build(model.generator.trainable_variables)
        model.built = True
        model.compile(**how)
        return model
    model, (optimizer,) = plain_copy(assembly.model), new_optimizers(assembly.model)
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, entropy, metrics=[keras.metrics.SparseCategoricalAccuracy()], **how)
    return model


def batches_for(assembly: TrainingSetup) -> tf.data.Dataset:
    """What `fit` takes: the images of a step of a GAN, or (images, labels) of a batch."""
    steps = batches_alike(assembly, assembly.schedule.batches_per_step)
    if hasattr(assembly.model, "critic"):
        return steps.map(lambda images, *_: images)
    return steps.map(lambda images, labels: (images[0], labels[0]))
