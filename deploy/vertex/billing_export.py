"""Reads what was billed from a billing export in BigQuery, by its REST interface, and holds a month to a budget.

https://cloud.google.com/billing/docs/how-to/export-data-bigquery-tables/standard-usage: a row has the labels of a job,
cost and credits. It appears hours to two days after the use.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from deploy.vertex.api import ApiError, JobStatus, unreadable_as_lost
from deploy.vertex.errors import VertexFault, not_logged_in
from deploy.vertex.rest import address, call, pages
from deploy.vertex.retry import Clock, retried
from deploy.vertex.spending import counted_usd
from trainer.base.errors import UserError

BIGQUERY_FIX = (
    "the account needs roles/bigquery.jobUser on the table's project and roles/bigquery.dataViewer on the export"
)
LAG_S = 48 * 3600.0  # after which the export has a job's costs
_POLLS, _POLL_S = 60, 5.0
_BILLED = """
SELECT l.value AS label, currency,
  SUM(cost) + SUM(IFNULL((SELECT SUM(c.amount) FROM UNNEST(credits) AS c), 0)) AS billed
FROM `{table}`, UNNEST(labels) AS l
WHERE l.key = @key AND l.value IN UNNEST(@values) AND usage_start_time >= TIMESTAMP(@since)
GROUP BY label, currency
"""


@contextmanager
def billing_errors(action: str, fix: str) -> Iterator[None]:
    """Raises an ApiError as one line: UserError with `fix` if the user can do something, else VertexFault."""
    try:
        yield
    except ApiError as error:
        if not error.transient:
            raise UserError(f"{action}: {not_logged_in(error) if error.code == 401 else f'{error}: {fix}'}") from None
        raise VertexFault(f"{action}: {error}") from None


def checked_table(table: str) -> str:
    """Returns the name of a billing export; UserError for another one."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.:-]*\.\w+\.gcp_billing_export_\w+", table):
        raise UserError(
            f"table={table}: write PROJECT.DATASET.gcp_billing_export_v1_XXXXXX_XXXXXX_XXXXXX, as BigQuery names it"
        )
    return table


def billed(table: str, key: str, values: Sequence[str], since: str, clock: Clock) -> dict[str, float]:
    """Returns what was billed in USD, after credits, for each value of a label that has a row.

    since: RFC 3339. Raises ApiError if BigQuery fails, UserError for another currency.
    """
    project = table.rsplit(".", 2)[0]
    url = f"{address('BIGQUERY', 'https://bigquery.googleapis.com')}/bigquery/v2/projects/{project}/queries"
    query = {
        "query": _BILLED.format(table=checked_table(table)), "useLegacySql": False, "parameterMode": "NAMED",
        "queryParameters": [
            _text("key", key), _text("since", since),
            {"name": "values", "parameterType": {"type": "ARRAY", "arrayType": {"type": "STRING"}},
             "parameterValue": {"arrayValues": [{"value": value} for value in values]}},
        ],
    }  # fmt: skip
    rows = list(_rows(url, query, clock))
    if others := ", ".join(sorted({currency for _, currency, _ in rows} - {"USD"})):
        raise UserError(f"{table} is in {others}: only exports in USD can be compared with estimates")
    return {label: float(cost) for label, _, cost in rows}


def _text(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "parameterType": {"type": "STRING"}, "parameterValue": {"value": value}}


def _rows(url: str, query: Mapping[str, Any], clock: Clock) -> Iterator[list[str]]:
    """Yields the rows of a query, once it is complete, of all pages."""
    started = retried(lambda: call("POST", url, json=query), clock)
    with unreadable_as_lost():
        job = started["jobReference"]
        place = {"location": job["location"]} if job.get("location") else {}
        result = f"{url}/{job['jobId']}"

    def page(token: dict[str, str]) -> Any:
        for _ in range(_POLLS):
            content = retried(lambda: call("GET", result, params={**place, **token}), clock)
            if content.get("jobComplete"):
                return content
            clock.sleep(_POLL_S)
        raise ApiError(0, "BigQuery has not answered: run it again later")

    with unreadable_as_lost():
        yield from ([cell["v"] for cell in row["f"]] for row in pages("rows", page))


def check_budget(
    budget: float, label: tuple[str, str], table: str, project: str, jobs: Iterable[JobStatus], limit: float,
    clock: Clock,
) -> str:  # fmt: skip
    """Returns one line on what is left of this month's budget of a label. Raises UserError if a job may exceed it.

    jobs: those of the label in all regions of `project`, of which the ones that ended longer ago than the export lags
    are in it; limit: the most that the new job may cost. A job that runs counts with its own limit.
    """
    now = clock.now()
    month = datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-01T00:00:00Z")
    key, value = label
    cost = billed(table, key, [value], month, clock).get(value, 0.0)
    recent = [job for job in jobs if job.labels.get(key) == value and now - (job.ended or now) < LAG_S]
    counted = [counted_usd(job, now) for job in recent]
    later, unpriced = sum(usd or 0.0 for usd in counted), counted.count(None)
    parts = f"{cost:.2f} USD billed this month for {key}:{value}, {later:.2f} for {len(recent)} jobs of the last 48 h"
    parts += f" in {project}, all regions"
    if unpriced:
        parts += f" (without a price, not counted: {unpriced})"
    if cost + later + limit > budget:
        raise UserError(
            f"month_budget={budget:g}: {parts}, and up to {limit:.2f} for this job: wait, or use a lower --max_cost"
        )
    return f"{parts}, up to {limit:.2f} for this job, of {budget:g} USD"
