"""Runs this project's training loop, alone or as a worker of TF_CONFIG, and describes its work for
its peers."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.processes import Run, Work
from trainer.base.settings.request import Overrides
from trainer.base.settings.step_counts import Schedule
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import read_cluster
from trainer.cluster.strategy import make_replicas
from trainer.data.batches import batches
from trainer.run.step_program import MOST_STEPS, gains_by_loop, steps_per_program
from trainer.run.training_setup import TrainingSetup, build_setup
from trainer.training.steps import StepRunner
from trainer.training.xla_choice import choose

STEPS_OF_A_RUN = 100_000  # for which "auto" chooses


class TrainingLoop:
    """Runs steps of one setup; each call continues where the last one ended.

    The steps of a call are one call to the device, as in a job, where calls grow to some seconds.
    """

    def __init__(self, setup: TrainingSetup, run_steps: StepRunner | None = None) -> None:
        self._run = run_steps or setup.step_runner()
        self.steps_per_program = self._run.steps_per_program
        self.step, self._rows = 0, setup.rows_from(0, self.steps_per_program)

    def __call__(self, steps: int) -> float:
        """Runs `steps` steps; returns the seconds that they took."""
        began = time.perf_counter()
        self._run(self._rows, self.step, steps)
        self.step += steps
        return time.perf_counter() - began

    def steps_in(self, seconds: float) -> int:
        """Warms up; returns how many steps take about `seconds`."""
        self(1)  # traces
        return max(1, round(3 * seconds / self(3)))


def make_candidate(config: TrainConfig, option: str = "") -> tuple[Run, Work]:
    """Returns the loop and its work.

    option: "compiled" by XLA, as many steps a program as a run takes, or "single" ones; "auto", as
        a long run chooses; else plain.
    """
    setup = build_setup(config, make_replicas(config, read_cluster()))
    return TrainingLoop(setup, _runner(setup, option)), work_of(
        networks(setup.model), optimizers(setup.model)
    )


def _runner(setup: TrainingSetup, option: str) -> StepRunner:
    compiled = setup.step_runner(compiled=True)
    rows = setup.rows_from(0)
    if option == "auto":
        choice = choose(
            setup.config,
            setup.model,
            setup.replicas,
            STEPS_OF_A_RUN,
            partial(compiled.size, rows),
            partial(gains_by_loop, setup.step_runner(), rows),
        )
        option = "compiled" * choice.compiled
    if option == "single":
        return compiled
    if option == "compiled":
        steps = steps_per_program(compiled, rows, MOST_STEPS)
        return setup.step_runner(compiled=True, steps_per_program=steps)
    return setup.step_runner()


def setup_of(*flags: str) -> TrainingSetup:
    """Builds the setup that flags of trainer.task describe; setups of several numbers of replicas
    can coexist."""
    config = Overrides.parse(flags).config
    return build_setup(config, make_replicas(config))


def traced_steps(setup: TrainingSetup) -> Any:
    """Traces the tf.function over steps that the loop calls; returns its ConcreteFunction."""
    return setup.step_runner().traced(setup.rows_from(0))


def step_graph(setup: TrainingSetup) -> Any:
    """Returns the graph of `traced_steps`."""
    return traced_steps(setup).graph


def networks(model: keras.Model) -> list[keras.Model]:
    """Returns the networks that a step trains: generator and critic, or the only one."""
    return [model.generator, model.critic] if hasattr(model, "critic") else [model]


def optimizers(model: keras.Model) -> list[Any]:
    """Returns the optimizer of each network."""
    return (
        [model.generator_optimizer, model.critic_optimizer]
        if hasattr(model, "critic")
        else [model.optimizer]
    )


def new_optimizers(model: keras.Model) -> list[Any]:
    """Returns new optimizers of Keras with the settings of the model's own."""
    return [type(own).from_config(own.get_config()) for own in optimizers(model)]


def peer_batches(setup: TrainingSetup, batches_per_step: int) -> tf.data.Dataset:
    """Returns endless (images, labels) of (batches_per_step, rows, …), from the pipeline that feeds
    our loop."""
    schedule = Schedule(
        setup.dataset.train.count, setup.config.global_batch_size, batches_per_step, 0
    )
    rows = batches(setup.dataset.train, schedule, setup.replicas)
    return rows.map(lambda *parts: tuple(part[0] for part in parts))


def work_of(trained: Sequence[keras.Model], updated_by: Sequence[Any]) -> Work:
    """Returns the trainable numbers of each network and the settings of each optimizer."""
    numbers = [
        sum(int(np.prod(each.shape)) for each in network.trainable_variables) for network in trained
    ]
    names = ("learning_rate", "beta_1", "beta_2", "rho", "epsilon")
    configs = [optimizer.get_config() for optimizer in updated_by]
    settings = [
        {name: round(float(config[name]), 9) for name in names if name in config}
        for config in configs
    ]
    return {"trainable": numbers, "optimizers": settings}
