"""Checks a saved model: what `export` wrote, loaded and called on a few rows, against the model in memory."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.log import warn_once
from trainer.base.run_files.serving_file import Servable
from trainer.invariance.internals import all_layers
from trainer.run.export import load_template, model_inputs, named_leaves, random_rows
from trainer.run.training_setup import TrainingSetup
from trainer.user_code.interface import ModelInterface, numbers_of, scalars_of, symbolic_inputs

_ROWS = 8
DIFFERS = "what is saved is not the model in memory: it differs"
# How far apart numbers may be that are the same but for rounding: what is saved computes in float32 where a run of
# 16 bits does not.
_SAME = {"float64": 1e-8, "float32": 5e-3, "mixed_bfloat16": 0.1, "mixed_float16": 0.1}


def compare_saved(setup: TrainingSetup, folder: Path) -> str:
    """Compares what `export` wrote to `folder` with the model in memory, on a few rows; returns one line.

    It begins with DIFFERS and names what differs, or says that all is equal, or why it was not compared: predictions,
    and where Keras alone can load the compiled model its loss and metrics; of a GAN, those of the generator.
    """
    interface = ModelInterface.of(setup.model)
    trained, tolerance = interface.templates()["model"], _SAME[setup.config.precision]
    is_whole, data = trained is setup.model, None
    if is_whole:
        count = next((leaf.shape[0] for leaf in symbolic_inputs(trained)), None) or _ROWS
        data = setup.dataset.as_fit(tf.nest.map_structure(tf.convert_to_tensor, setup.dataset.train.first(count)))
        x = data[0] if isinstance(data, tuple) else data
    else:  # a generator, of noise and perhaps of labels
        inputs_of = dict(named_leaves(model_inputs(trained)))
        drawn = [tf.constant(column) for column in random_rows(inputs_of, Servable({}, {}, {}), _ROWS)]
        x = drawn if len(drawn) > 1 else drawn[0]
    with tf.device("CPU:0"):
        served = tf.saved_model.load(str(folder / "saved_model"))
        # The rows as the served model takes them: in the order of its signature, by name if there are several.
        signature = served.serve.input_signature
        leaves = tf.nest.flatten(x)
        named = x if isinstance(x, dict) else {spec.name: leaf for spec, leaf in zip(signature, leaves, strict=False)}
        pairs = [(named[spec.name], spec) for spec in signature if spec.name in named]
        fits = len(pairs) == len(signature) and all(spec.shape.is_compatible_with(leaf.shape) for leaf, spec in pairs)
        if not fits:
            return "not compared: the rows do not fit its inputs"
        answers = served.serve(
            *(leaf if leaf.dtype == spec.dtype else tf.cast(leaf, spec.dtype) for leaf, spec in pairs)
        )
        loaded = None
        if (folder / "model.keras").exists():
            try:
                loaded = load_template(folder / "model.keras", "model.keras", compiled=True)
            except UserError as error:
                warn_once(
                    f"{error}: register its classes (https://keras.io/guides/serialization_and_saving/#custom-objects)"
                    ", or only python -m trainer.predict can load it, with the function of this run"
                )
        expected, again = _called(trained, x, 2)
        if _apart(expected, again, tolerance):
            return "not compared: two calls on the same rows differ, as the model draws at random when it is called"
        if loaded is None:
            if _apart(interface.serve(expected), answers, tolerance):
                return f"{DIFFERS} in the predictions of saved_model/"
            return "saved_model/ predicts as the model in memory"
        if _apart(expected, _called(loaded, x, 1)[0], tolerance):
            line = f"{DIFFERS} in its predictions"
            with suppress(Exception):  # a model without a graph of layers; the name must not hide the difference
                for before, after in zip(trained.layers, loaded.layers, strict=True):
                    expected = keras.Model(trained.inputs, before.output)(x, training=False)
                    if _apart(expected, keras.Model(loaded.inputs, after.output)(x, training=False), tolerance):
                        return f"{line}, first after {before.name} ({type(before).__name__})"
            return line
        if not (is_whole and loaded.compiled and isinstance(data, tuple) and len(data) > 1):
            return "model.keras predicts as the model in memory"
        before, after = _tested(trained, data), _tested(loaded, data)
    # Counts, as those of an accuracy, jump where 16-bit numbers differ a little: then the loss alone is compared.
    names = [name for name in before.keys() & after.keys() if name == "loss" or tolerance < _SAME["mixed_bfloat16"]]
    if apart := sorted(name for name in names if _apart(before[name], after[name], tolerance)):
        kind = interface.loss if isinstance(interface.loss, str) else type(interface.loss).__name__
        which = f"its loss ({kind})" if apart == ["loss"] else ", ".join(apart)
        return f"{DIFFERS} in {which}: {before[apart[0]]:.4g} before saving, {after[apart[0]]:.4g} once loaded"
    return "model.keras predicts and evaluates as the model in memory"


def _called(model: keras.Model, x: Any, times: int) -> list[Any]:
    """Returns what each of some calls predicts; no variable changes in the end.

    A stateful layer, whose state is not saved, begins each call anew.
    """
    predictions = []
    with keras.StatelessScope():
        for _ in range(times):
            for layer in all_layers(model):
                if getattr(layer, "stateful", False):
                    layer.reset_state()
            predictions.append(model(x, training=False))
    return predictions


def _apart(before: Any, after: Any, tolerance: float) -> bool:
    """Returns whether two nests of numbers differ by more than rounding."""
    for pair in zip(keras.tree.flatten(before), keras.tree.flatten(after), strict=False):
        a, b = (np.asarray(keras.ops.convert_to_numpy(value), np.float64) for value in pair)
        largest = np.abs(a[np.isfinite(a)]).max(initial=1e-6)
        if a.shape != b.shape or not np.allclose(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
            return True
    return False


def _tested(model: keras.Model, data: Any) -> dict[str, float]:
    """Returns what test_step says of one batch; no variable changes."""
    weights = [(weight, weight.value) for weight in model.weights if weight.regularizer is not None]
    with keras.StatelessScope(weights):  # in which Keras only regularizes weights whose values are given
        model.reset_metrics()
        return numbers_of(scalars_of(model.test_step(data)))
