"""Exports the template model, a plain Keras model that needs neither a strategy nor this package,
in three formats.

model.keras is compiled like the trained model if Keras can load that by itself, with or without the
optimizer's state.
"""

import io
import json
import logging
import re
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError, reason
from trainer.base.log import warn_once
from trainer.base.run_files.serving_file import Servable, write_servable
from trainer.base.storage import atomic_folder
from trainer.invariance.internals import all_layers
from trainer.measures.prediction import outputs_of
from trainer.reporting.error_lines import tensorflow_writing
from trainer.user_code.interface import ModelInterface, output_names, symbolic_inputs
from trainer.user_code.mistakes import where_raised

# Keras warns at each save that HDF5 is a legacy format.
logging.getLogger("absl").addFilter(lambda record: "as an HDF5 file" not in record.getMessage())


def export(
    model: keras.Model,
    folder: Path,
    input_spec: Any,
    *,
    save_optimizer: bool = False,
    image: tuple[int, ...] = (),
    class_names: tuple[str, ...] = (),
) -> None:
    """Writes the exported model to `folder` atomically.

    Its files: model.keras, model.h5, saved_model/, further templates (.keras) and serving.json.
    model.h5 is left out for what HDF5 cannot hold: a subclassed model, a vocabulary. If a class
    lacks the get_config that Keras needs, model.weights.h5 takes the place of model.keras.
    `input_spec`: a tf.TensorSpec or a nest of them, for a subclassed model, which has no symbolic
    inputs. `save_optimizer`: whether model.keras also holds the state of the optimizer. `image`:
    the shape of an image, if the data are images; it and `class_names` go into serving.json.
    """
    interface = ModelInterface.of(model)
    templates = interface.templates()
    with atomic_folder(folder) as beside:
        copies = {name: plain_copy(trained) for name, trained in templates.items()}
        template = copies["model"]
        compiled: AbstractContextManager[None] = nullcontext()
        if templates["model"] is model:  # not a part of it, such as a generator
            compiled = compiled_as(template, model, save_optimizer=save_optimizer)
        with compiled:
            for name, network in copies.items():
                _save(network, beside / f"{name}.keras")
        _save_h5(template, beside / "model.h5")
        _save_for_serving(template, interface, input_spec, beside / "saved_model")
        # The rest describes the model to servers and the serving verbs, in serving.json.
        inputs = named_leaves(model_inputs(template, input_spec))
        outputs = keras.tree.flatten(template.outputs) if symbolic_inputs(template) else []
        names = ["predictions"] if len(outputs) == 1 else output_names(template)
        # The loss tells whether the scores of classes are logits.
        loss = interface.loss
        scores = ""
        if class_names and [tuple(leaf.shape[1:]) for leaf in outputs] == [(len(class_names),)]:
            if isinstance(
                loss,
                keras.losses.SparseCategoricalCrossentropy | keras.losses.CategoricalCrossentropy,
            ):
                scores = "logits" if loss.from_logits else "probabilities"
            elif loss in ("sparse_categorical_crossentropy", "categorical_crossentropy"):
                scores = "probabilities"
        # A generator is a network whose inputs are noise and, if it has classes, a label.
        classes = interface.generated_classes
        sampler = interface.sampler if len(inputs) == 1 + bool(classes) else None
        write_servable(
            beside,
            inputs=_specs(inputs),
            outputs=_specs(zip(names, outputs, strict=False)),
            image=image if len(inputs) == 1 and len(inputs[0][1].shape) == 4 else (),
            class_names=class_names,
            latent_dim=sampler.latent_dim if sampler else 0,
            classes=classes if sampler else 0,
            scores=scores,
        )


