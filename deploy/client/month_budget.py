"""Holds a job to a month's budget of a label: flags of `submit`, and the check before anything is sent."""

import argparse
from collections.abc import Sequence

from deploy.client.arguments import usd
from deploy.tiers.job_spec import RenderedJob
from deploy.tiers.machine_table import load_machines
from deploy.tiers.output import say
from deploy.tiers.spec_changes import read_labels
from deploy.vertex.billing_export import BIGQUERY_FIX, billing_errors, check_budget, checked_table
from deploy.vertex.retry import retried, told
from deploy.vertex.session import Session
from trainer.base.errors import UserError
from trainer.base.settings.flags import Parser


def add_budget_flags(cli: Parser) -> None:
    """Declares the flags."""
    cli.add_argument("--month_budget", type=usd, metavar="USD", help="refuse a job that may exceed this sum for the "
                     "month, with what was billed and estimated for --month_label, by --billing_table")  # fmt: skip
    cli.add_argument("--month_label", default="", metavar="KEY:VALUE", help="the label that the budget is for")
    cli.add_argument("--billing_table", default="", metavar="TABLE", help="the billing export in BigQuery, "
                     "PROJECT.DATASET.gcp_billing_export_v1_X")  # fmt: skip


def check_budget_flags(asked: argparse.Namespace) -> None:
    """Raises UserError unless the flags are complete, or none is given, and the job has the label."""
    if not (asked.month_budget or asked.month_label or asked.billing_table):
        return
    if not (asked.month_budget and asked.month_label and asked.billing_table):
        raise UserError("--month_budget, --month_label=KEY:VALUE and --billing_table belong together: give all three")
    checked_table(asked.billing_table)
    key, _, value = asked.month_label.partition(":")
    if read_labels(asked.labels).get(key) != value:
        raise UserError(f"month_label={asked.month_label}: the job lacks this label: add --labels={key}={value}")


def hold_to_budget(jobs: Sequence[RenderedJob], asked: argparse.Namespace, session: Session) -> None:
    """Prints what is left of the month's budget, if there is one. Raises UserError if one of the jobs may exceed it."""
    if not asked.month_budget:
        return
    limits, project = [job.tier.most_usd for job in jobs], jobs[0].gcp.project
    key, _, value = asked.month_label.partition(":")
    with told(f"looks for jobs of {asked.month_label} in all regions of {project}"):
        places = [session.open(asked.backend, project, region) for region in load_machines().regions]
        known = [status for place in places for status in retried(place.jobs, session.clock)]
    with billing_errors(asked.billing_table, BIGQUERY_FIX):
        limit = None if None in limits else max(limit or 0.0 for limit in limits)
        line = check_budget(asked.month_budget, (key, value), asked.billing_table, project, known, limit, session.clock)
    say(f"# {line}")
