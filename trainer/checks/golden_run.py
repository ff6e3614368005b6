"""Measures the first steps of a run for a golden file: losses, weights and optimizers' slots after some steps.

The control of every comparison are the same steps with their rows in another order, which shows what rounding alone
changes. Steps are those of a real run, from `trainer.run.training_setup`; `trainer.golden` reads the result.
"""

import dataclasses
import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.base.run_files.job_files import write_json
from trainer.base.settings.own_settings import own_sources
from trainer.base.settings.train_config import TrainConfig
from trainer.checks.golden_file import losses_apart, moment
from trainer.cluster.cluster_spec import Cluster, read_cluster
from trainer.cluster.strategy import make_replicas
from trainer.invariance.step import StepContext
from trainer.run.training_setup import TrainingSetup, build_setup, starting_weights
from trainer.training.checkpoint import snapshot, variables_of
from trainer.training.steps import StepRunner

ORDERS = (7, 8)  # seeds of the orders of rows that make the control
# Processor features by which TensorFlow and its libraries choose kernels, the widest vectors first.
_INSTRUCTIONS = ("amx_tile", "avx512_bf16", "avx512f", "avx2", "avx", "sve", "asimd")
State = tuple[Mapping[str, npt.NDArray[Any]], Mapping[str, float]]  # variables by name, losses and metrics


def measure(config: TrainConfig, steps: Sequence[int], replicas: int, out: Path | str, *, control: bool) -> None:
    """Writes to `out` the run's numbers after each of `steps`, and what they depend on; only the chief writes.

    control: whether to also measure how much the numbers change if the rows are in another order.
    """
    config = dataclasses.replace(config, replicas=replicas, strategy="auto", expect_devices=0, jit_compile="false")
    cluster = read_cluster()
    setup = _build_start(config, cluster)
    states = list(_states(setup, steps))
    functions = (config.model, config.data, config.callbacks)
    files = dict(file for dotted in functions for file in own_sources(dotted))  # the user's own, by path in its package
    packages = ((package.metadata["Name"], package.version) for package in distributions())
    # The widest vector instructions of this processor, or its architecture.
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    instructions = next((name for name in _INSTRUCTIONS if name in line.split()), platform.machine())
    content: dict[str, Any] = {
        "names": [getattr(variable, "path", variable.name) for variable in variables_of(setup.model).values()],
        "sizes": [int(values.size) for values in states[-1][0].values()],
        "moments": {str(step): moment(*state) for step, state in zip(steps, states, strict=True)},
        "learning_rate": config.learning_rate,
        "data": setup.content,
        "sources": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(files.items())},
        "packages": dict(sorted((name.lower().replace("_", "-"), version) for name, version in packages if name)),
        "instructions": instructions,
    }
    if control:
        content["control"] = {}
        others = [list(_states(_build_start(config, cluster), steps, order)) for order in ORDERS]
        for step, (values, losses), *reordered in zip(steps, states, *others, strict=True):
            norms = [
                np.max([np.linalg.norm(np.subtract(value, other[name], dtype=np.float64)) for other, _ in reordered])
                for name, value in values.items()
            ]
            apart = max(losses_apart(losses, other_losses) for _, other_losses in reordered)
            rounded = [float(f"{norm:.1e}") for norm in norms]
            content["control"][str(step)] = {"tensors": rounded, "losses": float(f"{apart:.1e}")}
    if cluster.is_chief:
        write_json(Path(out), content)


def _build_start(config: TrainConfig, cluster: Cluster) -> TrainingSetup:
    """Builds data and model, with the weights that a run has before its first step."""
    setup = build_setup(config, make_replicas(config, cluster))
    starting_weights(config, setup)
    return setup


def _states(setup: TrainingSetup, steps: Sequence[int], order: int | None = None) -> Iterator[State]:
    """Trains, and yields the state after each of `steps`. order: the seed of another order of rows, if any."""
    runner, rows = runner_and_rows(setup, order)
    variables, start = variables_of(setup.model), 0
    with setup.dataset.reading():
        for step in steps:
            logs = runner(rows, start, step - start)
            start = step
            yield snapshot(variables), logs.means()


def runner_and_rows(
    setup: TrainingSetup, order: int | None = None, *, compiled: bool = False
) -> tuple[StepRunner, Any]:
    """Returns a step runner and its rows. order: the seed by which rows and draws of each micro-batch are permuted."""
    runner = setup.step_runner(compiled=compiled)
    if order is None:
        return runner, setup.rows_from(0)
    rows = setup.replicas.rows // setup.replicas.micro_batches
    permutation = np.random.default_rng(order).permutation(rows)

    def in_order(values: Any, axis: int = 0) -> Any:
        firsts = np.arange(0, values.shape[axis], rows)
        return tf.gather(values, (firsts[:, None] + permutation).ravel(), axis=axis)

    class Reordered(StepContext):
        def draw(self, *arguments: Any, **named: Any) -> Any:
            return in_order(super().draw(*arguments, **named))

        def draw_for_all(self, *arguments: Any, **named: Any) -> Any:
            drawn = super().draw_for_all(*arguments, **named)
            if not drawn.shape.rank or drawn.shape[0] is not None:
                return drawn
            whole = (rows, *drawn.shape[1:])  # only at run time is it known whether these are all rows
            return tf.cond(
                tf.equal(tf.shape(drawn)[0], rows), lambda: in_order(tf.ensure_shape(drawn, whole)), lambda: drawn
            )

    def permuted(*parts: Any) -> Any:  # (replicas, batches, rows, …)
        return tf.nest.map_structure(lambda part: in_order(part, axis=2), parts)

    runner.context = Reordered
    return runner, iter(setup.batches_from(0).map(permuted))
