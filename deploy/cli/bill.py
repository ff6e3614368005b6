"""Prints what was billed for jobs beside what was estimated: `python -m deploy bill RUN … --table=P.DATASET.TABLE`.

RUN is a submission, or a job's name or number, of this folder; the table is the billing export in BigQuery. A job has
rows there some hours to two days after it ran, by its label; one without any is said to have none.
"""

from collections.abc import Sequence

from deploy.client.arguments import parser
from deploy.tiers.spec_changes import LABEL
from deploy.vertex.billing_export import BIGQUERY_FIX, billed, billing_errors, checked_table
from deploy.vertex.history import Attempt, attempt_label, find_attempt
from deploy.vertex.session import SESSION, Session
from trainer.base.errors import DONE, UserError


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Prints one line for each job."""
    cli = parser("bill", __doc__ or "", "RUN … --table=PROJECT.DATASET.gcp_billing_export_v1_X")
    cli.add_argument("runs", nargs="+", metavar="RUN", help="a submission, or a job's name or number")
    cli.add_argument("--table", required=True, metavar="TABLE", help="the billing export, PROJECT.DATASET.TABLE")
    args = cli.parse_args(arguments)
    table = checked_table(args.table)
    jobs = dict(label_and_attempt for run in args.runs for label_and_attempt in _attempts(run))
    with billing_errors(table, BIGQUERY_FIX):
        usd_by_label = billed(table, LABEL, list(jobs), "2000-01-01T00:00:00Z", session.clock)
    for label, attempt in jobs.items():
        print(f"{attempt.job or label} ({attempt.tier}): {_line(label, attempt, usd_by_label.get(label))}")
    return DONE


def _attempts(run: str) -> list[tuple[str, Attempt]]:
    """Returns the attempts of a submission, or the one of a job, with their labels."""
    try:
        record, attempt = find_attempt(run)
    except LookupError:
        raise UserError(f"{run}: no submission or job of this folder: run it where it was submitted") from None
    labelled = [(attempt_label(record.submission, number), sent) for number, sent in enumerate(record.attempts, 1)]
    return labelled if run == record.submission else [pair for pair in labelled if pair[1] is attempt]


def _line(label: str, attempt: Attempt, usd: float | None) -> str:
    estimated = "not estimated" if attempt.spent_usd is None else f"estimated {attempt.spent_usd:.2f}"
    if usd is None:
        return f"{estimated}, no row with the label submission={label} yet: the export lags hours to two days"
    change = f", {100 * (usd / attempt.spent_usd - 1):+.1f} %" if attempt.spent_usd else ""
    return f"{estimated}, billed {usd:.2f}{change}"
