"""Parses the command line of a verb, once: its own flags and arguments, and the settings of the trainer beside them."""

import argparse
import dataclasses
import itertools
import math
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from deploy.tiers.script import Script, read_script
from deploy.tiers.sources import MOST_MB
from trainer.base.errors import UserError
from trainer.base.settings import TrainConfig
from trainer.base.settings.fields import nearest, refuse_removed
from trainer.base.settings.flags import Parser, add_setting_flags, flag_values, refuse_unknown, underscored, whole
from trainer.base.settings.own_settings import settings_of_models
from trainer.base.settings.resolution import Overrides, flags_of, own_settings
from trainer.base.storage import expanded


class VerbParser(Parser):
    """Parses as the trainer does, and refuses a flag with two values, of which one would be ignored."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Returns what argparse returns. Raises UserError for a flag that is given twice with two values."""
        normalized = self._normalized(list(sys.argv[1:] if args is None else args))
        many = {name for action in self._actions if type(action.default) is list for name in action.option_strings}
        values: dict[str, str] = {}
        for argument, following in itertools.zip_longest(normalized, normalized[1:], fillvalue=""):
            name, equals, value = argument.partition("=")
            value = value if equals else following
            if name.startswith("--") and name not in many and values.setdefault(name, value) != value:
                raise UserError(f"{name}={values[name]} and {name}={value} contradict each other: drop one of them")
        return super().parse_known_args(normalized, namespace)


def parser(verb: str, description: str, usage: str) -> VerbParser:
    """Returns a parser for `python -m deploy VERB` whose errors are one line."""
    return VerbParser(prog=f"python -m deploy {verb}", usage=f"%(prog)s {usage}", description=description)


# Flags of several verbs. Those that are not given are empty.
_SHARED: dict[str, dict[str, Any]] = {
    "project": {"metavar": "ID", "help": "Google Cloud project (default: gcloud's)"},
    "region": {"metavar": "NAME", "help": "as us-central1 (default: gcloud's ai/region)"},
    "bucket": {"metavar": "gs://NAME[/PREFIX]", "help": "where packages and job directories go"},
    "package": {"metavar": "PATH", "help": "a Python package of yours, or one .py file, to ship with the job"},
    "max_package_mb": {
        "metavar": "MB", "help": f"largest size of --package (default: {MOST_MB})", "type": whole(1, 100_000),
        "default": MOST_MB,
    },
    "prices": {"metavar": "FILE", "help": "YAML of your own prices, in USD an hour"},
    "price_per_hour": {
        "metavar": "TIER=USD", "help": "the price of all machines of a tier", "action": "append", "default": [],
    },
}  # fmt: skip


def add_flags(cli: argparse.ArgumentParser, *names: str) -> None:
    """Declares flags that several verbs share."""
    for name in names:
        cli.add_argument(f"--{name}", **{"default": "", **_SHARED[name]})


def add_table_flags(cli: argparse.ArgumentParser) -> None:
    """Declares the flags of every verb that prints a comparison table."""
    cli.add_argument("--baseline", default="", metavar="TIER", help="base of the speed-ups (default: the first)")
    add_flags(cli, "price_per_hour")


def usd(text: str) -> float:
    """Returns a sum in USD; an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, in USD, as 5")
    return value


def seconds(text: str) -> float:
    """Returns the seconds in a time such as 2h, 30m or 1d; an argparse type."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smhd])", text)
    value = float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]] if match else 0.0
    if not 1 <= value <= 30 * 86400:
        raise argparse.ArgumentTypeError(f"{text!r} must be a time of up to 30 days with its unit, as 30m, 2h or 1d")
    return value


def factor(text: str) -> float:
    """Returns how many times as much is allowed as planned; an argparse type."""
    if not re.fullmatch(r"\d{1,3}(\.\d{1,3})?", text) or float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 1 to 999, as 1.5")
    return float(text)


def read_prices(values: Sequence[str]) -> dict[str, float]:
    """Returns `["l4x1=0.71"]` as {"l4x1": 0.71}, in USD an hour. Raises UserError for anything else."""
    prices = {}
    for text in values:
        name, _, number = text.rpartition("=")
        try:
            prices[name] = float(number)
        except ValueError:
            prices[name] = math.nan
        if not name or not 0 < prices[name] < math.inf:
            raise UserError(f"price_per_hour={text}: write --price_per_hour=TIER=NUMBER, above 0, as l4x1=0.71")
    return prices


def command_line(verb: str, arguments: Sequence[str]) -> str:
    """Returns the shell command for a verb."""
    return shlex.join(["python", "-m", "deploy", verb, *arguments])


