"""Defines what training needs of a model and what a model may offer; no other module inspects a
model's attributes.

A model comes from `build(config: TrainConfig, dataset: Dataset) -> keras.Model`, which runs under
the strategy's scope and builds the optimizers. It inherits nothing from this package, needs a
`train_step` (see `UserModel`; a compiled Keras model has one) and may have any attribute of
`ModelInterface`. examples/table.py is a compiled model, examples/conditional_gan.py one with a
train_step of its own.

Rows, random numbers and means come from `trainer.invariance.step.current_step()`. Gradients are
applied by an optimizer from `trainer.invariance.gradients.sum_and_build`, or by a compiled model's
own optimizer.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol

import keras
import numpy as np


class UserModel(Protocol):
    """Describes what is called of a model: train_step of each, the others of one that has them.

    One with a loss in compile(), or a test_step of its own, is evaluated; one with `sample` draws
    sample grids; FID and KID measure one with `averaged_generator`. The last two need `latent_dim`.
    """

    latent_dim: int

    def train_step(self, data: Any) -> Mapping[str, Any]:
        """Trains on this replica's rows, in replica context within a tf.function; returns scalars
        by name.

        `data`: what `fit` passes: x, (x, y) or (x, y, sample_weight), each a tensor or a nest of
            them (tuples, dicts), (rows, *the shape of one example); x alone as (x,) if it is a
            nest. Floating-point numbers come as floatx, all others in the type that they have. Of
            an image source, x is (rows, height, width, channels), 0 to 255, as floatx, and y, if
            there are labels, is (rows,) int32. A model with `batches_per_step` gets the same parts
            as (batches_per_step, rows, …).

        Scalars must be divided by the GLOBAL batch: they are summed over replicas. For a compiled
        Keras model, which returns its metrics, these are computed over all replicas instead. A
        train_step that never asks `current_step()` and has optimizers of Keras, as one written for
        `fit`, may take means over the rows that it gets: its gradients and scalars are averaged
        over replicas.
        """

    def test_step(self, data: Any) -> Mapping[str, Any]:
        """Evaluates a batch on one device, outside of a step; returns val_… scalars by name.

        `data`: as in train_step, without `batches_per_step`: (rows, …) of each part, the last batch
            smaller. Results of the model's `metrics` are those of all batches together; other
            scalars are averaged over rows.
        """

    def sample(self, noise: Any, labels: Any = None) -> Any:
        """Returns images for (count, latent_dim) noise: an array or a tensor, outside of a step.

        The images are uint8, (count, height, width, 1 or 3), from 0 to 255, one for each row of the
        noise. Only a model with `generated_classes` gets labels, (count,) int32, from 0.
        """

    def averaged_generator(self) -> keras.Model:
        """Returns the same network, with current weights: (rows, latent_dim) -> images in [-1, 1].

        If the model has `generated_classes`, the network takes [noise, labels], with labels (rows,)
        int32.
        """


@dataclass(frozen=True)
class ModelInterface:
    """Holds the attributes of a model, with defaults for missing ones."""

    # the networks to save, "model" first; default: the model
    templates: Callable[[], Mapping[str, keras.Model]]
    stacked: bool  # whether the model has `batches_per_step`, which adds an axis to `data`
    own_step: bool  # whether the train_step is not Keras's
    sampler: UserModel | None  # the model, if it has `sample`
    missing_for_fid: list[str]  # the attributes that FID needs and the model lacks
    batches_per_step: int = 1  # global batches that one step reads
    # whether gradients and scalars are means over a replica's rows (set by build_model)
    means_of_rows: bool = False
    # whether a loss of compile() divides by a count of rows, as with masks (set by build_model)
    counted_losses: bool = False
    # converts the template's outputs to those of the served model
    serve: Callable[[Any], Any] = lambda outputs: outputs
    generated_classes: int = 0  # number of classes of images that it generates by a label
    optimizer: Any = None  # of a compiled model
    loss: Any = None  # of a compiled model
    # arguments of compile() for the export; None: as trained
    plain_compile: Callable[[], Mapping[str, Any]] | None = None
    # whether its own train_step lets XLA compile its gradients, if not the whole step
    compiles_gradients: bool = False

    @classmethod
    def of(cls, model: Any) -> "ModelInterface":
        """Reads the attributes of `model`."""
        names = [field.name for field in fields(cls)]
        needed = ("averaged_generator", "latent_dim")
        return cls(
            **{
                "templates": lambda: {"model": model},
                **{name: getattr(model, name) for name in names if hasattr(model, name)},
                "stacked": hasattr(model, "batches_per_step"),
                "own_step": has_own(model, "train_step"),
                "sampler": model if hasattr(model, "sample") else None,
                "missing_for_fid": [name for name in needed if not hasattr(model, name)],
            }
        )


def has_own(model: Any, method: str) -> bool:
    """Returns whether a method of a model is not Keras's, by its class or on the object."""
    own = getattr(getattr(model, method, None), "__func__", None)
    return own is not getattr(keras.Model, method)


