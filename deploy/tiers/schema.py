"""Validates that a YAML value is a CustomJobSpec: known keys in camelCase, correct types, known enum names.

gcloud sends nearly anything, and the API's error comes late and is terse.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deploy.tiers.machine_table import NO_TPU
from trainer.base.errors import UserError
from trainer.base.settings.fields import nearest
from trainer.base.settings.yaml_file import read_yaml

_TABLES = read_yaml(Path(__file__).with_name("schema.yaml"), "schema.yaml")
MESSAGES: Mapping[str, Mapping[str, str]] = _TABLES["messages"]
ENUMS: Mapping[str, tuple[str, ...]] = {name: tuple(values) for name, values in _TABLES["enums"].items()}


def check_shape(value: Any, kind: str, where: str) -> None:
    """Raises UserError with the location `where` for the first part of `value` that does not fit the type `kind`."""
    if kind.endswith("[]"):
        if not isinstance(value, list):
            raise UserError(f"{where}: must be a list, not {_shown(value)}: begin each item with '- '")
        for index, item in enumerate(value):
            check_shape(item, kind[:-2], f"{where}[{index}]")
    elif kind in MESSAGES:
        _check_message(value, kind, where)
    elif kind in ENUMS:
        if not isinstance(value, str) or value not in ENUMS[kind]:
            hint = _accelerators_like(str(value)) if kind == "AcceleratorType" else nearest(str(value), ENUMS[kind])
            raise UserError(f"{where}={value}: unknown name{hint} Known: {', '.join(ENUMS[kind])}")
    else:
        fits, rule = _SCALARS[kind]
        if not fits(value):
            raise UserError(f"{where}={_shown(value)}: {rule}")


# Fields of a CustomJob -> what to do instead.
_OF_CUSTOM_JOB = {
    "jobSpec": "move its content to the top of the file",
    "displayName": "remove it, and use --name=",
    "labels": "remove it, and use --labels=",
    "encryptionSpec": "remove it, and use --kms_key=",
}


def _accelerators_like(name: str) -> str:
    """Returns a hint with the accelerators of the same model: A100 is in the names of two, spelt unlike each other."""
    if "TPU" in name.upper():
        return f": {NO_TPU}."
    models = set(name.upper().replace("-", "_").split("_")) - {"NVIDIA", "TESLA", "80GB"}
    same = [known for known in ENUMS["AcceleratorType"] if models & set(known.split("_"))]
    if not same:
        return nearest(name, ENUMS["AcceleratorType"])
    return f"; did you mean {' or '.join(map(repr, same))}?"


def _check_message(value: Any, kind: str, where: str) -> None:
    fields = MESSAGES[kind]
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: must be 'key: value' lines ({', '.join(fields)}), not {_shown(value)}")
    for key, inner in value.items():
        if key not in fields:
            camel = re.sub(r"_([a-z])", lambda match: match[1].upper(), str(key))
            if camel in fields:
                raise UserError(f"{where}: {key} is snake_case, which the API ignores: use {camel}")
            if kind == "CustomJobSpec" and key in _OF_CUSTOM_JOB:
                raise UserError(
                    f"{where}: unknown key {key!r}: it belongs to a CustomJob, and this file is the CustomJobSpec in "
                    f"its jobSpec: {_OF_CUSTOM_JOB[key]}"
                )
            raise UserError(f"{where}: unknown key {key!r}{nearest(str(key), fields)} Known: {', '.join(fields)}")
        check_shape(inner, fields[key], f"{where}.{key}" if kind != "CustomJobSpec" else f"{where}: {key}")


def _shown(value: Any) -> str:
    """Returns the value as written in the file."""
    return json.dumps(value, default=str)


def _whole(bits: int) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        text = "" if isinstance(value, bool) else str(value)
        return re.fullmatch(r"[0-9]{1,19}", text) is not None and int(text) < 2 ** (bits - 1)

    return fits


# type -> (test of a value, rule)
_SCALARS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "string": (lambda value: isinstance(value, str), "must be text: put it in quotes"),
    "bool": (lambda value: isinstance(value, bool), "must be true or false, without quotes"),
    "int32": (_whole(32), "must be a whole number below 2,147,483,648"),
    "int64": (_whole(64), "must be a whole number below 2^63"),
    "Duration": (
        lambda value: isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?s", value) is not None,
        'must be text in seconds, as "3600s"',
    ),
}
