"""Data, schedule and model of a run, put together: what training, the check and the benchmarks drive alike."""

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from trainer.compat import reset_layer_names, seed_initializers
from trainer.config.train_config import TrainConfig
from trainer.data.augment import augmentation
from trainer.data.batches import Schedule, batches
from trainer.data.dataset import Dataset, closed_on_failure
from trainer.data.sources import load_dataset
from trainer.distribution.strategy import Replicas
from trainer.models import build_model
from trainer.training.steps import StepRunner


@dataclass(frozen=True)
class TrainingSetup:
    """What trains, on what, in which order."""

    config: TrainConfig
    replicas: Replicas
    dataset: Dataset
    model: keras.Model
    schedule: Schedule

    def rows_from(self, first_step: int) -> Any:
        """This worker's rows of every step from `first_step` on: the iterator that `step_runner` takes."""
        return iter(batches(self.dataset.train, self.schedule, self.replicas, first_step))

    def step_runner(self) -> StepRunner:
        """What runs steps of the model on all replicas."""
        return StepRunner(self.model, self.replicas, self.config.seed, augmentation(self.config))


def build_setup(config: TrainConfig, replicas: Replicas) -> TrainingSetup:
    """Loads the data and builds the model with the precision and the seed of `config`."""
    set_precision_and_seed(config)
    dataset = load_dataset(config)
    with closed_on_failure(dataset.close), replicas.strategy.scope():
        model = build_model(config, dataset)
    per_step = getattr(model, "batches_per_step", 1)
    schedule = Schedule(dataset.train.count, config.global_batch_size, per_step, config.seed)
    return TrainingSetup(config, replicas, dataset, model, schedule)


def set_precision_and_seed(config: TrainConfig) -> None:
    """Sets the arithmetic of every layer made from here on, the seed of its first weights, and how names are counted.

    `config.deterministic` holds for the process: https://www.tensorflow.org/api_docs/python/tf/config/experimental/enable_op_determinism
    """
    reset_layer_names()
    keras.config.set_floatx("float64" if config.precision == "float64" else "float32")
    keras.config.set_dtype_policy(config.precision)
    keras.utils.set_random_seed(config.seed)
    seed_initializers(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
