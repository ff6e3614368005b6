"""Answers `model.evaluate` and `model.predict` over all replicas, where a script or a callback
calls them, and lets the chief alone write what all workers would save at one place."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.callbacks import CallbackList

from trainer.base.errors import UserError
from trainer.base.log import warn_once
from trainer.cluster.strategy import Replicas
from trainer.data.dataset import Dataset, NestedArrays
from trainer.data.fit_data import FitArrays, FitBatches, examples_of_fit, first_batches
from trainer.invariance.internals import build_compiled, outside_of_scopes, wrapped
from trainer.measures import prediction
from trainer.measures.evaluation import Evaluation


@contextmanager
def answered_by_replicas(replicas: Replicas, **others: Callable[..., Any]) -> Iterator[None]:
    """Makes `evaluate` and `predict` of all Keras models in the block those of this module; others:
    more methods.

    Of several workers the chief alone saves at places that they share; train_on_batch is refused
    where it cannot train.
    """

    def outside(method: Callable[..., Any], original: Any, *given: Any, **named: Any) -> Any:
        with outside_of_scopes():
            return method(*given, **named)

    predict = partial(_predict, replicas)
    others |= {"evaluate": partial(_evaluate, replicas), "predict": predict}
    if replicas.count > 1:
        # Keras's own would have the answers of each replica
        others["predict_on_batch"] = lambda model, x: predict(model, x)
    with ExitStack() as stack:
        for name, method in others.items():
            stack.enter_context(wrapped(f"keras.Model.{name}", partial(outside, method)))
        for name in ("train_on_batch", "test_on_batch"):
            stack.enter_context(wrapped(f"keras.Model.{name}", partial(_on_batch, replicas, name)))
        if not replicas.cluster.is_chief:
            folder = stack.enter_context(TemporaryDirectory(prefix="trainer-saved-"))
            save = partial(_save, replicas, folder)
            for name in ("save", "save_weights", "export"):
                stack.enter_context(wrapped(f"keras.Model.{name}", save))
        yield


def _on_batch(replicas: Replicas, name: str, original: Any, *given: Any, **named: Any) -> Any:
    """Does what Keras's one-batch method does; refused in a step and on several replicas."""
    if tf.inside_function():
        raise UserError(
            f"{name} is called within a step, which is itself one: compute the gradients there by"
            " tf.GradientTape and give them to the optimizer (optimizer.apply)"
        )
    if replicas.count > 1:
        raise UserError(
            f"{name}: a loop of its own runs on one device: call fit and evaluate, write its step"
            " as train_step of the model, or take --replicas=1"
        )
    return original(*given, **named)


def _save(
    replicas: Replicas,
    folder: str,
    original: Any,
    model: Any,
    filepath: Any,
    *given: Any,
    **named: Any,
) -> Any:
    """Saves a model as Keras does, but into `folder` if the chief saves at the same place, a bucket
    or a disk of both."""
    if not replicas.cluster.writes(filepath):
        warn_once(f"{filepath}: all workers would save it, so the chief alone does")
        filepath = Path(folder) / Path(filepath).name
    return original(model, filepath, *given, **named)


def _evaluate(replicas: Replicas, *given: Any, **named: Any) -> Any:
    """Does what `keras.Model.evaluate` does, over all replicas; every worker must call it.

    The metrics of the epoch that trains stay as they are.
    """
    call, callbacks, examples, size = _read_call(keras.Model.evaluate, given, named)
    model = call["self"]

    def traced() -> Evaluation:
        row = examples.first(1)
        step_data = Dataset("evaluate", NestedArrays(*row)).step_data
        with replicas.strategy.scope():
            build_compiled(model, step_data(tf.nest.map_structure(tf.convert_to_tensor, row)))
        return Evaluation(model, replicas, examples, size, step_data)

    callbacks.on_test_begin()
    evaluation = _kept(model, replicas, ("evaluate", size, str(examples.spec)), traced)
    evaluation.reset()
    found = evaluation.of(examples).results()
    del evaluation.examples  # which may fill the memory
    results = {name: value if np.ndim(value) else float(value) for name, value in found.items()}
    callbacks.on_test_end(results)
    if call["return_dict"]:
        return results
    return [*results.values()] if len(results) > 1 else next(iter(results.values()))


def _predict(replicas: Replicas, *given: Any, **named: Any) -> Any:
    """Does what `keras.Model.predict` does with these arguments, over all replicas."""
    call, callbacks, examples, size = _read_call(keras.Model.predict, given, named)
    model = call["self"]

    def traced() -> Any:
        row = examples.first(1)
        step_data = Dataset("predict", NestedArrays(*row)).step_data
        # What is built here, before a `fit`, belongs to the strategy.
        if not model.built:
            x = step_data(tf.nest.map_structure(tf.convert_to_tensor, row[:1]))
            with replicas.strategy.scope():
                model(x[0] if isinstance(x, tuple) else x)
        return prediction.round_of(model, replicas, size, step_data)

    callbacks.on_predict_begin()
    run = _kept(model, replicas, ("predict", size, str(examples.spec)), traced)
    outputs = prediction.predict_by(run, replicas, examples, size)
    callbacks.on_predict_end()
    return tf.nest.map_structure(np.asarray, outputs)


def _kept(
    model: keras.Model, replicas: Replicas, kind: tuple[Any, ...], make: Callable[[], Any]
) -> Any:
    """Returns what `make` has traced for such calls, until the model is compiled again."""
    key = (*kind, *map(id, (replicas, *model.metrics)))
    kept = vars(model).setdefault("__answers", {})  # of the model, with which it is forgotten
    if key not in kept:
        kept[key] = make()
    return kept[key]


def _read_call(
    method: Any, given: Any, named: Any
) -> tuple[dict[str, Any], CallbackList, FitArrays | FitBatches, int]:
    """Returns the arguments of a call of Keras's `method` by name, its callbacks and its examples.

    The last value is how many rows their batches have.
    """
    bound = inspect.signature(method).bind(*given, **named)
    bound.apply_defaults()
    call = bound.arguments
    callbacks = call["callbacks"]
    if not isinstance(callbacks, CallbackList):
        callbacks = CallbackList(callbacks, model=call["self"])
    steps = call["steps"]
    parts = [call[name] for name in ("x", "y", "sample_weight") if name in call]
    examples, size = examples_of_fit(
        method.__name__, *parts, batch_size=call["batch_size"], steps=steps
    )
    if steps:
        examples = first_batches(examples, steps, size)
    return call, callbacks, examples, size
