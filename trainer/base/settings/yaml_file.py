"""Reads YAML files of settings, machines or prices by PyYAML's safe loader.

Refuses what could only be a mistake or an attack: duplicate keys, huge files, aliases that expand
to huge documents.
"""

from pathlib import Path
from typing import Any

import yaml

from trainer.base.errors import UserError, reason

_MAX_CHARACTERS = 100_000
_MAX_VALUES = 10_000
_MAX_DIGITS = 100


def read_yaml(path: Path, name: str) -> dict[str, Any]:
    """Returns the mapping in a YAML file.

    Raises UserError, calling the file `name`, for anything else, and FileNotFoundError if there is
    no such file.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or not a possible file name
        problem = error.strerror if isinstance(error, OSError) else reason(error)
        raise UserError(
            f"{name}: cannot be read ({problem}): name a text file of 'setting: value' lines"
        ) from None
    if len(text) > _MAX_CHARACTERS:
        raise UserError(
            f"{name}: too large for a file of settings (more than {_MAX_CHARACTERS:,} characters)"
        )
    try:
        content = yaml.load(text, _StrictLoader)  # noqa: S506 (it is a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}, line {mark.line + 1}" if mark else name
        raise UserError(
            f"{place}: not valid YAML: {error.problem}: mend this line or the one before"
        ) from None
    except Exception as error:  # YAML constructors raise anything, for example for `!!int text`
        raise UserError(f"{name}: not valid YAML: {reason(error)}") from None
    if not isinstance(content, dict):
        kind = "it is empty" if content is None else f"this is {type(content).__name__}"
        raise UserError(f"{name}: 'setting: value' lines are needed, {kind}")
    return content


class _StrictLoader(yaml.SafeLoader):
    """Loads YAML as yaml.safe_load does, but refuses duplicate keys and values that aliases or
    digits inflate."""

    def get_single_node(self) -> Any:
        """Returns the document.

        Raises YAMLError if it is too large once its aliases are expanded.
        """
        node = super().get_single_node()
        if node is not None and _expanded_size(node, {}) > _MAX_VALUES:
            raise yaml.YAMLError(f"more than {_MAX_VALUES:,} values once its aliases are expanded")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Returns a mapping. Raises YAMLError if a key is listed twice."""
        # of `<<: *anchor`, whose keys those of the mapping itself replace
        merge = "tag:yaml.org,2002:merge"
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        duplicates = [key for index, key in enumerate(keys) if key in keys[:index]]
        if duplicates:
            raise yaml.YAMLError(f"{duplicates[0]} is listed twice")
        return super().construct_mapping(node, deep)


def _expanded_size(node: Any, sizes: dict[int, int]) -> int:
    """Returns the number of values in a YAML node with its aliases expanded.

    `sizes` caches those of other nodes.
    """
    if id(node) not in sizes:
        sizes[id(node)] = _MAX_VALUES  # a node that contains itself never ends
        if isinstance(node, yaml.ScalarNode):
            inner: list[Any] = []
            if node.tag.endswith(":int") and len(node.value) > _MAX_DIGITS:
                raise yaml.YAMLError(f"a number of {len(node.value):,} digits")
        else:
            inner = []
            for item in node.value:  # of a mapping a pair
                inner += item if isinstance(item, tuple) else [item]
        sizes[id(node)] = 1 + sum(_expanded_size(part, sizes) for part in inner)
    return sizes[id(node)]
