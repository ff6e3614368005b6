"""Measures training from a list of examples against training from the same arrays: `python -m benchmarks.own_rows`.

The network is that of the recipe mlp at batch 100, as a user's own compiled model.
"""

from functools import partial
from typing import Any

import keras
import numpy as np

from benchmarks.runner import compare, make_parser, program, save
from benchmarks.trainer_loop import TrainingLoop, setup_of
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset

STEPS = 200
PARSER = make_parser(__doc__, repeats=5)


def arrays(config: TrainConfig) -> tuple[Any, Any]:
    """Returns 5,000 images, (28, 28) uint8, and their labels."""
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (5000, 28, 28), np.uint8), draw.integers(0, 10, 5000)


def rows(config: TrainConfig) -> list[Any]:
    """Returns the same as a list of (image, label)."""
    return [*zip(*arrays(config), strict=True)]


def build(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Returns a compiled classifier with two hidden layers of 512 units."""
    hidden = [keras.layers.Dense(512, activation="relu") for _ in range(2)]
    flat = [keras.Input((28, 28)), keras.layers.Rescaling(1 / 255), keras.layers.Flatten()]
    model = keras.Sequential([*flat, *hidden, keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


@program
def main() -> None:
    """Prints the table and saves the raw numbers."""
    options = PARSER.parse_args()
    own = ["--model=benchmarks.own_rows:build", "--global_batch_size=100", f"--steps={10**6}"]
    loops = {
        name: TrainingLoop(setup_of(*own, f"--data=benchmarks.own_rows:{function}"))
        for name, function in {"a list of examples": "rows", "the same arrays": "arrays"}.items()
    }
    for loop in loops.values():
        loop(STEPS)  # traces
    candidates = {name: partial(loop, STEPS) for name, loop in loops.items()}
    save("own_rows", seconds=compare(f"{STEPS} steps of an mlp at batch 100", candidates, options.repeats))
