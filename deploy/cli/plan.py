"""Writes and prints a plan of a run on tiers: `python -m deploy plan [TIER …] --recipe=…`."""

import json
from collections.abc import Sequence

from deploy.client.arguments import parse
from deploy.client.documents import write_document
from deploy.client.plan_request import plan_flags, planned
from deploy.planning.plan_page import to_html
from deploy.report.collection import ESTIMATE
from deploy.tiers.output import say
from trainer.base.errors import DONE
from trainer.base.storage import local_path, write_whole


def main(arguments: Sequence[str]) -> int:
    """Writes all files, then prints: a closed pipe ends the program."""
    asked, overrides = parse(plan_flags(), arguments)
    out = local_path(asked.out, "out")
    plan = planned(asked, overrides, out)
    table, wish = plan.table, plan.wish
    write_whole(out / ESTIMATE, json.dumps(plan.kept, indent=2) + "\n")
    write_whole(out / "plan.md", table.to_markdown(wish))
    forecast = table.to_json(wish)
    write_whole(out / "forecast.json", forecast)
    try:
        write_whole(out / "plan.html", to_html(table, wish))
    finally:
        say(str(plan))
    say(f"\n{out / 'plan.html'}")
    write_document(asked, "plan", **json.loads(forecast))
    return DONE
