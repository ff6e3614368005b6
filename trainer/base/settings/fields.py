"""Declares settings as fields of dataclasses, and reads and writes their values.

A field has a type, a unit, limits and a meaning. Flags, --help, keyword arguments of Python calls,
recipes and run.json are filled from it, and `coerce` reads a value from any of them, so that the
same value is accepted, or refused in the same line, wherever it comes from. `write_flags` writes
values as arguments of a command, and `read_flags` reads them.

A command line is `--name=value`, `--name value`, `--flag` or `--no_flag`, with `_` and `-` alike.
This module knows nothing of training: `trainer.base.settings.train_config` has the settings of a
run.
"""

import argparse
import dataclasses
import difflib
import math
import operator
import os
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType, UnionType
from typing import Any, TypeVar

import trainer
from trainer.base.errors import UserError

BOOLEAN_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_LARGEST = 2**31  # whole numbers are smaller: they end up in int32
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Seconds(float):
    """Represents a time; its text has a unit, as 7200s, and so has one that is read, as 2h."""

    def __str__(self) -> str:
        return f"{float(self):.10g}s"


# type -> its name in messages, and what --help shows for a value
_TYPES = {
    int: (f"a whole number below {_LARGEST:,}", "INT"),
    float: ("a number", "NUMBER"),
    Seconds: ("a time of up to 30 days with its unit, as 30m, 2h or 1d", "TIME"),
    bool: ("true or false", "BOOL"),
    str: ("text without control characters", "TEXT"),
    tuple: ("one or several names, separated by commas", "NAME,…"),
    dict: ("pairs of a name and a value, each name once", "NAME=VALUE,…"),
}
_LIMITS = {
    "minimum": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "maximum": ("at most", operator.le),
}
_CLOSE = 0.6  # similarity by difflib from which a name is suggested in place of another
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")

ALL_FLAGS = "--help=all lists them all"

Field = dataclasses.Field[Any]
Values = Mapping[str, Any]  # of fields, by name
Options = TypeVar("Options")


@dataclass(frozen=True)
class Setting:
    """Describes a setting: its meaning, unit and limits, as in `Annotated[int, Setting("hidden
    units", minimum=1)]`.

    above: an exclusive minimum; reads: whether it may name a file, which a job must then be able to
        read. Settings of this package also have group: the place in --help; positional: whether it
        is an argument without a flag; repeated: whether its flag may be given several times, a
        value each; once: whether a second, other value is refused instead of replacing the first;
        may_be_empty: whether an empty text is a value, which replaces that of a recipe; used_with:
        the setting without which it has no effect; used_by: why nothing uses it in some runs, and
        where its value comes from then.
    """

    meaning: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[Any, ...] = ()
    reads: bool = False
    group: str = ""
    metavar: str = ""
    positional: bool = False
    repeated: bool = False
    once: bool = False
    may_be_empty: bool = False
    used_with: str = ""
    used_by: str = ""


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def options_class(kind: type[Options]) -> type[Options]:
    """Makes a class whose fields are options a frozen dataclass of keywords."""
    return dataclass(frozen=True, kw_only=True)(kind)


def setting(
    default: Any = dataclasses.MISSING, meaning: str = "", metavar: str = "", **rules: Any
) -> Any:
    """Returns a dataclass field whose metadata are the values of `Setting(meaning, metavar=metavar,
    **rules)`."""
    metadata = vars(Setting(meaning, metavar=metavar, **rules))
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def fields_of(kind: type, *names: str) -> dict[str, Field]:
    """Returns the settings of a dataclass by name, or only these `names`; fields not made by
    `setting` are left out."""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.metadata}
    return {name: fields[name] for name in names} if names else fields


def setting_of(kind: type, name: str) -> Any:
    """Returns a dataclass field that is the same setting as the one called `name` in another
    dataclass."""
    return fields_of(kind)[name]


def default_of(field: Field) -> Any:
    """Returns the default of a field, dataclasses.MISSING if it has none."""
    return (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )


