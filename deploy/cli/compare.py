"""Compares tiers by the same work on each: `python -m deploy compare TIER … --recipe=… [any trainer
flag]`."""

from collections.abc import Sequence

from deploy.api.compare import USAGE, CompareOptions, compare_by_options
from deploy.api.request import parse_verb
from deploy.cli.output import JSON, write_document
from trainer.base.settings.fields import options_class, setting


@options_class
class CompareFlags(CompareOptions):
    """Holds the flags of `compare`."""

    dry_run: bool = setting(False, "print what the jobs may cost at most, and submit nothing")
    json: bool = JSON


def main(arguments: Sequence[str]) -> int:
    """Runs the comparison to its end and returns its exit code."""
    request = parse_verb(CompareFlags, arguments, USAGE)
    comparison = compare_by_options(request, dry_run=request.options.dry_run)
    write_document(
        request.options, "compare", **vars(comparison) | {"folder": str(comparison.folder)}
    )
    return comparison.exit_code
