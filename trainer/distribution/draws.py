"""Makes layers that draw random numbers by Keras draw the same for a global row on any number of replicas.

Within a step, Keras's random functions draw from a stream named by the layer's path and the number of the draw in the
step, for the whole global batch, and return this replica's rows. Elsewhere they are Keras's own.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from trainer.compat import compiled_by_xla, intercept_random, outside_conditions
from trainer.distribution.layer_inputs import hide_size, layer_inputs, name_dependence, name_other_size
from trainer.distribution.philox import NORMAL, UNIFORM
from trainer.distribution.step import NotCompilable, StepContext, running_step

_TRUNCATED = functools.partial(tf.random.stateless_truncated_normal, dtype=tf.float32, alg="philox")


@dataclass(frozen=True)
class _Stream:
    """Draws for one call of a random function of Keras."""

    step: StepContext
    seed: Any  # as given: a SeedGenerator, a number, or None

    @property
    def path(self) -> str:
        return getattr(self.seed, "name", "keras.random")

    def __call__(self, draw: Any, shape: Any) -> Any:
        """Returns what `draw(shape=…, seed=…)` gives: this replica's rows, or the same on all replicas."""
        step, stream = self.step, self.step.numbered(self.path)
        sizes = _sizes(shape)
        if not sizes or not self.by_row(sizes[0]):
            return step.draw_for_all(draw, sizes if all(isinstance(each, int) for each in sizes) else shape, stream)
        parts = self.parts_of(sizes[0])
        drawn, inputs = step.draw(draw, (parts, *sizes[1:]), stream), layer_inputs()
        if inputs and not inputs.together:
            drawn = tf.transpose(drawn, [1, 0, *range(2, len(sizes) + 1)])
        drawn = tf.reshape(drawn, (step.rows * parts, *sizes[1:]))
        if tf.is_tensor(parts):
            name_other_size(step, self.path, sizes[0])
            return drawn[: sizes[0]]
        return hide_size(drawn, drawn.shape[0]) if inputs and inputs.size is None else drawn

    def parts_of(self, first: Any) -> Any:
        """Returns how many numbers each row gets along an axis of size `first`; 0 if it is not one of rows.

        A tensor where only the running step knows the size: 1 if it is that of the rows, else enough for all.
        """
        inputs, known = layer_inputs(), isinstance(first, int)
        if inputs is None:
            return (1 if first == self.step.rows else 0) if known else -(-first // self.step.rows)
        return inputs.parts if (first == inputs.size if known else inputs.size is None) else 0

    def by_row(self, first: Any) -> bool:
        """Returns whether an axis of size `first` is, or may be, one of rows."""
        parts = self.parts_of(first)
        return tf.is_tensor(parts) or parts > 0


def _sizes(shape: Any) -> list[Any]:
    """Returns the sizes of a shape, given as a tensor or a sequence: ints where they are known, else tensors."""
    if tf.is_tensor(shape):
        shape = tf.unstack(shape)
    known = [tf.get_static_value(size) if tf.is_tensor(size) else size for size in shape]
    return [size if number is None else int(number) for number, size in zip(known, shape, strict=True)]


def _constant(value: Any, dtype: Any) -> Any:
    """Returns a number as this type: in NumPy, which every graph takes, if it is known while the step is traced."""
    cast = tf.cast(value, dtype)
    known = tf.get_static_value(cast)
    return cast if known is None else known


def _affine(drawn: Any, factor: Any, offset: Any, dtype: Any) -> Any:
    kind = dtype or keras.config.floatx()
    return tf.cast(drawn, kind) * tf.cast(factor, kind) + tf.cast(offset, kind)


def _uniform(stream: _Stream, shape: Any, minval: Any, maxval: Any, dtype: Any) -> Any:
    return _affine(stream(UNIFORM, shape), maxval - minval, minval, dtype)


def _normal(stream: _Stream, shape: Any, mean: Any, stddev: Any, dtype: Any, draw: Any = NORMAL) -> Any:
    return _affine(stream(draw, shape), stddev, mean, dtype)


def _randint(stream: _Stream, shape: Any, minval: Any, maxval: Any, dtype: Any) -> Any:
    kind = dtype if dtype in ("int32", "int64") else "int64"
    draw = functools.partial(
        tf.random.stateless_uniform,
        minval=_constant(minval, kind),
        maxval=_constant(maxval, kind),
        dtype=kind,
        alg="philox",
    )
    return tf.cast(stream(draw, shape), dtype)


def _gamma(stream: _Stream, shape: Any, alpha: Any, dtype: Any) -> Any:
    draw = functools.partial(tf.random.stateless_gamma, alpha=_constant(alpha, tf.float32), dtype=tf.float32)
    return tf.cast(stream(draw, shape), dtype or keras.config.floatx())


def _beta(stream: _Stream, shape: Any, alpha: Any, beta: Any, dtype: Any) -> Any:
    one, other = (_gamma(stream, shape, each, "float32") for each in (alpha, beta))
    return tf.cast(one / (one + other), dtype or keras.config.floatx())


def _dropout(stream: _Stream, inputs: Any, rate: float, noise_shape: Any) -> Any:
    if rate in (0.0, 1.0):
        return inputs if rate == 0.0 else tf.zeros_like(inputs)
    sizes = keras.ops.shape(inputs)
    shape = [
        size if wanted is None else wanted
        for wanted, size in zip(noise_shape or [None] * len(sizes), sizes, strict=True)
    ]
    return tf.where(stream(UNIFORM, shape) >= rate, inputs * tf.cast(1.0 / (1.0 - rate), inputs.dtype), 0)


def _whole_rows(function: str, stream: _Stream, given: dict[str, Any]) -> str | None:
    """Returns why Keras's own function has to draw, if it gives other numbers for one replica's rows than for all."""
    if function == "shuffle":
        first = _sizes(keras.ops.shape(given["x"]))[0]
        return "mixes the rows of one replica" if given["axis"] == 0 and stream.by_row(first) else None
    if function in ("binomial", "categorical"):
        return f"draws by keras.random.{function}"
    if isinstance(stream.seed, int):  # the same numbers in every step, as initializers draw
        sizes = _sizes(given["shape"] if "shape" in given else keras.ops.shape(given["inputs"]))
        by_row = layer_inputs() is not None and bool(sizes) and stream.by_row(sizes[0])
        return "draws with a number as seed, which gives each replica the same numbers" if by_row else None
    parameters = [
        given[name] for name in ("alpha", "beta", "minval", "maxval") if name in given and function != "uniform"
    ]
    scalar = all(len(keras.ops.shape(each)) == 0 for each in parameters)
    return None if scalar else f"draws by keras.random.{function} with parameters that are not numbers"


_BY_ROW: dict[str, Callable[..., Any]] = {
    "uniform": _uniform,
    "normal": _normal,
    "truncated_normal": functools.partial(_normal, draw=_TRUNCATED),
    "randint": _randint,
    "gamma": _gamma,
    "beta": _beta,
    "dropout": _dropout,
}
_OTHERS = ("binomial", "categorical", "shuffle")


def _around(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what a layer calls instead of `original`, which it is outside of steps."""
    name, signature = original.__name__, inspect.signature(original)

    def draw(*args: Any, **kwargs: Any) -> Any:
        step, graph = running_step(), tf.compat.v1.get_default_graph()
        if step is None or (tf.executing_eagerly() and graph is not step.graph):  # outside, or where variables are made
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        stream = _Stream(step, given.pop("seed"))
        step.refuse_xla(stream.path)
        if outside_conditions(graph) is not step.graph:
            why: str | None = "draws random numbers inside a loop, or in a tf.function of its own"
        else:
            why = _whole_rows(name, stream, given)
            if (inputs := layer_inputs()) and inputs.doubt and not why:
                name_dependence(step, stream.path, inputs.doubt)
        own = why or name not in _BY_ROW or isinstance(stream.seed, int)
        if own and compiled_by_xla():
            raise NotCompilable(f"{stream.path} {why or 'draws with a number as seed'}")
        if why:
            name_dependence(step, stream.path, why)
        return original(*args, **kwargs) if own else _BY_ROW[name](stream, **given)

    return draw


def draw_by_row_everywhere() -> None:
    """Makes Keras's random functions draw by row in every later step of this process."""
    intercept_random(_around, (*_BY_ROW, *_OTHERS))
