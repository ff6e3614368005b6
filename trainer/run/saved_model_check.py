"""Checks an export: loads what `export` wrote, calls it on a few rows, and compares it with the
model in memory."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.log import warn_once
from trainer.base.run_files.serving_file import Servable
from trainer.measures.prediction import outputs_of, outputs_of_calls
from trainer.run.export import load_template, model_inputs, named_leaves, random_rows
from trainer.run.training_setup import TrainingSetup
from trainer.user_code.interface import ModelInterface, numbers_of, scalars_of, symbolic_inputs

_ROWS = 8
DIFFERS = "what is saved is not the model in memory: it differs"
# Relative tolerance by precision, for rounding alone. It is wide for 16 bits, since a saved model
# computes in float32.
_TOLERANCES = {"float64": 1e-8, "float32": 5e-3, "mixed_bfloat16": 0.1, "mixed_float16": 0.1}


def compare_saved(setup: TrainingSetup, folder: Path) -> str:
    """Compares what `export` wrote to `folder` with the model in memory, on a few rows.

    Returns one line. The line starts with DIFFERS and names what differs, or says that all agrees,
    or why nothing was compared. Compared are predictions (of a GAN, those of its generator) and, if
    Keras loads the model compiled, its loss and metrics.
    """
    interface = ModelInterface.of(setup.model)
    trained = interface.templates()["model"]
    tolerance = _TOLERANCES[setup.config.precision]
    is_whole = trained is setup.model

    # The rows are the first ones of the data or, for a generator, noise and perhaps labels.
    data = None
    if is_whole:
        count = next((leaf.shape[0] for leaf in symbolic_inputs(trained)), None) or _ROWS
        parts = tf.nest.map_structure(tf.convert_to_tensor, setup.dataset.train.first(count))
        data = setup.dataset.step_data(parts)
        x = data[0] if isinstance(data, tuple) else data
    else:
        inputs = dict(named_leaves(model_inputs(trained)))
        columns = random_rows(inputs, Servable({}, {}, {}), _ROWS)
        tensors = [tf.constant(column) for column in columns]
        x = tensors if len(tensors) > 1 else tensors[0]
    with tf.device("CPU:0"):
        loaded = None
        if (folder / "model.keras").exists():
            try:
                loaded = load_template(folder / "model.keras", "model.keras", compiled=True)
            except UserError as error:
                warn_once(
                    f"{error}: register its classes"
                    " (https://keras.io/guides/serialization_and_saving/#custom-objects), or only"
                    " python -m trainer.predict can load it, with the function of this run"
                )

        # saved_model/ takes the inputs one by one, in the order of its signature: by their names,
        # or else in order.
        served = tf.saved_model.load(str(folder / "saved_model"))
        signature = served.serve.input_signature
        named = dict(named_leaves(x))
        if any(spec.name not in named for spec in signature):
            named = dict(zip((spec.name for spec in signature), named.values(), strict=False))
        pairs = [(named[spec.name], spec) for spec in signature if spec.name in named]
        fitting = [spec.shape.is_compatible_with(leaf.shape) for leaf, spec in pairs]
        if len(pairs) < len(signature) or not all(fitting):
            return "not compared: the rows do not fit its inputs"
        answers = served.serve(*(tf.cast(leaf, spec.dtype) for leaf, spec in pairs))

        # Predictions are compared first, if the model gives the same ones twice.
        expected, again = outputs_of_calls(trained, (x,), 2)
        if _differ(expected, again, tolerance):
            return (
                "not compared: two calls on the same rows differ, as the model draws at random when"
                " it is called"
            )
        if loaded is not None and _differ(expected, outputs_of(loaded, (x,)), tolerance):
            line = f"{DIFFERS} in its predictions"
            # The line names the first layer that differs, unless the model has no graph of layers.
            with suppress(Exception):
                for before, after in zip(trained.layers, loaded.layers, strict=True):
                    expected = keras.Model(trained.inputs, before.output)(x, training=False)
                    output = keras.Model(loaded.inputs, after.output)(x, training=False)
                    if _differ(expected, output, tolerance):
                        return f"{line}, first after {before.name} ({type(before).__name__})"
            return line
        if _differ(interface.serve(expected), answers, tolerance):
            return f"{DIFFERS} in the predictions of saved_model/"
        if loaded is None:
            return "saved_model/ predicts as the model in memory"
        if not (is_whole and loaded.compiled and isinstance(data, tuple) and len(data) > 1):
            return "model.keras predicts as the model in memory"

        # Then the loss and the metrics, of which only a whole, compiled model has any.
        before = _test_results(trained, data)
        after = _test_results(loaded, data)

    # With 16-bit arithmetic a metric that counts, such as accuracy, jumps by tiny differences:
    # compare only the loss.
    only_loss = tolerance >= _TOLERANCES["mixed_bfloat16"]
    names = [name for name in before.keys() & after.keys() if name == "loss" or not only_loss]
    if differing := sorted(name for name in names if _differ(before[name], after[name], tolerance)):
        kind = interface.loss if isinstance(interface.loss, str) else type(interface.loss).__name__
        which = f"its loss ({kind})" if differing == ["loss"] else ", ".join(differing)
        return (
            f"{DIFFERS} in {which}: {before[differing[0]]:.4g} before saving,"
            f" {after[differing[0]]:.4g} once loaded"
        )
    return "model.keras predicts and evaluates as the model in memory"


def _differ(before: Any, after: Any, tolerance: float) -> bool:
    """Returns whether two nests of numbers differ in shape or by more than the tolerance.

    It is relative to the largest number.
    """
    for pair in zip(keras.tree.flatten(before), keras.tree.flatten(after), strict=False):
        a, b = (np.asarray(keras.ops.convert_to_numpy(value), np.float64) for value in pair)
        largest = np.abs(a[np.isfinite(a)]).max(initial=1e-6)
        if a.shape != b.shape:
            return True
        if not np.allclose(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
            return True
    return False


def _test_results(model: keras.Model, data: Any) -> dict[str, float]:
    """Returns the numbers of test_step for one batch; no variable keeps a change."""
    weights = [(weight, weight.value) for weight in model.weights if weight.regularizer is not None]
    # Within the scope Keras only regularizes weights whose values are given here.
    with keras.StatelessScope(weights):
        model.reset_metrics()
        return numbers_of(scalars_of(model.test_step(data)))
