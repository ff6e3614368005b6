"""Whether a YAML value has the shape of a CustomJobSpec: known keys in camelCase, right types, known names of enums.

gcloud sends nearly anything, and the API's answer to it is late and terse.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from deploy.spec.schema_fields import ENUMS, MESSAGES
from trainer.config.fields import nearest
from trainer.errors import UserError


def check_shape(value: Any, kind: str, where: str) -> None:
    """UserError, naming the place `where`, for the first thing in `value` that a message or type `kind` cannot hold."""
    if kind.endswith("[]"):
        if not isinstance(value, list):
            raise UserError(f"{where}: a list is needed, this is {_shown(value)}: begin each item with '- '")
        for place, item in enumerate(value):
            check_shape(item, kind[:-2], f"{where}[{place}]")
    elif kind in MESSAGES:
        _check_message(value, kind, where)
    elif kind in ENUMS:
        if not isinstance(value, str) or value not in ENUMS[kind]:
            hint = nearest(str(value), ENUMS[kind])
            raise UserError(f"{where}={value}: no such name{hint} Known: {', '.join(ENUMS[kind])}")
    else:
        fits, rule = _SCALARS[kind]
        if not fits(value):
            raise UserError(f"{where}={_shown(value)}: {rule}")


def _check_message(value: Any, kind: str, where: str) -> None:
    fields = MESSAGES[kind]
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: 'key: value' lines are needed ({', '.join(fields)}), this is {_shown(value)}")
    for key, inner in value.items():
        if key not in fields:
            camel = re.sub(r"_([a-z])", lambda match: match[1].upper(), str(key))
            if camel in fields:
                raise UserError(f"{where}: {key} is snake_case, which is dropped unread: write {camel}")
            raise UserError(f"{where}: unknown key {key!r}{nearest(str(key), fields)} Known: {', '.join(fields)}")
        check_shape(inner, fields[key], f"{where}.{key}" if kind != "CustomJobSpec" else f"{where}: {key}")


def _shown(value: Any) -> str:
    """As it stands in the file."""
    return json.dumps(value, default=str)


def _whole(bits: int) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        text = "" if isinstance(value, bool) else str(value)
        return re.fullmatch(r"[0-9]{1,19}", text) is not None and int(text) < 2 ** (bits - 1)

    return fits


# type -> (whether a value is one, the rule)
_SCALARS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "string": (lambda value: isinstance(value, str), "text is needed: put it in quotes"),
    "bool": (lambda value: isinstance(value, bool), "true or false is needed, without quotes"),
    "int32": (_whole(32), "a whole number below 2,147,483,648 is needed"),
    "int64": (_whole(64), "a whole number below 2^63 is needed"),
    "Duration": (
        lambda value: isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?s", value) is not None,
        'a time is text in seconds, as "3600s"',
    ),
}