def scalars_of(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scalars of a train_step or test_step in one flat dict, as `fit` does.

    Keras's own container of compiled metrics returns a dict as one of the values.
    """
    scalars: dict[str, Any] = {}
    for name, value in logs.items():
        scalars |= scalars_of(value) if isinstance(value, Mapping) else {name: value}
    return scalars


def all_metrics(model: keras.Model) -> list[keras.Metric]:
    """Returns the model's metrics, and those of compile(), which one of these holds."""
    metrics = model.metrics
    return [*metrics, *(part for metric in metrics for part in getattr(metric, "metrics", ()))]


@contextmanager
def recording_results(model: keras.Model) -> Iterator[list[tuple[Any, keras.Metric]]]:
    """Yields a list that gets the results of the model's metrics in the block, with each metric."""
    returned = []

    def recording(metric: keras.Metric, result: Callable[[], Any]) -> Any:
        value = result()
        returned.append((value, metric))
        return value

    metrics = all_metrics(model)
    for metric in metrics:
        metric.result = partial(recording, metric, metric.result)
    try:
        yield returned
    finally:
        for metric in metrics:
            del metric.result


def metrics_by_key(
    logs: Mapping[str, Any], returned: Sequence[tuple[Any, keras.Metric]]
) -> dict[str, keras.Metric]:
    """Returns the metrics whose results are values of `logs`, by their keys there."""
    by_value = {id(value): metric for value, metric in returned}
    return {key: by_value[id(value)] for key, value in logs.items() if id(value) in by_value}


def results_of(
    model: Any, updated: Collection[int], by_key: Mapping[str, keras.Metric]
) -> dict[str, Any]:
    """Returns the results of the model's metrics by name, without metrics that no step updates.

    updated: the ids of the variables that steps update. Keras's own loss tracker is not updated if
        a train_step or test_step returns its loss without it. by_key: metrics that a step returns
        under keys of its own.
    """
    in_use = set[str]()
    idle = set[str]()
    for metric in model.metrics:
        is_updated = any(id(variable) in updated for variable in metric.variables)
        (in_use if is_updated else idle).update(scalars_of({metric.name: metric.result()}))
    left_out = idle - in_use
    results = {
        name: value for name, value in model.get_metrics_result().items() if name not in left_out
    }
    results |= {key: metric.result() for key, metric in by_key.items()}
    # A metric may return its variable, as in Keras's guide: its value is read here, in the scope of
    # the caller.
    return {
        name: value.value if isinstance(value, keras.Variable) else value
        for name, value in results.items()
    }


def numbers_of(results: Mapping[str, Any]) -> dict[str, float]:
    """Returns results as numbers; elements of a vector, as of F1Score, are name_0, name_1, …"""
    numbers: dict[str, float] = {}
    for name, value in results.items():
        values = np.asarray(value, np.float64)
        names = [f"{name}_{index}" for index in range(values.size)] if values.ndim else [name]
        numbers |= dict(zip(names, values.ravel().tolist(), strict=True))
    return numbers


def symbolic_inputs(model: keras.Model) -> list[Any]:
    """Returns the symbolic inputs; none for a subclassed model."""
    return getattr(model, "inputs", None) or []


def output_names(model: keras.Model) -> list[str]:
    """Returns the names of the outputs; none for a subclassed model."""
    return list(getattr(model, "output_names", None) or [])


def has_class_outputs(model: keras.Model) -> bool:
    """Returns whether the model has one output, (rows, classes), with at least two classes."""
    shape = getattr(model, "output_shape", None)
    return (
        isinstance(shape, tuple)
        and len(shape) == 2
        and isinstance(shape[-1], int)
        and shape[-1] > 1
    )
