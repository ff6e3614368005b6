"""Handles nests of arrays, as `fit` takes them: an array, or dicts, lists and tuples of arrays, with rows in axis 0."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.base.errors import UserError, shortened

Nest = Any
PARTS = ("x", "y", "sample_weight")


def is_array(value: Any) -> bool:
    """Returns whether NumPy reads `value` as one array: it has `__array__`, is a number, or is a list of numbers."""
    if hasattr(value, "__array__") or np.isscalar(value):
        return True
    return isinstance(value, list) and bool(value) and all(np.isscalar(item) for item in value)


def parts_of(parts: Sequence[Nest]) -> tuple[Nest, ...]:
    """Returns x, y and sample_weight, as many as there are, by `as_arrays`. Raises UserError for none, or for more."""
    if not 1 <= len(parts) <= len(PARTS):
        raise UserError(f"{len(parts)} parts: return x, (x, y) or (x, y, sample_weight)")
    return tuple(as_arrays(part, name) for part, name in zip(parts, PARTS, strict=False))


def as_arrays(value: Nest, name: str) -> Nest:
    """Returns `value` with every leaf as an array of a type that `fit` would pass. Raises UserError, naming the leaf.

    `name`: what the leaves are called in errors, as "x".
    """
    if is_array(value):
        return as_array(value, name)
    if isinstance(value, list) and value and isinstance(value[0], list):
        raise UserError(
            f"{name} is a list of lists: use np.array(…) for the rows of one input, or a tuple of arrays for several "
            "inputs"
        )
    if isinstance(value, dict):
        return {key: as_arrays(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(as_arrays(item, f"{name}[{number}]") for number, item in enumerate(value))
    padded = {tf.RaggedTensor: ": use .to_tensor()", tf.SparseTensor: ": use tf.sparse.to_dense"}.get(type(value), "")
    raise UserError(
        f"{name} is of type {type(value).__name__}: it must be an array, or a dict, list or tuple of arrays{padded}"
    )


def as_array(value: Any, name: str) -> npt.NDArray[Any]:
    """Returns one array: floating-point numbers as floatx, all others as they are, as `fit` passes them.

    Text is kept in x alone, as an array of objects.
    """
    if np.ma.is_masked(value):
        raise UserError(f"{name} is a masked array, whose masked values would be trained on: fill them by .filled(…)")
    try:
        array = np.asarray(value)
    except ValueError:  # rows of several lengths
        raise UserError(f"{name}: its rows have several lengths: pad them to one length") from None
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        return array.astype(keras.config.floatx(), copy=False)
    if array.dtype.kind in "biu":
        return array
    if name.startswith("x") and _is_text(array):
        return array.astype(object)  # as TensorFlow holds text
    if array.dtype.kind == "O":
        raise UserError(f"{name} holds Python objects, or rows of several lengths: it must hold numbers of one shape")
    if array.dtype.kind in "SU":
        raise UserError(
            f"{name} holds text, first {str(array.flat[0] if array.size else '')[:40]!r}, not numbers: number its "
            'classes from 0, as with np.unique(…, return_inverse=True); for numbers in text use .astype("float32")'
        )
    raise UserError(f"{name} holds {array.dtype}, not numbers")


def _is_text(array: npt.NDArray[Any]) -> bool:
    return array.dtype.kind in "SU" or (
        array.dtype.kind == "O" and array.size > 0 and all(isinstance(item, (str, bytes)) for item in array.flat)
    )


def rows_in(parts: Sequence[Nest]) -> int:
    """Returns the number of rows of all leaves. Raises UserError if they differ, or if there is none."""
    counts = [
        (f"{name} {tuple(leaf.shape)}", len(leaf) if leaf.ndim else 0)
        for name, part in zip(PARTS, parts, strict=False)
        for leaf in tf.nest.flatten(part)
    ]
    shapes = shortened(", ".join(shape for shape, _ in counts))
    if not counts or min(count for _, count in counts) == 0:
        raise UserError(f"no rows: {shapes or 'an empty nest'}")
    if len({count for _, count in counts}) > 1:
        raise UserError(f"the parts have different numbers of rows: {shapes}")
    return counts[0][1]


def specs_of(parts: Nest) -> Nest:
    """Returns the tf.TensorSpec of one example for parts that have rows in axis 0."""
    return tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), parts)


def described(spec: Nest) -> str:
    """Returns types and shapes of one example for people, as `float32 (13,)`, or `{'image': uint8 (32, 32, 3), …}`."""
    if isinstance(spec, dict):
        return "{" + ", ".join(f"{key!r}: {described(part)}" for key, part in spec.items()) + "}"
    if isinstance(spec, (list, tuple)):
        return "(" + ", ".join(described(part) for part in spec) + ")"
    return f"{spec.dtype.name} {tuple(spec.shape)}"
