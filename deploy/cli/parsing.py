"""Parses the command line of a verb: its own flags and arguments, and the trainer's settings among them."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from deploy.api.keywords import LISTED, package_folder, read_settings, split_words
from deploy.base.options import declare
from deploy.job.job import Program
from deploy.job.script import read_script
from trainer.base.errors import UserError
from trainer.base.settings.fields import Parser, add_setting_flags, flag_values, nearest, refuse_unknown
from trainer.base.settings.resolution import Overrides, flags_of, own_settings

SCHEMA_VERSION = 1  # of docs/json.schema.json; changes when a field is removed or changes its meaning


# The flags that --help of submit and of compare shows; --help=all shows the rest.
USUAL = (
    "project", "region", "bucket", "package", "script", "max_cost", "spot", "timeout", "dry_run", "detach", "on", "out",
    "repeats",
)  # fmt: skip


def parser(
    verb: str, description: str | None, usage: str, kind: type | None = None, *names: str, usual: Sequence[str] = (),
    with_json: bool = True,
) -> Parser:  # fmt: skip
    """Returns a parser for `python -m deploy VERB` whose errors are one line; its --help shows the `usual` flags.

    It has the options of `kind`, all or those of these `names`, and --json unless the verb prints no document.
    """
    cli = Parser(prog=f"python -m deploy {verb}", usage=f"%(prog)s {usage}", description=description, usual=usual)
    if kind:
        declare(cli, kind, *names)
    if with_json:
        meaning = "print one JSON document on stdout (docs/api.md), and the text on stderr"
        cli.add_argument("--json", action="store_true", help=meaning)
    return cli


def parse_program(cli: Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Program]:
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
    if getattr(args, "check", False):
        raise UserError("--check trains a recipe on the tier's GPUs, not a script: drop --check, or run it without one")
    if getattr(args, "plan", False):
        raise UserError("--plan is for recipes: the memory of a script is not known: drop it")
    if getattr(args, "scaling", "") == "weak":
        raise UserError("--scaling=weak changes the batch of a recipe; that of a script is its own: leave it out")
    return args, read_script(args.script, args.module, getattr(args, "package", ""), words, args.job_dir)


def parse(cli: Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Overrides]:
    """Returns the verb's own arguments and the trainer's settings. Raises UserError for any other argument."""
    package = flag_values(arguments, ["package"]).get("package", "") if "package" in cli.names else ""
    first, of_verb = package_folder(package), cli.names
    settings = own_settings(arguments, first)
    flags = flags_of(settings.settings)
    names = {field.name for field in flags}
    if both := [name for name in of_verb if name in names]:
        raise UserError(f"--{both[0]} is a flag of `{cli.prog}` and a setting of your own: rename the setting")
    add_setting_flags(cli, flags, hidden=True)
    args, unknown = cli.parse_known_args(arguments)
    refuse_unknown(unknown, cli.flags, settings.hint, LISTED)
    return args, read_settings({name: value for name, value in vars(args).items() if name in names}, first)


def write_document(args: argparse.Namespace, verb: str, **content: Any) -> None:
    """Prints the content as one JSON document on stdout if --json was given; dataclasses become objects."""
    if args.json:
        document = {"schema_version": SCHEMA_VERSION, "verb": verb, **content}
        print(
            json.dumps(
                document,
                default=lambda value: dict(value) if isinstance(value, Mapping) else dataclasses.asdict(value),
            ),
            flush=True,
        )
