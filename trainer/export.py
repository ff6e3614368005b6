"""The template model: the plain Keras model, free of strategy and of this package, in three formats."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from trainer.storage import whole_folder


def export(model: keras.Model, folder: Path) -> None:
    """Writes `folder` whole: model.keras, model.h5, saved_model/, and what else `model.templates()` names (.keras)."""
    templates = model.templates() if hasattr(model, "templates") else {"model": model}
    with whole_folder(folder) as beside:
        for name, trained in templates.items():
            plain_copy(trained).save(beside / f"{name}.keras")
        template = plain_copy(templates["model"])
        _save_h5(template, beside / "model.h5")
        _save_for_serving(template, getattr(model, "serve", lambda outputs: outputs), beside / "saved_model")


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
    return copy


def _plain_layer(layer: keras.layers.Layer) -> keras.layers.Layer:
    if isinstance(layer, keras.Model):
        return plain_copy(layer)
    if hasattr(layer, "plain"):  # one of ours, which needs the step that it runs in
        return layer.plain()
    config = layer.get_config()
    if "synchronized" in config:
        config["synchronized"] = False
    if "dtype" in config:
        config["dtype"] = layer.dtype_policy.variable_dtype
    return type(layer).from_config(config)


def _save_h5(template: keras.Model, path: Path) -> None:
    absl = logging.getLogger("absl")  # Keras calls the format legacy at each save: we write it beside the newer ones
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        template.save(path)
    finally:
        absl.setLevel(level)


def _save_for_serving(template: keras.Model, serve: Callable[[Any], Any], folder: Path) -> None:
    signature = [tf.TensorSpec(each.shape, each.dtype, name=each.name) for each in template.inputs]
    archive = keras.export.ExportArchive()
    archive.track(template)
    one = len(signature) == 1
    archive.add_endpoint("serve", lambda *given: serve(template(given[0] if one else list(given))), signature)
    archive.write_out(str(folder), verbose=False)
