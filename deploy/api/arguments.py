"""Parses the command line of a verb, once: its own flags and arguments, and the settings of the trainer beside them."""

import argparse
import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from deploy.job.script import Script, read_script
from deploy.platform.clients import BACKENDS
from deploy.tiers.images import INSTALL, PLAIN_IMAGE
from deploy.tiers.sources import MOST_MB
from trainer.base.errors import UserError
from trainer.base.settings.fields import (
    Parser,
    add_setting_flags,
    flag_values,
    nearest,
    refuse_unknown,
    underscored,
    whole,
)
from trainer.base.settings.own_settings import settings_of_models
from trainer.base.settings.resolution import Overrides, flags_of, own_settings
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import expanded


def parser(verb: str, description: str, usage: str) -> Parser:
    """Returns a parser for `python -m deploy VERB` whose errors are one line."""
    return Parser(prog=f"python -m deploy {verb}", usage=f"%(prog)s {usage}", description=description)


def usd(text: str) -> float:
    """Returns a sum in USD; an argparse type."""
    if not re.fullmatch(r"\d{1,6}(\.\d+)?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, in USD, as 5")
    return float(text)


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


# Flags of several verbs: metavar (empty for a switch), help, and what else argparse needs. Not given they are empty.
_FLAGS: dict[str, tuple[str, str] | tuple[str, str, dict[str, Any]]] = {
    "project": ("ID", "Google Cloud project (default: gcloud's)"),
    "region": ("NAME", "as us-central1 (default: gcloud's ai/region); submit: several, as us-central1,us-east4, are "
               "tried in this order where there are no machines"),
    "bucket": ("gs://NAME[/PREFIX]", "where packages and job directories go"),
    "package": ("PATH", "a Python package of yours, or one .py file, to ship with the job"),
    "max_package_mb": ("MB", f"largest size of --package (default: {MOST_MB})",
                       {"type": whole(1, 100_000), "default": MOST_MB}),
    "prices": ("FILE", "YAML of your own prices, in USD an hour"),
    "price_per_hour": ("TIER=USD", "the price of all machines of a tier", {"action": "append", "default": []}),
    "baseline": ("TIER", "base of the speed-ups (default: the first)"),
    "backend": ("gcloud|sdk", "what creates jobs: gcloud (default), or Google's Python SDK",
                {"choices": BACKENDS, "default": "gcloud"}),
    "script": ("FILE", "a training script of yours, which runs instead of the trainer with the arguments after `--`; "
               "its folder goes along"),
    "module": ("NAME", "the same for a module, as `python -m` takes it; its package goes along: --package, or the "
               "folder of that name here"),
    "image": ("IMAGE", f"the image that jobs run in: the URI of your own; {INSTALL}: a public Python image "
              f"({PLAIN_IMAGE}, or {INSTALL}:URI) in which TensorFlow and the packages are installed at each start "
              f"(default: the tier's, else the one that `image` built in this folder, else {INSTALL})"),
    "max_cost": ("USD", "the most that a job may cost, each job of a comparison: it is stopped when that is spent",
                 {"type": usd, "default": None}),
    "stop_if_idle": ("TIME", "the job saves and ends itself when all its GPUs are below 10 %% for so long, as 30m",
                     {"type": seconds, "default": 0.0}),
    "stop_if_over": ("FACTOR", "the job saves and ends itself after so many times the upper end of its plan, in hours "
                     "or USD, as 1.5", {"type": factor, "default": 0.0}),
    "timeout": ("TIME", "the longest time of a job, as 6h (default: the tier's)", {"type": seconds, "default": None}),
    "max_wait": ("TIME", "the longest wait for machines, as 2h: then the job is cancelled, and the next tier or region "
                 "tried; as FLEX_START the service ends the wait", {"type": seconds, "default": None}),
    "flex_start": ("", "as FLEX_START, which waits for machines (--max_wait), and is cheaper"),
    "spot": ("", "on spot machines: cheaper, and they may be taken away"),
    "disk_gb": ("GB", "each machine's disk (default: the tier's)", {"type": whole(100, 64_000), "default": None}),
    "reservation": ("NAME", "machines that you reserved: projects/P/zones/Z/reservations/R"),
    "labels": ("KEY=VALUE,…", "labels of the jobs, as team=vision,cost=42"),
    "kms_key": ("NAME", "your own key, which encrypts the jobs' disks: "
                "projects/P/locations/REGION/keyRings/…/cryptoKeys/…"),
    "service_account": ("EMAIL", "the account that the jobs run as"),
    "network": ("NAME", "projects/NUMBER/global/networks/NAME, peered"),
    "env": ("NAME=VALUE", "a variable of the job; it can be read in the job's spec",
            {"action": "append", "default": []}),
    "secret": ("NAME=VERSION", "a variable that the job reads from Secret Manager at its start, as "
               "TOKEN=projects/P/secrets/S/versions/latest", {"action": "append", "default": []}),
    "web_access": ("", "an interactive shell in each worker, whose link is printed"),
}  # fmt: skip


def add_flags(cli: Parser, *names: str) -> None:
    """Declares flags that several verbs share."""
    for name in names:
        metavar, meaning, *more = _FLAGS[name]
        options: dict[str, Any] = {"default": "", "metavar": metavar, "help": meaning}
        if metavar:
            cli.add_argument(f"--{name}", **{**options, **dict(*more)})
        else:
            cli.add_boolean(name, meaning)


