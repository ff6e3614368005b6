"""Writes and prints a plan of a run on tiers: `python -m deploy plan [TIER …] --recipe=…`."""

import json
from collections.abc import Sequence

from deploy.api.arguments import parse, write_document
from deploy.api.plan import plan_flags, planned
from deploy.tiers.output import say
from trainer.base.errors import DONE
from trainer.base.storage import local_path, write_whole


def main(arguments: Sequence[str]) -> int:
    """Writes all files, then prints: a closed pipe ends the program."""
    args, overrides = parse(plan_flags(), arguments)
    out = local_path(args.out, "out")
    plan = planned(args, overrides, out)
    forecast = plan.to_json()
    write_whole(out / "plan.md", plan.to_markdown())
    write_whole(out / "forecast.json", forecast)
    say(plan.table() if args.all else plan.brief(str(out / "plan.md")))
    write_document(args, "plan", **json.loads(forecast))
    return DONE
