"""Tries on a user's own model and data, before training, what a run does only after hours: evaluation, sample, save."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.log import warn_once
from trainer.base.run_files.serving_file import Servable
from trainer.base.settings.train_config import DATA_SOURCES, MODELS, TrainConfig
from trainer.data.sample_grids import as_uint8, noise, noise_and_labels
from trainer.data.sources import is_named
from trainer.invariance.compat import all_layers
from trainer.invariance.sharded_slots import parts_of_others_as_zeros
from trainer.measures.evaluation import Evaluation
from trainer.run.export import export, load_template, model_inputs, named_leaves, random_rows
from trainer.run.training_setup import TrainingSetup
from trainer.training.checkpoint import check_fits, read_checkpoint, snapshot, variables_of, write_checkpoint
from trainer.user_code.interface import ModelInterface, numbers_of, scalars_of, symbolic_inputs
from trainer.user_code.mistakes import as_user_mistake, message_of

_ROWS, _SAVED_ROWS = 2, 8
DIFFERS = "what is saved is not the model in memory: it differs"
# How far apart numbers may be that are the same but for rounding: what is saved computes in float32 where a run of
# 16 bits does not.
_SAME = {"float64": 1e-8, "float32": 5e-3, "mixed_bfloat16": 0.1, "mixed_float16": 0.1}


def has_own_parts(config: TrainConfig) -> bool:
    """Returns whether the model or the data come from a function of the user's."""
    return config.model not in MODELS or (is_named(config.data) and config.data not in DATA_SOURCES)


def rehearse(setup: TrainingSetup, evaluate: Evaluation | None) -> None:
    """Evaluates one batch, draws two samples, writes a checkpoint and the model to a temporary folder, and loads them.

    The first step follows at once, so it is not tried here. Raises UserError that names what fails. Changes no weight.
    """
    model, interface = setup.model, ModelInterface.of(setup.model)
    with tempfile.TemporaryDirectory(prefix="trainer-rehearsal-") as name:
        folder = Path(name)
        parts: dict[str, Callable[[], object]] = {"checkpoint": lambda: _checkpoint(model, folder / "state")}
        if evaluate:
            parts["evaluation"] = evaluate.try_one_batch
        if sampler := interface.sampler:
            seed, kind = setup.config.seed, (sampler.latent_dim, keras.config.floatx())
            drawn: tuple[Any, ...] = (noise(seed, _ROWS, *kind),)
            if interface.generated_classes:
                drawn = noise_and_labels(seed, 1, range(_ROWS), *kind)
            parts["sample"] = lambda: as_uint8(sampler.sample(*drawn))
        parts["export"] = lambda: _export(setup, folder / "exported")
        for part, attempt in parts.items():
            try:
                attempt()
            except UserError:
                raise
            except Exception as error:
                raise as_user_mistake(error) or UserError(
                    f"model={setup.config.model}: its {part} fails, tried before training: {message_of(error)} "
                    "(--verbose prints the whole traceback)"
                ) from error


def _checkpoint(model: keras.Model, folder: Path) -> None:
    variables = variables_of(model)
    if not variables:
        raise UserError("the model has no variables: build its layers, or call it on some rows, before it is returned")
    write_checkpoint(folder, snapshot(variables), {"step": 0, "state": {}})
    _, values = read_checkpoint(folder)
    check_fits(variables, {name: tf.TensorShape(value.shape) for name, value in values.items()}, "checkpoint")


def _export(setup: TrainingSetup, folder: Path) -> None:
    """Writes the model, and loads it as somebody would who has it alone. Raises UserError if it is another model then.

    Keras saves classes that it cannot load without their code: a warning tells of a model.keras like that.
    """
    with parts_of_others_as_zeros():
        export(setup.model, folder, setup.dataset.input_spec, save_optimizer=setup.config.save_optimizer)
    if (outcome := compare_saved(setup, folder)).startswith(DIFFERS):
        raise UserError(
            f"model={setup.config.model}: {outcome}: Keras {keras.__version__} loses what it was made with: "
            "give it a registered class of your own with a get_config that has all arguments, or use another"
        )


