"""This project's loop, alone or as one of the workers of TF_CONFIG; and what its step is, for peers made alike."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.turns import Run, Work, timed
from trainer.build import TrainingSetup, build_setup
from trainer.config.train_config import TrainConfig
from trainer.data.batches import Schedule, batches
from trainer.distribution.cluster import read_cluster
from trainer.distribution.strategy import make_replicas
from trainer.models.optimizers import FusedAdam


def contender(config: TrainConfig, option: str = "") -> tuple[Run, Work]:
    """All steps of a turn are one call to the device, as in a job whose calls grow to some seconds."""
    assembly = build_setup(config, make_replicas(config, read_cluster()))
    iterator, run_steps, position = assembly.rows_from(0), assembly.step_runner(), 0

    def run(steps: int) -> None:
        nonlocal position
        run_steps(iterator, position, steps)
        position += steps

    return timed(run), work_of(networks(assembly.model), optimizers(assembly.model))


def fresh_collectives() -> None:
    """Lets the next MirroredStrategy of this process have another number of devices than the last.

    TensorFlow keys groups of devices by a number that each strategy counts from the same base, made to be set in tests.
    """
    tf.distribute.MirroredStrategy._collective_key_base += 1_000


def networks(model: keras.Model) -> list[keras.Model]:
    """What a step trains: generator and critic, or the one network."""
    return [model.generator, model.critic] if hasattr(model, "critic") else [model]


def optimizers(model: keras.Model) -> list[Any]:
    """Of each network."""
    return [model.generator_optimizer, model.critic_optimizer] if hasattr(model, "critic") else [model.optimizer]


def new_optimizers(model: keras.Model) -> list[Any]:
    """Fresh ones with the settings of the model's own, and nothing of this project in them."""
    kinds = {FusedAdam: keras.optimizers.Adam}
    return [kinds.get(type(own), type(own)).from_config(own.get_config()) for own in optimizers(model)]


def batches_alike(assembly: TrainingSetup, batches_per_step: int) -> tf.data.Dataset:
    """(images, labels) without end, by the very pipeline that feeds ours: (batches_per_step, rows, …)."""
    schedule = Schedule(assembly.dataset.train.count, assembly.config.global_batch_size, batches_per_step, 0)
    rows = batches(assembly.dataset.train, schedule, assembly.replicas)
    return rows.map(lambda *parts: tuple(part[0] for part in parts))


def work_of(trained: Sequence[keras.Model], updated_by: Sequence[Any]) -> Work:
    """Trainable numbers of each network, settings of each optimizer."""
    numbers = [sum(int(np.prod(each.shape)) for each in network.trainable_variables) for network in trained]
    names = ("learning_rate", "beta_1", "beta_2", "rho", "epsilon")
    configs = [optimizer.get_config() for optimizer in updated_by]
    settings = [{name: round(float(config[name]), 9) for name in names if name in config} for config in configs]
    return {"trainable": numbers, "optimizers": settings}
