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
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import trainer
from trainer.base.errors import UserError

BOOLEAN_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
# type -> its name in messages, and what --help shows for a value
_TYPES = {
    int: ("a whole number", "INT"),
    float: ("a number", "NUMBER"),
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
_LARGEST = 2**31  # whole numbers are smaller: they end up in int32
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
        read. Settings of this package also have group: the place in --help; read: a function that
        converts its text, and raises ValueError with the rule; positional: whether it is an
        argument without a flag; repeated: whether its flag may be given several times, a value
        each; once: whether a second, other value is refused instead of replacing the first;
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
    read: Callable[[str], Any] | None = None
    positional: bool = False
    repeated: bool = False
    once: bool = False
    may_be_empty: bool = False
    used_with: str = ""
    used_by: str = ""


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
    ratios = {}
    for candidate in known:
        ratios[candidate] = difflib.SequenceMatcher(None, candidate, name).ratio()
    closest = max(ratios, key=ratios.__getitem__, default="")
    return f"; did you mean '{closest}'?" if ratios.get(closest, 0.0) >= _CLOSE else "."


def value_type(field: Field) -> tuple[type, bool]:
    """Returns the type of a field, a key of _TYPES, and whether it is optional (`X | None`)."""
    kind = field.type
    optional = isinstance(kind, types.UnionType)
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
            read = rules["read"]
            result = read(as_text(value)) if read else _converted(field, kind, value)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            form = f", written as {rules['metavar']}" if rules["metavar"] and kind is dict else ""
            rule = str(error) if rules["read"] else f"must be {_TYPES[kind][0]}{form}"
            raise UserError(f"{name}={value!r} {rule}") from None
    if kind is int and abs(result) >= _LARGEST:
        raise UserError(f"{name}={value} must be below {_LARGEST:,}")
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
    parts = typing.get_args(field.type)
    if kind is tuple:
        texts = [value] if isinstance(value, str) and field.metadata["repeated"] else _split(value)
        return tuple(_scalar(str, text) for text in texts)
    if kind is dict:
        sign = ":" if parts[0] is int else "="
        items: Collection[Any]
        if isinstance(value, Mapping):
            items = value.items()
        else:
            items = [str(pair).split(sign, 1) for pair in _split(value)]
        converted = {_scalar(parts[0], key): _scalar(parts[1], part) for key, part in items}
        if len(converted) < len(items) or "" in converted:
            raise ValueError
        return converted
    return _scalar(kind, value)


def _split(value: Any) -> Sequence[Any]:
    """Returns the parts of a text that commas separate, or the items of a list."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, (list, tuple)):
        raise TypeError
    return value


def _scalar(kind: type, value: Any) -> Any:
    if kind is str:
        text = as_text(value) if isinstance(value, (int, float, list, tuple)) else value
        if not isinstance(text, str) or _CONTROL.search(text):
            raise ValueError
        return text
    if isinstance(value, bool) or kind is bool:
        raise ValueError
    number = float(value)
    if not math.isfinite(number) or (kind is int and not number.is_integer()):
        raise ValueError
    return kind(number)


def coerce_all(fields: Mapping[str, Field], values: Values, origin: str = "") -> dict[str, Any]:
    """Returns values as the types of their fields.

    Raises UserError, naming `origin`, a file, if one does not fit.
    """
    result = {}
    for key, value in values.items():
        try:
            if key not in fields:
                raise UserError(f"unknown setting '{key}'{nearest(str(key), fields)}")
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
        elif (rules.get("repeated") or rules.get("positional")) and isinstance(
            value, (list, tuple)
        ):
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
    texts: dict[str, Any] = {}
    bare: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-"):
            bare.append(word)
            continue
        # The field that the flag names; --no_NAME is NAME=false.
        flag, equals, text = word.partition("=")
        name = flag_name(word)
        if not name:
            raise UserError(f"{word!r} is not a flag: write --name=value")
        switch = name.removeprefix("no_")
        if name not in fields and switch in fields and is_switch(fields[switch]):
            name = switch
            equals = "="
            text = "false"
        # a name that Python reserves, such as from_
        name = f"{name}_" if f"{name}_" in fields else name
        field = fields.get(name)
        if field is None or field.metadata["positional"]:
            keys = [key for key in fields if not fields[key].metadata["positional"]]
            flags = [key.removesuffix("_") for key in keys]
            raise UserError(f"unknown flag --{name}{nearest(name, flags)} {about_unknown(name)}")
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
        if field.metadata["once"] and texts.get(name, text) != text:
            raise UserError(f"{name} is given twice, as {texts[name]} and {text}: give it once")
        if field.metadata["repeated"]:
            texts.setdefault(name, []).append(text)
        else:
            texts[name] = text
    # Words without a flag are those of the positional fields, in their order.
    for field in fields.values():
        if field.metadata["positional"] and bare:
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


def answer_help(words: Sequence[str], usage: Usage, fields: Iterable[Field]) -> None:
    """Prints the help or the version, and raises SystemExit(0), if the words ask for it."""
    if [*words] == ["--version"]:
        print(f"vertex-trainer {trainer.__version__}")
        raise SystemExit(0)
    if {"-h", "--help", "--help=all"}.isdisjoint(words):
        return
    # Positional arguments come first; without --help=all only what most runs need.
    described = sorted(
        (field for field in fields if field.metadata["meaning"]),
        key=lambda field: not field.metadata["positional"],
    )
    usual = () if "--help=all" in words else usage.usual
    listed = [item for item in described if item.name in usual or item.metadata["positional"]]
    if not usual:
        listed = described
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
        parts = [rules["meaning"]]
        if rules["choices"]:
            parts.append(f"one of {', '.join(map(as_text, rules['choices']))}")
        for key, (limit, _) in _LIMITS.items():
            if rules[key] is not None:
                parts.append(f"{limit} {rules[key]:.10g}")
        if rules["unit"]:
            parts.append(f"in {rules['unit']}")
        default = default_of(field)
        if default is dataclasses.MISSING:
            parts[-1] += " (required)"
        elif default and "(default" not in rules["meaning"]:
            parts[-1] += f" (default: {as_text(default)})"
        name = field.name.removesuffix("_")
        group = rules["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group or None)
        groups[group].add_argument(
            rules["metavar"] or name if rules["positional"] else f"--{name}",
            help="; ".join(parts).replace("%", "%%"),
            metavar=rules["metavar"] or _TYPES[kind][1],
        )
    hidden = len(described) - len(listed)
    print(parser.format_help() + (f"\n--help=all shows {hidden} more" if hidden else ""))
    raise SystemExit(0)


def read_options(kind: type[Options], texts: Values, usage: Usage) -> Options:
    """Returns the options of a command from their texts or values.

    Raises UserError for a wrong or a missing one.
    """
    fields = fields_of(kind)
    values = coerce_all(fields, {name: text for name, text in texts.items() if name in fields})
    for name, field in fields.items():
        if default_of(field) is dataclasses.MISSING and name not in values:
            argument = field.metadata["metavar"] if field.metadata["positional"] else f"--{name}"
            raise UserError(f"{argument} is missing: {usage.program} {usage.arguments}")
    return kind(**values)


def parse_options(kind: type[Options], words: Sequence[str], usage: Usage, *names: str) -> Options:
    """Returns the options of a command line, all those of `kind` or only these `names`, or prints
    its --help."""
    fields = fields_of(kind, *names)
    answer_help(words, usage, fields.values())
    return read_options(kind, read_flags(words, fields), usage)


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
