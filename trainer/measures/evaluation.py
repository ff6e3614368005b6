"""Evaluates a model as `model.evaluate` does on one device, whatever the number of replicas."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.log import log
from trainer.cluster.strategy import Replicas
from trainer.data.dataset import Dataset
from trainer.data.examples import AnyExamples
from trainer.measures.class_counts import class_counts, outputs_kept
from trainer.reporting.classification import Classification
from trainer.training.loop import CallSize
from trainer.user_code.interface import results_of, scalars_of

_SAME = 1e-5  # relative difference of two sums that rounding explains

# First the variables of all metrics; then sums over rows: the values of test_step that are no metrics, the number of
# rows, and the counts of each class.
Totals = list[Any]


class Evaluation:
    """Evaluates `model` by its test_step: returns its loss and its metrics as val_….

    The examples are cut into batches of `batch_size`, the last one smaller, as `evaluate` cuts them, and the replicas
    of all workers take whole batches in turn. A replica computes as if it were the only device; the variables of the
    metrics are added up over replicas. `as_fit` makes the `data` of test_step of the parts of a batch. `classes`: what
    the newest call found of each class, if the model is a classifier with integer labels; `class_names`: their names.
    """

    def __init__(
        self,
        model: keras.Model,
        replicas: Replicas,
        examples: AnyExamples,
        batch_size: int,
        as_fit: Callable[[tuple[Any, ...]], Any],
        class_names: Sequence[str] = (),
    ) -> None:
        self.model, self.replicas, self.examples, self.batch_size = model, replicas, examples, batch_size
        self._as_fit = as_fit
        self._counts = class_counts(model, class_names)
        self.classes: Classification | None = None
        self._batches = math.ceil(examples.count / batch_size)
        self._call_size = CallSize(most_steps=0)
        self._run = tf.function(self._run_batches)
        self._on_device = tf.autograph.experimental.do_not_convert(self._one_batch)
        self._logged: tuple[str, ...] = ()  # the names that test_step returns
        self._updated: set[int] = set()  # the ids of the variables of metrics that test_step assigns

    def __call__(self) -> dict[str, float]:
        """Returns the values by name. Every worker must call it."""
        replicas, takers = self.replicas, self._takers
        mine = [index for index in range(replicas.first, replicas.first + replicas.local) if index < takers]
        shares = [len(range(index, self._batches, takers)) for index in mine]
        iterators, states = [iter(self._part(takers, index)) for index in mine], [self._begin for _ in mine]
        done, rounds = 0, math.ceil(self._batches / takers)
        while done < rounds:
            # A few batches a call: between calls workers synchronise, and a signal can interrupt.
            count, began = self._call_size(rounds - done), time.monotonic()
            if mine:
                states = self._ran(iterators, states, [min(done + count, share) - done for share in shares])
            (seconds,) = replicas.sum_over_workers([time.monotonic() - began]).tolist()
            self._call_size.learn(count, seconds / replicas.cluster.workers)  # equal on all workers
            done += count
        state = self._summed(states)
        if self._counts:
            self.classes = Classification.of(state[-1][-self._counts.size :], self._counts.names)
        return self._results(state)

    @property
    def counts_classes(self) -> bool:
        """Returns whether a call sets `classes`."""
        return self._counts is not None

    def try_one_batch(self) -> None:
        """Evaluates one batch on this worker alone."""
        self._ran([iter(self._part(self._batches, 0))], [self._begin], [1])

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the values."""
        return tuple(self._results([np.asarray(part) for part in self._begin]))

    @cached_property
    def _takers(self) -> int:
        """Returns how many replicas take batches: one, if the variables of a metric do not add up over batches."""
        if self.replicas.count == 1 or self._batches == 1:
            return 1
        adds_up = self.replicas.from_chief(self._adds_up() if self.replicas.cluster.is_chief else None)
        if not adds_up:
            log.info("evaluates on one replica: the variables of a metric do not add up over batches")
        return self.replicas.count if adds_up else 1

    def _adds_up(self) -> bool:
        """Returns whether two batches give the same state one after the other as added up."""

        def after(state: Totals, number: int) -> Totals:
            (new,) = self._ran([iter(self._part(self._batches, number))], [state], [1])
            return new

        one, other = after(self._begin, 0), after(self._begin, 1)
        together, both = (one[i] + other[i] - self._begin[i] for i in range(len(one))), after(one, 1)
        return all(np.allclose(a, b, rtol=_SAME, atol=_SAME) for a, b in zip(together, both, strict=True))

    @cached_property
    def _begin(self) -> Totals:
        with keras.StatelessScope() as scope:
            self.model.reset_metrics()
            held = [tf.convert_to_tensor(scope.get_current_value(one)) for one in self._variables]
        counts = self._counts.size if self._counts else 0
        return [*held, tf.zeros(len(self._others) + 1 + counts, tf.float64)]

    @cached_property
    def _others(self) -> list[str]:
        """Returns the names that test_step returns beside its metrics: these values are averaged over rows."""
        if type(self.model).test_step is keras.Model.test_step:
            return []
        specs = [tf.TensorSpec(one.shape, one.dtype) for one in self._variables]
        trace = tf.function(self._tested, autograph=False)
        trace.get_concrete_function(specs, self._part(1, 0).element_spec)
        return [name for name in self._logged if name not in self._metric_names]

    @property
    def _metric_names(self) -> set[str]:
        """Returns the names of the results of the metrics that test_step updates."""
        with keras.StatelessScope():
            self.model.reset_metrics()
            return {*results_of(self.model, self._updated)}

    @property
    def _variables(self) -> list[Any]:
        return [variable for metric in self.model.metrics for variable in metric.variables]

    def _part(self, of: int, index: int) -> tf.data.Dataset:
        return self.examples.in_order(self.batch_size, of, index)

    def _ran(self, iterators: list[Any], states: list[Totals], counts: list[int]) -> list[Totals]:
        """Runs `counts` batches, one number a device; returns the new states when the devices are done."""
        after = self._run(iterators, states, [tf.constant(count) for count in counts])
        return [[part.numpy() for part in state] for state in after]

    def _run_batches(self, iterators: Any, states: Any, counts: Any) -> Any:
        after = []
        # Outside of the strategy: Keras then computes as on one device. The devices' loops run side by side.
        for device, iterator, state, count in zip(self.replicas.devices, iterators, states, counts):  # noqa: B905
            with tf.device(device):
                for _ in tf.range(count):
                    state = self._on_device(state, next(iterator))
            after.append(state)
        return after

    def _one_batch(self, state: Totals, parts: Any) -> Totals:
        values, logs, rows, counts = self._tested(state[:-1], parts)
        others = [tf.cast(logs[name], tf.float64) * rows for name in self._others]
        return [*values, state[-1] + tf.concat([tf.stack([*others, rows]), *counts], axis=0)]

    def _tested(self, values: Totals, parts: Any) -> tuple[Totals, Mapping[str, Any], Any, list[Any]]:
        """Returns the metrics' variables after test_step on one batch, what it returned, its rows, and their counts."""
        rows = tf.cast(tf.shape(tf.nest.flatten(parts)[0])[0], tf.float64)
        variables = self._variables
        # In this scope Keras only regularizes weights whose values are given.
        weights = [(one, one.value) for one in self.model.weights if one.regularizer is not None]
        held, data = [*zip(variables, values, strict=True), *weights], self._as_fit(parts)
        kept: AbstractContextManager[list[Any]] = outputs_kept(self.model) if self._counts else nullcontext([])
        with keras.StatelessScope(held, collect_losses=True) as scope, kept as outputs:
            before = [scope.get_current_value(one) for one in variables]
            logs = scalars_of(self.model.test_step(data))
        after = [scope.get_current_value(one) for one in variables]
        self._logged = tuple(logs)
        self._updated = {id(one) for one, a, b in zip(variables, before, after, strict=True) if a is not b}
        counts = [self._counts.of_batch(tf.nest.flatten(data[1])[0], outputs[-1])] if self._counts else []
        return after, logs, rows, counts

    def _summed(self, states: list[Totals]) -> Totals:
        """Returns the state after all batches of all workers, in float64."""
        begin = [np.asarray(part, np.float64) for part in self._begin]
        changes = [sum((state[i] - part for state in states), np.zeros_like(part)) for i, part in enumerate(begin)]
        flat = self.replicas.sum_over_workers(np.concatenate([change.ravel() for change in changes]))
        totals = np.split(flat, np.cumsum([change.size for change in changes])[:-1])
        return [part + total.reshape(part.shape) for part, total in zip(begin, totals, strict=True)]

    def _results(self, state: Totals) -> dict[str, float]:
        variables = [(one, tf.cast(held, one.dtype)) for one, held in zip(self._variables, state[:-1], strict=True)]
        with keras.StatelessScope(variables):
            found = {name: float(value) for name, value in self.model.get_metrics_result().items()}
        *others, rows = state[-1][: len(self._others) + 1].tolist()
        found |= {name: value / max(rows, 1.0) for name, value in zip(self._others, others, strict=True)}
        return {f"val_{name}": value for name, value in found.items() if not self._logged or name in self._logged}


def evaluation(model: keras.Model, replicas: Replicas, dataset: Dataset, batch_size: int) -> Evaluation | None:
    """Returns what evaluates `model`; None without evaluation examples, or if the model has no loss to evaluate.

    A model has one if it is compiled with a loss, or if it has a test_step of its own.
    """
    examples = dataset.evaluation
    if examples is None:
        return None
    if reason := why_not_evaluated(model):
        log.info(f"the {examples.count:,} examples for evaluation are not used: {reason}")
        return None
    return Evaluation(model, replicas, examples, batch_size, dataset.as_fit, dataset.class_names)


def why_not_evaluated(model: keras.Model) -> str:
    """Returns why the model has nothing to evaluate; empty if it has."""
    kind = type(model)
    if kind.test_step is not keras.Model.test_step or kind.compute_loss is not keras.Model.compute_loss:
        return ""
    if model.compiled and model.loss is not None:
        return ""
    return f"{kind.__name__} is not compiled with a loss, and has no test_step of its own"