def compare_saved(setup: TrainingSetup, folder: Path) -> str:
    """Compares what `export` wrote to `folder` with the model in memory, on a few rows; returns one line.

    It begins with DIFFERS and names what differs, or says that all is equal, or why it was not compared: predictions,
    and where Keras alone can load the compiled model its loss and metrics; of a GAN, those of the generator.
    """
    interface = ModelInterface.of(setup.model)
    trained, tolerance = interface.templates()["model"], _SAME[setup.config.precision]
    is_whole, data = trained is setup.model, None
    if is_whole:
        count = next((leaf.shape[0] for leaf in symbolic_inputs(trained)), None) or _SAVED_ROWS
        data = setup.dataset.as_fit(tf.nest.map_structure(tf.convert_to_tensor, setup.dataset.train.first(count)))
        x = data[0] if isinstance(data, tuple) else data
    else:  # a generator, of noise and perhaps of labels
        inputs_of = dict(named_leaves(model_inputs(trained)))
        drawn = [tf.constant(column) for column in random_rows(inputs_of, Servable({}, {}, {}), _SAVED_ROWS)]
        x = drawn if len(drawn) > 1 else drawn[0]
    with tf.device("CPU:0"):
        served = tf.saved_model.load(str(folder / "saved_model"))
        inputs = _as_served(x, served.serve.input_signature)
        answers = served.serve(*inputs) if inputs else None
        loaded, why = None, "there is no model.keras"
        if (folder / "model.keras").exists():
            try:
                loaded = load_template(folder / "model.keras", "model.keras", compiled=True)
            except UserError as error:
                why = str(error)
                warn_once(
                    f"{error}: register its classes (https://keras.io/guides/serialization_and_saving/#custom-objects)"
                    ", or only python -m trainer.predict can load it, with the function of this run"
                )
        if (loaded is None and answers is None) or not inputs:
            return f"not compared: {why if inputs else 'the rows do not fit its inputs'}"
        expected, again = _called(trained, x, 2)
        if _apart(expected, again, tolerance):
            return "not compared: two calls on the same rows differ, as the model draws at random when it is called"
        if loaded is None:
            if _apart(interface.serve(expected), answers, tolerance):
                return f"{DIFFERS} in the predictions of saved_model/"
            return "saved_model/ predicts as the model in memory"
        if _apart(expected, _called(loaded, x, 1)[0], tolerance):
            return f"{DIFFERS} in its predictions{_first_layer_apart(trained, loaded, x, tolerance)}"
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


def _first_layer_apart(trained: keras.Model, loaded: keras.Model, x: Any, tolerance: float) -> str:
    """Returns the name of the first layer whose outputs differ, "" for models that have no graph of layers."""
    with suppress(Exception):  # what is only for a name must not hide the difference
        for before, after in zip(trained.layers, loaded.layers, strict=True):
            values = [keras.Model(model.inputs, layer.output)(x, training=False)
                      for model, layer in ((trained, before), (loaded, after))]  # fmt: skip
            if _apart(values[0], values[1], tolerance):
                return f", first after {before.name} ({type(before).__name__})"
    return ""


def _tested(model: keras.Model, data: Any) -> dict[str, float]:
    """Returns what test_step says of one batch; no variable changes."""
    weights = [(weight, weight.value) for weight in model.weights if weight.regularizer is not None]
    with keras.StatelessScope(weights):  # in which Keras only regularizes weights whose values are given
        model.reset_metrics()
        return numbers_of(scalars_of(model.test_step(data)))


def _as_served(x: Any, signature: Sequence[tf.TensorSpec]) -> list[Any]:
    """Returns the tensors that the served model takes, in the order of its signature; [] if x does not hold them."""
    leaves = tf.nest.flatten(x)
    named = x if isinstance(x, dict) else {spec.name: leaf for spec, leaf in zip(signature, leaves, strict=False)}
    pairs = [(named[spec.name], spec) for spec in signature if spec.name in named]
    if len(pairs) < len(signature) or not all(spec.shape.is_compatible_with(leaf.shape) for leaf, spec in pairs):
        return []
    return [leaf if leaf.dtype == spec.dtype else tf.cast(leaf, spec.dtype) for leaf, spec in pairs]
