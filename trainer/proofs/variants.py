"""Trains the first steps of one model in one variant: on some devices, in some precision, and measures them."""

import dataclasses
import gc
import time
from collections.abc import Callable
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
from trainer.training.steps import StepRunner, nodes_of

COMPARED_STEPS = 5  # of the comparison


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
        return dataclasses.replace(base, replicas=self.devices, **changed)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Holds what a variant takes, and how several devices sum its gradients, as `CollectiveReduceV2 (nccl)`."""

    first_seconds: float  # traces, compiles and runs the steps of the comparison
    peak_gib: float | None  # of the fullest device; None where TensorFlow does not count it
    steps_per_second: float
    sums: str


class Running:
    """Runs a variant: the steps of the comparison at once, and then as many as are asked for."""

    def __init__(self, runner: StepRunner, rows: Any, dataset: Dataset) -> None:
        self._runner, self._rows, self._dataset, self._step = runner, rows, dataset, COMPARED_STEPS
        began, before = time.monotonic(), _values(runner.model)
        with dataset.reading():
            logs = runner(rows, 0, COMPARED_STEPS)
        self.first_seconds = time.monotonic() - began
        losses = {name: value for name, value in logs.means().items() if is_loss(name)}
        self.trained = Trained(before, _values(runner.model), losses, _gradient_norm(runner.model, before))
        self.peak_gib = max(peak_device_memory_gib(runner.replicas.devices), default=None)

    def __call__(self, steps: int) -> float:
        """Runs more steps; returns the seconds that they took."""
        began = time.monotonic()
        with self._dataset.reading():
            self._runner(self._rows, self._step, steps)
        self._step += steps
        return time.monotonic() - began

    def sums(self) -> str:
        """Returns what sums over devices in the traced step; "" on one."""
        nodes = nodes_of(self._runner.traced(self._rows).graph) if self._runner.replicas.count > 1 else []
        sums = [node for node in nodes if node.op.startswith(("CollectiveReduce", "NcclAllReduce"))]
        hints = {(node.op, node.attr["communication_hint"].s.decode()) for node in sums}
        return ", ".join(sorted(f"{name} ({hint})" if hint else name for name, hint in hints))


class Trials:
    """Trains the first steps of one model in several variants, all from the weights that the first one draws."""

    def __init__(self, config: TrainConfig, dataset: Dataset) -> None:
        self._config, self._dataset, self._start = config, dataset, dict[str, npt.NDArray[Any]]()

    def begin(self, variant: Variant, replicas: Replicas) -> Running:
        """Builds a variant and runs its first steps."""
        gc.collect()  # a traced function and its model refer to each other: what ran before may still hold memory
        log.info(f"{variant.name} on {', '.join(replicas.devices)} …")
        for device in replicas.devices:
            with suppress(ValueError):  # this device's allocator keeps no statistics
                tf.config.experimental.reset_memory_stats(device)
        setup = self._setup(variant, replicas)
        runner = setup.step_runner(compiled=variant.jit_compile == "true")
        return Running(runner, setup.rows_from(0), self._dataset)

    def measured(self, variant: Variant, replicas: Replicas, seconds: float) -> tuple[Trained, Cost]:
        """Returns what the first steps compute, and what a step costs, measured for `seconds`."""
        running = self.begin(variant, replicas)
        rate = steps_per_second(running, seconds)
        return running.trained, Cost(running.first_seconds, running.peak_gib, rate, running.sums())

    def reordered(self, variant: Variant, replicas: Replicas, seed: int) -> Trained:
        """Returns what they compute if the rows of each global batch, and all draws, stand in another order.

        Only on one replica: the order spans the global batch.
        """
        return Running(*reordered(self._setup(variant, replicas), seed), self._dataset).trained

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


def steps_per_second(run: Callable[[int], float], seconds: float) -> float:
    """Returns the median rate of `run(steps)`, in calls long enough for the time of a call itself not to matter."""
    count, spent = 1, list[float]()
    until = time.monotonic() + seconds
    while not spent or time.monotonic() < until:
        spent.append(run(count) / count)
        count = max(1, min(2 * count, int(seconds / 3 / spent[-1])))
    return 1.0 / float(np.median(spent[len(spent) // 2 :]))  # the first calls are short


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