def _may_be_empty(name: str) -> bool:
    """Returns whether an empty value of a setting means something: it overrides what a recipe names."""
    usual = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    of_models = [names[name].default for names in settings_of_models().values() if name in names]
    return "" in (usual.get(name), *of_models) and name not in ("recipe", "job_dir")


def refuse_empty(arguments: Sequence[str]) -> None:
    """Raises UserError for an empty argument or value, which an unset shell variable leaves."""
    before = ""
    for argument in split_words(arguments)[0]:
        flag, equals, value = underscored(argument).partition("=")
        name = flag[2:] if equals and flag.startswith("--") else before
        if not (value if equals and flag.startswith("--") else argument).strip() and not _may_be_empty(name):
            raise UserError(
                f"empty argument {argument!r}: give a value, or leave it out (is a variable of the shell not set?)"
            )
        before = flag[2:] if flag.startswith("--") and not equals else ""


def add_script_flags(cli: Parser) -> None:
    """Declares the flags of a user's script, which runs instead of the trainer."""
    cli.add_argument("--script", default="", metavar="FILE", help="a training script of yours, which runs instead of "
                     "the trainer with the arguments after `--`; its folder goes along")  # fmt: skip
    cli.add_argument("--module", default="", metavar="NAME", help="the same for a module, as `python -m` takes it; its "
                     "package goes along: --package, or the folder of that name here")  # fmt: skip


def parse_program(cli: Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Overrides | Script]:
    """Returns what `parse` does or, with --script or --module, the verb's own arguments and the script."""
    flags, words = split_words(arguments)
    named = flag_values(flags, ("script", "module"))
    if not any(named.values()):
        if len(flags) < len(arguments):
            raise UserError("what follows -- is for a script of yours: name it by --script=FILE or --module=NAME")
        return parse(cli, arguments)
    cli.add_argument("--job_dir", default="", help=argparse.SUPPRESS)
    asked, unknown = cli.parse_known_args(flags)
    if unknown:
        refuse_removed(underscored(unknown[0]).partition("=")[0].removeprefix("--"), unknown[0])
        hint = nearest(unknown[0].partition("=")[0].removeprefix("--"), cli.names)
        raise UserError(f"unknown argument {unknown[0]}{hint} The arguments of your script follow --")
    for name, refusal in _NOT_OF_SCRIPTS.items():
        if getattr(asked, name, False):
            raise UserError(refusal)
    if getattr(asked, "scaling", "") == "weak":
        raise UserError("--scaling=weak changes the batch of a recipe; that of a script is its own: leave it out")
    if asked.job_dir and cli.prog.endswith("compare"):
        raise UserError("--job_dir is not for a comparison: --out names the folder: leave it out")
    package = getattr(asked, "package", "")
    return asked, read_script(asked.script, asked.module, package, words, asked.job_dir)


# Flags of verbs that take a recipe or a script, and that say nothing of a script.
_NOT_OF_SCRIPTS = {
    "check": "--check trains a recipe on the tier's GPUs, not a script: drop --check, or run it without one",
    "plan": "--plan is for recipes: the memory of a script is not known: drop it",
}


def split_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before `--`, and those after it, which are a script's own."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), list(arguments[end + 1 :])


def parse(cli: Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Overrides]:
    """Returns the verb's own arguments, and the trainer's settings. Raises UserError for anything else."""
    package = flag_values(arguments, ["package"]).get("package", "") if "package" in cli.names else ""
    first, of_verb = str(expanded(package).resolve().parent) if package else "", cli.names
    settings = own_settings(arguments, first)
    flags = flags_of(settings.settings)
    if both := [field.name for field in flags if field.name in of_verb]:
        raise UserError(f"--{both[0]} is a flag of `{cli.prog}` and a setting of your own: rename the setting")
    add_setting_flags(cli, flags, hidden=True)
    asked, unknown = cli.parse_known_args(arguments)
    listed = "those of this verb, `python -m trainer.task --help` those of the training"
    refuse_unknown(unknown, [*of_verb, *(field.name for field in flags)], settings.hint, listed)
    names = {field.name for field in flags}
    texts = {name: value for name, value in vars(asked).items() if name in names}
    if texts.pop("print_config", "false") != "false":
        raise UserError("--print_config trains nothing: use it with `python -m trainer.task`")
    if texts.pop("verbose", "false") != "false":
        raise UserError("--verbose is a flag of one run on this machine: use it with `python -m trainer.task`")
    return asked, Overrides.read(texts, first)
