"""Writes and prints a plan of a run on tiers: `python -m deploy plan [TIER …] --recipe=…`."""

import json
from collections.abc import Sequence

from deploy.api.plan import USAGE, PlanOptions, plan_by_options
from deploy.api.request import parse_verb
from deploy.base.console import say
from deploy.cli.output import JSON, write_document
from trainer.base.errors import DONE
from trainer.base.settings.fields import options_class, setting
from trainer.base.storage import local_path, write_whole


@options_class
class PlanCommand(PlanOptions):
    """Holds the flags of `plan`."""

    out: str = setting("runs/plan", "folder for plan.md and forecast.json", "FOLDER")
    all: bool = setting(False, "print every tier, and not only those that no other beats")
    dry_run: bool = setting(False, "show the job of --measure, and plan without it")
    json: bool = JSON


def main(arguments: Sequence[str]) -> int:
    """Plans, writes all files, then prints, as a closed pipe ends the program."""
    request = parse_verb(PlanCommand, arguments, USAGE)
    flags = request.options
    out = local_path(flags.out, "out")
    plan = plan_by_options(request, out, dry_run=flags.dry_run)
    forecast = plan.to_json()
    write_whole(out / "plan.md", plan.to_markdown())
    write_whole(out / "forecast.json", forecast)
    say(plan.table() if flags.all else plan.brief(str(out / "plan.md")))
    write_document(flags, "plan", **json.loads(forecast))
    return DONE
