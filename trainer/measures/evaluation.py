"""Evaluates a model as `model.evaluate` does on one device, on any number of replicas.

Replicas take whole batches in turn, each as if it were the only device, and the metrics' variables
are added up: the values are those of one device, in any precision. For a classifier it also counts
the confusion matrix.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.log import log, warn_once
from trainer.cluster.strategy import Replicas
from trainer.data.dataset import Dataset
from trainer.data.examples import AnyExamples
from trainer.invariance.internals import wrapped
from trainer.reporting.classification import Classification
from trainer.training.loop import CallSize
from trainer.user_code.interface import (
    ModelInterface,
    has_class_outputs,
    has_own,
    metrics_by_key,
    numbers_of,
    recording_results,
    results_of,
    scalars_of,
)

MOST_CLASSES = 1000  # of a confusion matrix


def counted_classes(model: keras.Model) -> int:
    """Returns the classes of a model with sparse categorical cross-entropy alone, else 0."""
    loss = ModelInterface.of(model).loss
    sparse = (
        isinstance(loss, keras.losses.SparseCategoricalCrossentropy) and loss.ignore_class is None
    )
    if (
        has_own(model, "test_step")
        or not (sparse or loss == "sparse_categorical_crossentropy")
        or not has_class_outputs(model)
    ):
        return 0
    classes = int(model.output_shape[-1])
    return classes if classes <= MOST_CLASSES else 0


def confusion(labels: Any, outputs: Any) -> Any:
    """Returns the confusion matrix, (true classes, predicted classes), as exact float64.

    labels: (rows,) or (rows, 1); outputs: (rows, classes).
    """
    return tf.math.confusion_matrix(
        tf.reshape(labels, (-1,)), tf.argmax(outputs, axis=1), outputs.shape[1], dtype=tf.float64
    )


_SAME = 1e-5  # the largest relative difference of two sums that rounding explains


class Totals(NamedTuple):
    """Holds sums over some of the examples: tensors on a device, or arrays on the host."""

    metrics: list[Any]  # the variables of all metrics of the model
    others: Any  # (names,) float64: the values of test_step that are no metrics, summed over rows
    rows: Any  # float64
    confusion: Any  # (classes, classes); (0, 0) if it is not counted

    def apply(self, function: Callable[..., Any], *others: "Totals") -> "Totals":
        """Returns the totals with `function` applied to each array and its `others`."""
        return cast(Totals, tf.nest.map_structure(function, self, *others))


@dataclass(eq=False)
class Evaluation:
    """Evaluates `model` by its test_step: a call returns loss and metrics as val_….

    The examples are cut into batches of `batch_size`, the last one smaller, as `evaluate` cuts
    them, and the replicas of all workers take whole batches in turn. A replica computes as if it
    were the only device, and the variables of the metrics are added up over replicas.

    step_data: returns the `data` of test_step for the parts of a batch, such as x and y;
    class_names: those of a classifier with integer labels, for which a call sets `classes` to its
        confusion matrix.
    """

    model: keras.Model
    replicas: Replicas
    examples: AnyExamples
    batch_size: int
    step_data: Callable[[tuple[Any, ...]], Any]
    class_names: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.class_count = counted_classes(self.model)  # 0: a call sets no `classes`
        self.classes: Classification | None = None
        self._call_size = CallSize(most_steps=0)
        self._run = tf.function(partial(self._run_batches))  # see StepRunner
        self._on_device = tf.autograph.experimental.do_not_convert(self._one_batch)
        self._returned: tuple[str, ...] = ()  # the names that test_step returns
        # metrics among them, by the names that it gives them
        self._by_key: dict[str, keras.Metric] = {}
        # the ids of the variables of metrics that test_step assigns
        self._updated: set[int] = set()

    def of(self, examples: AnyExamples) -> "Evaluation":
        """Returns itself for other examples of the same kind, and keeps what it has traced."""
        self.examples = examples
        vars(self).pop("_takers", None)
        return self

    def reset(self) -> None:
        """Calls an own reset_metrics, as Keras before it evaluates: it may anneal a loss. Metrics
        stay as they are."""
        if has_own(self.model, "reset_metrics"):
            metrics = self.model.metrics
            for metric in metrics:
                metric.reset_state = lambda: None
            self.model.reset_metrics()
            for metric in metrics:
                del metric.reset_state

    def __call__(self) -> dict[str, float]:
        """Returns the numbers by name. Every worker must call it."""
        return {f"val_{name}": number for name, number in numbers_of(self.results()).items()}

    def results(self) -> dict[str, Any]:
        """Returns what `evaluate` returns, as arrays by name. Every worker must call it."""
        replicas = self.replicas
        takers = self._takers
        indices = range(replicas.first, min(replicas.first + replicas.local, takers))
        # numbers of batches
        shares = [len(range(index, self._batches, takers)) for index in indices]
        iterators = [iter(self._part(takers, index)) for index in indices]
        totals = [self._initial for _ in indices]
        start = 0
        rounds = math.ceil(self._batches / takers)
        self.examples.on_epoch_begin()
        while start < rounds:
            # Few batches in each call: between calls workers synchronise, and a signal can
            # interrupt.
            count = self._call_size(rounds - start)
            began = time.monotonic()
            if indices:
                totals = self._run_each(
                    iterators, totals, [min(start + count, share) - start for share in shares]
                )
            (seconds,) = replicas.sum_over_workers([time.monotonic() - began]).tolist()
            self._call_size.learn(count, seconds / replicas.cluster.workers)  # equal on all workers
            start += count
        self.examples.on_epoch_end()

        def summed(begin: Any, *ends: Any) -> Any:
            begin = np.asarray(begin, np.float64)
            change = sum((end - begin for end in ends), np.zeros_like(begin))
            return begin + (replicas.sum_over_workers(change) if change.size else change)

        whole = self._initial.apply(summed, *totals)
        if count := self.class_count:
            numbers = map(str, range(len(self.class_names), count))  # of classes without a name
            self.classes = Classification((*self.class_names, *numbers)[:count], whole.confusion)
        return self._results(whole)

    def try_one_batch(self) -> None:
        """Evaluates one batch on this worker alone; raises what the model's test_step raises."""
        self._after_batch(0, self._initial)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the values."""
        return tuple(
            f"val_{name}" for name in numbers_of(self._results(self._initial.apply(np.asarray)))
        )

    @property
    def _batches(self) -> int:
        return math.ceil(self.examples.count / self.batch_size)

    @cached_property
    def _takers(self) -> int:
        """Returns how many replicas take batches: 1 if a metric's variables do not add up."""
        if self.replicas.count == 1 or self._batches == 1:
            return 1
        adds_up = None
        # compares two batches in one run with the sum of two runs
        if self.replicas.cluster.is_chief:
            first, second = (self._after_batch(number, self._initial) for number in range(2))
            added = first.apply(lambda a, b, begin: a + b - begin, second, self._initial)
            same = added.apply(
                lambda a, b: np.allclose(a, b, rtol=_SAME, atol=_SAME), self._after_batch(1, first)
            )
            adds_up = all(tf.nest.flatten(same))
        if self.replicas.from_worker(adds_up):
            return self.replicas.count
        log.info("evaluates on one replica: the variables of a metric do not add up over batches")
        return 1

    def _after_batch(self, number: int, totals: Totals) -> Totals:
        """Returns the totals after one more batch."""
        (after,) = self._run_each([iter(self._part(self._batches, number))], [totals], [1])
        return after

    @cached_property
    def _initial(self) -> Totals:
        """Returns the totals before the first batch."""
        with keras.StatelessScope() as scope:
            self.model.reset_metrics()
        for metric in self.model.metrics:
            if any(scope.get_current_value(variable) is None for variable in metric.variables):
                raise UserError(
                    f"reset_metrics of {type(self.model).__name__} leaves out {metric.name}: call"
                    " super().reset_metrics() in it"
                )
        metrics = [
            tf.convert_to_tensor(scope.get_current_value(variable))
            for variable in self.model.metrics_variables
        ]
        zeros = partial(tf.zeros, dtype=tf.float64)
        return Totals(metrics, zeros(len(self._others)), zeros(()), zeros([self.class_count] * 2))

    @cached_property
    def _others(self) -> list[str]:
        """Returns the names of test_step's values that are no metrics: they are averaged."""
        if not (has_own(self.model, "test_step") or has_own(self.model, "compute_metrics")):
            return []
        specs = [
            tf.TensorSpec(variable.shape, variable.dtype)
            for variable in self.model.metrics_variables
        ]
        tf.function(self._test_batch, autograph=False).get_concrete_function(
            specs, self._part(1, 0).element_spec
        )
        with keras.StatelessScope():
            self.model.reset_metrics()
            # Of those that test_step updates.
            of_metrics = {*results_of(self.model, self._updated, self._by_key)}
        if others := [name for name in self._returned if name not in of_metrics]:
            warn_once(
                f"{', '.join(others)}: no metric of the model: evaluation has its mean over rows,"
                " Keras's has the value of the last batch: return the result of a"
                " keras.metrics.Metric"
            )
        return others

    def _part(self, takers: int, index: int) -> tf.data.Dataset:
        """Returns the batches of one taker: from number `index` on, every `takers`-th."""
        return self.examples.in_order(self.batch_size, takers, index)

    def _run_each(
        self, iterators: list[Any], totals: list[Totals], counts: list[int]
    ) -> list[Totals]:
        """Runs `counts` batches, a number for each device, and returns the new totals."""
        after = self._run(iterators, totals, [tf.constant(count) for count in counts])
        return [device.apply(np.asarray) for device in after]

    def _run_batches(self, iterators: Any, totals: Any, counts: Any) -> Any:
        after = []
        # Outside of the strategy: Keras then computes as on one device. The devices' loops run side
        # by side; there may be fewer iterators than devices.
        devices = zip(self.replicas.devices, iterators, totals, counts)  # noqa: B905
        for device, iterator, so_far, count in devices:
            with tf.device(device):
                for _ in tf.range(count):
                    so_far = self._on_device(so_far, next(iterator))
            after.append(so_far)
        return after

    def _one_batch(self, totals: Totals, parts: Any) -> Totals:
        """Returns the totals after one more batch, in the graph."""
        metrics, values, rows, counts = self._test_batch(totals.metrics, parts)
        others = [tf.cast(values[name], tf.float64) * rows for name in self._others]
        summed = totals.others + (tf.stack(others) if others else 0.0)
        return Totals(metrics, summed, totals.rows + rows, totals.confusion + counts)

    def _test_batch(
        self, metrics: list[Any], parts: Any
    ) -> tuple[list[Any], Mapping[str, Any], Any, Any]:
        """Runs test_step on one batch, with these values of the metrics' variables.

        Returns the variables' new values, the values of test_step, the number of rows, and the
        confusion of classes.
        """
        rows = tf.cast(tf.shape(tf.nest.flatten(parts)[0])[0], tf.float64)
        variables = self.model.metrics_variables
        # In this scope Keras regularizes only weights whose values are given.
        weights = [
            (weight, weight.value)
            for weight in self.model.weights
            if weight.regularizer is not None
        ]
        held = [*zip(variables, metrics, strict=True), *weights]
        data = self.step_data(parts)
        outputs: list[Any] = []  # from which Keras's test_step computes the metrics

        def keep(compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
            outputs.extend(given[2:3])
            return compute(*given, **named)

        keeping = wrapped("keras.Model.compute_metrics", keep, owner=self.model)
        recording = recording_results(self.model)
        with (
            keras.StatelessScope(held, collect_losses=True) as scope,
            keeping,
            recording as returned,
        ):
            before = [scope.get_current_value(variable) for variable in variables]
            values = scalars_of(self.model.test_step(data))
        self._by_key = metrics_by_key(values, returned)
        after = [scope.get_current_value(variable) for variable in variables]
        self._returned = tuple(values)
        self._updated = {
            id(variable)
            for variable, a, b in zip(variables, before, after, strict=True)
            if a is not b
        }
        counts = tf.zeros((0, 0), tf.float64)
        if self.class_count:
            counts = confusion(tf.nest.flatten(data[1])[0], outputs[-1])
        return after, values, rows, counts

    def _results(self, totals: Totals) -> dict[str, Any]:
        """Returns the values by name, from totals over all examples."""
        metrics = zip(self.model.metrics_variables, totals.metrics, strict=True)
        with keras.StatelessScope(
            [(variable, tf.cast(value, variable.dtype)) for variable, value in metrics]
        ):
            results = self.model.get_metrics_result()
            values = {
                name: results[name] for name in results if name in (self._returned or results)
            }
            values |= {key: metric.result() for key, metric in self._by_key.items()}
            values = {name: np.asarray(value, np.float64) for name, value in values.items()}
        means = totals.others / max(float(totals.rows), 1.0)
        return values | dict(zip(self._others, means.tolist(), strict=True))


def evaluation(
    model: keras.Model, replicas: Replicas, dataset: Dataset, batch_size: int
) -> Evaluation | None:
    """Returns the evaluation of `model`; None without examples or anything to evaluate.

    It needs a loss in compile(), or a test_step of its own.
    """
    examples = dataset.evaluation
    if examples is None:
        return None
    if reason := why_not_evaluated(model):
        log.info(f"the {examples.count:,} examples for evaluation are not used: {reason}")
        return None
    return Evaluation(model, replicas, examples, batch_size, dataset.step_data, dataset.class_names)


def why_not_evaluated(model: keras.Model) -> str:
    """Returns why the model has nothing to evaluate; empty if it has."""
    own = has_own(model, "test_step") or has_own(model, "compute_loss")
    if own or (model.compiled and model.loss is not None):
        return ""
    return f"{type(model).__name__} is not compiled with a loss, and has no test_step of its own"
