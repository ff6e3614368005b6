"""Reads and writes JSON files. Missing or damaged content becomes None or empty instead of an exception."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.storage import write_whole

_LIMIT = 1e15  # no count, time or loss of a run is larger: a larger number is damaged


def read_json(path: Path) -> tuple[dict[str, Any], str]:
    """Returns the object in a JSON file and "", or {} and what is wrong with the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"{path} is missing"
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path} cannot be read ({error})"
    return (content, "") if isinstance(content, dict) else ({}, f"{path} contains no JSON object")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object atomically; NaN and infinity, which JSON does not have, become null."""
    write_whole(path, json.dumps(finite(content), indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """Returns a copy of `value` in which NaN and infinity are None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def mapping(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the object under `key`, or an empty one."""
    value = content.get(key)
    return value if isinstance(value, Mapping) else {}


def items(content: Mapping[str, Any], key: str) -> list[Any]:
    """Returns the list under `key`, or an empty one."""
    value = content.get(key)
    return value if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """Returns a number of plausible size as float; None for anything else."""
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LIMIT
    return float(value) if valid else None


def positive(value: Any) -> float | None:
    """Returns a `number` above 0; None for anything else."""
    valid = number(value)
    return valid if valid is not None and valid > 0 else None


def whole(value: Any) -> int | None:
    """Returns a count; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LIMIT else None
