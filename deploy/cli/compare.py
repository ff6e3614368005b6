"""Compares tiers by the same work on each: `python -m deploy compare TIER … --recipe=… [any trainer flag]`."""

from collections.abc import Sequence

from deploy.api.compare import CompareOptions, compare_by_options
from deploy.api.keywords import command_line
from deploy.base.options import parsed
from deploy.cli.parsing import USUAL, parse_program, parser, write_document
from deploy.platform.gcloud_and_sdk import SESSION, Session

DESCRIPTION = """Trains one recipe on several tiers, the same work on each, and reports what came out.

The state of a comparison is in its folder: comparison.json holds the request, TIER/repeat-N the job directory of each
run, or a copy of the files that a report needs. The same command again repeats no finished run and resumes failed or
interrupted ones. On Vertex AI an interrupted comparison leaves its jobs running and finds them again.
"""


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Runs the comparison to its end and returns its exit code."""
    usage = "TIER … --recipe=NAME [--scaling=weak] [--repeats=3] [any trainer flag]"
    cli = parser("compare", DESCRIPTION, usage, CompareOptions, usual=USUAL)
    cli.add_boolean("dry_run", "print what the jobs may cost at most, and submit nothing")
    flags, program = parse_program(cli, arguments)
    asked, command = parsed(CompareOptions, flags), command_line("compare", arguments)
    comparison = compare_by_options(asked, program, command, session, dry_run=flags.dry_run)
    write_document(flags, "compare", **vars(comparison) | {"folder": str(comparison.folder)})
    return comparison.exit_code
