"""Defines the options of a verb once, as fields of a dataclass, for its flags, their help and Python calls."""

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeVar

from trainer.base.errors import UserError
from trainer.base.settings.fields import Parser, as_text, boolean

Value = str | PathLike[str] | int | float | bool | None | Sequence[str] | Mapping[str, str | int | float]
Options = TypeVar("Options")


def option(
    metavar: str, meaning: str, default: Any = "", read: Callable[[Any], Any] = str, *, count: str = "",
    many: bool = False, choices: Sequence[str] | None = None,
) -> Any:  # fmt: skip
    """Returns a field of an options class; without a `metavar` it is a switch.

    `read` converts the flag's text to a value, or a list of texts if the flag may be given `many` times; `count` makes
    it a positional argument with argparse's nargs. A field whose name Python reserves ends with _, such as from_.
    """
    about = {"metavar": metavar, "meaning": meaning, "default": default, "read": read, "count": count, "many": many,
             "choices": choices}  # fmt: skip
    return dataclasses.field(default_factory=lambda: default, metadata=about)


def switch(meaning: str) -> Any:
    """Returns a field of an options class that is true or false."""
    return option("", meaning, False, boolean)


def option_of(kind: type, name: str) -> Any:
    """Returns a field that is the same option as the one called `name` in another options class."""
    field = options_of(kind, [name])[name]
    return dataclasses.field(default_factory=field.default_factory, metadata=field.metadata)


def options_of(kind: type, names: Iterable[str] = ()) -> dict[str, "dataclasses.Field[Any]"]:
    """Returns the options of a class by name, or only these `names`; fields not made by `option` are left out."""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.metadata}
    return {name: fields[name] for name in names} if names else fields


def declare(cli: Parser, kind: type, *names: str) -> None:
    """Adds the options of a class, or only these `names`, to the parser as flags and arguments."""
    for field in options_of(kind, names).values():
        about, flag = field.metadata, f"--{field.name.removesuffix('_')}"
        shown = {"metavar": about["metavar"], "help": about["meaning"], "default": about["default"]}
        if not about["metavar"]:
            cli.add_boolean(field.name, about["meaning"])
        elif about["count"]:
            cli.add_argument(field.name, nargs=about["count"], **shown)
        elif about["many"]:
            cli.add_argument(flag, dest=field.name, action="append", **{**shown, "default": []})
        else:
            cli.add_argument(flag, dest=field.name, type=about["read"], choices=about["choices"], **shown)


def parsed(kind: type[Options], flags: argparse.Namespace, **more: Any) -> Options:
    """Returns the options object of a command line parsed with the flags of `declare`; `more`: other fields."""
    values = {name: value for name, value in vars(flags).items() if name in options_of(kind)}
    many = {name: field.metadata["read"] for name, field in options_of(kind, values).items() if field.metadata["many"]}
    return kind(**values | {name: read(values[name]) for name, read in many.items()} | more)


def texts_of(name: str, value: Value) -> list[str]:
    """Returns the texts that the flag `name` would be given for the value of a Python call; none for None or "".

    A list becomes a text for each value, a dictionary a NAME=VALUE for each entry. Labels and regions become one text.
    """
    if isinstance(value, Mapping):
        texts = [f"{key}={part}" for key, part in value.items()]
    else:
        texts = [*map(as_text, value if isinstance(value, (list, tuple)) else (value,))]
    texts = [",".join(texts)] if name in ("region", "regions", "labels") else texts
    return [text for text in texts if value is not None and text]


def read_texts(kind: type, texts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Returns the values of options from their texts. Raises UserError as the command does."""
    values: dict[str, Any] = {}
    for name, field in options_of(kind, [name for name in texts if texts[name]]).items():
        about = field.metadata
        try:
            values[name] = about["read"](texts[name] if about["many"] or about["count"] else texts[name][-1])
            if about["choices"] and values[name] not in about["choices"]:
                raise argparse.ArgumentTypeError(f"{values[name]!r} is none of {', '.join(about['choices'])}")
        except argparse.ArgumentTypeError as error:
            raise UserError(f"argument --{name}: {error}") from None
    return values


def usd(text: str) -> float:
    """Returns a sum in USD from its text. Raises ArgumentTypeError unless it is a number above 0."""
    if not re.fullmatch(r"\d{1,6}(\.\d+)?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, in USD, as 5")
    return float(text)


def seconds(text: str) -> float:
    """Returns the seconds in a time such as 2h, 30m or 1d. Raises ArgumentTypeError for anything else."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smhd])", text)
    value = float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]] if match else 0.0
    if not 1 <= value <= 30 * 86400:
        raise argparse.ArgumentTypeError(f"{text!r} must be a time of up to 30 days with its unit, as 30m, 2h or 1d")
    return value


def factor(text: str) -> float:
    """Returns a factor by which a job may exceed its plan. Raises ArgumentTypeError unless it is 1 to 999."""
    if not re.fullmatch(r"\d{1,3}(\.\d{1,3})?", text) or float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 1 to 999, as 1.5")
    return float(text)


def read_prices(values: Sequence[str]) -> dict[str, float]:
    """Returns `["l4x1=0.71"]` as {"l4x1": 0.71}, in USD an hour. Raises UserError for anything else."""
    prices = {}
    for text in values:
        name, _, number = text.rpartition("=")
        if not name or not re.fullmatch(r"\d{1,6}(\.\d+)?", number) or not float(number):
            raise UserError(f"price_per_hour={text}: write --price_per_hour=TIER=NUMBER, above 0, as l4x1=0.71")
        prices[name] = float(number)
    return prices
