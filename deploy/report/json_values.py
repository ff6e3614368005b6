"""JSON of any origin: what is missing or damaged in it is None, or empty, never an exception."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MOST = 1e15  # no count, time or loss of a run is larger: what is, is damaged


def read_json(path: Path) -> tuple[dict[str, Any], str]:
    """The object in a JSON file and "", or {} and what is wrong with the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"{path} is missing"
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path} cannot be read ({error})"
    return (content, "") if isinstance(content, dict) else ({}, f"{path} holds no JSON object")


def mapping(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under `key`, or an empty one."""
    value = content.get(key)
    return value if isinstance(value, Mapping) else {}


def items(content: Mapping[str, Any], key: str) -> list[Any]:
    """The list under `key`, or an empty one."""
    value = content.get(key)
    return value if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """A number of a size that arithmetic can take, or None."""
    sound = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MOST
    return float(value) if sound else None


def positive(value: Any) -> float | None:
    """A `number` above 0, or None."""
    sound = number(value)
    return sound if sound is not None and sound > 0 else None


def whole(value: Any) -> int | None:
    """A count, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST else None