def read_prices(values: Sequence[str]) -> dict[str, float]:
    """Returns `["l4x1=0.71"]` as {"l4x1": 0.71}, in USD an hour. Raises UserError for anything else."""
    prices = {}
    for text in values:
        name, _, number = text.rpartition("=")
        if not name or not re.fullmatch(r"\d{1,6}(\.\d+)?", number) or not float(number):
            raise UserError(f"price_per_hour={text}: write --price_per_hour=TIER=NUMBER, above 0, as l4x1=0.71")
        prices[name] = float(number)
    return prices


def command_line(verb: str, arguments: Sequence[str]) -> str:
    """Returns the shell command for a verb."""
    return shlex.join(["python", "-m", "deploy", verb, *arguments])


def check_arguments(arguments: Sequence[str]) -> None:
    """Raises UserError for an empty argument or value, which an unset shell variable leaves, and for two max_cost.

    The empty value of a setting whose default is empty means something: it overrides what a recipe names.
    """
    usual = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    usual |= {name: field.default for names in settings_of_models().values() for name, field in names.items()}
    optional = {name for name, default in usual.items() if default == ""} - {"recipe", "job_dir"}
    words = [*map(underscored, split_words(arguments)[0])]
    limits = dict.fromkeys(re.findall(r"^--max_cost[=\n](.*)", "\n".join(words), re.MULTILINE))
    if len(limits) > 1:  # of other flags the last counts, but this one is money
        raise UserError(f"max_cost is given twice, as {' and '.join(limits)}: give it once")
    before = ""
    for argument in words:
        flag, equals, value = argument.partition("=")
        name = flag[2:] if equals and flag.startswith("--") else before
        if not (value if equals and flag.startswith("--") else argument).strip() and name not in optional:
            raise UserError(
                f"empty argument {argument!r}: give a value, or leave it out (is a variable of the shell not set?)"
            )
        before = flag[2:] if flag.startswith("--") and not equals else ""


def split_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before `--`, and those after it, which are a script's own."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), list(arguments[end + 1 :])


# Flags of verbs that take a recipe or a script, and that say nothing of a script; one with the value that is refused.
_NOT_OF_SCRIPTS = {
    "check": "--check trains a recipe on the tier's GPUs, not a script: drop --check, or run it without one",
    "plan": "--plan is for recipes: the memory of a script is not known: drop it",
    "scaling=weak": "--scaling=weak changes the batch of a recipe; that of a script is its own: leave it out",
}


def parse_program(cli: Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Overrides | Script]:
    """Returns the verb's own arguments and, with --script or --module, the script, else the trainer's settings."""
    flags, words = split_words(arguments)
    if not any(flag_values(flags, ("script", "module")).values()):
        if len(flags) < len(arguments):
            raise UserError("what follows -- is for a script of yours: name it by --script=FILE or --module=NAME")
        return parse(cli, arguments)
    cli.add_argument("--job_dir", default="", help=argparse.SUPPRESS)
    args, unknown = cli.parse_known_args(flags)
    if unknown:
        hint = nearest(unknown[0].partition("=")[0].removeprefix("--"), cli.names)
        raise UserError(f"unknown argument {unknown[0]}{hint} The arguments of your script follow --")
    for flag, refusal in _NOT_OF_SCRIPTS.items():
        name, _, value = flag.partition("=")
        if (setting := getattr(args, name, False)) and setting == (value or setting):
            raise UserError(refusal)
    return args, read_script(args.script, args.module, getattr(args, "package", ""), words, args.job_dir)


def parse(cli: Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Overrides]:
    """Returns the verb's own arguments, and the trainer's settings. Raises UserError for anything else."""
    package = flag_values(arguments, ["package"]).get("package", "") if "package" in cli.names else ""
    first, of_verb = str(expanded(package).resolve().parent) if package else "", cli.names
    settings = own_settings(arguments, first)
    flags = flags_of(settings.settings)
    names = {field.name for field in flags}
    if both := [name for name in of_verb if name in names]:
        raise UserError(f"--{both[0]} is a flag of `{cli.prog}` and a setting of your own: rename the setting")
    add_setting_flags(cli, flags, hidden=True)
    args, unknown = cli.parse_known_args(arguments)
    listed = "those of this verb, `python -m trainer.task --help` those of the training"
    refuse_unknown(unknown, cli.flags, settings.hint, listed)
    texts = {name: value for name, value in vars(args).items() if name in names}
    for name, reason in {"print_config": "trains nothing", "verbose": "is a flag of one run on this machine"}.items():
        if texts.pop(name, "false") != "false":
            raise UserError(f"--{name} {reason}: use it with `python -m trainer.task`")
    return args, Overrides.read(texts, first)


SCHEMA_VERSION = 1  # changes when a field goes or means something else


def add_json_flag(cli: Parser) -> None:
    """Declares --json."""
    cli.add_argument(
        "--json", action="store_true", help="print one JSON document on stdout (docs/api.md), and the text on stderr"
    )


def write_document(args: argparse.Namespace, verb: str, **content: Any) -> None:
    """Prints the content on stdout, if --json was given, as JSON; data classes become objects."""
    if args.json:
        document = {"schema_version": SCHEMA_VERSION, "verb": verb, **content}
        print(json.dumps(document, default=_plain), file=sys.stdout, flush=True)


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else dict(value)
