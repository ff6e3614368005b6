"""Runs the peer Keras `fit` on the same networks, optimizers and input pipeline; a GAN has its own
`train_step`."""

from typing import Any

import keras
import tensorflow as tf

from benchmarks.fit_clock import Clock
from benchmarks.processes import Run, Work
from benchmarks.trainer_loop import networks, new_optimizers, peer_batches, work_of
from benchmarks.tutorial import GAN
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.run.export import plain_copy
from trainer.run.training_setup import TrainingSetup, build_setup


def make_candidate(config: TrainConfig, option: str = "1") -> tuple[Run, Work]:
    """Returns `fit` with `option` steps per execution; "10x" also compiles with XLA."""
    setup = build_setup(config, make_replicas(config))
    model = model_for(setup, int(option.rstrip("x")), jit_compile=option.endswith("x"))
    batches = batches_for(setup)
    clock = Clock()

    def run(steps: int) -> float:
        model.fit(batches, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[clock])
        return clock.seconds

    return run, work_of(networks(setup.model), new_optimizers(setup.model))


class FittedGAN(keras.Model):
    """Trains a GAN as Keras's examples do: all updates of a step in `train_step`."""

    def __init__(self, setup: TrainingSetup) -> None:
        super().__init__()
        self.gan = GAN(setup)
        self.generator = self.gan.generator
        self.critic = self.gan.critic
        self.critic_steps = setup.schedule.batches_per_step

    def train_step(self, data: Any) -> dict[str, Any]:
        """Trains on (critic_steps, rows, height, width, channels) grey levels in [0, 255]."""
        for index in range(self.critic_steps):
            critic_loss = self.gan.train_critic(data[index])
        return {"critic_loss": critic_loss, "generator_loss": self.gan.train_generator()}


def model_for(setup: TrainingSetup, steps_per_execution: int, *, jit_compile: bool) -> keras.Model:
    """Returns a compiled model on plain copies of the networks of `setup`."""
    options = {"steps_per_execution": steps_per_execution, "jit_compile": jit_compile}
    if hasattr(setup.model, "critic"):
        model = FittedGAN(setup)
        # fit traces, and cannot make variables
        model.gan.critic_optimizer.build(model.critic.trainable_variables)
        model.gan.generator_optimizer.build(model.generator.trainable_variables)
        model.built = True
        model.compile(**options)
        return model
    model = plain_copy(setup.model)
    model.compile_from_config({**setup.model.get_compile_config(), **options})
    return model


def batches_for(setup: TrainingSetup) -> tf.data.Dataset:
    """Returns the input of `fit`: the images of a step of a GAN, or what `fit` takes of a batch."""
    steps = peer_batches(setup, setup.schedule.batches_per_step)
    if hasattr(setup.model, "critic"):
        return steps.map(lambda images, *rest: images)
    return steps.map(lambda *parts: setup.dataset.step_data(tuple(part[0] for part in parts)))
