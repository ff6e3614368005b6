"""Describes the fields of a settings dataclass: meaning, limits, and the conversion of text to a value.

Knows nothing of training: `trainer.base.settings.train_config` has the settings.
"""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.base.errors import UserError

BOOLEAN_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False),
}  # fmt: skip
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text without control characters"}
_CLOSE = 0.6  # the ratio of difflib from which a name is taken for another
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Says what a setting means, its unit and its limits: `Annotated[int, Setting("hidden units", minimum=1)]`.

    above: an exclusive minimum; reads: it may name a file, which a job must then reach.
    """

    meaning: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[Any, ...] = ()
    reads: bool = False


def setting(default: Any, meaning: str, *, group: str = "", **limits: Any) -> Any:
    """Returns a dataclass field whose metadata are those of `Setting(meaning, **limits)`, and the group of --help."""
    return dataclasses.field(default=default, metadata={**vars(Setting(meaning, **limits)), "group": group})


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the known name closest to `name`, the first of them, or a full stop."""
    ratios = {candidate: difflib.SequenceMatcher(None, candidate, name).ratio() for candidate in known}
    closest = max(ratios, key=ratios.__getitem__, default="")
    return f"; did you mean '{closest}'?" if ratios.get(closest, 0.0) >= _CLOSE else "."


def value_type(field: dataclasses.Field[Any]) -> tuple[type, bool]:
    """Returns the plain type of a field, and whether it is optional (`X | None`)."""
    if isinstance(field.type, types.UnionType):
        plain = [t for t in typing.get_args(field.type) if t is not type(None)]
        return plain[0], True
    assert isinstance(field.type, type), f"{field.name}: settings take plain types, not {field.type}"
    return field.type, False


def is_switch(field: dataclasses.Field[Any]) -> bool:
    """Returns whether the flag of a field may stand alone, for true: of a boolean, or of true, false and more."""
    return value_type(field)[0] is bool or "true" in (field.metadata.get("choices") or ())


def coerce(field: dataclasses.Field[Any], value: Any) -> Any:
    """Returns a value from YAML, or the text of a flag, as the field's type. Raises UserError if it does not fit.

    The text `none` is None where the field allows that.
    """
    kind, optional = value_type(field)
    if kind is str and is_switch(field) and str(value).lower() in BOOLEAN_WORDS:
        return as_text(BOOLEAN_WORDS[str(value).lower()])
    if optional and (value is None or str(value).lower() == "none"):
        return None
    try:
        result = _convert(kind, value)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{field.name}={value!r} must be {TYPE_NAMES[kind]}") from None
    if kind is int and abs(result) >= 2**31:
        raise UserError(f"{field.name}={value} must be below {2**31:,}")
    _check_limits(field, result)
    return result


def coerce_all(cls: type, values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Returns the values as the types of the fields of `cls`. Raises UserError, naming `origin`, for a wrong one."""
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


def as_text(value: Any) -> str:
    """Returns a value as a flag takes it: true, none, 0.0001, text."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _convert(kind: type, value: Any) -> Any:
    if kind is bool:
        return BOOLEAN_WORDS[str(value).lower()] if str(value).lower() in BOOLEAN_WORDS else _refuse()
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError
    if kind is int:
        return _whole_number(value)
    if kind is float:
        number = float(value)
        return number if math.isfinite(number) else _refuse()
    return value if isinstance(value, str) and not _CONTROL.search(value) else _refuse()


def _refuse() -> Any:
    raise ValueError


def _whole_number(value: str | int | float) -> int:
    """Takes 1000, '1000' and '1e3'; refuses 0.5."""
    try:
        if not isinstance(value, float):
            return int(value)
    except ValueError:
        value = float(value)
    return int(value) if float(value).is_integer() else _refuse()


def _check_limits(field: dataclasses.Field[Any], value: Any) -> None:
    rules = field.metadata
    if rules["choices"] and value not in rules["choices"]:
        choices = [as_text(choice) for choice in rules["choices"]]
        raise UserError(
            f"{field.name}={as_text(value)} must be one of {', '.join(choices)}{nearest(str(value), choices)}"
        )
    unit = f" {rules['unit']}" if rules["unit"] not in ("", field.name) else ""
    if rules["minimum"] is not None and value < rules["minimum"]:
        raise UserError(f"{field.name}={value} must be at least {rules['minimum']}{unit}")
    if rules["above"] is not None and value <= rules["above"]:
        raise UserError(f"{field.name}={value} must be greater than {rules['above']}{unit}")
    if rules["maximum"] is not None and value > rules["maximum"]:
        raise UserError(f"{field.name}={value} must be at most {rules['maximum']}{unit}")
