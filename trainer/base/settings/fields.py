"""Describes the fields of a settings dataclass: meaning, limits, conversion from text, and their command-line flags.

A command line is `--name=value`, `--name value`, `--flag` or `--no-flag`, with `_` and `-` alike. It relies on argparse
and dataclasses alone and knows nothing of training: `trainer.base.settings.train_config` has the settings. A value that
`coerce` returns has the type of its field and is within its limits; anything else is one UserError.
"""

import argparse
import dataclasses
import difflib
import itertools
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import trainer
from trainer.base.errors import UserError

BOOLEAN_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False),
}  # fmt: skip
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text without control characters"}
_LIMITS = {"minimum": ("at least", operator.ge), "above": ("above", operator.gt), "maximum": ("at most", operator.le)}

_CLOSE = 0.6  # similarity by difflib from which a name is suggested in place of another
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Describes a setting: its meaning, unit and limits, as in `Annotated[int, Setting("hidden units", minimum=1)]`.

    above: an exclusive minimum; reads: whether it may name a file, which a job must then be able to read.
    """

    meaning: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[Any, ...] = ()
    reads: bool = False


def setting(default: Any, meaning: str, *, group: str = "", **limits: Any) -> Any:
    """Returns a dataclass field whose metadata are the values of `Setting(meaning, **limits)` and the --help group."""
    return dataclasses.field(default=default, metadata={**vars(Setting(meaning, **limits)), "group": group})


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the most similar known name, or a full stop if none is similar."""
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
    """Returns whether the flag may stand alone and then means true: booleans, and choices that include true."""
    return value_type(field)[0] is bool or "true" in (field.metadata.get("choices") or ())


def coerce(field: dataclasses.Field[Any], value: Any) -> Any:
    """Returns a value from YAML, or the text of a flag, as the field's type. Raises UserError if it does not fit.

    The text `none` is None where the field allows that; whole numbers may be written as 1e3.
    """
    kind, optional = value_type(field)
    if kind is str and is_switch(field) and str(value).lower() in BOOLEAN_WORDS:
        return as_text(BOOLEAN_WORDS[str(value).lower()])
    if optional and (value is None or str(value).lower() == "none"):
        return None
    try:
        if kind is bool:
            result: Any = BOOLEAN_WORDS[str(value).lower()]
        elif kind is str:
            result, valid = value, isinstance(value, str) and not _CONTROL.search(value)
        else:
            number = float(value)
            valid = not isinstance(value, bool) and math.isfinite(number) and (kind is float or number.is_integer())
            result = kind(number)
        if kind is not bool and not valid:
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{field.name}={value!r} must be {TYPE_NAMES[kind]}") from None
    if kind is int and abs(result) >= 2**31:
        raise UserError(f"{field.name}={value} must be below {2**31:,}")
    rules = field.metadata
    if rules["choices"] and result not in rules["choices"]:
        choices = [as_text(choice) for choice in rules["choices"]]
        raise UserError(
            f"{field.name}={as_text(result)} must be one of {', '.join(choices)}{nearest(str(result), choices)}"
        )
    unit = f" {rules['unit']}" if rules["unit"] not in ("", field.name) else ""
    for key, (words, holds) in _LIMITS.items():
        if rules[key] is not None and not holds(result, rules[key]):
            raise UserError(f"{field.name}={result} must be {words} {rules[key]}{unit}")
    return result


