"""Measures the first steps of a run for a golden file: losses, weights and optimizers' slots after
some steps.

The control of every comparison are the same steps with their rows in another order, which shows
what rounding alone changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.golden.comparison import losses_apart, moment
from tests.support import resolved
from trainer.base.settings.train_config import TrainConfig
from trainer.checks.on_gpus import PERMUTATION_SEEDS, runner_and_rows
from trainer.cluster.strategy import make_replicas
from trainer.run.training_setup import TrainingSetup, build_setup, starting_weights
from trainer.training.checkpoint import snapshot, variables_of

# variables by name, losses and metrics
State = tuple[Mapping[str, npt.NDArray[Any]], Mapping[str, float]]


def measure(
    flags: Sequence[str], steps: Sequence[int], replicas: int = 1, *, control: bool = False
) -> dict[str, Any]:
    """Returns the run's numbers after each of `steps`, in the form of a golden file.

    control: whether to also measure how much the numbers change if the rows are in another order.
    """
    config = replace(
        resolved(*flags), replicas=replicas, strategy="auto", expect_devices=0, jit_compile="false"
    )
    setup = _build_start(config)
    states = list(_states(setup, steps))
    content: dict[str, Any] = {
        "flags": [*flags],
        "steps": [*steps],
        "names": [
            getattr(variable, "path", variable.name)
            for variable in variables_of(setup.model).values()
        ],
        "sizes": [int(values.size) for values in states[-1][0].values()],
        "learning_rate": config.learning_rate,
        "moments": {str(step): moment(*state) for step, state in zip(steps, states, strict=True)},
    }
    if control:
        content["control"] = {}
        others = [list(_states(_build_start(config), steps, seed)) for seed in PERMUTATION_SEEDS]
        for step, (values, losses), *reordered in zip(steps, states, *others, strict=True):
            norms = [
                np.max(
                    [
                        np.linalg.norm(np.subtract(value, other[name], dtype=np.float64))
                        for other, _ in reordered
                    ]
                )
                for name, value in values.items()
            ]
            apart = max(losses_apart(losses, other_losses) for _, other_losses in reordered)
            rounded = [float(f"{norm:.1e}") for norm in norms]
            content["control"][str(step)] = {"tensors": rounded, "losses": float(f"{apart:.1e}")}
    return content


def _build_start(config: TrainConfig) -> TrainingSetup:
    """Builds data and model, with the weights that a run has before its first step."""
    setup = build_setup(config, make_replicas(config))
    starting_weights(config, setup)
    return setup


def _states(
    setup: TrainingSetup, steps: Sequence[int], order: int | None = None
) -> Iterator[State]:
    """Trains, and yields the state after each of `steps`. order: the seed of another order of rows,
    if any."""
    runner, rows = runner_and_rows(setup, order)
    variables = variables_of(setup.model)
    start = 0
    with setup.dataset.reading():
        for step in steps:
            logs = runner(rows, start, step - start)
            start = step
            yield snapshot(variables), logs.means()
