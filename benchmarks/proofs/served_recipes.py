"""Proves that the models of all recipes and examples are served: `python -m benchmarks.proofs.served_recipes`.

All examples but that of KerasHub, which is no package of `dev`. Each is built, exported and loaded as a server does. 60
rows in 50 random splits must have the same bytes; those of a model of rows must be the bytes that `trainer.predict`
computes. Prints a line each; exits with 1 if one differs.
"""

import json
import random
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.own_runs import EXAMPLES, arguments_of
from trainer.base.settings.resolution import resolve
from trainer.data.sources import load_dataset
from trainer.measures import prediction
from trainer.models.construction import build_model
from trainer.run import saved_run
from trainer.run.export import export
from trainer.run.served_model import ServedModel
from trainer.run.training_setup import set_precision_and_seed
from trainer.user_code.interface import ModelInterface

ROWS, SPLITS = 60, 50


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yields each recipe, on the digits of the package, and each example, with the flags of its docstring."""
    for path in sorted(Path("trainer/recipes").glob("*.yaml")):
        small = (
            ["--weights=none", "--fine_tune_from=", "--fine_tune_after_steps=0", "--image_size=64"]
            if "efficientnet" in path.stem
            else []
        )  # they are downloaded
        yield path.stem, [f"--recipe={path.stem}", "--data=digits", *small]
    for name in EXAMPLES:
        yield name, arguments_of(name)


def served(flags: list[str], folder: Path) -> str:
    """Returns what was compared. Raises AssertionError if bytes differ."""
    config = resolve([flag for flag in flags if not flag.startswith("--job_dir")]).config
    set_precision_and_seed(config)
    dataset = load_dataset(config)
    built = build_model(config, dataset)
    image = dataset.image_shape if dataset.holds_images else ()
    export(built, folder, dataset.input_spec, image=image, class_names=dataset.class_names)
    model = ServedModel(folder, "run")
    if model.about.latent_dim:
        label = {"label": 1} if model.about.classes else {}
        rows = [model.row({"seed": seed, **label}) for seed in range(ROWS)]
    elif ModelInterface.of(built).sampler:  # a generator of the user's own, with inputs by name
        draw = np.random.default_rng(0)
        inputs = {
            name: draw.integers(0, 2, (ROWS, *(size or 1 for size in shape)))
            for name, (_, shape) in model.about.inputs.items()
        }
        rows = [model.row({name: values[at].tolist() for name, values in inputs.items()}) for at in range(ROWS)]
    else:
        x = tf.nest.flatten(dataset.train.first(ROWS)[0])
        rows = [tuple(np.asarray(leaf)[at] for leaf in x) for at in range(len(x[0]))]
    alone = [json.dumps(model.answers([row])[0]) for row in rows]
    shuffled = random.Random(0)
    for _ in range(SPLITS):
        order = shuffled.sample(range(len(rows)), len(rows))
        at = 0
        while at < len(order):
            taken = order[at : at + shuffled.randint(1, model.fixed_batch)]
            answers = model.answers([rows[index] for index in taken])
            assert [json.dumps(answer) for answer in answers] == [alone[index] for index in taken], "another batch"
            at += len(taken)
    how = f"{model.fixed_batch} rows a call, a row alone costs {model.cost_of_one:.1f}"
    if ModelInterface.of(built).sampler:
        return f"{how}: a generator"
    network = ModelInterface.of(built).templates()["model"]
    arrays = prediction.predict(network, saved_run._replicas(config), dataset.train, model.fixed_batch, dataset.as_fit)
    for index, answer in enumerate(alone):
        values = json.loads(answer)
        named = values if isinstance(values, dict) and arrays.keys() == values.keys() else {next(iter(arrays)): values}
        for name, value in named.items():
            same = np.array(value, arrays[name].dtype).tobytes() == arrays[name][index].tobytes()
            assert same, f"another answer than trainer.predict's: {name} of row {index}"
    return f"{how}: as trainer.predict"


def main() -> None:
    """Prints a line for each."""
    failed = 0
    for name, flags in ((name, flags) for name, flags in commands() if name in sys.argv[1:] or not sys.argv[1:]):
        keras.backend.clear_session()
        with tempfile.TemporaryDirectory() as folder:
            try:
                about: Any = served(flags, Path(folder, "model"))
            except Exception as error:  # of any model
                failed += 1
                about = f"FAILED: {type(error).__name__}: {error}"
                traceback.print_exc()
        print(f"{name}: {about}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
