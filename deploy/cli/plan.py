"""Writes and prints a plan of a run on tiers: `python -m deploy plan [TIER …] --recipe=…`."""

import json
from collections.abc import Sequence

from deploy.api.keywords import command_line
from deploy.api.plan import PlanOptions, plan_by_options
from deploy.base.console import say
from deploy.base.options import parsed
from deploy.cli.parsing import parse, parser, write_document
from deploy.platform.gcloud_and_sdk import SESSION, Session
from trainer.base.errors import DONE
from trainer.base.storage import local_path, write_whole

DESCRIPTION = """Says before anything is paid whether a run fits each tier, how long it takes and what it costs.

Memory and work of a step come from real steps on this machine's CPU, in a process of its own; the plan is kept, and
made again only if the settings, your sources or the versions change. Times come from the step's graph; with runs at
hand (--from) from these, which is much narrower. No machine is started, but for --measure.
"""


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Plans, writes all files and only then prints, as a closed pipe ends the program. Returns the exit code."""
    cli = parser("plan", DESCRIPTION, "[TIER …] --recipe=NAME [--from=DIR] [any trainer flag]", PlanOptions)
    cli.add_argument("--out", default="runs/plan", metavar="FOLDER", help="folder for plan.md and forecast.json "
                     "(default: %(default)s)")  # fmt: skip
    cli.add_boolean("all", "print every tier, and not only those that no other beats")
    cli.add_boolean("dry_run", "show the job of --measure, and plan without it")
    flags, overrides = parse(cli, arguments)
    out = local_path(flags.out, "out")
    command = command_line("plan", arguments)
    plan = plan_by_options(parsed(PlanOptions, flags), overrides, command, session, out, dry_run=flags.dry_run)
    forecast = plan.to_json()
    write_whole(out / "plan.md", plan.to_markdown())
    write_whole(out / "forecast.json", forecast)
    say(plan.table() if flags.all else plan.brief(str(out / "plan.md")))
    write_document(flags, "plan", **json.loads(forecast))
    return DONE
