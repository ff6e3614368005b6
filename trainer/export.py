"""The template model: the plain Keras model, free of strategy and of this package, in three formats."""

import contextlib
import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from trainer.errors import UserError, reason
from trainer.log import log
from trainer.models.layers import refresh_normalization
from trainer.storage import whole_folder
from trainer.storage.tensorflow_errors import tensorflow_writing


def export(model: keras.Model, folder: Path, image_shape: tuple[int, int, int]) -> None:
    """Writes `folder` whole: model.keras, model.h5, saved_model/, and what else `model.templates()` names (.keras).

    `image_shape`: (height, width, channels) that a subclassed model takes; Keras cannot save such a one as HDF5.
    """
    templates = model.templates() if hasattr(model, "templates") else {"model": model}
    with whole_folder(folder) as beside:
        for name, trained in templates.items():
            plain_copy(trained).save(beside / f"{name}.keras")
        template = plain_copy(templates["model"])
        if _inputs(template):
            _save_h5(template, beside / "model.h5")
        else:
            log.warning("model.h5 is not written: Keras takes no subclassed model there; model.keras needs its class")
        serve = getattr(model, "serve", lambda outputs: outputs)
        _save_for_serving(template, serve, image_shape, beside / "saved_model")


def load_template_weights(model: keras.Model, path: Path) -> None:
    """Gives the networks of `model` the weights of saved template models; call it under the strategy's scope.

    `path`: the model.keras that `export` wrote; a GAN's other networks are read from the files beside it, where they
    are there, and its generator begins as its average. UserError where the weights do not fit.
    """
    templates = model.templates() if hasattr(model, "templates") else {"model": model}
    weights = _weights_of(path)
    if _shapes(weights) != _shapes(templates["model"].weights):
        raise UserError(f"initial_model={path}: its weights do not fit this model: give the settings it was made with")
    for name, network in templates.items():
        beside = path.with_name(f"{name}{path.suffix}")
        own = _weights_of(beside) if name != "model" and beside.exists() else weights
        if _shapes(own) == _shapes(network.weights):
            network.set_weights(own)


def _weights_of(path: Path) -> list[Any]:
    try:
        return list(keras.models.load_model(path, compile=False, safe_mode=True).get_weights())
    except Exception as error:  # whatever Keras makes of a file that is not a model
        raise UserError(f"initial_model={path}: cannot be loaded as a model.keras: {reason(error)}") from error


def _shapes(weights: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in weights]


def plain_copy(model: keras.Model) -> keras.Model:
    """A copy with the same weights, outside any strategy, with plain batch norm and no 16-bit arithmetic.

    A subclassed model, which Keras cannot take apart, is returned as it is.
    """
    compiled, model.compiled = model.compiled, False  # a template is no one's training state
    try:
        copy = keras.models.clone_model(model, clone_function=_plain_layer)
    except ValueError:
        return model
    finally:
        model.compiled = compiled
    copy.set_weights(model.get_weights())
    refresh_normalization(copy)
    return copy


def _plain_layer(layer: keras.layers.Layer) -> keras.layers.Layer:
    if isinstance(layer, keras.Model):
        return plain_copy(layer)
    if hasattr(layer, "plain"):  # one of ours, which needs the step that it runs in
        layer = layer.plain()
    config = layer.get_config()
    if "synchronized" in config:
        config["synchronized"] = False
    if "dtype" in config:
        config["dtype"] = layer.dtype_policy.variable_dtype
    return type(layer).from_config(config)


def _save_h5(template: keras.Model, path: Path) -> None:
    # HDF5 crashes where the disk fills up: the room, for the weights and what it writes around them, is proved first.
    path.write_bytes(bytes(8 * template.count_params() + 64 * 1024))
    absl = logging.getLogger("absl")  # Keras calls the format legacy at each save: we write it beside the newer ones
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        template.save(path)
    finally:
        absl.setLevel(level)


def _inputs(template: keras.Model) -> list[Any]:
    """The symbolic inputs; none of a subclassed model."""
    return getattr(template, "inputs", None) or []


def _save_for_serving(
    template: keras.Model, serve: Callable[[Any], Any], image_shape: tuple[int, int, int], folder: Path
) -> None:
    images = tf.TensorSpec((None, *image_shape), keras.config.floatx(), name="images")
    signature = [tf.TensorSpec(each.shape, each.dtype, name=each.name) for each in _inputs(template)] or [images]
    archive = keras.export.ExportArchive()
    archive.track(template)
    one = len(signature) == 1
    archive.add_endpoint("serve", lambda *given: serve(template(given[0] if one else list(given))), signature)
    with tensorflow_writing(folder), contextlib.redirect_stdout(io.StringIO()):  # it prints what it wrote
        archive.write_out(str(folder))
