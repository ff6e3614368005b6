"""Holds a job to a month's budget of a label: flags of `submit`, and the check before anything is sent."""

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from deploy.client.arguments import usd
from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.job_spec import RenderedJob
from deploy.tiers.machine_table import load_machines
from deploy.tiers.output import say
from deploy.tiers.spec_changes import read_labels
from deploy.vertex.api import JobStatus
from deploy.vertex.billing_export import BIGQUERY_FIX, billing_errors, check_budget, checked_table
from deploy.vertex.errors import api_errors
from deploy.vertex.retry import retried, told
from deploy.vertex.session import Session
from trainer.base.errors import PlatformFault, UserError
from trainer.base.settings.flags import Parser

_AT_ONCE, _RETRY_S = 8, 60.0  # regions whose jobs are listed at a time, and how long one that fails is asked again


def add_budget_flags(cli: Parser) -> None:
    """Declares the flags."""
    cli.add_argument("--month_budget", type=usd, metavar="USD", help="refuse a job that may exceed this sum for the "
                     "month, with what was billed and estimated for --month_label, by --billing_table")  # fmt: skip
    cli.add_argument("--month_label", default="", metavar="KEY:VALUE", help="the label that the budget is for")
    cli.add_argument("--billing_table", default="", metavar="TABLE", help="the billing export in BigQuery, "
                     "PROJECT.DATASET.gcp_billing_export_v1_X")  # fmt: skip


def check_budget_flags(args: argparse.Namespace) -> None:
    """Raises UserError unless the flags are complete, or none is given, and the job has the label."""
    if not (args.month_budget or args.month_label or args.billing_table):
        return
    if not (args.month_budget and args.month_label and args.billing_table):
        raise UserError("--month_budget, --month_label=KEY:VALUE and --billing_table belong together: give all three")
    checked_table(args.billing_table)
    key, colon, value = args.month_label.partition(":")
    if not colon:
        raise UserError(f"month_label={args.month_label}: write KEY:VALUE, as team:vision")
    if read_labels(args.labels).get(key) != value:
        raise UserError(f"month_label={args.month_label}: the job lacks this label: add --labels={key}={value}")


def checked_limit(jobs: Sequence[RenderedJob], budget: float) -> float:
    """Returns the most that one of the jobs may cost. Raises UserError if it is not known, or exceeds the budget."""
    limits = [job.tier.most_usd for job in jobs]
    if None in limits:
        raise UserError(
            f"month_budget={budget:g}: the {jobs[0].tier.price_name} of this job is not known: give it with "
            "--prices=FILE"
        )
    limit = max(usd or 0.0 for usd in limits)
    if limit > budget:
        raise UserError(
            f"month_budget={budget:g}: this job alone may cost {limit:.2f} USD: use a lower --max_cost or --timeout"
        )
    return limit


def hold_to_budget(jobs: Sequence[RenderedJob], args: argparse.Namespace, session: Session) -> None:
    """Prints what is left of the month's budget, if there is one. Raises UserError if one of the jobs may exceed it."""
    if not args.month_budget:
        return
    limit, project = checked_limit(jobs, args.month_budget), jobs[0].gcp.project
    key, _, value = args.month_label.partition(":")
    listed = partial(_jobs_in, project=project, backend=args.backend, session=session)
    search = told(f"looks for jobs of {args.month_label} in all regions of {project}")
    with search, ThreadPoolExecutor(_AT_ONCE) as pool:
        statuses = [status for of_region in pool.map(listed, load_machines().regions) for status in of_region]
    table = args.billing_table
    with billing_errors(table, BIGQUERY_FIX):
        line = check_budget(args.month_budget, (key, value), table, project, statuses, limit, session.clock)
    say(f"# {line}")


def _jobs_in(region: str, project: str, backend: str, session: Session) -> Sequence[JobStatus]:
    """Returns the jobs of a region. Raises UserError or PlatformFault, which names it, if they cannot be listed."""
    try:
        with api_errors(GcpConfig(project, region, "")):
            return retried(session.open(backend, project, region).jobs, session.clock, _RETRY_S)
    except (UserError, PlatformFault) as error:
        raise type(error)(
            f"a month's budget counts the jobs of all regions, and those of {region} cannot be listed: {error}"
        ) from None
