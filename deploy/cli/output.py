"""Prints the answer of a verb as one JSON document, for --json."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from trainer.base.settings.fields import setting

# of docs/json.schema.json; changes when a field is removed or changes its meaning
SCHEMA_VERSION = 1
JSON = setting(False, "print one JSON document on stdout (docs/api.md), and the text on stderr")


def write_document(flags: Any, verb: str, **content: Any) -> None:
    """Prints the content as one JSON document on stdout if --json was given."""
    if flags.json:
        document = {"schema_version": SCHEMA_VERSION, "verb": verb, **content}
        print(
            json.dumps(
                document,
                default=lambda value: (
                    dict(value) if isinstance(value, Mapping) else dataclasses.asdict(value)
                ),
            ),
            flush=True,
        )
