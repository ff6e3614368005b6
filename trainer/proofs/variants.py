"""Trains a few steps of one model in one variant: on some devices, in some precision, and measures it."""

import dataclasses
import gc
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.base.log import log
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import Replicas
from trainer.data.dataset import Dataset
from trainer.invariance.layers import refresh_normalization
from trainer.invariance.reachable import reachable
from trainer.proofs.bands import Trained, Weights
from trainer.proofs.reordering import reordered
from trainer.reporting.progress import is_loss
from trainer.reporting.resources import peak_device_memory_gib
from trainer.run.training_setup import TrainingSetup, set_precision_and_seed, setup_with
from trainer.training.state import WEIGHTS, put_back, snapshot, variables_of
from trainer.training.steps import StepRunner

COMPARED_STEPS = 5  # of the comparison

Variables = dict[str, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Variant:
    """Describes how the same steps are computed: the name in the table, and the settings that make the variant."""

    name: str
    devices: int
    precision: str = "float32"
    tf32: bool = False
    jit_compile: str = "false"

    def config(self, base: TrainConfig) -> TrainConfig:
        """Returns the settings of the variant."""
        changed = {name: getattr(self, name) for name in ("precision", "tf32", "jit_compile")}
        return dataclasses.replace(base, replicas=self.devices, strategy="auto", expect_devices=0, **changed)


@dataclasses.dataclass(frozen=True)
class Speed:
    """Holds what a variant costs. A snapshot is the copy of the state to the host that a checkpoint begins with."""

    first_call_seconds: float  # traces, compiles and runs the steps of the comparison
    steps_per_second: float
    peak_device_memory_gib: Sequence[float]
    state_bytes: int
    snapshot_seconds: float


def replicas_on(devices: Sequence[str], config: TrainConfig, strategy: Any) -> Replicas:
    """Returns `devices` of this machine as replicas; raises UserError if the batch does not divide."""
    rows = config.rows_per_replica(len(devices))
    return Replicas(strategy, tuple(devices), rows, config.global_batch_size, micro_batches=config.micro_batches)


class Trials:
    """Trains the first steps of one model in several variants, all from the weights that the first one draws."""

    def __init__(self, config: TrainConfig, dataset: Dataset) -> None:
        self._config, self._dataset, self._start = config, dataset, Variables()

    def run(self, variant: Variant, replicas: Replicas, seconds: float | None = None) -> tuple[Trained, Speed | None]:
        """Returns what the first steps compute and what a step costs, measured for `seconds`; None: not measured."""
        log.info(f"{variant.name} on {', '.join(replicas.devices)} …")
        for device in replicas.devices:
            with suppress(ValueError):  # this device's allocator keeps no statistics
                tf.config.experimental.reset_memory_stats(device)
        setup = self._setup(variant, replicas)
        runner, rows = setup.step_runner(compiled=variant.jit_compile == "true"), setup.rows_from(0)
        began = time.monotonic()
        with self._dataset.reading():
            trained = _train_first_steps(runner, rows)
            first = time.monotonic() - began
            speed = None if seconds is None else _speed(runner, rows, first, seconds)
        del setup, runner, rows
        gc.collect()  # a traced function and its model refer to each other
        return trained, speed

    def reordered(self, variant: Variant, replicas: Replicas, seed: int) -> Trained:
        """Returns what they compute if the rows of each global batch, and all draws, stand in another order.

        Only on one replica: the order spans the global batch.
        """
        runner, rows = reordered(self._setup(variant, replicas), seed)
        with self._dataset.reading():
            return _train_first_steps(runner, rows)

    def _setup(self, variant: Variant, replicas: Replicas) -> TrainingSetup:
        """Builds the model with the same weights: a precision of its own would draw others."""
        config = variant.config(self._config)
        set_precision_and_seed(config)
        setup = setup_with(config, replicas, self._dataset)
        variables = variables_of(setup.model)
        weights = {name: variables[name] for name in variables if name.startswith(WEIGHTS)}
        if self._start:
            put_back(weights, self._start, replicas)
            refresh_normalization(setup.model)
        else:
            self._start = snapshot(weights)
        return setup


def _train_first_steps(runner: StepRunner, rows: Any) -> Trained:
    before = _values(runner.model)
    logs = runner(rows, 0, COMPARED_STEPS)
    losses = {name: value for name, value in logs.means().items() if is_loss(name)}
    return Trained(before, _values(runner.model), losses, _gradient_norm(runner.model, before))


def _values(model: keras.Model) -> Weights:
    groups = {"trained": model.trainable_weights, "others": model.non_trainable_weights}
    return {name: [_array(variable) for variable in weights] for name, weights in groups.items()}


def _array(variable: Any) -> npt.NDArray[np.float64]:
    return np.asarray(tf.convert_to_tensor(variable)).astype(np.float64)


def _gradient_norm(model: keras.Model, before: Weights) -> float:
    """Returns the root mean square norm of the gradients since the start.

    Adam's second moments are their mean squares: v / (1 - beta_2^t) after t updates (Kingma and Ba 2015, section 3).
    """
    squares = [
        _array(moment).sum() / max(1.0 - adam.beta_2 ** float(_array(adam.iterations)), 1e-9)
        for adam in reachable(model)
        if isinstance(adam, keras.optimizers.Adam)
        for moment in adam.variables
        if moment.name.endswith("velocity")
    ]
    changes = [
        np.square(after - start).sum()
        for after, start in zip(_values(model)["trained"], before["trained"], strict=True)
    ]
    return float(np.sqrt(sum(squares or changes)))


def _speed(runner: StepRunner, rows: Any, first: float, seconds: float) -> Speed:
    """Measures steps in calls that are long enough for the time of a call itself not to matter."""
    step, count, spent = COMPARED_STEPS, 1, list[float]()
    until = time.monotonic() + seconds
    while not spent or time.monotonic() < until:
        began = time.monotonic()
        runner(rows, step, count)
        step += count
        spent.append((time.monotonic() - began) / count)
        count = max(1, min(2 * count, int(seconds / 3 / spent[-1])))
    peak = peak_device_memory_gib(runner.replicas.devices)
    began = time.monotonic()
    state = snapshot(variables_of(runner.model))
    copied = time.monotonic() - began
    size = sum(value.nbytes for value in state.values())
    return Speed(first, 1.0 / float(np.median(spent)), peak, size, copied)