VERBOSE = setting(
    False, "print every report with all its values, and the whole traceback of an error"
)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the most similar known name, or a full stop if none is
    similar."""

    def similarity(candidate: str) -> float:
        return difflib.SequenceMatcher(None, candidate, name).ratio()

    closest = max(known, key=similarity, default="")
    return f"; did you mean '{closest}'?" if closest and similarity(closest) >= _CLOSE else "."


def nearest_file(text: str, folder: str | os.PathLike[str] = ".") -> str:
    """Returns `; did you mean 'x'?` for an error's text that names a missing file of `folder`."""
    missing = re.search(r"No such file or directory: '(.+?)'", text)
    if not missing:
        return ""
    inner = os.path.dirname(missing[1])
    known: list[str] = []
    with suppress(OSError):
        known = [os.path.join(inner, name) for name in os.listdir(os.path.join(folder, inner))]
    return nearest(missing[1], known).rstrip(".")


def value_type(field: Field) -> tuple[type, bool]:
    """Returns the type of a field, a key of _TYPES, and whether it is optional (`X | None`)."""
    kind = field.type
    optional = isinstance(kind, UnionType)
    if optional:
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    origin = typing.get_origin(kind)
    kind = dict if origin is Mapping else origin or kind
    assert kind in _TYPES, f"{field.name}: settings take plain types, not {field.type}"
    return kind, optional


def is_switch(field: Field) -> bool:
    """Returns whether the flag may stand alone and then means true: booleans, and choices that
    include true."""
    return value_type(field)[0] is bool or "true" in field.metadata["choices"]


def coerce(field: Field, value: Any) -> Any:
    """Returns a value from YAML, from a Python call or from the text of a flag, as the field's
    type.

    The text `none` is None where the field allows that; whole numbers may be written as 1e3; names,
    pairs (as 0:1,1:6) and lists of them may be one text with commas. Raises UserError if the value
    does not fit the field.
    """
    name = field.name.removesuffix("_")
    rules = field.metadata
    kind, optional = value_type(field)
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(value, str) and not value.strip() and not rules["may_be_empty"]:
        raise UserError(
            f"{name} is empty: give a value, or leave it out (is a variable of the shell not set?)"
        )
    if optional and (value is None or str(value).lower() == "none"):
        return None
    # The value in its type, then its limits and choices.
    if is_switch(field) and str(value).lower() in BOOLEAN_WORDS:
        result: Any = BOOLEAN_WORDS[str(value).lower()]
        result = result if kind is bool else as_text(result)
    else:
        try:
            result = _converted(field, kind, value)
        except (TypeError, ValueError, OverflowError):
            form = f", written as {rules['metavar']}" if rules["metavar"] and kind is dict else ""
            raise UserError(f"{name}={value!r} must be {_TYPES[kind][0]}{form}") from None
    choices = [as_text(choice) for choice in rules["choices"]]
    unit = f" {rules['unit']}" if rules["unit"] not in ("", name) else ""
    parts = [*result.values()] if kind is dict else result if kind is tuple else [result]
    for part in parts:
        if choices and part not in rules["choices"]:
            advice = f"{', '.join(choices)}{nearest(str(part), choices)}"
            raise UserError(f"{name}={as_text(part)} must be one of {advice}")
        for key, (words, holds) in _LIMITS.items():
            if rules[key] is not None and not holds(part, rules[key]):
                raise UserError(f"{name}={as_text(result)} must be {words} {rules[key]}{unit}")
    return result


