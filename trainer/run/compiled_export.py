"""Compiles the exported model as the trained one, where Keras alone can load that, with or without optimizer state."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras

from trainer.base.log import warn_once
from trainer.user_code.interface import ModelInterface

_STEPS = ("train_step", "test_step", "compute_loss")


@contextmanager
def compiled_as(template: keras.Model, model: keras.Model, *, save_optimizer: bool) -> Iterator[None]:
    """Makes `template`, a plain copy of the trained `model`, in the block one compiled with its loss and optimizer.

    A template is uncompiled, and a line says why, if a process without the user's code could not load it compiled.
    save_optimizer: whether its optimizer gets the state of the model's. The copy of a subclassed model is the model,
    and is saved with that state.
    """
    compiled = model.compiled
    try:
        if compiled:
            _compile(template, model, save_optimizer=save_optimizer)
        yield
    finally:
        model.compiled = compiled


def _compile(template: keras.Model, model: keras.Model, *, save_optimizer: bool) -> None:
    arguments = ModelInterface.of(model).plain_compile or _arguments_of(model, has_steps=template is model)
    if arguments is None:
        template.compiled = False
    elif template is not model:
        template.compile(**arguments())
        if save_optimizer:
            optimizer = ModelInterface.of(model).optimizer
            _copy_state(getattr(optimizer, "inner_optimizer", optimizer), template)


def _arguments_of(model: keras.Model, *, has_steps: bool) -> Any:
    """Returns what makes the arguments of `compile`; None, and logs why, if only the user's code could load them.

    has_steps: whether the template has the model's own train_step and test_step.
    """
    kind = type(model)
    own = [name for name in _STEPS if getattr(kind, name) is not getattr(keras.Model, name) and not has_steps]
    why = f"{kind.__name__} has a {own[0]} of its own" if own else ""
    config: Mapping[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras's, of a lambda
        try:
            config = config if own else model.get_compile_config()
        except Exception as error:  # of a user's get_config
            why = f"the get_config of a part of it fails ({error})"
    code = [_name(part) for part in _parts(config) if not _is_of_keras(part)]
    why = why or (f"its {code[0]} is code of yours" if code else "")
    if not why:
        return lambda: keras.saving.deserialize_keras_object(config)
    warn_once(f"model.keras is not compiled, as {why}: compile it after loading, or use trainer.evaluate")
    return None


def _name(part: Mapping[str, Any]) -> str:
    """Returns the name of a serialized class, or of a function."""
    function = part.get("config")
    return function if isinstance(function, str) else str(part.get("registered_name") or part["class_name"])


def _parts(config: Any) -> Iterator[dict[str, Any]]:
    """Yields the serialized objects in the configuration of `compile`."""
    if isinstance(config, dict) and "class_name" in config:
        yield config
    if isinstance(config, (dict, list, tuple)):
        for value in config.values() if isinstance(config, dict) else config:
            yield from _parts(value)


def _is_of_keras(part: dict[str, Any]) -> bool:
    """Returns whether Keras loads a serialized class or function by itself."""
    if part["class_name"] == "function":
        return any(hasattr(module, str(part["config"])) for module in (keras.losses, keras.metrics))
    return str(part.get("module")).startswith("keras") and not part.get("registered_name")


def _copy_state(trained: keras.optimizers.Optimizer, template: keras.Model) -> None:
    template.optimizer.build(template.trainable_variables)
    before, after = (
        [variable for variable in optimizer.variables if variable.name != "learning_rate"]  # a schedule has none
        for optimizer in (trained, template.optimizer)
    )
    if [source.shape for source in before] != [target.shape for target in after]:  # LoRA, or frozen parts of layers
        warn_once(
            "model.keras has no state of the optimizer: once loaded it trains other weights than this run, as LoRA is "
            "merged and single weights are not frozen in it"
        )
        return
    for source, target in zip(before, after, strict=True):
        target.assign(keras.ops.convert_to_numpy(source))
