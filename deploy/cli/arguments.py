"""The command line of a verb: its own flags and positional arguments, and every flag of the trainer besides."""

import argparse
import dataclasses
import math
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from trainer.config.fields import nearest
from trainer.config.flags import Parser, underscored
from trainer.config.train_config import TrainConfig
from trainer.errors import UserError


def parser(verb: str, description: str, usage: str) -> Parser:
    """An argparse parser for `python -m deploy VERB`; its errors are one line."""
    return Parser(
        prog=f"python -m deploy {verb}", usage=f"%(prog)s {usage}", description=description, allow_abbrev=False
    )


# Flags of several verbs. What is not given is empty.
_SHARED: dict[str, dict[str, Any]] = {
    "project": {"metavar": "ID", "help": "Google Cloud project (default: gcloud's)"},
    "region": {"metavar": "NAME", "help": "as us-central1 (default: gcloud's ai/region)"},
    "bucket": {"metavar": "gs://NAME[/PREFIX]", "help": "where packages and job directories go"},
    "package": {"metavar": "DIR", "help": "a Python package of yours that goes along"},
    "prices": {"metavar": "FILE", "help": "YAML of your own prices, in USD an hour"},
    "price_per_hour": {
        "metavar": "TIER=USD", "help": "the price of all machines of a tier", "action": "append", "default": [],
    },
}  # fmt: skip


def add_flags(own: argparse.ArgumentParser, *names: str) -> None:
    """Declares flags that several verbs have, each as it is everywhere."""
    for name in names:
        own.add_argument(f"--{name}", **{"default": "", **_SHARED[name]})


def add_table_flags(own: argparse.ArgumentParser) -> None:
    """The flags of every verb that ends in a table."""
    own.add_argument("--baseline", default="", metavar="TIER", help="what speed-ups are against (default: the first)")
    add_flags(own, "price_per_hour")


def read_prices(given: Sequence[str]) -> dict[str, float]:
    """`["l4x1=0.71"]` -> {"l4x1": 0.71}, in USD an hour; UserError for anything else."""
    return numbers_by_tier("price_per_hour", given)


def numbers_by_tier(flag: str, given: Sequence[str]) -> dict[str, float]:
    """The TIER=NUMBER texts of a flag; UserError for what is no number above 0."""
    found = {}
    for text in given:
        name, _, number = text.rpartition("=")
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = math.nan
        if not name or not 0 < found[name] < math.inf:
            raise UserError(f"{flag}={text}: write --{flag}=TIER=NUMBER with a number above 0, as l4x1=0.71")
    return found


def check_tiers(given: Iterable[str], known: Sequence[str], flag: str = "") -> None:
    """UserError, naming the flag, for the first name `given` of a tier that is not `known`."""
    for name in given:
        if name not in known:
            named = f"{flag}={name}" if flag else name
            raise UserError(f"{named}: no such tier{nearest(name, known)} Here are: {', '.join(known)}")


def command_line(verb: str, arguments: Sequence[str]) -> str:
    """What a user types into a shell to run the verb."""
    return shlex.join(["python", "-m", "deploy", verb, *arguments])


# Settings that may be empty: an empty one overrides what a recipe names.
_MAY_BE_EMPTY = {field.name for field in dataclasses.fields(TrainConfig) if field.default == ""} - {"recipe", "job_dir"}


def refuse_empty(arguments: Sequence[str]) -> None:
    """UserError for an argument, or a flag's value, that is empty, as of a shell's variable that is not set."""
    for argument in arguments:
        flag, equals, value = underscored(argument).partition("=")
        given = value if equals and flag.startswith("--") else argument
        if not given.strip() and flag[2:] not in _MAY_BE_EMPTY:
            raise UserError(
                f"empty argument {argument!r}: give a value, or leave it out (is a variable of the shell not set?)"
            )


def parse(own: Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The verb's own arguments, and the flags that are left for the trainer, as given."""
    found, left = own.parse_known_args(arguments)
    stray = [argument for argument in left if not argument.startswith("--")]
    if stray:
        raise UserError(f"{stray[0]!r} is not a flag: write --name=value")
    ours, theirs = [*vars(found), "help"], [*(field.name for field in dataclasses.fields(TrainConfig)), "print_config"]
    for name in (argument[2:].split("=")[0] for argument in left):
        if name not in theirs:
            raise UserError(
                f"unknown flag --{name}{nearest(name, [*ours, *theirs])} --help lists those of this verb, "
                "`python -m trainer.task --help` those of the training"
            )
    return found, left
