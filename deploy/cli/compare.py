"""Compares tiers by the same work on each: `python -m deploy compare TIER … --recipe=… [any trainer flag]`."""

from collections.abc import Sequence

from deploy.api.arguments import write_document
from deploy.api.compare import compared
from deploy.platform.clients import SESSION, Session


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Runs the comparison to its end and returns its exit code."""
    args, comparison = compared(arguments, session)
    write_document(args, "compare", **vars(comparison) | {"folder": str(comparison.folder)})
    return comparison.exit_code