def _converted(field: Field, kind: type, value: Any) -> Any:
    """Returns a value converted to the type of its field; raises an error of conversion if it is
    none of that type."""
    if kind not in (tuple, dict):
        return _scalar(kind, value)
    # The items of a list, or the parts of a text that commas separate.
    parts = value
    if isinstance(value, str):
        whole = kind is tuple and field.metadata["repeated"]
        parts = [value] if whole else [*filter(None, map(str.strip, value.split(",")))]
    elif not isinstance(value, (list, tuple, Mapping)):
        raise TypeError
    if kind is tuple:
        return tuple(_scalar(str, part) for part in parts)
    of_key, of_value = typing.get_args(field.type)
    pairs = parts
    if not isinstance(parts, Mapping):
        pairs = [str(part).split(":" if of_key is int else "=", 1) for part in parts]
    converted = {_scalar(of_key, key): _scalar(of_value, part) for key, part in dict(pairs).items()}
    if len(converted) < len(pairs) or "" in converted:
        raise ValueError
    return converted


def _scalar(kind: type, value: Any) -> Any:
    if kind is str:
        text = as_text(value) if isinstance(value, (int, float, list, tuple)) else value
        if not isinstance(text, str) or _CONTROL.search(text):
            raise ValueError
        return text
    if isinstance(value, bool) or kind is bool:
        raise ValueError
    if kind is Seconds:
        match = re.fullmatch(r"(\d{1,8}(?:\.\d{1,3})?)([smhd])", as_text(value))
        number = float(match[1]) * _UNITS[match[2]] if match else 0.0
        if not 1 <= number <= 30 * _UNITS["d"]:
            raise ValueError
    else:
        number = float(value)
        whole = number.is_integer() and abs(number) < _LARGEST
        if not math.isfinite(number) or (kind is int and not whole):
            raise ValueError
    return kind(number)


def coerce_all(
    fields: Mapping[str, Field],
    values: Values,
    origin: str = "",
    about_unknown: Callable[[str], str] = lambda name: "",
) -> dict[str, Any]:
    """Returns values as the types of their fields.

    Raises UserError, naming `origin`, a file, if one does not fit. about_unknown: returns what else
        to say of an unknown one.
    """
    result = {}
    for key, value in values.items():
        try:
            if key not in fields:
                line = f"unknown setting '{key}'{nearest(str(key), fields)} {about_unknown(key)}"
                raise UserError(line.strip())
            result[key] = coerce(fields[key], value)
        except UserError as error:
            raise UserError(f"{origin}: {error}" if origin else str(error)) from None
    return result


