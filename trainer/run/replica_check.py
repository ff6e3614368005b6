"""Compares a few steps of a run on one and on two replicas of this machine's CPU, in float64: weights and losses."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.invariance.layers import depends_on_replicas
from trainer.run.build import build_setup
from trainer.user_code.interface import ModelInterface

COMPARED_STEPS = 5
# Operations that draw from TensorFlow's own state.
_DRAWS = {
    "RandomStandardNormal": "tf.random.normal", "RandomUniform": "tf.random.uniform",
    "RandomUniformInt": "tf.random.uniform", "TruncatedNormal": "tf.random.truncated_normal",
    "RandomGamma": "tf.random.gamma", "RandomPoissonV2": "tf.random.poisson", "RandomShuffle": "tf.random.shuffle",
    "Multinomial": "tf.random.categorical",
}  # fmt: skip
TOLERANCE = 1e-10  # relative L2 norm of a weight tensor, far above float64 rounding


def compare(config: TrainConfig) -> list[str]:
    """Returns what differs between one and two replicas and what to change; an empty list if nothing differs."""
    (alone, logs, _), (together, logs_of_two, draws) = (_steps(config, replicas) for replicas in (1, 2))
    # A weight without effect (a bias before batch norm) moves by rounding alone, of which Adam's epsilon of 1e-7 makes
    # up to 1e-8 of an update: compare it with a hundred of them.
    moved = 100 * COMPARED_STEPS * _learning_rate(alone, config)
    differences = [
        float(np.linalg.norm(a - b) / max(float(np.linalg.norm(a)), moved * np.sqrt(a.size), 1e-30))
        for a, b in zip(alone.get_weights(), together.get_weights(), strict=True)
    ]
    losses = {name: (logs.means()[name], logs_of_two.means()[name]) for name in logs.means()}
    uneven = {n: (a, b) for n, (a, b) in losses.items() if abs(a - b) > 1e-8 * max(abs(a), abs(b), 1e-30)}
    if max(differences) <= TOLERANCE and not uneven:
        return []
    worst = alone.weights[int(np.argmax(differences))].path
    difference = f"{worst} differs by {max(differences):.1e} (relative) after {COMPARED_STEPS} steps"
    problems = [f"{config.model}: on 2 replicas {difference}"]
    problems += [f"{name} is {a:.6g} on 1 replica and {b:.6g} on 2" for name, (a, b) in uneven.items()]
    ratios = {name: b / a for name, (a, b) in uneven.items() if a}
    return problems + list(_advice(together, ratios, draws, config.micro_batches))


def _learning_rate(model: Any, config: TrainConfig) -> float:
    optimizer = ModelInterface.of(model).optimizer
    return float(optimizer.learning_rate) if optimizer else config.learning_rate


def _steps(config: TrainConfig, replicas: int) -> tuple[Any, Any, list[str]]:
    """Returns the model after a few steps, what they returned, and TensorFlow's random functions in them."""
    config = dataclasses.replace(
        config, precision="float64", replicas=replicas, strategy="auto", expect_devices=0, jit_compile="false"
    )
    setup = build_setup(config, make_replicas(config))
    with setup.dataset.reading():
        runner, rows = setup.step_runner(), setup.rows_from(0)
        return setup.model, runner(rows, 0, COMPARED_STEPS), sorted(_DRAWS.keys() & runner.operations(rows))


def _advice(model: Any, ratios: dict[str, float], draws: Sequence[str], micro_batches: int) -> Iterator[str]:
    """Yields the likely reasons why the steps of this model depend on replicas."""
    doubled = [name for name, ratio in ratios.items() if abs(ratio - 2) < 0.2]
    if doubled:
        yield (
            f"{doubled[0]} is about twice as large: divide its sum by the GLOBAL batch (current_step().mean(values)), "
            "not by the rows of one replica (reduce_mean)"
        )
    reasons = depends_on_replicas(model, replicas=2, micro_batches=micro_batches)
    if draws:
        functions = ", ".join(_DRAWS[operation] for operation in draws)
        reasons.append(
            f"the step draws by {functions}, whose numbers are others on each replica: use the function of "
            "keras.random of that name, or current_step()"
        )
    yield from reasons
    if not doubled and not reasons:
        yield "means over rows, random numbers and batch statistics must span the global batch: see current_step()"
