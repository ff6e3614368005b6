"""Writes what a verb found as one JSON document, in the form of docs/json.schema.json."""

import argparse
import dataclasses
import json
import sys
from typing import Any

from trainer.base.settings.fields import Parser

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