def as_text(value: Any) -> str:
    """Returns a value as a flag takes it: true, none, 0.0001, text; names and pairs with commas, as
    flip,crop."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, Mapping):
        signs = {key: ":" if isinstance(key, int) else "=" for key in value}
        return ",".join(f"{key}{signs[key]}{part}" for key, part in value.items())
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def write_flags(values: Values, fields: Mapping[str, Field] | None = None) -> list[str]:
    """Returns values as arguments of a command.

    `fields`: those of which some are positional or repeated.
    """
    arguments: list[str] = []
    flags: list[str] = []
    for name, value in values.items():
        rules = fields[name].metadata if fields and name in fields else {}
        parts = [value]
        if rules.get("repeated") and isinstance(value, Mapping):
            parts = [{key: part} for key, part in value.items()]
        elif isinstance(value, tuple) and (rules.get("repeated") or rules.get("positional")):
            parts = [*value]
        if rules.get("positional"):
            arguments += map(as_text, parts)
        else:
            flags += [f"--{name.removesuffix('_')}={as_text(part)}" for part in parts]
    return [*arguments, *flags]


def flag_name(word: str) -> str:
    """Returns the name of the flag in a word, with `_`, as job_dir of --job-dir=a; "" if the word
    is no flag."""
    return word.partition("=")[0][2:].replace("-", "_") if word.startswith("--") else ""


def read_flags(
    words: Sequence[str],
    fields: Mapping[str, Field],
    about_unknown: Callable[[str], str] = lambda name: ALL_FLAGS,
) -> dict[str, Any]:
    """Returns the texts of a command line by the names of its fields, a list for a field that takes
    several.

    about_unknown: returns where the flags are listed, and what else to say of an unknown one.
        Raises UserError for anything else than these flags.
    """
    positional = [field for field in fields.values() if field.metadata["positional"]]
    # by flag: a name that Python reserves, such as from_, has none of its `_`
    flags = {
        name.removesuffix("_"): field for name, field in fields.items() if field not in positional
    }
    texts: dict[str, Any] = {}
    bare: list[str] = []
    waiting = [*words]
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-"):
            bare.append(word)
            continue
        flag, equals, text = word.partition("=")
        name = flag_name(word)
        if not name:
            raise UserError(f"{word!r} is not a flag: write --name=value")
        # --no_NAME is NAME=false
        switch = name.removeprefix("no_")
        if name not in flags and switch in flags and is_switch(flags[switch]):
            texts[flags[switch].name] = "false"
            continue
        if name not in flags:
            raise UserError(f"unknown flag --{name}{nearest(name, flags)} {about_unknown(name)}")
        field = flags[name]
        # Its text: what follows, unless the flag may stand alone.
        if not equals:
            following = waiting[0].lower() if waiting else "--"
            if not is_switch(field):
                if following.startswith("--"):
                    raise UserError(f"{flag} has no value: write {flag}=VALUE")
                text = waiting.pop(0)
            elif following in BOOLEAN_WORDS or following in field.metadata["choices"]:
                text = waiting.pop(0)
            else:
                text = "true"
        if field.metadata["once"] and texts.get(field.name, text) != text:
            raise UserError(f"{name} is given twice, as {texts[name]} and {text}: give it once")
        earlier = texts.get(field.name, [])
        texts[field.name] = [*earlier, text] if field.metadata["repeated"] else text
    # Words without a flag are those of the positional fields, in their order.
    for field in positional:
        if bare:
            several = value_type(field)[0] is tuple
            texts[field.name] = bare if several else bare[0]
            bare = [] if several else bare[1:]
    if bare:
        raise UserError(f"{bare[0]!r} is not a flag: write --name=value. {about_unknown(bare[0])}")
    return texts


@dataclass(frozen=True)
class Usage:
    """Describes a command for its --help.

    arguments: what follows the program's name in the usage line; usual: the settings that --help
        shows, while --help=all shows all; all of them if it is empty; shows_settings: whether
        settings of a run are among them; flags: where an error says that its flags are listed.
    """

    program: str
    arguments: str
    description: str | None = ""
    epilog: str = ""
    usual: Collection[str] = ()
    shows_settings: bool = True
    flags: str = ALL_FLAGS


def answer_help(
    words: Sequence[str], usage: Usage, fields: Iterable[Field], own: Collection[str] = ()
) -> None:
    """Prints the help or the version, and raises SystemExit(0), if the words ask for it.

    own: settings of the user's functions, which are shown beside the usual ones.
    """
    if [*words] == ["--version"]:
        print(f"vertex-trainer {trainer.__version__}")
        raise SystemExit(0)
    if {"-h", "--help", "--help=all"}.isdisjoint(words):
        return
    # Positional arguments come first; without --help=all only what most runs need.
    described = [field for field in fields if field.metadata["meaning"]]
    described.sort(key=lambda field: not field.metadata["positional"])
    listed = described
    if usage.usual and "--help=all" not in words:
        usual = {*usage.usual, *own}
        listed = [item for item in described if item.name in usual or item.metadata["positional"]]
    parser = argparse.ArgumentParser(
        prog=usage.program,
        usage=f"%(prog)s {usage.arguments}",
        description=usage.description,
        epilog=usage.epilog,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Each setting in its group, with its limits, unit and default.
    groups: dict[str, Any] = {}
    for field in listed:
        rules = field.metadata
        kind, _ = value_type(field)
        name = field.name.removesuffix("_")
        limits = [
            f"{limit} {rules[key]:.10g}"
            for key, (limit, _) in _LIMITS.items()
            if rules[key] is not None
        ]
        choices = ", ".join(map(as_text, rules["choices"]))
        unit = rules["unit"]
        parts = [rules["meaning"], choices and f"one of {choices}", *limits, unit and f"in {unit}"]
        text = "; ".join(filter(None, parts))
        default = default_of(field)
        if default is dataclasses.MISSING:
            text += " (required)"
        elif default and "(default" not in text:
            text += f" (default: {as_text(default)})"
        group = rules["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group or None)
        groups[group].add_argument(
            rules["metavar"] or name if rules["positional"] else f"--{name}",
            help=text.replace("%", "%%"),
            metavar=rules["metavar"] or _TYPES[kind][1],
        )
    hidden = len(described) - len(listed)
    print(parser.format_help() + (f"\n--help=all shows {hidden} more" if hidden else ""))
    raise SystemExit(0)


def read_values(
    kind: type[Options],
    values: Values,
    usage: Usage,
    settings: Mapping[str, Field] = MappingProxyType({}),
    about_unknown: Callable[[str], str] = lambda name: "",
) -> tuple[Options, dict[str, Any]]:
    """Returns the options of a command, and values of its other settings, from values or texts.

    Raises UserError for a wrong, an unknown or a missing one.
    """
    options = fields_of(kind)
    typed = coerce_all({**options, **settings}, values, about_unknown=about_unknown)
    for name, field in options.items():
        if default_of(field) is dataclasses.MISSING and name not in typed:
            argument = field.metadata["metavar"] if field.metadata["positional"] else f"--{name}"
            raise UserError(f"{argument} is missing: {usage.program} {usage.arguments}")
    of_options = {name: typed.pop(name) for name in options if name in typed}
    return kind(**of_options), typed


def parse_command(
    kind: type[Options],
    words: Sequence[str],
    usage: Usage,
    settings: Mapping[str, Field] = MappingProxyType({}),
    about_unknown: Callable[[str], str] = lambda name: ALL_FLAGS,
    own: Collection[str] = (),
    names: Collection[str] = (),
) -> tuple[Options, dict[str, Any]]:
    """Returns the options of a command line, and the values of its other settings; or prints its
    help.

    own: settings of the user's functions, which --help shows; names: the options that the command
        has, by default all of `kind`. Raises UserError for a mistake.
    """
    options = fields_of(kind, *names)
    if both := sorted(options.keys() & settings.keys()):
        raise UserError(
            f"--{both[0]} is a flag of `{usage.program}` and a setting of your own: rename the"
            " setting"
        )
    fields = {**options, **settings}
    answer_help(words, usage, (fields if usage.shows_settings else options).values(), own)
    return read_values(kind, read_flags(words, fields, about_unknown), usage, settings)


def parse_options(kind: type[Options], words: Sequence[str], usage: Usage, *names: str) -> Options:
    """Returns the options of a command line, all those of `kind` or only these `names`, or prints
    its --help."""
    return parse_command(kind, words, usage, names=names)[0]


def recording_reads(values: Options) -> tuple[Options, set[str]]:
    """Returns a copy of the values, and the names of the fields that are read from the copy, as
    they are read."""
    names: set[str] = set()
    kind: Any = type(values)

    class Recording(kind):
        def __getattribute__(self, name: str) -> Any:
            names.add(name)
            return super().__getattribute__(name)

    copy: Any = object.__new__(Recording)
    vars(copy).update(vars(values))
    return typing.cast(Options, copy), names


def refuse_unused(named: Collection[str], used: Collection[str], values: Any) -> None:
    """Raises UserError for a field that a command or a call names and that nothing in the run has
    used.

    A model that is compiled with "adam" has a learning rate of its own: without this,
    --learning_rate would be accepted, written to run.json and ignored.
    """
    for name, field in fields_of(type(values)).items():
        reason = field.metadata["used_by"]
        if reason and name in named and name not in used:
            text = as_text(getattr(values, name))
            raise UserError(f"{name}={text} has no effect, as {reason}; or drop --{name}")
