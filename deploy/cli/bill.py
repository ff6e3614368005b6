"""Prints what was billed for jobs beside what was estimated: `python -m deploy bill RUN …
--table=P.DATASET.TABLE`.

RUN is a submission, or a job's name, display name or number, whoever submitted it; the table is the
billing export in BigQuery. A job has rows there some hours to two days after it ran, by its label;
one without any is said to have none.
"""

import re
from collections.abc import Sequence
from typing import Any

from deploy.api.jobs import JobsOptions, attach
from deploy.api.request import verb_usage
from deploy.base.console import say
from deploy.cli.output import JSON, write_document
from deploy.job.ledger import Attempt, attempt_label, find_attempt, find_elsewhere
from deploy.platform.api_error import ApiError, unreadable_as_lost
from deploy.platform.errors import api_errors, billing_errors
from deploy.platform.rest import address, call, pages
from deploy.platform.retries import CLOCK, retried
from deploy.tiers.tier import LABEL
from trainer.base.errors import DONE, UserError
from trainer.base.settings.fields import options_class, parse_options, setting, setting_of

# how often, and at which interval, BigQuery is asked for the result
_POLLS = 60
_POLL_S = 5.0
# https://cloud.google.com/billing/docs/how-to/export-data-bigquery-tables/standard-usage: a row has
# the labels of a job, cost and credits.
_BILLED = """
SELECT l.value AS label, currency,
  SUM(cost) + SUM(IFNULL((SELECT SUM(c.amount) FROM UNNEST(credits) AS c), 0)) AS billed
FROM `{table}`, UNNEST(labels) AS l
WHERE l.key = @key AND l.value IN UNNEST(@values)
GROUP BY label, currency
"""


@options_class
class BillFlags:
    """Holds the flags of `bill`."""

    runs: tuple[str, ...] = setting(
        meaning="a submission, or a job's name, display name or number",
        metavar="RUN",
        positional=True,
    )
    table: str = setting(meaning="the billing export, PROJECT.DATASET.TABLE", metavar="TABLE")
    project: str = setting_of(JobsOptions, "project")
    region: str = setting_of(JobsOptions, "region")
    json: bool = JSON


def main(arguments: Sequence[str]) -> int:
    """Prints what was billed and what was estimated, one line for each job."""
    usage = verb_usage("bill", "RUN … --table=PROJECT.DATASET.gcp_billing_export_v1_X", __doc__)
    args = parse_options(BillFlags, arguments, usage)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.:-]*\.\w+\.gcp_billing_export_\w+", args.table):
        raise UserError(
            f"table={args.table}: write PROJECT.DATASET.gcp_billing_export_v1_XXXXXX_XXXXXX_XXXXXX,"
            " as BigQuery names it"
        )
    jobs: dict[str, Attempt] = {}  # by label: all attempts of a submission, or the one of a job
    for run in args.runs:
        known = find_attempt(run)
        if not known:  # it was submitted from elsewhere
            job = attach(run, args.project, args.region)
            with api_errors(job.gcp):
                known = job.attempt or find_elsewhere(job.name, job.backend)
        if not known:
            raise UserError(
                f"{run}: this package did not submit it, so no label finds it on the bill"
            )
        record, attempt = known
        for number, sent in enumerate(record.attempts, 1):
            if run == record.submission or sent is attempt:
                jobs[attempt_label(record.submission, number)] = sent
    roles = (
        "roles/bigquery.jobUser on the table's project and roles/bigquery.dataViewer on the export"
    )
    with billing_errors(args.table, f"the account needs {roles}"):
        usd_by_label = billed_usd(args.table, list(jobs))
    for label, attempt in jobs.items():
        estimated = (
            "not estimated" if attempt.spent_usd is None else f"estimated {attempt.spent_usd:.2f}"
        )
        billed = f"no row with the label submission={label} yet: the export lags hours to two days"
        if (usd := usd_by_label.get(label)) is not None:
            change = f", {100 * (usd / attempt.spent_usd - 1):+.1f} %" if attempt.spent_usd else ""
            billed = f"billed {usd:.2f}{change}"
        say(f"{attempt.job or label} ({attempt.tier}): {estimated}, {billed}")
    write_document(
        args,
        "bill",
        jobs=[
            {
                "job": attempt.job,
                "submission": label,
                "tier": attempt.tier,
                "estimated_usd": attempt.spent_usd,
                "billed_usd": usd_by_label.get(label),
            }
            for label, attempt in jobs.items()
        ],
    )
    return DONE


def billed_usd(table: str, labels: Sequence[str]) -> dict[str, float]:
    """Returns what was billed in USD, after credits, for each label of a submission that has a row.

    Raises ApiError if BigQuery fails, UserError for another currency.
    """
    project = table.rsplit(".", 2)[0]
    url = f"{address('BIGQUERY', 'https://bigquery.googleapis.com')}/bigquery/v2/projects/{project}/queries"
    query = {
        "query": _BILLED.format(table=table),
        "useLegacySql": False,
        "parameterMode": "NAMED",
        "queryParameters": [
            {
                "name": "key",
                "parameterType": {"type": "STRING"},
                "parameterValue": {"value": LABEL},
            },
            {
                "name": "values",
                "parameterType": {"type": "ARRAY", "arrayType": {"type": "STRING"}},
                "parameterValue": {"arrayValues": [{"value": label} for label in labels]},
            },
        ],
    }
    started = retried(lambda: call("POST", url, json=query))
    usd_by_label = {}
    with unreadable_as_lost():
        job = started["jobReference"]
        place = {"location": job["location"]} if job.get("location") else {}
        result = f"{url}/{job['jobId']}"

        def page(token: dict[str, str]) -> Any:
            """Returns a page of rows, once the query is complete."""
            for _ in range(_POLLS):
                content = retried(lambda: call("GET", result, params={**place, **token}))
                if content.get("jobComplete"):
                    return content
                CLOCK.sleep(_POLL_S)
            raise ApiError(0, "BigQuery has not answered: run it again later")

        for row in pages("rows", page):
            label, currency, cost = (cell["v"] for cell in row["f"])
            if currency != "USD":
                raise UserError(
                    f"{table} is in {currency}: only exports in USD can be compared with estimates"
                )
            usd_by_label[label] = float(cost)
    return usd_by_label
