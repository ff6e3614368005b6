"""Measures programs of many steps on this machine, against a step a program and Keras `fit` with 50 steps per execution
and XLA: `python -m benchmarks.looped`.

Small models at batch 32, of which a step takes less time than its start. Model, optimizer, metrics and rows are the
same.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from benchmarks.fit_clock import Clock
from benchmarks.processes import Run
from benchmarks.runner import alternate, make_parser, print_table, program, save, table
from benchmarks.trainer_loop import TrainingLoop, peer_batches, setup_of
from trainer.base.settings.train_config import TrainConfig
from trainer.run.export import plain_copy
from trainer.run.step_program import MOST_STEPS
from trainer.run.training_setup import TrainingSetup

CASES = {
    "mlp": ["--model=mlp", "--data=digits", "--global_batch_size=32", "--learning_rate_schedule=constant"],
    "table": ["--model=benchmarks.looped:regression", "--data=benchmarks.looped:columns", "--global_batch_size=32"],
}
PARSER = make_parser(__doc__, repeats=5, seconds=2.0)


def columns(config: TrainConfig) -> Any:
    """Returns 2,048 rows of eight numbers, and one number for each."""
    x = np.random.default_rng(0).normal(size=(2048, 8))
    return x, np.sin(x.sum(1))


def regression(config: TrainConfig, dataset: Any) -> keras.Model:
    """Returns a network of two hidden layers."""
    hidden = [keras.layers.Dense(64, "relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(config.learning_rate), loss="mse", metrics=["mae"])
    return model


def fitted(setup: TrainingSetup) -> Run:
    """Returns Keras `fit` on a copy of the model, as a function of a multiple of 50 steps."""
    model, clock = plain_copy(setup.model), Clock()
    how = {"steps_per_execution": MOST_STEPS, "jit_compile": True}
    model.compile_from_config({**setup.model.get_compile_config(), **how})
    batches = peer_batches(setup, 1).map(lambda *parts: setup.dataset.as_fit(tuple(part[0] for part in parts)))

    def run(steps: int) -> float:
        model.fit(batches, steps_per_epoch=steps, verbose=0, callbacks=[clock])
        return clock.seconds

    return run


def rate_of(run: Run, seconds: float) -> Callable[[], float]:
    """Warms up; returns the function that measures steps a second, for about so long."""
    run(MOST_STEPS)
    steps = MOST_STEPS * max(2, round(seconds / run(2 * MOST_STEPS) * 2))
    return lambda: steps / run(steps)


@program
def main() -> None:
    """Prints a table of steps a second for each case and saves the raw numbers."""
    options, raw = PARSER.parse_args(), {}
    for case, flags in CASES.items():
        ways: dict[str, Run] = {}
        for name, steps in (("50 steps a program", MOST_STEPS), ("a step a program", 1)):
            setup = setup_of(*flags)
            ways[name] = TrainingLoop(setup, setup.step_runner(compiled=True, steps_per_program=steps))
        ways["Keras fit, 50 steps per execution, XLA"] = fitted(setup_of(*flags))
        raw[case] = alternate({name: rate_of(run, options.seconds) for name, run in ways.items()}, options.repeats)
        print_table(f"{case}, batch 32", table(raw[case], "steps/s"))
    save("looped", steps_per_second=raw)
