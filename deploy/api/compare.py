"""Compares tiers: runs the same work on each, and reads what came out."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from deploy.api.arguments import add_flags, add_json_flag, command_line, parse_program, parser, read_prices
from deploy.api.call_arguments import FlagValue, as_arguments
from deploy.api.submit import OF_VERTEX, add_plan_flags, read_changes, read_options
from deploy.comparison.directory import any_begun
from deploy.comparison.execution import ComparisonRequest, announce, read_tiers, run_comparison
from deploy.comparison.runners import LocalRunner, VertexRunner
from deploy.job.script import Script
from deploy.platform.clients import SESSION, Session
from deploy.report.html_page import write_report
from deploy.report.tracked_runs import track, trackers_in
from deploy.tiers.output import printed_on, say
from trainer.base.errors import DONE, UserError
from trainer.base.settings.fields import Parser, whole
from trainer.base.storage import local_path

DESCRIPTION = """Trains one recipe on several tiers, the same work on each, and reports what came out.

The state of a comparison is in its folder: comparison.json holds the request, TIER/repeat-N the job directory of each
run, or a copy of the files that a report needs. The same command again repeats no finished run and resumes failed or
interrupted ones. On Vertex AI an interrupted comparison leaves its jobs running and finds them again.
"""


@dataclass(frozen=True)
class Comparison:
    """Holds what a comparison found: its folder, its exit code, and the content of table.json.

    `tiers`: the numbers of each tier, by the keys of table.csv; `verdict` and `notes`: sentences.
    """

    folder: Path
    exit_code: int
    tiers: Sequence[Mapping[str, Any]]
    verdict: Sequence[str]
    notes: Sequence[str]


def read_comparison(folder: Path, code: int) -> Comparison:
    """Returns what the report in a folder says; nothing if no run has begun."""
    file = folder / "table.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return Comparison(folder, code, *(content.get(name, []) for name in ("tiers", "verdict", "notes")))


def comparison_flags() -> Parser:
    """Returns the parser of `compare`."""
    cli = parser("compare", DESCRIPTION, "TIER … --recipe=NAME [--scaling=weak] [--repeats=3] [any trainer flag]")
    cli.add_argument("tiers", nargs="+", metavar="TIER", help="bare names of job_configs/, as l4x4, or your own files")
    cli.add_argument(
        "--out", default="runs/comparison", metavar="FOLDER", help="folder of the comparison (default: %(default)s)"
    )
    cli.add_argument("--scaling", choices=("strong", "weak"), default="strong", help="strong: the same global batch on "
                     "every tier (default); weak: the same batch per replica")  # fmt: skip
    cli.add_argument("--repeats", type=whole(1, 100), default=1, metavar="COUNT", help="runs of each tier (default: 1)")
    cli.add_argument(
        "--parallel", type=whole(1, 100), metavar="COUNT", help="runs at a time (default: 1; on Vertex AI all at once)"
    )
    cli.add_argument("--on", choices=("local", "vertex"), default="local", help="processes of this machine (default), "
                     "or jobs of Vertex AI, without restarts; the flags of `submit` say where")  # fmt: skip
    cli.add_boolean("dry_run", "print what the jobs may cost at most, and submit nothing")
    add_flags(cli, *OF_VERTEX, "max_package_mb", "prices", "baseline", "price_per_hour", "script", "module")
    cli.set_defaults(name="", disable_retries=True, backend="")
    add_plan_flags(cli)
    add_json_flag(cli)
    return cli


def compare(
    *tiers: str, recipe: str = "", settings: Mapping[str, FlagValue] | None = None, stream: TextIO | None = None,
    session: Session = SESSION, **flags: FlagValue,
) -> Comparison:  # fmt: skip
    """Runs the same work on each tier, here or with on="vertex" as jobs, to the end, and returns what came out.

    `settings`: of the trainer; `flags`: those of `python -m deploy compare`, as out, repeats or bucket. The same call
    again repeats no finished run. Raises UserError as the command does; a run that failed is told by `exit_code`.
    """
    with printed_on(stream):
        return compared(as_arguments(tiers, {"recipe": recipe, **flags}, settings), session)[1]


def compared(arguments: Sequence[str], session: Session) -> tuple[argparse.Namespace, Comparison]:
    """Runs what `compare` was asked for, or announces it with --dry_run; returns the flags and what came out."""
    flags, overrides = parse_program(comparison_flags(), arguments)
    trackers = trackers_in(overrides.values)
    if not isinstance(overrides, Script):
        overrides = overrides.without("track")  # this machine sends all runs at the end, with their parent
    usd_by_tier = read_prices(flags.price_per_hour)
    specs = read_tiers(flags.tiers, flags.prices, usd_by_tier, read_changes(flags))
    if flags.baseline and flags.baseline not in (tier.name for tier in specs):
        raise UserError(f"baseline={flags.baseline}: it must be one of {', '.join(tier.name for tier in specs)}")
    scaling = "script" if flags.script or flags.module else flags.scaling  # its batch is not known
    command = command_line("compare", arguments)
    plan = ComparisonRequest(specs, overrides, scaling, flags.repeats, command)
    out = local_path(flags.out, "out")
    vertex = flags.on == "vertex"
    if not vertex and (given := next((name for name in (*OF_VERTEX, "dry_run", "plan", "force")
                                      if getattr(flags, name)), "")):  # fmt: skip
        raise UserError(f"--{given} is for jobs of Vertex AI: add --on=vertex, or leave it out")
    runner = VertexRunner(flags, read_options(flags, overrides), session) if vertex else LocalRunner()
    runs = plan.resolve(runner)
    if flags.dry_run:
        if not announce(plan, runs, out, runner):
            say(f"nothing to submit: all runs in {out} are done")
        return flags, Comparison(out, DONE, [], [], [])
    parallel = flags.parallel or (len(plan.runs()) if vertex else 1)
    code = run_comparison(plan, runs, out, runner, parallel)
    if any_begun(out):
        write_report([flags.out], flags.out, flags.baseline, usd_by_tier)
        track([flags.out], trackers)
    return flags, read_comparison(out, code)
