"""Fields of a settings dataclass: their meaning, their limits, and how text becomes a value.

Knows nothing of training: `trainer.config.train_config` says which settings exist.
"""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.errors import UserError

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text without control characters"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def setting(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    group: str = "",
) -> Any:
    """A dataclass field that knows its meaning, unit and limits (`above` is an exclusive minimum)."""
    metadata = {
        "meaning": meaning,
        "unit": unit,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "choices": choices,
        "group": group,
    }
    return dataclasses.field(default=default, metadata=metadata)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known name that is closest to `name`, or a full stop where none is."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean '{close[0]}'?" if close else "."


def value_type(field: dataclasses.Field[Any]) -> tuple[type, bool]:
    """The plain type of a field, and whether it may be left out (`X | None`)."""
    if isinstance(field.type, types.UnionType):
        plain = [t for t in typing.get_args(field.type) if t is not type(None)]
        return plain[0], True
    assert isinstance(field.type, type), f"{field.name}: settings take plain types, not {field.type}"
    return field.type, False


def coerce(field: dataclasses.Field[Any], value: Any) -> Any:
    """`value`, from YAML or from a flag's text, as the field's type and within its limits; UserError otherwise."""
    kind, optional = value_type(field)
    if value is None and optional:
        return None
    try:
        result = _convert(kind, value)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{field.name}={value!r} must be {_KINDS[kind]}") from None
    if kind is int and abs(result) >= 2**31:
        raise UserError(f"{field.name}={value} must be below {2**31:,}")
    _check_limits(field, result)
    return result


def _convert(kind: type, value: Any) -> Any:
    if kind is bool:
        word = str(value).lower()
        if word not in _TRUE + _FALSE:
            raise ValueError
        return word in _TRUE
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError
    if kind is int:
        return _whole_number(value)
    if kind is float:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError
        return number
    if not isinstance(value, str) or _CONTROL.search(value):
        raise TypeError
    return value


def _whole_number(value: str | int | float) -> int:
    """Takes 1000, '1000' and '1e3'; refuses 0.5."""
    try:
        return int(value) if not isinstance(value, float) else _exact(value)
    except ValueError:
        return _exact(float(value))


def _exact(number: float) -> int:
    if not number.is_integer():
        raise ValueError
    return int(number)


def _check_limits(field: dataclasses.Field[Any], value: Any) -> None:
    rules = field.metadata
    if rules["choices"] and value not in rules["choices"]:
        hint = nearest(str(value), rules["choices"])
        raise UserError(f"{field.name}={value} must be one of {', '.join(rules['choices'])}{hint}")
    unit = f" {rules['unit']}" if rules["unit"] not in ("", field.name) else ""
    if rules["minimum"] is not None and value < rules["minimum"]:
        raise UserError(f"{field.name}={value} must be at least {rules['minimum']}{unit}")
    if rules["above"] is not None and value <= rules["above"]:
        raise UserError(f"{field.name}={value} must be greater than {rules['above']}{unit}")
    if rules["maximum"] is not None and value > rules["maximum"]:
        raise UserError(f"{field.name}={value} must be at most {rules['maximum']}{unit}")


def coerce_all(cls: type, values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Every value of `values` as the type of its field of `cls`; an unknown key is named with its nearest name."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    result = {}
    for key, value in values.items():
        if key not in fields:
            raise UserError(f"{origin}: unknown setting '{key}'{nearest(str(key), fields)}")
        try:
            result[key] = coerce(fields[key], value)
        except UserError as error:
            raise UserError(f"{origin}: {error}") from None
    return result
