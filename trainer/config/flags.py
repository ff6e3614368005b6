"""Command-line flags and YAML files for a dataclass of settings: `--name=value`, `_` and `-` alike; `name: value`."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from trainer.config.fields import nearest, value_type
from trainer.errors import UserError, reason

# What a file of settings, machines or prices may hold.
_MOST_CHARACTERS, _MOST_VALUES, _MOST_DIGITS = 100_000, 10_000, 100


def whole(least: int, most: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `least` to `most`."""

    def convert(text: str) -> int:
        if not (text.isdecimal() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least:,} to {most:,}")
        return int(text)

    return convert


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, and whose flags take `-` for `_`."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, which parse_args calls too."""
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([underscored(argument) for argument in given], namespace)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """As argparse's; what is unknown is told as everywhere, with the nearest name."""
        found, unknown = self.parse_known_args(args, namespace)
        refuse_unknown(unknown, [name.removeprefix("--") for name in self._option_string_actions])
        return found

    def error(self, message: str) -> NoReturn:
        """As argparse asks, but a UserError."""
        cure = "write --name=value" if "expected one argument" in message else f"{self.prog} --help says more"
        raise UserError(f"{message} ({cure})")


def parse_flags(
    fields: Sequence[dataclasses.Field[Any]], arguments: Sequence[str], description: str, epilog: str
) -> dict[str, str]:
    """The text of each flag given. UserError for an unknown one, with the nearest name; --help prints and exits."""
    parser = _parser(fields, description, epilog)
    found, unknown = parser.parse_known_args(arguments)
    refuse_unknown(unknown, [*(field.name for field in fields), "help"])
    return vars(found)


def refuse_unknown(arguments: Sequence[str], known: Sequence[str]) -> None:
    """UserError for the first of `arguments` that is no flag, or whose name is not `known`."""
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--")
        if not argument.startswith("--"):
            raise UserError(f"{argument!r} is not a flag: write --name=value")
        if name not in known:
            raise UserError(f"unknown flag --{name}{nearest(name, known)} --help lists them all")


def read_yaml(path: Path, name: str) -> dict[str, Any]:
    """A YAML mapping; UserError, naming it `name`, where the file holds something else. FileNotFoundError passes."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no name that a file can have
        raise UserError(f"{name}: cannot be read: {error}") from None
    if len(text) > _MOST_CHARACTERS:
        raise UserError(f"{name}: more than {_MOST_CHARACTERS:,} characters are no file of settings")
    try:
        content = yaml.load(text, _Plain)  # noqa: S506 (it is a SafeLoader)
    except Exception as error:  # its constructors raise whatever a tag such as !!int before other text lets them
        raise UserError(f"{name}: not valid YAML: {reason(error)}") from None
    if not isinstance(content, dict):
        found = "it is empty" if content is None else f"this is {type(content).__name__}"
        raise UserError(f"{name}: 'setting: value' lines are needed, {found}")
    return content


class _Plain(yaml.SafeLoader):
    """yaml.safe_load, but it refuses a key that stands twice, and what aliases or digits blow up."""

    def get_single_node(self) -> Any:
        """The document, if it is of a size that settings have once its aliases are written out."""
        node = super().get_single_node()
        if node is not None and _written_out(node, {}) > _MOST_VALUES:
            raise yaml.YAMLError(f"more than {_MOST_VALUES:,} values, with its aliases written out")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys differ."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for place, key in enumerate(keys) if key in keys[:place]]
        if twice:
            raise yaml.YAMLError(f"{twice[0]} stands there twice")
        return super().construct_mapping(node, deep)


def _written_out(node: Any, known: dict[int, int]) -> int:
    """How many values a YAML node stands for. `known`: those of nodes that were counted before."""
    if id(node) not in known:
        known[id(node)] = _MOST_VALUES  # a node inside itself has no end
        if isinstance(node, yaml.ScalarNode):
            inner: list[Any] = []
            if node.tag.endswith(":int") and len(node.value) > _MOST_DIGITS:
                raise yaml.YAMLError(f"a number of {len(node.value):,} digits")
        else:
            inner = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_written_out(part, known) for part in inner)
    return known[id(node)]


def underscored(argument: str) -> str:
    """`--job-dir=a-b` -> `--job_dir=a-b`, as Parser reads it."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _parser(fields: Sequence[dataclasses.Field[Any]], description: str, epilog: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m trainer.task",
        usage="%(prog)s --recipe=NAME --job_dir=FOLDER [--setting=value …]",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,  # description and epilog have their own lines
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups: dict[str, Any] = {}
    for field in fields:
        group = field.metadata["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        groups[group].add_argument(f"--{field.name}", help=_help(field), **_shape(field))
    return parser


def _shape(field: dataclasses.Field[Any]) -> dict[str, Any]:
    kind, _ = value_type(field)
    if kind is bool:
        return {"nargs": "?", "const": "true", "metavar": "BOOL"}
    return {"metavar": {int: "INT", float: "NUMBER", str: "TEXT"}[kind]}


def _help(field: dataclasses.Field[Any]) -> str:
    rules = field.metadata
    parts = [rules["meaning"]]
    if rules["choices"]:
        parts.append(f"one of {', '.join(rules['choices'])}")
    limits = {"minimum": "at least", "above": "above", "maximum": "at most"}
    parts += [f"{word} {rules[key]:.10g}" for key, word in limits.items() if rules[key] is not None]
    if rules["unit"]:
        parts.append(f"in {rules['unit']}")
    default = "none" if field.default in (None, "") else field.default
    if isinstance(default, bool):
        default = str(default).lower()
    return f"{'; '.join(parts)} (default: {default})".replace("%", "%%")