def coerce_all(cls: type, values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Returns values converted to the field types of `cls`. Raises UserError, naming `origin`, if one does not fit."""
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


Field = dataclasses.Field[Any]
VERBOSE = "print every report with all its values, and the whole traceback of an error"  # the meaning of --verbose


def integer_in(minimum: int, maximum: int) -> Callable[[str], int]:
    """Returns an argparse type: a whole number from `minimum` to `maximum`."""

    def convert(text: str) -> int:
        if not (text.isdecimal() and minimum <= int(text) <= maximum):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum:,} to {maximum:,}")
        return int(text)

    return convert


class Parser(argparse.ArgumentParser):
    """Parses as argparse does, but reports an error as a one-line UserError and takes `-` for `_` in flags.

    usual: the flags that --help shows; --help=all shows all of them. --version prints the package's version.
    """

    def __init__(self, *, usual: Iterable[str] = (), **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self._usual = {*usual}
        self._booleans: dict[str, set[str]] = {}  # the words that each boolean flag takes as its value

    def add_boolean(
        self, name: str, help: str, *, group: Any = None, others: Iterable[str] = (), **options: Any
    ) -> None:
        """Declares a flag: --NAME means true, --no_NAME false; --NAME=WORD takes a boolean word or one of `others`."""
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
        if words == ["--version"]:
            print(f"vertex-trainer {trainer.__version__}")
            raise SystemExit(0)
        if "--help=all" in words:
            self._usual, words = set(), ["--help"]
        normalized = []
        for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
            flag = underscored(word)
            if flag.startswith("--no_") and flag[5:] in self._booleans:
                flag = f"--{flag[5:]}=false"
            elif flag.startswith("--") and flag[2:] in self._booleans:
                # Without "=true", argparse would take a following positional argument as the value.
                flag += "" if following.lower() in self._booleans[flag[2:]] else "=true"
            normalized.append(flag)
        return super().parse_known_args(normalized, namespace)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Returns the namespace. Raises UserError with the nearest name for an unknown flag."""
        options, unknown = self.parse_known_args(args, namespace)
        refuse_unknown(unknown, self.flags)
        return options

    def format_help(self) -> str:
        """Returns the text of --help."""
        hidden = [action for action in self._actions if action.option_strings and action.dest not in self._usual]
        hidden = [action for action in hidden if self._usual and action.help != argparse.SUPPRESS]
        for action in hidden:
            action.help = argparse.SUPPRESS
        return super().format_help() + (f"\n--help=all shows {len(hidden)} more\n" if hidden else "")

    def error(self, message: str) -> NoReturn:
        """Raises UserError instead of printing the usage and exiting."""
        advice = "write --name=value" if "expected one argument" in message else f"see {self.prog} --help"
        raise UserError(f"{message} ({advice})")


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

    listed: what --help=all lists, in words; hint: returns what else to say about the unknown name.
    """
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--")
        if not argument.startswith("--"):
            raise UserError(f"{argument!r} is not a flag: write --name=value")
        if name not in known:
            raise UserError(f"unknown flag --{name}{nearest(name, known)} --help=all lists {listed}{hint(name)}")


def boolean(text: str) -> bool:
    """Converts the text of a boolean flag; an argparse type."""
    if text.lower() not in BOOLEAN_WORDS:
        raise argparse.ArgumentTypeError(f"{text!r} must be true or false")
    return BOOLEAN_WORDS[text.lower()]


def flag_values(arguments: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Returns the texts of these flags by name, before the command line is parsed: its other flags depend on them."""
    values = {}
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        flag, equals, value = underscored(argument).partition("=")
        if flag.startswith("--") and flag[2:] in names:
            values[flag[2:]] = value if equals else following
    return values


def add_setting_flags(parser: Parser, fields: Sequence[Field], *, hidden: bool = False) -> None:
    """Declares a flag for each field, in the groups that the fields name.

    The namespace then holds the text of each flag that is given; `hidden` leaves the flags out of --help.
    """
    groups: dict[str, Any] = {}
    for field in fields:
        rules, kind = field.metadata, value_type(field)[0]
        name = "" if hidden else rules["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name or None)
        parts = [rules["meaning"]]
        if rules["choices"]:
            parts.append(f"one of {', '.join(map(as_text, rules['choices']))}")
        parts += [f"{words} {rules[key]:.10g}" for key, (words, _) in _LIMITS.items() if rules[key] is not None]
        if rules["unit"]:
            parts.append(f"in {rules['unit']}")
        required = field.default is dataclasses.MISSING
        parts[-1] += " (required)" if required else f" (default: {as_text(field.default) or 'none'})"
        help_text = argparse.SUPPRESS if hidden else "; ".join(parts).replace("%", "%%")
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "type": str}
        if is_switch(field):
            others = () if kind is bool else field.metadata["choices"]
            parser.add_boolean(field.name, help_text, group=groups[name], others=others, **options)
        else:
            metavar = {int: "INT", float: "NUMBER", str: "TEXT"}[kind]
            groups[name].add_argument(f"--{field.name}", help=help_text, metavar=metavar, **options)
