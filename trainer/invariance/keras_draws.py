"""Makes Keras's random layers draw the same numbers for a row of the global batch on any number of
replicas.

Within a step, Keras's random functions draw from a stream named by the layer's path and the number
of the draw in the step, for the whole global batch, and return this replica's rows. Elsewhere they
are Keras's own.

Numbers for each row have to be told from numbers that all rows share. Under `fit` a layer does not
know how many rows it gets: the first size of what it asks for is a tensor for numbers by row, and
an integer for shared ones. In a step the number of rows is known, and an integer of that value
could mean either. So, while a layer runs in a step, the size of the first axis of its inputs is
hidden from it.
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.log import warn_once
from trainer.invariance.internals import compiled_by_xla, intercept_random, outside_conditions, wrap
from trainer.invariance.philox import NORMAL, UNIFORM
from trainer.invariance.step import NotCompilable, StepContext, holding, running_step


@dataclass(frozen=True)
class LayerInputs:
    """Describes the inputs of the layer that runs."""

    size: int  # of the first axis
    hidden: bool  # whether that size is the number of rows, and hidden from the layer
    of_keras: bool  # whether the layer is one of Keras's own


# Those of the running layer, if `draw_by_row` changed it. None also where the size of the first
# axis is known only when the step runs, as after `RaggedTensor.to_tensor`.
_inputs: ContextVar[LayerInputs | None] = ContextVar("layer_inputs", default=None)


def draw_by_row(layer: keras.layers.Layer, path: str) -> None:
    """Makes `layer` draw by row if it holds SeedGenerators, from streams named after `path`.

    Its class and its weights stay; its `call` is replaced. The size of the first axis is not hidden
    from a recurrent layer, which draws the dropout of its cells before it loops over time, nor from
    a model, only from layers in it.
    """
    # The generators are those of the layer itself, not those of layers in it.
    by_id = {}
    for value in vars(layer).values():
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, keras.random.SeedGenerator):
                by_id[id(item)] = item
    generators = list(by_id.values())
    for index, generator in enumerate(generators):
        generator.name = f"{path}#{index}" if index else path
    recurrent = isinstance(layer, keras.layers.RNN)
    cell = hasattr(layer, "state_size")
    draws = generators and not cell and not isinstance(layer, keras.Model)
    if not (recurrent or draws) or "call" in vars(layer):
        return

    # Within a step, `_inputs` describes the inputs of the layer while it runs.
    of_keras = type(layer).__module__.startswith("keras.")

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = running_step()
        tensors = keras.tree.flatten((args, kwargs))
        tensors = [tensor for tensor in tensors if isinstance(tensor, tf.Tensor)]
        sizes = [tensor.shape[0] for tensor in tensors if tensor.shape.rank]
        if step is None or tf.executing_eagerly() or not sizes or sizes[0] is None:
            return original(*args, **kwargs)
        hidden = not recurrent and sizes[0] == step.rows
        inputs = LayerInputs(sizes[0], hidden, of_keras)
        if hidden:
            args, kwargs = keras.tree.map_structure(
                lambda value: hide_size(value, step.rows), (args, kwargs)
            )
        with holding(_inputs, inputs):
            outputs = original(*args, **kwargs)

        # A layer of Keras returns a row for each row, so that its outputs get the size back.
        if hidden and of_keras:
            for value in keras.tree.flatten(outputs):
                if isinstance(value, tf.Tensor) and value.shape.rank and value.shape[0] is None:
                    value.set_shape([step.rows, *value.shape[1:]])
        return outputs

    wrap("keras.layers.Layer.call", call, owner=layer)


def hide_size(value: Any, size: int) -> Any:
    """Returns a tensor with `size` rows as one of unknown size, and any other value as it is."""
    if not isinstance(value, tf.Tensor) or not value.shape.rank or value.shape[0] != size:
        return value
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=[None, *value.shape[1:]])


_TRUNCATED = functools.partial(tf.random.stateless_truncated_normal, dtype=tf.float32, alg="philox")
_NO_ROWS = "draws random numbers for inputs whose first axis is not one of rows"
_SOME_ROWS = "draws random numbers for inputs whose first axis, of unknown size, is not one of rows"


@dataclass(frozen=True)
class _Stream:
    """Draws the numbers of one call to a random function of Keras."""

    step: StepContext
    seed: Any  # a SeedGenerator, a number, or None

    @property
    def path(self) -> str:
        return getattr(self.seed, "name", "keras.random")

    def __call__(self, draw: Any, shape: Any) -> Any:
        """Returns numbers of `draw(shape=…, seed=…)`.

        They are drawn by row if the first axis is that of rows, else they are the same for all.
        Raises UserError if the first axis has several entries for each row, whose order is unknown.
        """
        step = self.step
        stream = step.numbered(self.path)
        sizes = _sizes(shape)

        def own_rows() -> Any:
            drawn = tf.reshape(step.draw(draw, sizes[1:], stream), (step.rows, *sizes[1:]))
            inputs = _inputs.get()
            return hide_size(drawn, step.rows) if inputs and inputs.hidden else drawn

        def for_all() -> Any:
            known = all(isinstance(size, int) for size in sizes)
            return step.draw_for_all(draw, sizes if known else shape, stream)

        def for_all_with_warning() -> Any:
            warning = tf.numpy_function(lambda: self.warn_of_dependence(_SOME_ROWS), [], [])
            with tf.control_dependencies([warning]):
                return for_all()

        # Where the size is known only when the step runs, the step itself decides.
        by_row = bool(sizes) and self.is_row_axis(sizes[0])
        if tf.is_tensor(by_row):
            # A replica that has the whole global batch gets the same numbers either way.
            return tf.cond(by_row, own_rows, for_all_with_warning) if step.is_part else for_all()

        # Several entries for each row are neither numbers by row nor the same for all.
        inputs = _inputs.get()
        rows = step.rows
        multiple = inputs and rows != inputs.size and not inputs.size % rows
        if (
            sizes
            and not by_row
            and step.is_part
            and inputs
            and multiple
            and sizes[0] == inputs.size
        ):
            raise UserError(
                f"{self.path}: it draws random numbers for {sizes[0]} parts of {rows} rows, whose"
                " order is unknown: give the layer inputs that have the rows alone as first axis,"
                " (rows, parts, …)"
            )
        return own_rows() if by_row else for_all()

    def is_row_axis(self, first: Any) -> Any:
        """Returns whether the first size of a shape stands for the rows.

        It is a tensor if only the running step can tell.
        """
        inputs = _inputs.get()
        rows = self.step.rows
        if inputs and inputs.hidden:
            return not isinstance(first, int)
        if not isinstance(first, int):
            return tf.equal(first, rows)
        return first == rows and (inputs is None or inputs.size == rows)

    def warn_of_dependence(self, why: str) -> None:
        """Warns once, on several replicas, that the numbers depend on how many there are.

        `why` follows the layer. Raises UserError with virtual replicas, which promise that no
        number does.
        """
        if self.step.virtual_replicas:
            raise UserError(f"{self.step.split}: {self.path} {why}: drop it, or --virtual_replicas")
        if self.step.is_part:
            warn_once(f"the result depends on the number of replicas: {self.path} {why}")


def _sizes(shape: Any) -> list[Any]:
    """Returns the sizes of a shape (a tensor or a sequence): ints where known, else tensors."""
    if tf.is_tensor(shape):
        shape = tf.unstack(shape)
    values = [tf.get_static_value(size) if tf.is_tensor(size) else size for size in shape]
    pairs = zip(values, shape, strict=True)
    return [size if value is None else int(value) for value, size in pairs]


def _constant(value: Any, dtype: Any) -> Any:
    """Casts a number to a NumPy value, which every graph accepts, if known, else to a tensor."""
    cast = tf.cast(value, dtype)
    constant = tf.get_static_value(cast)
    return cast if constant is None else constant


def _affine(drawn: Any, factor: Any, offset: Any, dtype: Any) -> Any:
    """Returns drawn * factor + offset as `dtype`, by default floatx."""
    kind = dtype or keras.config.floatx()
    return tf.cast(drawn, kind) * tf.cast(factor, kind) + tf.cast(offset, kind)


def _normal(
    stream: _Stream, shape: Any, mean: Any, stddev: Any, dtype: Any, draw: Any = NORMAL
) -> Any:
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


def _dropout(stream: _Stream, inputs: Any, rate: float, noise_shape: Any) -> Any:
    if rate in (0.0, 1.0):
        return inputs if rate == 0.0 else tf.zeros_like(inputs)
    sizes = keras.ops.shape(inputs)
    noise_shape = noise_shape or [None] * len(sizes)
    pairs = zip(noise_shape, sizes, strict=True)
    shape = [size if noise is None else noise for noise, size in pairs]
    keeps = stream(UNIFORM, shape) >= rate
    return tf.where(keeps, inputs * tf.cast(1.0 / (1.0 - rate), inputs.dtype), 0)


def _dependence(function: str, stream: _Stream, arguments: dict[str, Any]) -> str | None:
    """Returns why the numbers of a Keras function depend on the number of replicas.

    It is None if they do not. Raises UserError for gamma and beta, except in Keras's own layers,
    which `depends_on_replicas` reports.
    """
    inputs = _inputs.get()
    if function == "shuffle":
        first = _sizes(keras.ops.shape(arguments["x"]))[0]
        mixes = arguments["axis"] == 0 and stream.is_row_axis(first) is not False
        return "mixes the rows of one replica" if mixes else None
    if function in ("gamma", "beta") and stream.step.is_part and not (inputs and inputs.of_keras):
        raise UserError(
            f"{stream.path}: keras.random.{function} draws other numbers on several replicas or in"
            " micro-batches: use keras.random.uniform or normal"
        )
    if function in _NOT_BY_ROW:
        return f"draws by keras.random.{function}"
    if isinstance(stream.seed, int):  # the same numbers in every step, as initializers draw
        sizes = _sizes(
            arguments["shape"] if "shape" in arguments else keras.ops.shape(arguments["inputs"])
        )
        if inputs and sizes and stream.is_row_axis(sizes[0]) is True:
            return "draws with a number as seed, which gives each replica the same numbers"
    return None


_BY_ROW: dict[str, Callable[..., Any]] = {
    "uniform": lambda stream, shape, minval, maxval, dtype: _affine(
        stream(UNIFORM, shape), maxval - minval, minval, dtype
    ),
    "normal": _normal,
    "truncated_normal": functools.partial(_normal, draw=_TRUNCATED),
    "randint": _randint,
    "dropout": _dropout,
}
_NOT_BY_ROW = ("binomial", "categorical", "gamma", "beta", "shuffle")


def _by_row(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Draws by row within a step, and elsewhere as `original`, a random function of Keras."""
    step = running_step()
    graph = tf.compat.v1.get_default_graph()
    # Outside of a step, and where variables are made, Keras draws.
    if step is None or (tf.executing_eagerly() and graph is not step.graph):
        return original(*args, **kwargs)
    name = original.__name__
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    stream = _Stream(step, arguments.pop("seed"))
    step.refuse_xla(stream.path)

    # Some draws depend on replicas, and keep Keras's numbers.
    if outside_conditions(graph) is not step.graph:
        why: str | None = "draws random numbers inside a loop, or in a tf.function of its own"
    else:
        why = _dependence(name, stream, arguments)
        if (inputs := _inputs.get()) and inputs.size % step.rows and not why:
            stream.warn_of_dependence(_NO_ROWS)
    ours = not why and name in _BY_ROW and not isinstance(stream.seed, int)
    if not ours and compiled_by_xla():
        raise NotCompilable(f"{stream.path} {why or 'draws with a number as seed'}")
    if why:
        stream.warn_of_dependence(why)
    return _BY_ROW[name](stream, **arguments) if ours else original(*args, **kwargs)


def draw_by_row_everywhere() -> None:
    """Makes Keras's random functions draw by row in every later step of this process."""
    intercept_random(_by_row, (*_BY_ROW, *_NOT_BY_ROW))
