"""Keeps what callbacks themselves changed since on_train_begin, so that it goes on after a resume.

`fit` has no such thing, so that EarlyStopping forgets its best epoch in a run that was interrupted
(https://github.com/keras-team/keras/issues/9462). Constructor settings stay those of the new
command, as they do not change.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from keras.callbacks import Callback

from trainer.base.log import log
from trainer.reporting.progress import State
from trainer.training.checkpoint import CALLBACKS, Arrays

# Keras sets these together at the end of the first epoch, and negates min_delta when it does.
_SET_BY_KERAS = ("monitor_op", "min_delta")


@dataclass
class AttributeValue:
    """Holds the value of an attribute: `text`, valid in JSON, and the arrays in it by name."""

    text: Any
    arrays: Arrays = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any, name: str) -> "AttributeValue":
        """Copies a value; arrays are called `name`/NUMBER.

        Raises TypeError unless it consists of numbers, text, lists, tuples, sets, dictionaries and
        arrays.
        """
        # JSON has no infinity, no tuple and no array: an object names the type of each.
        arrays: Arrays = {}

        def encode(part: Any) -> Any:
            if isinstance(part, float) and not math.isfinite(part):
                return {"float": str(part)}
            if part is None or isinstance(part, bool | int | float | str):
                return part
            # get_weights returns a scalar weight, such as the count of a Normalization, as a NumPy
            # number, and set_weights needs its shape.
            if isinstance(part, np.generic):
                return {"number": [part.dtype.name, encode(part.item())]}
            if type(part) in (list, tuple, set):
                return {type(part).__name__: [encode(item) for item in part]}
            if type(part) is dict:
                return {"dict": [[encode(key), encode(item)] for key, item in part.items()]}
            # Kind V has bfloat16, and structured arrays, whose types have names.
            plain = isinstance(part, np.ndarray) and part.dtype.names is None
            if plain and part.dtype.kind in "biufV":
                key = f"{name}/{len(arrays)}"
                arrays[key] = np.array(part)
                return {"array": key}
            raise TypeError

        return cls(encode(value), arrays)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, AttributeValue)
            and self.text == other.text  # which names the arrays
            and all(
                np.array_equal(array, other.arrays[name]) for name, array in self.arrays.items()
            )
        )


def decoded(text: Any, arrays: Mapping[str, Any]) -> Any:
    """Returns the value that `AttributeValue.of` copied.

    Raises KeyError if `arrays` lacks one of its arrays.
    """
    if not isinstance(text, dict):
        return text
    ((kind, content),) = text.items()
    if kind == "array":
        return arrays[content]
    if kind == "float":
        return float(content)
    if kind == "number":
        dtype, number = content
        return np.dtype(dtype).type(decoded(number, arrays))
    if kind == "dict":
        return {decoded(key, arrays): decoded(item, arrays) for key, item in content}
    items = [decoded(item, arrays) for item in content]
    return {"list": list, "tuple": tuple, "set": set}[kind](items)


class CallbackStates:
    """Notes the attributes of callbacks, and restores those that training has changed."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks
        # what `_attributes` returned for each callback when `begin` was called
        self._begun: dict[str, tuple[dict[str, AttributeValue], dict[str, Any]]] = {}

    def _named(self) -> Iterator[tuple[str, Callback]]:
        """Yields each callback with a name for the next process too: its class, and a number."""
        counts = Counter[str]()
        for callback in self._callbacks:
            kind = type(callback).__name__
            counts[kind] += 1
            yield f"{kind}-{counts[kind]}", callback

    def begin(self) -> None:
        """Notes all attributes.

        Call it right after on_train_begin, which resets Keras's callbacks.
        """
        self._begun = {name: _attributes(name, callback) for name, callback in self._named()}

    def changed(self) -> tuple[State, Arrays]:
        """Returns the attributes that have changed since `begin`, and their arrays by name."""
        state = {}
        arrays: Arrays = {}
        for name, callback in self._named() if self._begun else ():
            values, objects = _attributes(name, callback)
            begun, others = self._begun[name]
            changed = {key: value for key, value in values.items() if value != begun.get(key)}
            omitted = sorted(key for key, item in objects.items() if item is not others.get(key))
            if changed or omitted:
                state[name] = {
                    "monitor": getattr(callback, "monitor", None),
                    "values": {key: value.text for key, value in changed.items()},
                    "not_kept": omitted,
                }
            for value in changed.values():
                arrays |= value.arrays
        return state, arrays

    def restore(self, state: State, arrays: Mapping[str, Any]) -> None:
        """Sets the attributes that `changed` returned.

        A callback that now monitors another value gets none. Call it after `begin`.
        """
        for name, callback in self._named():
            saved = state.get(name)
            if saved is None or saved["monitor"] != getattr(callback, "monitor", None):
                continue
            for key, text in saved["values"].items():
                setattr(callback, key, decoded(text, arrays))
            # Keras's own callbacks open their files again.
            if saved["not_kept"] and not type(callback).__module__.startswith("keras."):
                log.info(
                    f"callbacks: {type(callback).__name__}: {', '.join(saved['not_kept'])} starts"
                    " afresh: only numbers, text, arrays and lists of them are kept in a checkpoint"
                )


def _attributes(name: str, callback: Callback) -> tuple[dict[str, AttributeValue], dict[str, Any]]:
    """Returns the values of a callback's attributes, and those of other kinds as they are."""
    values = {}
    objects = {}
    for key, item in vars(callback).items():
        if key not in _SET_BY_KERAS:
            try:
                values[key] = AttributeValue.of(item, f"{CALLBACKS}{name}/{key}")
            except TypeError:
                objects[key] = item
    return values, objects


def drop_epochs(file: Path, separator: str, first: int) -> None:
    """Removes the last rows of a CSVLogger's file, whose epochs are trained again.

    They are those from `first` on.
    """
    if not file.is_file():
        return
    rows = file.read_text(encoding="utf-8").splitlines(keepends=True)
    count = len(rows)
    for row in reversed(rows):
        epoch = row.partition(separator)[0]
        if not epoch.isdecimal() or int(epoch) < first:
            break
        count -= 1
    if count < len(rows):
        file.write_text("".join(rows[:count]), encoding="utf-8")
