"""Parses command lines: `--name=value`, `--name value`, `--flag`, `--no-flag`, with `_` and `-` alike."""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from trainer.base.errors import UserError
from trainer.base.settings.fields import BOOLEAN_WORDS, as_text, is_switch, nearest, value_type

Field = dataclasses.Field[Any]
VERBOSE = "print the whole traceback of an error"  # the meaning of --verbose


def whole(minimum: int, maximum: int) -> Callable[[str], int]:
    """Returns an argparse type: a whole number from `minimum` to `maximum`."""

    def convert(text: str) -> int:
        if not (text.isdecimal() and minimum <= int(text) <= maximum):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum:,} to {maximum:,}")
        return int(text)

    return convert


class Parser(argparse.ArgumentParser):
    """Parses as argparse does, but reports an error as a one-line UserError and takes `-` for `_` in flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self._booleans: dict[str, set[str]] = {}  # with the values that each takes

    def add_boolean(
        self, name: str, help: str, *, group: Any = None, others: Iterable[str] = (), **options: Any
    ) -> None:
        """Declares a flag that is true alone, false as --no_NAME, and takes a value too: --NAME=false, or `others`."""
        self._booleans[name] = {*BOOLEAN_WORDS, *others}
        options = {"type": boolean, "default": False, **options}
        (group or self).add_argument(f"--{name}", nargs="?", const="true", metavar="BOOL", help=help, **options)

    @property
    def names(self) -> list[str]:
        """Returns the names of all arguments in the namespace."""
        return [action.dest for action in self._actions]

    @property
    def flags(self) -> list[str]:
        """Returns the names of all flags, without those of positional arguments."""
        return [name.removeprefix("--") for name in self._option_string_actions]

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Returns the namespace and the unknown arguments, as argparse does; parse_args calls it too."""
        words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._normalized(words), namespace)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Returns the namespace. Raises UserError with the nearest name for an unknown flag."""
        options, unknown = self.parse_known_args(args, namespace)
        refuse_unknown(unknown, self.flags)
        return options

    def error(self, message: str) -> NoReturn:
        """Raises UserError instead of printing the usage and exiting."""
        advice = "write --name=value" if "expected one argument" in message else f"see {self.prog} --help"
        raise UserError(f"{message} ({advice})")

    def _normalized(self, arguments: Sequence[str]) -> list[str]:
        """Returns the arguments with underscores in the flags' names and a value for each boolean flag."""
        result = []
        for index, argument in enumerate(arguments):
            flag = underscored(argument)
            name, following = flag[2:], arguments[index + 1 : index + 2]
            if flag.startswith("--no_") and flag[5:] in self._booleans:
                flag = f"--{flag[5:]}=false"
            elif flag.startswith("--") and name in self._booleans:
                has_value = following and following[0].lower() in self._booleans[name]
                flag += "" if has_value else "=true"  # else argparse would take a positional argument for its value
            result.append(flag)
        return result


def underscored(argument: str) -> str:
    """Returns `--job-dir=a-b` as `--job_dir=a-b`."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def refuse_unknown(
    arguments: Sequence[str],
    known: Sequence[str],
    hint: Callable[[str], str] = lambda name: "",
    listed: str = "them all",
) -> None:
    """Raises UserError for the first argument that is not a flag, or whose name is not in `known`.

    listed: which flags --help lists; hint: returns what else to say of the unknown name.
    """
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--")
        if not argument.startswith("--"):
            raise UserError(f"{argument!r} is not a flag: write --name=value")
        if name not in known:
            raise UserError(f"unknown flag --{name}{nearest(name, known)} --help lists {listed}{hint(name)}")


def boolean(text: str) -> bool:
    """Returns the value of a switch; an argparse type."""
    if text.lower() not in BOOLEAN_WORDS:
        raise argparse.ArgumentTypeError(f"{text!r} must be true or false")
    return BOOLEAN_WORDS[text.lower()]


def flag_values(arguments: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Returns the values of these flags, on which others depend, before the command line is parsed."""
    values = {}
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        flag, equals, value = underscored(argument).partition("=")
        if flag.startswith("--") and flag[2:] in names:
            values[flag[2:]] = value if equals else following
    return values


def add_setting_flags(parser: Parser, fields: Sequence[Field], *, hidden: bool = False) -> None:
    """Declares a flag for each field, in the groups that the fields name.

    The namespace gets the text of each flag that is given; `hidden` leaves the flags out of --help.
    """
    groups: dict[str, Any] = {}
    for field in fields:
        name = "" if hidden else field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name or None)
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "type": str}
        help_text = argparse.SUPPRESS if hidden else _help(field)
        kind, _ = value_type(field)
        if is_switch(field):
            others = () if kind is bool else field.metadata["choices"]
            parser.add_boolean(field.name, help_text, group=groups[name], others=others, **options)
        else:
            metavar = {int: "INT", float: "NUMBER", str: "TEXT"}[kind]
            groups[name].add_argument(f"--{field.name}", help=help_text, metavar=metavar, **options)


def _help(field: Field) -> str:
    rules = field.metadata
    parts = [rules["meaning"]]
    if rules["choices"]:
        parts.append(f"one of {', '.join(map(as_text, rules['choices']))}")
    limits = {"minimum": "at least", "above": "above", "maximum": "at most"}
    parts += [f"{word} {rules[key]:.10g}" for key, word in limits.items() if rules[key] is not None]
    if rules["unit"]:
        parts.append(f"in {rules['unit']}")
    default = f"default: {as_text(field.default) or 'none'}"
    if field.default is dataclasses.MISSING:
        default = "required"
    return f"{'; '.join(parts)} ({default})".replace("%", "%%")
