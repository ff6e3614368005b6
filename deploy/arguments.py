"""The command line of a verb: its own flags and positional arguments, and every flag of the trainer besides."""

import argparse
from collections.abc import Sequence

from trainer.errors import UserError
from trainer.flags import Parser, underscored


def parser(verb: str, description: str, usage: str) -> Parser:
    """An argparse parser for `python -m deploy VERB`; its errors are one line."""
    return Parser(
        prog=f"python -m deploy {verb}", usage=f"%(prog)s {usage}", description=description, allow_abbrev=False
    )


def parse(own: Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The verb's own arguments, and the flags that are left for the trainer, as given (trainer.config checks them)."""
    found, left = own.parse_known_args([underscored(argument) for argument in arguments])
    stray = [argument for argument in left if not argument.startswith("--")]
    if stray:
        raise UserError(f"{stray[0]!r} is not a flag: write --name=value")
    return found, left