def _specs(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns each tensor's type and the shape of one row, by name, as serving.json has them."""
    return {name: (tf.as_dtype(leaf.dtype).name, list(leaf.shape[1:])) for name, leaf in named}


def _save(network: keras.Model, path: Path) -> None:
    """Saves a network, or only its weights, with a warning, if a class lacks a get_config."""
    try:
        network.save(path)
    except (NotImplementedError, TypeError) as error:
        if where_raised(error):
            raise
        path.unlink(missing_ok=True)
        weights = path.with_suffix(".weights.h5")
        warn_once(
            f"{path.name} is not written: {reason(error).partition(' Please')[0]}: give that class"
            " a get_config whose values JSON can hold"
            " (https://keras.io/guides/serialization_and_saving/#custom-objects); until then"
            f" {weights.name} has its weights, and saved_model/ serves it"
        )
        network.save_weights(weights)


def load_template_weights(model: keras.Model, path: Path, origin: str = "") -> None:
    """Sets the weights of the model's networks from saved template models.

    Call it under the strategy's scope. `path`: the model.keras that `export` wrote. A GAN's other
        networks are read from the files beside it, if they exist; its generator starts from the
        saved average. Raises UserError that names `origin` if the weights do not fit.
    """
    origin = origin or f"initial_model={path}"
    templates = ModelInterface.of(model).templates()
    try:
        template = load_template(path, origin)
    # A class may be unknown here; the weights alone may still load.
    except UserError:
        with suppress(Exception):  # Keras raises many types of errors
            templates["model"].load_weights(path)
            return
        raise
    for name, network in templates.items():
        beside = path.with_name(f"{name}{path.suffix}")
        saved = load_template(beside, origin) if name != "model" and beside.exists() else template
        copied = _copy_values(_without_lora(saved), _without_lora(network))
        if name == "model" and not copied:
            raise UserError(
                f"{origin}: its weights do not fit this model: use the settings of its run"
            )


def _copy_values(sources: list[Any], targets: list[Any]) -> bool:
    """Copies the values of variables to others, and returns whether their shapes allow it."""
    if [source.shape for source in sources] != [target.shape for target in targets]:
        return False
    for source, target in zip(sources, targets, strict=True):
        target.assign(keras.ops.convert_to_numpy(source))
    return True


def _without_lora(network: keras.Model) -> list[Any]:
    """Returns the weights without LoRA's matrices.

    A template has none, and those of a new model add nothing.
    """
    lora = set()
    for layer in all_layers(network):
        if getattr(layer, "lora_enabled", False):
            lora |= {id(weight) for weight in layer.weights if weight.name.startswith("lora_")}
    return [weight for weight in network.weights if id(weight) not in lora]


def load_template(path: Path, origin: str, *, compiled: bool = False) -> keras.Model:
    """Loads the model in a .keras file that `export` wrote.

    compiled: whether to compile it with the loss, metrics and optimizer that the file holds, if
        any. Raises UserError that names `origin` if that fails.
    """
    try:
        with warnings.catch_warnings():
            # Keras warns of what the file lacks, of which the export has warned already.
            warnings.simplefilter("ignore")
            return keras.models.load_model(path, compile=compiled, safe_mode=True)
    except Exception as error:  # Keras raises many types of errors for a file that is not a model
        unknown = re.search(r"Could not locate (class|function) '[^']*'", str(error))
        raise UserError(
            f"{origin}: Keras cannot load it: {unknown[0] if unknown else reason(error)}"
        ) from error


def plain_copy(model: keras.Model) -> keras.Model:
    """Returns a copy without strategy and synchronized batch norm, LoRA merged.

    It is of float32, or float64 for a float64 model. A model that cannot be
    copied, such as a subclassed one, is returned itself, and so is one whose copy would lack its
    predict_step.
    """
    # Copies are kept by the id of the layer, as networks within the model may share one.
    copies = {}

    def copy_of(layer: keras.layers.Layer) -> keras.layers.Layer:
        if id(layer) not in copies and isinstance(layer, keras.Model):
            copies[id(layer)] = _cloned(layer, copy_of)
        elif id(layer) not in copies:
            # A layer of this package has plain(), which returns the Keras layer that stands for it
            # in a template.
            plain = layer.plain() if hasattr(layer, "plain") else layer
            config = plain.get_config()
            # save_own_variables merges LoRA into the kernel
            for name in ("lora_rank", "lora_alpha"):
                config.pop(name, None)
            if "synchronized" in config:
                config["synchronized"] = False
            if "dtype" in config:
                config["dtype"] = plain.dtype_policy.variable_dtype
            copies[id(layer)] = type(plain).from_config(config)
        return copies[id(layer)]

    copy = _cloned(model, copy_of)
    if copy is model or type(copy).predict_step is not type(model).predict_step:
        return model

    # Networks within the model may share inputs, and their copies do not.
    def without_inputs(network: keras.Model) -> list[keras.layers.Layer]:
        layers = all_layers(network)
        return [layer for layer in layers if not isinstance(layer, keras.layers.InputLayer)]

    for trained, plain in zip(without_inputs(model), without_inputs(copy), strict=True):
        if plain is not trained:  # a subclassed model within was not copied
            _copy_learnt(trained, plain)
    return copy


def _copy_learnt(trained: keras.layers.Layer, plain: keras.layers.Layer) -> None:
    """Copies a layer's own weights and assets, such as a vocabulary, as Keras saves and loads."""
    values: dict[str, Any] = {}
    trained.save_own_variables(values)
    plain.load_own_variables(
        {name: keras.ops.convert_to_numpy(value) for name, value in values.items()}
    )
    if hasattr(trained, "save_assets"):
        with tempfile.TemporaryDirectory() as folder:
            trained.save_assets(folder)
            plain.load_assets(folder)


def _cloned(
    model: keras.Model, copy_of: Callable[[keras.layers.Layer], keras.layers.Layer]
) -> keras.Model:
    """Returns a clone of the model made of copies of its layers, or a subclassed model itself."""
    # An uncompiled model has no training state that clone_model would copy.
    compiled = model.compiled
    model.compiled = False
    try:
        return keras.models.clone_model(model, clone_function=copy_of)
    # Keras cannot make a function of a Lambda layer again by its name.
    except (TypeError, ValueError):
        return model
    finally:
        model.compiled = compiled


def _save_h5(template: keras.Model, path: Path) -> None:
    """Saves model.h5 if HDF5 can hold the model.

    It is uncompiled, since Keras cannot load a compiled one from HDF5.
    """
    saved = path.with_suffix(".keras")
    why = ""
    if not symbolic_inputs(template):
        why = "a subclassed model; model.keras needs its class"
    elif not saved.is_file():
        why = "a class without get_config"
    else:
        with zipfile.ZipFile(saved) as archive:
            if any(name.startswith("assets/") for name in archive.namelist()):
                why = "a vocabulary, or another file that a layer saves; model.keras has it"
    if why:
        # The rehearsal and the export both save, and one warning is enough.
        warn_once(f"model.h5 is not written: HDF5 cannot hold {why}")
        return
    # HDF5 crashes on a full disk, so an ordinary file of at least the same size is written first,
    # which raises.
    path.write_bytes(bytes(8 * template.count_params() + 64 * 1024))
    template.save(path, include_optimizer=False)


def _save_for_serving(
    template: keras.Model, interface: ModelInterface, input_spec: Any, folder: Path
) -> None:
    """Writes a SavedModel whose endpoint `serve` takes the model's inputs by name."""
    inputs = model_inputs(template, input_spec)
    leaves = named_leaves(inputs)
    signature = [tf.TensorSpec(leaf.shape, leaf.dtype, name=name) for name, leaf in leaves]
    archive = keras.export.ExportArchive()
    archive.track(template)

    def answers(*tensors: Any) -> Any:
        arguments = (keras.tree.pack_sequence_as(inputs, tensors),)
        return interface.serve(outputs_of(template, arguments))

    archive.add_endpoint("serve", answers, signature)
    with tensorflow_writing(folder), redirect_stdout(io.StringIO()):  # write_out prints a summary
        archive.write_out(str(folder))


def model_inputs(template: keras.Model, input_spec: Any = None) -> Any:
    """Returns the symbolic inputs as `call` takes them, or a subclassed model's `input_spec`."""
    if not symbolic_inputs(template):
        return input_spec
    return template.inputs[0] if isinstance(template, keras.Sequential) else template.input


def named_leaves(inputs: Any) -> list[tuple[str, Any]]:
    """Returns (name, leaf) for each leaf of a nest of inputs or rows.

    The name is its key, or its own name, or its position.
    """
    named = []
    for path, leaf in keras.tree.flatten_with_path(inputs):
        name = "_".join(map(str, path))
        if not any(isinstance(key, str) for key in path):
            name = getattr(leaf, "name", None) or "_".join(["inputs", *map(str, path)])
        named.append((name, leaf))
    return named


def random_rows(specs: Mapping[str, Any], about: Servable, rows: int) -> list[Any]:
    """Returns an array of random rows for each input.

    Integers are 0, text is always "a b", and images are random bytes.
    """
    draw = np.random.default_rng(0)

    def column(spec: Any) -> Any:
        shape = (rows, *(about.image or (size or 3 for size in spec.shape[1:])))
        dtype = np.dtype(tf.as_dtype(spec.dtype).as_numpy_dtype)
        if about.image:
            return draw.integers(0, 256, shape, np.uint8)
        if dtype.kind == "O":
            return np.full(shape, b"a b", object)
        if dtype.kind == "f":
            return draw.normal(size=shape).astype(dtype)
        return np.zeros(shape, dtype)

    return [column(spec) for spec in specs.values()]


_STEP_METHODS = ("train_step", "test_step", "compute_loss")


@contextmanager
def compiled_as(
    template: keras.Model, model: keras.Model, *, save_optimizer: bool
) -> Iterator[None]:
    """Compiles `template` with the loss and optimizer of the trained `model`, within the block.

    The template is a plain copy of the model. It stays uncompiled, with a warning that says why, if
    a process without the user's code could not load it compiled. save_optimizer: whether the state
    of the optimizer is copied, too. A subclassed model is its own template, and always keeps that
    state.
    """
    compiled = model.compiled
    interface = ModelInterface.of(model)
    plain_compile = interface.plain_compile
    why_not = ""
    if compiled and not plain_compile:
        why_not = _why_not_compiled(model, has_steps=template is model)
    if why_not:
        warn_once(
            f"model.keras is not compiled, as {why_not}: compile it after loading, or use"
            " trainer.evaluate"
        )
    if why_not or not compiled:
        template.compiled = False
    elif template is not model:
        if plain_compile:
            config = plain_compile()
        else:
            config = keras.saving.deserialize_keras_object(model.get_compile_config())
        template.compile(**config)
        if save_optimizer:
            template.optimizer.build(template.trainable_variables)
            used = getattr(interface.optimizer, "inner_optimizer", interface.optimizer)
            # A learning rate is left out, as it is a variable only if it is no schedule.
            sources, targets = (
                [variable for variable in optimizer.variables if variable.name != "learning_rate"]
                for optimizer in (used, template.optimizer)
            )
            if not _copy_values(sources, targets):  # because of LoRA or frozen weights
                warn_once(
                    "model.keras has no state of the optimizer: once loaded it trains other weights"
                    " than this run, as LoRA is merged and single weights are not frozen in it"
                )
    try:
        yield
    finally:
        model.compiled = compiled


def _why_not_compiled(model: keras.Model, *, has_steps: bool) -> str:
    """Returns why a compiled template cannot be loaded without the user's code, or "" if it can.

    has_steps: whether the template has the model's own train_step and test_step.
    """
    kind = type(model)
    own = [name for name in _STEP_METHODS if getattr(kind, name) is not getattr(keras.Model, name)]
    if own and not has_steps:
        return f"{kind.__name__} has a {own[0]} of its own"
    # The hook of the parser collects every object of the configuration, however deep it lies.
    parts: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns that it cannot save a lambda
        try:
            json.loads(
                json.dumps(model.get_compile_config(), default=str), object_hook=parts.append
            )
        except Exception as error:  # a user's get_config may raise anything
            return f"the get_config of a part of it fails ({error})"
    for part in parts:
        name = part.get("registered_name") or part.get("class_name")
        of_keras = str(part.get("module")).startswith("keras") and not part.get("registered_name")
        if part.get("class_name") == "function":
            name = str(part["config"])
            of_keras = hasattr(keras.losses, name) or hasattr(keras.metrics, name)
        if name and not of_keras:
            return f"its {name} is code of yours"
    # Saving a loss may lose an argument, as delta of Huber in Keras 3.15.
    for loss in keras.tree.flatten(model.loss):
        if not isinstance(loss, keras.Loss):
            continue
        copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(loss))
        before, after = (
            {
                name: value
                for name, value in vars(part).items()
                if isinstance(value, int | float | str | dict)
            }
            for part in (loss, copy)
        )
        if before != after:
            return (
                f"Keras {keras.__version__} saves its {type(loss).__name__} without what it was"
                " made with"
            )
    return ""
